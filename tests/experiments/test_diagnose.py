"""Diagnostics look at a run and leave it as it is."""

from dataclasses import replace
from pathlib import Path

import pytest

from proxreplay.experiments.configure import configure
from proxreplay.experiments.results import Record, read_run
from proxreplay.experiments.run import RunOptions, run
from tests.experiments.test_run import QUICK, contents, interrupted

ALL = {
    "diagnostics.drift": "paper",
    "diagnostics.gradients_every": 7,
    "diagnostics.spectrum": True,
}


def plain(folder: Path) -> list[Record]:
    kinds = ("train", "evaluation", "refresh")
    return [r for r in read_run(folder).records if r["kind"] in kinds]


@pytest.mark.parametrize("method", ["lpr-er", "lpr-der", "lpr-lode", "lpr-ema"])
def test_a_run_is_bit_identical_with_and_without(method: str, tmp_path: Path) -> None:
    run(configure("split-digits", method, QUICK), tmp_path / "without")
    run(configure("split-digits", method, QUICK, ALL), tmp_path / "with")
    assert plain(tmp_path / "with") == plain(tmp_path / "without")
    results = [read_run(tmp_path / name).result for name in ("without", "with")]
    bare = [replace(found, records_sha256=None) for found in results if found is not None]
    assert bare[0] == bare[1]
    kinds = {r["kind"] for r in read_run(tmp_path / "with").records}
    assert kinds == {"train", "evaluation", "refresh", "drift", "gradient", "spectrum"}


def test_they_survive_an_interruption(tmp_path: Path) -> None:
    config = configure("split-digits", "lpr-er", QUICK, ALL)
    run(config, tmp_path / "whole")
    for at in (13, 52):
        interrupted(config, tmp_path / "parts", at, RunOptions(checkpoint_every=10))
    run(config, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
