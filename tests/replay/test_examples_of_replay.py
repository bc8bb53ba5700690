"""The examples a person with a stream would start from do run, and do what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_your_own_stream(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "your_own_stream.py"))
    learner = names["learner"]
    assert learner.labels == ["winter", "spring", "summer", "autumn"]
    assert learner.predict([[0.0, 0.0, 3.0], [4.0, 3.0, 0.0]]).tolist() == ["winter", "summer"]
    assert learner.evaluate(names["weather"], names["seasons"]) > 0.8
    assert "accuracy" in capsys.readouterr().out
