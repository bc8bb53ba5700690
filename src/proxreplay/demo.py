"""The demo: plain replay, LPR and LPR averaged on bundled data, from stream to picture."""

from collections.abc import Sequence
from pathlib import Path

from proxreplay.evaluation.measures import MAIN
from proxreplay.experiments.engines import Job
from proxreplay.experiments.results import read_run
from proxreplay.files import write_text
from proxreplay.report.grouping import read_study
from proxreplay.report.page import write_report
from proxreplay.report.plots import over_time, save
from proxreplay.report.tables import Row, Table, comparison_rows, to_markdown

BENCHMARK = "split-digits"
METHOD_NAMES = ("er", "lpr-er", "lpr-er-avg")

EXPLANATION = (
    "Three learners saw the same stream of the ten digits, two new classes at a time, with a "
    "memory of {memory} images to replay. LPR (ER) differs from ER only in its gradients, which "
    "spare the hidden activations of remembered images. The last one also predicts with an average "
    "of its weights. Acc is the accuracy at the end, AAA the average over the whole stream, and "
    "WC-Acc the lowest that each task fell to after it was learned: there plain replay suffers "
    "most."
)


def conclude(out: Path, jobs: Sequence[Job]) -> tuple[list[Row], str, dict[str, Path]]:
    """Write table, picture and report of the finished runs.

    Returns the rows of the table, a text that explains them, and what is where.
    """
    rows = comparison_rows(read_run(job.folder) for job in jobs)
    table, picture = out / "table.md", out / "accuracy.png"
    write_text(table, to_markdown(Table("", MAIN, tuple(rows))))
    (section,) = read_study([job.folder for job in jobs]).sections
    save(over_time(section, "accuracy"), picture)
    page = write_report([out / "runs"], out / "report.html").path
    written = {"Report": page, "Picture": picture, "Table": table, "Records": out / "runs"}
    return rows, EXPLANATION.format(memory=jobs[0].config.capacity), written
