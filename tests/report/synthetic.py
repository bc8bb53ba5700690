"""Made-up run folders: plausible curves with a dip at every switch, in any state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from proxreplay.experiments.benchmarks import BENCHMARKS
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.configure import configure
from proxreplay.experiments.recipes import METHODS
from proxreplay.experiments.results import read_lines, summarise
from proxreplay.files import write_json, write_text


def write_run(
    folder: Path,
    method: str = "er",
    seed: int = 0,
    *,
    benchmark: str = "split-digits",
    tasks: int = 5,
    batches: int = 20,
    settings: Mapping[str, Any] | None = None,
    complete: bool = True,
    stop_after: int | None = None,
    online: bool = False,
    diagnostics: bool = False,
    timings: bool = True,
) -> Path:
    """Write one run folder; ``stop_after`` so many stream batches it was interrupted."""
    values = {"seed": seed, "capacity": 50, **(settings or {})}
    if benchmark in BENCHMARKS and method in METHODS:
        config = configure(benchmark, method, values)
    else:
        config = RunConfig(benchmark, method).with_values(values)
    records = _records(config, tasks, batches, online=online, diagnostics=diagnostics)
    if stop_after is not None:
        records = [r for r in records if r.get("position", 10**9) < stop_after]
        complete = False
    write_text(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
    write_text(folder / "records.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    if timings:
        cost = 0.02 if method.startswith("lpr-") else 0.01
        lines = [
            {"position": p, "learning": cost * p, "evaluating": 0.1 * p, "saving": 0.0}
            for p in range(10, tasks * batches + 1, 10)
        ]
        write_text(folder / "timings.jsonl", "".join(json.dumps(r) + "\n" for r in lines))
    if complete:
        stored = read_lines(folder / "records.jsonl")
        write_json(folder / "result.json", summarise(stored, config.eval_every).to_json())
    return folder


def _records(
    config: RunConfig, tasks: int, batches: int, *, online: bool, diagnostics: bool
) -> list[dict[str, Any]]:
    rng = np.random.default_rng([config.seed, len(config.method)])
    steady = config.method.startswith("lpr-")
    level = np.full(tasks, np.nan)
    records: list[dict[str, Any]] = []
    drift = 0.0
    for position in range(tasks * batches):
        task, step = divmod(position, batches)
        if step == 0:
            level[:task] -= 0.1 if steady else 0.35
            level[task] = 0.1
        level[:task] += 0.2 * (0.8 - level[:task])
        level[task] += 0.3 * (0.95 - level[task])
        noise = rng.normal(0, 0.01 if steady else 0.03, task + 1)
        accuracy = np.clip(level[: task + 1] + noise, 0, 1)
        moment = {"position": position, "task": task}
        records.append({"kind": "train", **moment, "loss": float(2 - accuracy.mean())})
        if steady and (position + 1) % config.refresh.every == 0:
            records.append({"kind": "refresh", **moment, "examples": 50})
        if (position + 1) % config.eval_every == 0 or step in (0, batches - 1):
            event = {"kind": "evaluation", "split": "validation", **moment}
            loss = -np.log(accuracy + 0.01)
            records.append({**event, "accuracy": accuracy.tolist(), "loss": loss.tolist()})
            if online:
                values = {"accuracy": (0.9 * accuracy).tolist(), "loss": loss.tolist()}
                records.append({**event, "online": True, **values})
        if diagnostics:
            drift += (0.5 if steady else 1.0) * (1 + 2 * (step < 3))
            layers = {"stage1": 0.3 * drift, "head": 0.7 * drift}
            records.append({"kind": "drift", **moment, "total": drift, "layers": layers})
            records.append({"kind": "refresh", **moment, "examples": 10, "share": 0.5})
            seen, right = 10.0 * (position + 1), float(accuracy[-1])
            regret = {"majority": seen * (0.4 - right), "no_change": seen * (0.5 - right)}
            score = {"accuracy": right, "fading": right, "kappa": 2 * right - 1, "regret": regret}
            records.append({"kind": "prequential", **moment, "examples": seen, **score})
            if steady:
                new, replay = 0.55 - 0.2 * (step < 3) + noise[0], 0.55 + noise[0]
                ratios = {"new": new, "replay": replay if position else None, "all": 0.55}
                records.append({"kind": "gradient", **moment, **ratios, "layers": {}})
    final = {"kind": "evaluation", "split": "test"}
    records.append({**final, "accuracy": level.tolist(), "loss": (1 - level).tolist()})
    if online:
        values = {"accuracy": (0.9 * level).tolist(), "loss": (1 - level).tolist()}
        records.append({**final, "online": True, **values})
    return records
