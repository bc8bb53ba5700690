"""The report as one self-contained HTML page: nothing is fetched, it opens from disk."""

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from proxreplay import __version__
from proxreplay.evaluation.measures import MAIN
from proxreplay.evaluation.trajectory import Array
from proxreplay.experiments.results import StoredRun
from proxreplay.files import write_text
from proxreplay.report.commands import run_command
from proxreplay.report.curves import Curve, curves, drawable, task_accuracy_map
from proxreplay.report.findings import headline, section_warnings, study_warnings, verdict
from proxreplay.report.grouping import Cache, Section, Study, read_some
from proxreplay.report.paper import paper
from proxreplay.report.plots import MOST_SWITCHES
from proxreplay.report.tables import FEW_SEEDS, comparisons, further_table, main_table, tables_of

CURVES_AT_FIRST = 8  # more than that are switched off until asked for
MAPS = 8


@dataclass(frozen=True)
class ReportSummary:
    """What a report was made of."""

    path: Path  # the page
    runs: int  # how many runs were found
    statuses: dict[str, int]  # how many are complete, incomplete, failed and broken
    verdict: tuple[str, ...]  # the sentences at the top of the page
    serious: tuple[str, ...]  # what is missing or wrong


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    reload_seconds: int | None = None,
    cache: Cache | None = None,
) -> ReportSummary:
    """Write one HTML page about every run at or below the folders.

    While runs are unfinished, the page reloads itself every ``reload_seconds``. A ``cache`` that is
    kept between calls spares reading runs again that have not changed.
    """
    study = read_some(folders, cache)
    return _write(study, out, render(study, reload_seconds=reload_seconds))


def write_tables(folders: Sequence[Path], out: Path) -> ReportSummary:
    """Write the tables of every run at or below the folders, as the ending of ``out`` says."""
    study = read_some(folders)
    return _write(study, out, tables_of(study, out.suffix))


def _write(study: Study, out: Path, text: str) -> ReportSummary:
    """Write it; names of files in it need not be UTF-8, and what is not becomes a question mark."""
    write_text(out, text.encode("utf-8", "replace").decode("utf-8"))
    statuses: Counter[str] = Counter(run.status for run in study.runs)
    sentences = tuple(text for section in study.sections for text in verdict(section))
    cautions = [*study_warnings(study), *(c for s in study.sections for c in section_warnings(s))]
    serious = tuple(str(one) for one in cautions if one.level == "serious")
    return ReportSummary(out, len(study.runs), dict(statuses), sentences, serious)


