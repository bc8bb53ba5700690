"""docs/integrations.md: its snippets run, and its table is what the models say."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
SECTIONS = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
SNIPPETS = {
    title: code
    for title, text in SECTIONS
    for code in re.findall(r"```python\n(.*?)```", text, re.S)
}
FRAMEWORKS = {
    "Lightning": "lightning",
    "transformers' Trainer": "transformers",
    "accelerate": "accelerate",
}


def test_every_framework_has_a_snippet():
    assert SNIPPETS.keys() == FRAMEWORKS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", FRAMEWORKS)
def test_snippets_run(title, tmp_path, monkeypatch, capsys):
    pytest.importorskip(FRAMEWORKS[title], reason="needs the extra 'integrations'")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "snippet"}
    exec(compile(SNIPPETS[title], f"docs/integrations.md ({title})", "exec"), space)
    if "callback" in space:
        assert space["callback"].rule.layers
        assert "positions" in capsys.readouterr().out
    else:
        assert space["lpr"].layers


ROWS = {name: row for row, name in re.findall(r"^(\| ([\w-]+) \| [\d.]+% \|.*)$", PAGE, re.M)}
ASKED = ["ViT", "BERT", "GPT-2", "Llama", "T5", "DistilBERT", "ResNet", "ConvNeXt", "MobileNetV2"]


def test_the_table_has_every_model():
    from tests.integrations.zoo import MODELS

    assert ROWS.keys() == MODELS.keys()
    assert all("100.0%" in ROWS[name] for name in ASKED)


@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_true(name):
    pytest.importorskip("transformers", reason="needs the extra 'integrations'")
    from tests.integrations.zoo import line

    assert line(name) == ROWS[name]
