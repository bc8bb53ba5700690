"""The examples a person with a stream would start from do run, and do what they say."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from proxreplay.data import digits

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_your_own_stream(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "your_own_stream.py"))
    learner = names["learner"]
    assert learner.labels == ["winter", "spring", "summer", "autumn"]
    assert learner.predict([[0.0, 0.0, 3.0], [4.0, 3.0, 0.0]]).tolist() == ["winter", "summer"]
    assert learner.evaluate(names["weather"], names["seasons"]) > 0.8
    assert "accuracy" in capsys.readouterr().out


def test_lpr_helps_er_on_split_digits() -> None:
    """One seed of the table in docs/replay.md."""
    names = runpy.run_path(str(EXAMPLES / "split_digits_methods.py"))
    data, method = digits(), names["METHODS"]["ER"]
    plain, lpr = (np.array(names["run"](data, method, on, seed=0)) for on in (False, True))
    assert (lpr > plain).all()
