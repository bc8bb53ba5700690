"""The demo: plain replay against LPR on bundled data, from stream to table and picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxreplay.batch import Batch
from proxreplay.experiments.benchmarks import find_benchmark
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.methods import label
from proxreplay.experiments.results import trajectory, write_text
from proxreplay.experiments.run import FinishedRun, run
from proxreplay.report.plots import anytime_accuracy
from proxreplay.report.tables import Row, comparison_rows, markdown

METHODS = ("er", "lpr-er")

EXPLANATION = (
    "Two networks learned the ten digits from the same stream, two new classes at a time and with "
    "a memory of {memory} images; LPR (ER) differs from ER only in that its gradients spare the "
    "activations of remembered images. Acc is the accuracy at the end, AAA the average over every "
    "moment on the way, and WC-Acc the worst that each task fell to after it was learned: that is "
    "where plain replay breaks in for a while at every new task and LPR does not."
)


@dataclass(frozen=True)
class Demo:
    """What the demo leaves behind."""

    rows: list[Row]
    explanation: str
    picture: Path
    table: Path


def run_demo(
    out: Path, seeds: Sequence[int], on_batch: Callable[[str, int, Batch, int], None]
) -> Demo:
    """Run ER and LPR (ER) on split-digits and write records, table and picture.

    Args:
        out: the folder for everything.
        seeds: one run of each method a seed.
        on_batch: called with method, seed, batch and length of the stream after every batch.
    """
    benchmark = find_benchmark("split-digits")
    dataset = benchmark.load()
    runs: dict[str, list[FinishedRun]] = {method: [] for method in METHODS}
    for seed in seeds:
        for method in METHODS:
            config = RunConfig("split-digits", method, seed, lr=benchmark.lr)
            config = config.with_values(
                {
                    "memory": benchmark.memory,
                    "lpr.omega_0": benchmark.omega_0,
                    "lpr.beta": benchmark.beta,
                }
            )
            folder = out / "runs" / f"{method}-seed{seed}"
            finished = run(
                config,
                folder,
                dataset=dataset,
                on_batch=lambda batch, total, method=method, seed=seed: on_batch(  # type: ignore[misc]
                    method, seed, batch, total
                ),
            )
            runs[method].append(finished)

    rows = comparison_rows({label(m): [r.result for r in done] for m, done in runs.items()})
    table, picture = out / "table.md", out / "accuracy.png"
    write_text(table, markdown(rows))
    curves = {label(m): [trajectory(r.records) for r in done] for m, done in runs.items()}
    anytime_accuracy(curves, picture)
    return Demo(rows, EXPLANATION.format(memory=benchmark.memory), picture, table)
