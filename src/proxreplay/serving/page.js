"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const at = (id) => document.getElementById(id);
  let token = "";  // never stored
  let timer = null;

  const element = (name, text, parent, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.appendChild(made);
    return made;
  };
  const shape = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    at("curve").appendChild(made);
  };
  const percent = (share) => share === null ? "–" : (100 * share).toFixed(1) + " %";
  const size = (bytes) => bytes > 1e6 ? (bytes / 1e6).toFixed(1) + " MB" : Math.ceil(bytes / 1e3) + " kB";
  const when = (seconds) => {  // in the reader's own time
    const shifted = new Date(1000 * seconds - 60000 * new Date(1000 * seconds).getTimezoneOffset());
    return seconds ? shifted.toISOString().slice(0, 19).replace("T", " ") : "–";
  };

  async function ask(path, body) {
    const headers = token ? { Authorization: "Bearer " + token } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const options = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
    const answer = await fetch(path, options);
    const content = await answer.json();
    if (answer.status === 401) { at("ask").hidden = false; at("why").textContent = content.detail; }
    if (!answer.ok) throw new Error(content.detail || answer.statusText);
    return content;
  }

  function warn(text) {
    at("warning").hidden = !text;
    at("warning").textContent = text || "";
  }

  function draw(points, backs) {
    const svg = at("curve");
    svg.replaceChildren();
    const left = 72, right = 790, top = 12, bottom = 228;
    const last = points.length ? points[points.length - 1].sequence : 1;
    const first = points.length ? Math.min(points[0].sequence, last - 1) : 0;
    const x = (sequence) => left + (right - left) * (sequence - first) / Math.max(1, last - first);
    const y = (accuracy) => bottom - (bottom - top) * accuracy;
    for (const level of [0, 0.25, 0.5, 0.75, 1]) {
      shape("line", { class: "grid", x1: left, x2: right, y1: y(level), y2: y(level) });
      shape("text", { x: left - 6, y: y(level) + 4, "text-anchor": "end" }, percent(level).replace(".0", ""));
    }
    shape("text", { x: left, y: 252 }, "event " + first);
    shape("text", { x: right, y: 252, "text-anchor": "end" }, "event " + last);
    for (const sequence of backs) {
      if (sequence >= first && sequence <= last) {
        shape("line", { class: "back", x1: x(sequence), x2: x(sequence), y1: top, y2: bottom });
      }
    }
    if (points.length) {
      const path = points.map((p, i) => (i ? "L" : "M") + x(p.sequence).toFixed(1) + " " + y(p.accuracy).toFixed(1));
      shape("path", { class: "line", d: path.join("") });
    }
    svg.setAttribute("aria-label", points.length
      ? "Prequential accuracy over events, now " + percent(points[points.length - 1].accuracy)
      : "Prequential accuracy over events: none yet");
  }

  function rows(body, items, fill) {
    const focused = document.activeElement && document.activeElement.dataset.to;
    body.replaceChildren();
    for (const item of items) fill(item, element("tr", null, body));
    const again = focused && body.querySelector(`[data-to="${focused}"]`);
    if (again) again.focus();
  }

  async function back(sequence) {
    if (!confirm("Go back to event " + sequence + "? What was learned since leaves the model; history keeps it.")) return;
    await change("rollback", { to: sequence, reason: "from the page" });
  }

  async function change(path, body) {
    try { await ask(path, body); warn(""); } catch (error) { warn(error.message); return; }
    await look();
  }

  function show(status) {
    at("headline").textContent = status.accuracy === null
      ? "Nothing was judged yet"
      : percent(status.accuracy) + " of the newest " + status.window + " examples were predicted right";
    at("summary").textContent = `Event ${status.sequence} of ${status.logged} is learned, ${status.queue} wait; version ${status.version}.`
      + (status.read_only ? " This server only reads." : "");
    if (status.stopped) warn("Learning is stopped: " + status.stopped);
    else if (status.problem) warn(status.problem);
    else warn("");
    at("resume").hidden = !status.stopped || status.read_only;
    at("snapshot").hidden = status.read_only;
    draw(status.curve, status.history.filter((h) => h.kind === "rollback").map((h) => h.sequence));
    at("memory").textContent = `${status.memory} examples in memory` + (status.capacity ? `, room for ${status.capacity}.` : ".");
    rows(at("classes"), status.classes, (item, row) => {
      element("td", item.label, row);
      element("td", percent(item.recall), row);
      element("td", item.judged, row);
      element("td", item.memory, row);
      element("meter", null, element("td", null, row), {
        min: 0, max: Math.max(1, status.memory), value: item.memory, "aria-label": "share of the memory" });
    });
    rows(at("versions"), status.versions, (item, row) => {
      element("td", item.sequence, row);
      element("td", when(item.time), row);
      element("td", size(item.bytes), row);
      element("td", item.good ? "yes" : "no", row);
      const cell = element("td", null, row);
      if (!status.read_only) {
        const button = element("button", "Go back", cell, {
          type: "button", "data-to": item.sequence, "aria-label": "Go back to event " + item.sequence });
        button.addEventListener("click", () => back(item.sequence));
      }
    });
    at("history").replaceChildren();
    for (const item of status.history) {
      element("li", `${when(item.time)}  event ${item.sequence}: ${item.kind} ${item.note || ""}`, at("history"));
    }
    if (!status.history.length) element("li", "Nothing but learning.", at("history"));
  }

  async function look() {
    clearTimeout(timer);
    try {
      show(await ask("status"));
      at("ask").hidden = true;
    } catch (error) {
      warn(error.message);
    }
    timer = setTimeout(look, 2000);
  }

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = at("token").value;
    look();
  });
  at("snapshot").addEventListener("click", () => change("snapshot", {}));
  at("resume").addEventListener("click", () => change("resume", {}));
  look();
})();
