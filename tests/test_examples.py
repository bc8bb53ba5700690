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


@pytest.mark.filterwarnings("ignore")
def test_the_avalanche_plugin_keeps_more(capsys):
    pytest.importorskip("avalanche", reason="avalanche-lib is not installed; the example needs it")
    runpy.run_path(str(EXAMPLES / "avalanche_plugin.py"), run_name="__main__")
    naive, with_lpr = (
        sum(map(float, line.split(":")[1].split()))
        for line in capsys.readouterr().out.splitlines()[-2:]
    )
    assert with_lpr > naive


def test_a_small_bert_learns_from_docstrings(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    example = runpy.run_path(str(EXAMPLES / "text_stream.py"))
    example["main"].__globals__.update(PACKAGES=("asyncio", "email"), EACH=80)
    example["main"]()
    out = capsys.readouterr().out
    accuracy = float(out.split()[-1])
    assert "all 2 packages, held out" in out
    assert accuracy > 0.6  # guessing gives a half


def test_two_sides_hold_what_matters_and_let_the_rest_go(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["two_sided.py", str(tmp_path / "picture.png")])
    runpy.run_path(str(EXAMPLES / "two_sided.py"), run_name="__main__")
    shares = {words[0]: [float(word) for word in words[1:]] for words in
              (line.split() for line in capsys.readouterr().out.splitlines())}  # fmt: skip
    assert shares["SGD"] == [1, 1, 1]
    assert len(set(shares["LPR"])) == len(set(shares["GPM"])) == 1
    assert shares["two-sided"] == [0.10, 0.98, 1.00]
    assert (tmp_path / "picture.png").exists()
