"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);
  const key = "proxreplay " + location.pathname;
  const colour = (i) => `var(--c${i % 8})`;
  const dash = (i) => ["", "7 4", "2 3", "9 3 2 3"][Math.floor(i / 8) % 4];

  // What was chosen survives a reload; where storage is forbidden, it does not.
  const remembered = (() => {
    try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; }
  })();
  const remember = () => {
    try { sessionStorage.setItem(key, JSON.stringify(remembered)); } catch { /* not allowed */ }
  };

  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [k, v] of Object.entries(attributes)) element.setAttribute(k, v);
    if (parent) parent.appendChild(element);
    return element;
  };

  const ticks = (low, high, count) => {
    const rough = (high - low) / count;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9; i++) found.push(i * step);
    return found;
  };
  const label = (v) => String(Math.round(v * 1e6) / 1e6);

  function chart(figure, section, memory) {
    const select = figure.querySelector("select");
    const methods = figure.querySelector(".methods");
    const plot = figure.querySelector(".plot");
    const caption = figure.querySelector("figcaption");
    const spoken = figure.querySelector(".spoken");
    const outputs = [];
    const shown = section.labels.map((name, i) =>
      memory.shown && name in memory.shown ? memory.shown[name] : section.shown[i]);
    let at = null;  // where the reader points, on the x axis
    let frame = null;  // how the last drawing maps numbers to pixels

    for (const measure of section.measures) {
      select.add(new Option(measure.title, measure.name));
    }
    if (section.measures.some((m) => m.name === memory.measure)) select.value = memory.measure;
    select.addEventListener("change", () => { at = null; draw(); });

    section.labels.forEach((name, i) => {
      const box = document.createElement("label");
      const input = document.createElement("input");
      input.type = "checkbox";
      input.checked = shown[i];
      input.addEventListener("change", () => { shown[i] = input.checked; draw(); });
      const swatch = make("svg", { width: 22, height: 10, "aria-hidden": "true" });
      make("line", { x1: 0, x2: 22, y1: 5, y2: 5, style: `stroke:${colour(i)};stroke-width:3`, "stroke-dasharray": dash(i) }, swatch);
      outputs[i] = document.createElement("output");
      box.append(input, swatch, name, outputs[i]);
      methods.append(box);
    });

    const current = () => section.measures.find((m) => m.name === select.value);
    const visible = () => current().curves.filter((c) => shown[c.group]);

    // Shares start where the lowest seed is, rounded down to a tenth; amounts at 0, or below it.
    function extent(measure, curves) {
      const known = (values) => values.filter((v) => v !== null);
      const tops = curves.flatMap((c) => known(c.high));
      const floors = curves.flatMap((c) => known(c.low));
      const ends = curves.map((c) => c.x[c.x.length - 1]);
      const x = measure.x === "tasks" ? section.tasks : Math.max(...ends, 1e-9);
      const top = tops.length ? Math.max(...tops) : 1;
      const low = floors.length ? Math.min(...floors) : 0;
      if (measure.kind === "amount") return [x, Math.min(0, low * 1.05), Math.max(top * 1.05, 1e-9)];
      const high = Math.min(1, Math.ceil(top * 10 + 0.2) / 10);
      const from = Math.floor(low * 10 - 0.2) / 10;
      return [x, low < 0 ? from : from < 0.25 ? 0 : from, high];
    }

    function draw() {
      const measure = current();
      const curves = visible();
      memory.measure = measure.name;
      memory.shown = Object.fromEntries(section.labels.map((name, i) => [name, shown[i]]));
      remember();
      const width = Math.max(plot.clientWidth, 240);
      const height = Math.round(Math.min(Math.max(width * 0.5, 230), 520));
      const margin = { left: 42, right: 8, top: 10, bottom: 40 };
      const [xMax, yMin, yMax] = extent(measure, curves);
      const X = (v) => margin.left + (v / xMax) * (width - margin.left - margin.right);
      const Y = (v) => height - margin.bottom - ((v - yMin) / (yMax - yMin)) * (height - margin.top - margin.bottom);
      const svg = make("svg", {
        viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0",
        "aria-label": `${measure.title} over the stream, ${curves.length} of ${section.labels.length} methods. Arrow keys read values.`,
      });
      for (const v of ticks(yMin, yMax, 5)) {
        make("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: Y(v), y2: Y(v) }, svg);
        make("text", { x: margin.left - 6, y: Y(v) + 4, "text-anchor": "end" }, svg).textContent = label(v);
      }
      if (measure.x === "tasks") taskAxis(svg, X, height - margin.bottom, width, margin);
      else for (const v of ticks(0, xMax, width < 500 ? 4 : 8)) {
        make("text", { x: X(v), y: height - margin.bottom + 16, "text-anchor": "middle" }, svg).textContent = label(v);
      }
      make("text", { x: (margin.left + width) / 2, y: height - 5, "text-anchor": "middle" }, svg)
        .textContent = measure.x === "tasks" ? "task (a new one begins at every thin line)" : "minutes of learning";
      for (const curve of curves) band(svg, curve, X, Y);
      for (const curve of curves) line(svg, curve, X, Y);
      const cursor = make("g", {}, svg);
      frame = { X, Y, xMax, base: height - margin.bottom, width, margin, svg, cursor };
      svg.addEventListener("pointermove", (event) => point(fromPixel(event)));
      svg.addEventListener("pointerleave", () => point(null));
      svg.addEventListener("keydown", (event) => walk(event));
      const focused = plot.contains(document.activeElement);
      plot.replaceChildren(svg);
      if (focused) svg.focus();
      const seeds = Math.max(...section.seeds);
      caption.textContent = `${measure.title}. ${measure.about} ` +
        (seeds > 1 ? "Mean over seeds; the band spans the lowest and the highest seed." : "One seed.");
      point(at);
    }

    function taskAxis(svg, X, base, width, margin) {
      const room = (width - margin.left - margin.right) / section.tasks;
      const every = Math.ceil(22 / room);
      for (let t = 0; t < section.tasks; t++) {
        if (t > 0) make("line", { class: "switch", x1: X(t), x2: X(t), y1: margin.top, y2: base }, svg);
        if ((t + 1) % every === 0 || section.tasks <= every) {
          make("text", { x: X(t + 0.5), y: base + 16, "text-anchor": "middle" }, svg).textContent = t + 1;
        }
      }
    }

    // Runs of known points; a gap stays a gap.
    function pieces(curve) {
      const found = [];
      let piece = [];
      curve.mean.forEach((v, i) => {
        if (v !== null) piece.push(i);
        else if (piece.length) { found.push(piece); piece = []; }
      });
      if (piece.length) found.push(piece);
      return found;
    }
    const path = (indices, x, values, X, Y) =>
      indices.map((i) => `${X(x[i]).toFixed(1)},${Y(values[i]).toFixed(1)}`).join("L");

    function band(svg, curve, X, Y) {
      for (const piece of pieces(curve)) {
        const there = path(piece, curve.x, curve.high, X, Y);
        const back = path([...piece].reverse(), curve.x, curve.low, X, Y);
        make("path", { class: "band", d: `M${there}L${back}Z`, style: `fill:${colour(curve.group)}` }, svg);
      }
    }

    function line(svg, curve, X, Y) {
      for (const piece of pieces(curve)) {
        make("path", {
          class: "curve", d: `M${path(piece, curve.x, curve.mean, X, Y)}`,
          style: `stroke:${colour(curve.group)}`, "stroke-dasharray": dash(curve.group),
          "data-method": section.labels[curve.group],
        }, svg);
      }
    }

    function fromPixel(event) {
      const box = frame.svg.getBoundingClientRect();
      const pixel = ((event.clientX - box.left) / box.width) * frame.width;
      const inner = frame.width - frame.margin.left - frame.margin.right;
      const v = ((pixel - frame.margin.left) / inner) * frame.xMax;
      return v < 0 || v > frame.xMax ? null : v;
    }

    const nearest = (curve, v) => {
      let best = 0;
      curve.x.forEach((x, i) => { if (Math.abs(x - v) < Math.abs(curve.x[best] - v)) best = i; });
      return best;
    };

    function point(v) {
      at = v;
      frame.cursor.replaceChildren();
      outputs.forEach((output) => { output.textContent = ""; });
      for (const curve of visible()) {
        const i = v === null ? curve.mean.findLastIndex((m) => m !== null) : nearest(curve, v);
        const value = curve.mean[i];
        if (value === null || value === undefined) continue;
        outputs[curve.group].textContent = value.toFixed(value < 10 ? 3 : 1);
        if (v !== null) make("circle", { cx: frame.X(curve.x[i]), cy: frame.Y(value), r: 4, style: `fill:${colour(curve.group)}` }, frame.cursor);
      }
      if (v !== null) make("line", { class: "cursor", x1: frame.X(v), x2: frame.X(v), y1: frame.margin.top, y2: frame.base }, frame.cursor);
    }

    function walk(event) {
      const step = { ArrowLeft: -0.01, ArrowRight: 0.01, PageDown: -0.1, PageUp: 0.1 }[event.key];
      if (step !== undefined) point(Math.min(Math.max((at ?? 0) + step * frame.xMax, 0), frame.xMax));
      else if (event.key === "Home") point(0);
      else if (event.key === "End") point(frame.xMax);
      else if (event.key === "Escape") point(null);
      else return;
      event.preventDefault();
      const values = visible().map((c) => `${section.labels[c.group]} ${outputs[c.group].textContent}`);
      spoken.textContent = at === null ? "" : `At ${label(Math.round(at * 100) / 100)}: ${values.join(", ")}`;
    }

    figure.hidden = section.measures.length === 0;
    if (figure.hidden) return;
    let width = 0;
    new ResizeObserver(() => {
      if (Math.abs(plot.clientWidth - width) > 1) { width = plot.clientWidth; draw(); }
    }).observe(plot);
    width = plot.clientWidth;
    draw();
  }

  for (const figure of document.querySelectorAll(".chart")) {
    const n = figure.dataset.section;
    remembered[n] = remembered[n] || {};
    chart(figure, data.sections[n], remembered[n]);
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const pre = button.parentElement.querySelector("pre");
      try {
        await navigator.clipboard.writeText(pre.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(pre);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // Open parts stay open over a reload.
  const open = new Set(remembered.open || []);
  for (const details of document.querySelectorAll("details[id]")) {
    if (open.has(details.id)) details.open = true;
    details.addEventListener("toggle", () => {
      if (details.open) open.add(details.id); else open.delete(details.id);
      remembered.open = [...open];
      remember();
    });
  }

  // While runs are unfinished: reload, but never under the reader's hands.
  const every = Number(document.body.dataset.reload || 0) * 1000;
  if (every) {
    let touched = 0;
    for (const kind of ["pointermove", "pointerdown", "keydown", "scroll"]) {
      addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
    }
    setInterval(() => {
      const busy = Date.now() - touched < 4000 || !getSelection().isCollapsed;
      if (document.getElementById("reload").checked && !busy && !document.hidden) location.reload();
    }, every);
  }
})();