def render(study: Study, *, reload_seconds: int | None = None) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("proxreplay.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    unfinished = any(run.status == "incomplete" for run in study.runs)
    sections = [_section(i, section) for i, section in enumerate(study.sections)]
    return environment.get_template("page.html.j2").render(
        headline=headline(study),
        sections=sections,
        warnings=study_warnings(study),
        counts=Counter(run.status for run in study.runs),
        total=len(study.runs),
        lost=[_run(run) for run in study.lost],
        data=_json({"sections": [section.pop("data") for section in sections]}),
        reload_seconds=reload_seconds if unfinished else None,
        environment=_environment(study),
        paper_source=paper()["source"].split(";")[0],
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _section(number: int, section: Section) -> dict[str, Any]:
    main, further = main_table(section), further_table(section)
    recorded = [g for g in section.groups if any(run.recorded is not None for run in g.runs)]
    mapped = recorded[:MAPS] if 1 < section.tasks <= MOST_SWITCHES else []
    maps = [_map(group.label, task_accuracy_map(group, section.tasks)) for group in mapped]
    return {
        "id": f"section-{number}",
        "title": section.title,
        "protocol": _protocol(section),
        "verdict": verdict(section),
        "warnings": section_warnings(section),
        "main": main,
        "has_paper": any(row.source == "paper" for row in main.rows),
        "further": further,
        "differences": _differences(section),
        "maps": maps,
        "more_maps": max(0, sum(bool(g.runs) for g in section.groups) - len(maps)),
        "tasks": section.tasks,
        "groups": [
            {"label": g.label, "index": i, "runs": [_run(run) for run in g.runs]}
            for i, g in enumerate(section.groups)
        ],
        "data": _data(section),
    }


def _protocol(section: Section) -> str:
    """How the runs were made, as far as they all agree."""
    configs = [run.config.flat() for run in section.runs if run.config is not None]
    words = {
        "batch_size": "stream batches of {}",
        "replay_batch": "{} replayed",
        "steps_per_batch": "{} SGD steps per batch",
        "lr": "learning rate {}",
        "eval_every": "evaluated every {} batches",
    }
    parts = [f"{section.tasks} tasks"] if section.tasks else []
    for key, text in words.items():
        values = {config[key] for config in configs}
        if len(values) == 1:
            value = values.pop()
            if (key, value) == ("eval_every", 1):
                text = "evaluated after every batch"
            parts.append(text.format(f"{value:g}"))
    return ", ".join(parts)


def _differences(section: Section) -> dict[str, Any] | None:
    found = comparisons(section)
    if not found:
        return None
    rows = []
    for one in found:
        cells: list[dict[str, Any] | None] = []
        for measure in MAIN:
            d = one.differences.get(measure.key)
            if d is None:
                cells.append(None)
                continue
            enough = d.seeds >= FEW_SEEDS
            low, high = (d.low, d.high) if enough else (d.least, d.most)
            cells.append(
                {
                    "mean": f"{d.mean:+.4f}",
                    "interval": f"{low:+.4f} to {high:+.4f}" if d.seeds > 1 else "one seed",
                    "p": f"{d.p_value:.3f}" if enough else "",
                    "bold": enough and not low <= 0 <= high,
                }
            )
        rows.append(
            {"label": one.group.label, "base": one.base.label, "seeds": one.seeds, "cells": cells}
        )
    return {"columns": [measure.label for measure in MAIN], "rows": rows}


def _run(run: StoredRun) -> dict[str, Any]:
    measures, config = run.measures, run.config
    done = None if run.recorded is None else int(run.recorded.accuracy.positions[-1]) + 1
    return {
        "name": run.folder.name,
        "folder": str(run.folder),
        "status": run.status,
        "problem": run.problem,
        "seed": None if config is None else config.seed,
        "numbers": " · ".join(
            f"{m.label} {measures[m.key]:.{m.digits}f}" for m in MAIN if m.key in measures
        ),
        "minutes": f"{measures['minutes']:.2f}" if "minutes" in measures else None,
        "batches": done,
        "command": None if config is None else run_command(config),
        "settings": [] if config is None else [(k, str(v)) for k, v in config.flat().items()],
        "test_accuracy": [f"{a:.3f}" for a in run.result.test_accuracy] if run.result else [],
    }


def _environment(study: Study) -> list[tuple[str, str]]:
    """Versions and hardware, every different value named once."""
    found: dict[str, dict[str, None]] = {}
    for run in study.runs:
        for key, value in run.environment.items():
            if value is not None:
                found.setdefault(key, {})[str(value)] = None
    return [(key.replace("_", " "), " | ".join(values)) for key, values in found.items()]


# Data for the interactive curves -----------------------------------------------------------------


def _data(section: Section) -> dict[str, Any]:
    """Everything that the page's script draws."""
    labels = [group.label for group in section.groups]
    shown = set(_best_first(section)[:CURVES_AT_FIRST])
    points = 600 if len(labels) <= 12 else 300
    measures = [
        {
            "name": measure.key,
            "title": measure.label,
            "about": measure.about,
            "x": measure.x,
            "kind": measure.scale,
            "curves": [_rounded(curve) for curve in drawn],
        }
        for measure in (drawable(section) if section.tasks else ())
        if (drawn := curves(section, measure, points))
    ]
    return {
        "tasks": section.tasks,
        "labels": labels,
        "shown": [label in shown for label in labels],
        "seeds": [sum(r.recorded is not None for r in g.runs) for g in section.groups],
        "measures": measures,
    }


def _best_first(section: Section) -> list[str]:
    """Labels, the most accurate first: these curves are shown before the reader chooses."""
    if len(section.groups) <= CURVES_AT_FIRST:
        return [group.label for group in section.groups]
    means = {
        group.label: np.mean(list(values.values())) if (values := group.values("acc")) else -1.0
        for group in section.groups
    }
    return sorted(means, key=lambda label: -means[label])


def _rounded(curve: Curve) -> dict[str, Any]:
    rounded: dict[str, Any] = {"group": curve.index}
    for name in ("x", "mean", "low", "high"):
        values = getattr(curve, name).tolist()
        rounded[name] = [round(v, 4) if math.isfinite(v) else None for v in values]
    return rounded


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _map(label: str, accuracy: Array) -> dict[str, Any]:
    """Accuracy on each task over time as a tiny picture, one pixel per value."""
    from matplotlib import colormaps
    from PIL import Image

    colours = (colormaps["cividis"](np.nan_to_num(accuracy)) * 255).astype(np.uint8)
    colours[np.isnan(accuracy)] = 0
    buffer = io.BytesIO()
    Image.fromarray(colours).save(buffer, "PNG", optimize=True)
    return {
        "label": label,
        "image": base64.b64encode(buffer.getvalue()).decode(),
        "rows": len(accuracy),
        "last": [f"{a:.2f}" for a in accuracy[:, -1] if not math.isnan(a)],
    }
