"""Rules without numbers against plain replay, on streams of many kinds: who is harmed?

``python -m benchmarks.streams OUT [--seeds N] [--only WORD]`` makes the runs that are missing in
OUT and prints a table: ER, and the difference of every other method from it, mean over seeds.
Streams marked ``*`` were looked at when the defaults were chosen; the others judge them.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage
from sklearn import datasets

from proxreplay.experiments.engines import InlineEngine
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.jobs import comparison
from proxreplay.experiments.recipes import find_method
from proxreplay.experiments.results import StoredRun, find_runs

ITSELF = {"lpr.omega_0": None, "lpr.beta": 1.0}
METHODS = {
    "er": {},
    "lpr-er": ITSELF,
    "klpr-er": {},
    "er-avg": {},
    "lpr-er-avg": ITSELF,
    "klpr-er-avg": {},
    "anytime": {},
}
MEASURES = ("acc", "aaa", "wc_acc")
Arrays = tuple[np.ndarray, np.ndarray]


def long_digits() -> Arrays:
    """Each digit ten times, turned, shifted and with noise: tasks of some 300 batches."""
    rng = np.random.default_rng(0)
    x, y = datasets.load_digits(return_X_y=True)
    made = []
    for image in np.repeat(x.reshape(-1, 8, 8), 10, axis=0):
        turned = ndimage.rotate(image, rng.uniform(-20, 20), reshape=False, order=1)
        moved = ndimage.shift(turned, rng.uniform(-1, 1, size=2), order=1)
        made.append(moved + rng.normal(0, 1.5, moved.shape))
    return np.stack(made).reshape(len(made), -1).astype("float32") / 16, np.repeat(y, 10)


def clusters(separation: float) -> Callable[[], Arrays]:
    """Ten classes of three clusters each in 20 columns, 5 of them noise."""

    def make() -> Arrays:
        x, y = datasets.make_classification(
            6000,
            20,
            n_informative=15,
            n_redundant=0,
            n_classes=10,
            n_clusters_per_class=3,
            class_sep=separation,
            random_state=0,
        )
        return x.astype("float32"), y

    return make


def segments() -> Arrays:
    """River's ImageSegments: seven kinds of surface, 18 columns, standardised."""
    from river.datasets import ImageSegments

    pairs = list(ImageSegments())
    x = np.array([[*row.values()] for row, _ in pairs], dtype="float32")
    names = sorted({label for _, label in pairs})
    y = np.array([names.index(label) for _, label in pairs])
    return (x - x.mean(0)) / (x.std(0) + 1e-6), y


DIGITS = "split-digits"
ARRAYS: dict[str, Callable[[], Arrays]] = {
    "long-digits": long_digits,
    "clusters": clusters(2.0),
    "hard-clusters": clusters(1.0),
    "segments": segments,
}
STREAMS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "digits *": (DIGITS, {}),
    "digits, 2 tasks": (DIGITS, {"stream.tasks": 2}),
    "digits, 10 tasks": (DIGITS, {"stream.tasks": 10}),
    "digits, memory 20": (DIGITS, {"capacity": 20}),
    "digits, memory 200": (DIGITS, {"capacity": 200}),
    "digits, memory 1000": (DIGITS, {"capacity": 1000}),
    "digits, blurry": (DIGITS, {"stream.scenario": "blurry"}),
    "digits, i.i.d.": (DIGITS, {"stream.scenario": "iid"}),
    "digits, small_cnn *": (DIGITS, {"network": "small_cnn", "lr": 0.1}),
    "digits, lr .02": (DIGITS, {"lr": 0.02}),
    "long digits": ("long-digits", {"stream.tasks": 5}),
    "long digits, i.i.d.": ("long-digits", {"stream.scenario": "iid", "stream.tasks": 5}),
    "clusters": ("clusters", {"stream.tasks": 5}),
    "hard clusters": ("hard-clusters", {"stream.tasks": 5}),
    "segments": ("segments", {"stream.tasks": 7}),
}


def made(out: Path, title: str, seeds: int) -> list[StoredRun]:
    """The runs of one stream, those that were there included."""
    benchmark, values = STREAMS[title]
    layer: dict[str, Any] = {"eval_every": 5, **values}
    if benchmark in ARRAYS:
        file = out / f"{benchmark}.npz"
        if not file.exists():
            x, y = ARRAYS[benchmark]()
            np.savez(file, X=x, y=y)
        layer |= {"stream.data": str(file), "network": "mlp"}
        benchmark = "custom"
    folder = out / title.replace(" *", "").replace(" ", "-").replace(",", "")
    for method, own in METHODS.items():
        chosen = {**layer, **own}
        if "lr" in chosen and find_method(method).longer != 1:
            chosen["lr"] *= find_method(method).longer
        jobs = comparison(benchmark, [method], range(seeds), folder, chosen)
        InlineEngine().make(jobs, StopRequest())
    return find_runs([folder])


def row(runs: list[StoredRun]) -> str:
    """ER, then the differences of the others from it, seed by seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        assert run.result is not None, f"{run.folder}: {run.problem}"
        values = [run.result.measures[key] for key in MEASURES]
        found.setdefault(run.config.method, {})[run.config.seed] = values
    plain = found["er"]
    cells = [" / ".join(f"{v:.3f}" for v in np.mean([*plain.values()], axis=0))]
    for method in [*METHODS][1:]:
        differences = [np.subtract(v, plain[seed]) for seed, v in found[method].items()]
        cells.append(" / ".join(f"{v:+.3f}" for v in np.mean(differences, axis=0)))
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="streams whose name holds this word")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"| stream | {' | '.join(METHODS)} |\n|{'---|' * (len(METHODS) + 1)}")
    for title in STREAMS:
        if options.only in title:
            print(f"| {title} | {row(made(options.out, title, options.seeds))} |", flush=True)


if __name__ == "__main__":
    main()
