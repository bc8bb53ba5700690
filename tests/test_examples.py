"""The examples run, and say what their text says."""

import runpy
from pathlib import Path

import pytest

from proxreplay.proximal.layers import registry

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _forget_layers(monkeypatch):
    monkeypatch.setattr(registry, "_LAYERS", dict(registry._LAYERS))


def test_three_lines_keep_the_first_task(capsys):
    runpy.run_path(str(EXAMPLES / "three_lines.py"), run_name="__main__")
    plain, with_lpr = (float(line.split()[2]) for line in capsys.readouterr().out.splitlines())
    assert with_lpr > plain + 0.05


def test_your_own_layer_is_treated(capsys):
    runpy.run_path(str(EXAMPLES / "your_own_layer.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "FourierLinear  d = 7, groups = 1" in out
    assert "LayerScale     d = 1, groups = 8" in out
