"""The paper's tables as studies: the right runs, and ours beside the paper's."""

import math
from pathlib import Path

import pytest

from proxreplay.errors import InputError
from proxreplay.evaluation import Estimate
from proxreplay.experiments.engines import InlineEngine
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.jobs import Block, Selection, reproduction
from proxreplay.reproduce import (
    REPRODUCTIONS,
    Beside,
    Reproduction,
    conclude,
    find_reproduction,
)

RUNS = {  # as many as the paper made
    "table1": 8 * 2 * 10,
    "table2": 8 * 2 * 10,
    "table3": 6 * 2 * 5,
    "unlimited": 3 * 2 * 5,
    "projections": 3 * 3 * 5,
    "sensitivity": 10 * 10 + 10 * 10 + 10 * 5,
    "figure1": 2 * 5,
    "figure2": 5,
}


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_table_makes_the_papers_runs(name: str, tmp_path: Path) -> None:
    jobs = reproduction(find_reproduction(name).blocks, Selection(), tmp_path)
    assert len(jobs) == RUNS[name]
    assert len({job.folder for job in jobs}) == len(jobs)
    assert len({job.config.digest for job in jobs}) == len(jobs)


def test_a_selection_leaves_the_rest_out(tmp_path: Path) -> None:
    wanted = Selection(rows=["er", "lpr-er"], capacity=2000, seeds=[0, 1, 2])
    jobs = reproduction(find_reproduction("table1").blocks, wanted, tmp_path, {"eval_every": 10})
    assert {(j.config.method, j.config.capacity, j.config.seed) for j in jobs} == {
        (m, 2000, s) for m in ("er", "lpr-er") for s in (0, 1, 2)
    }
    assert {j.config.eval_every for j in jobs} == {10}
    with pytest.raises(InputError, match="nothing left to run"):
        reproduction(find_reproduction("table1").blocks, Selection(capacity=7), tmp_path)
    with pytest.raises(InputError, match="unknown method 'err'"):
        reproduction(find_reproduction("table1").blocks, Selection(rows=["err"]), tmp_path)


def test_tables_are_made_as_in_the_paper_with_the_whole_memory(tmp_path: Path) -> None:
    table, one = find_reproduction("table1"), Selection(rows=["lpr-er"], capacity=2000, seeds=[0])
    [job] = reproduction(table.blocks, one, tmp_path)
    assert job.config.refresh.samples is None
    [job] = reproduction(table.blocks, one, tmp_path, {"refresh.samples": 400})
    assert job.config.refresh.samples == 400


def test_the_quick_protocol_is_smaller_and_of_the_same_shape(tmp_path: Path) -> None:
    table = find_reproduction("sensitivity")
    whole = reproduction(table.blocks, Selection(seeds=[0]), tmp_path)
    quick = reproduction(table.blocks, Selection(seeds=[0], quick=True), tmp_path)
    assert [j.folder for j in quick] == [j.folder for j in whole]
    for small, large in zip(quick, whole, strict=True):
        assert small.config.capacity == large.config.capacity // 10
        assert small.config.stream.limit == 200
        share = large.config.refresh.samples
        assert small.config.refresh.samples == (share and share // 10)


def test_the_difference_is_told_in_standard_errors() -> None:
    ours, theirs = Estimate(0.30, 0.003, 3), Estimate(0.29, 0.004, 10)
    assert Beside("x", "Acc", ours, theirs).standard_errors == pytest.approx(0.01 / 0.005)
    single = Estimate(0.30, math.nan, 1)
    assert Beside("x", "Acc", single, theirs).standard_errors == pytest.approx(0.01 / 0.004)


def test_tables_and_figures_are_written_from_the_runs(tmp_path: Path) -> None:
    block = Block("split-digits", ("er", "lpr-er"), (30,), 2)
    table = Reproduction("toy", "a table", (block,), {"curves.png": "appendix"})
    values = {"steps_per_batch": 1, "eval_every": 20}
    jobs = reproduction(table.blocks, Selection(), tmp_path, values)
    assert all(o.status == "complete" for o in InlineEngine().make(jobs, StopRequest()))
    text, beside = conclude(table, tmp_path, quick=False)
    assert (tmp_path / "tables.md").read_text() == text
    assert "| LPR (ER)" in text
    assert beside == []  # the paper has no split-digits
    assert (tmp_path / "split-digits-30-curves.png").stat().st_size > 1000
    assert "quick protocol" in conclude(table, tmp_path, quick=True)[0]
