"""Every command that the docs show is one that the command line takes.

Blocks of shell are executed by a shell in which the commands only write down how they were called.
Each call then goes through the real command line up to the point where runs would be made: unknown
options, methods, benchmarks and settings fail. Those of the guide are run, shortened.
"""

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from proxreplay.cli import app, runs
from tests.test_docs import PAGES as ALL_PAGES
from tests.test_docs import ROOT

PAGES = [page for page in ALL_PAGES if page.name != "CHANGELOG.md"]  # it speaks of old ones too
PLACEHOLDERS = {"S": "0", "M": "50", "NAME": "er", "lpr-X": "lpr-er"}
MAKE_RUNS = {"run", "compare", "sweep", "reproduce"}
NAMES = ("proxreplay", "torchrun", "python", "pip", "make", "ray")
SHIM = '#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@" >> "$CALLS"\nprintf "\\n" >> "$CALLS"\n'
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(rf"(?:^    (?:{'|'.join(NAMES)}) .*\n)+", re.M)
INLINE = re.compile(rf"`((?:{'|'.join(NAMES)})\s[^`]+)`")


def blocks(text: str) -> list[str]:
    """The blocks of shell of a page."""
    fenced = [code for language, code in FENCED.findall(text) if language in ("", "bash", "sh")]
    shell = [code for code in fenced if re.search(rf"\b(?:{'|'.join(NAMES)}) ", code)]
    return shell + INDENTED.findall(FENCED.sub("", text))


def calls_of(block: str, folder: Path) -> list[list[str]]:
    """What a shell calls when it executes a block."""
    for name in NAMES:
        (folder / name).write_text(SHIM)
        (folder / name).chmod(0o755)
    log = folder / "calls"
    log.write_text("")
    subprocess.run(
        ["bash", "-euc", block],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(log)},
        check=True,
    )
    return [line.split("\0")[:-1] for line in log.read_text().splitlines()]


def commands(page: Path, folder: Path) -> list[list[str]]:
    """All commands of a page, word by word; a usage line with ``[...]`` is one too."""
    text = page.read_text()
    found = []
    for block in blocks(text):
        usage = [line.strip() for line in block.splitlines() if "[--" in line]
        found += [line.split() for line in usage]
        rest = [line for line in block.splitlines() if "[--" not in line]
        found += calls_of("\n".join(rest), folder)
    spans = INLINE.findall(INDENTED.sub("", FENCED.sub("", text)))
    return found + [shlex.split(" ".join(span.split())) for span in spans]


class Planned(Exception):
    """The point where runs would be made."""


class WrongCommandError(Exception):
    """A command that would not work."""


def check(words: list[str]) -> None:
    """Refuse a command that would not work."""
    name, *rest = words
    if name in ("torchrun", "ray"):
        if "proxreplay" not in rest:
            return  # they start something else
        name, rest = "proxreplay", rest[rest.index("proxreplay") + 1 :]
    if name == "make":
        require(re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M), "no target")
    elif name == "pip":
        check_extras(rest)
    elif name == "python":
        check_module(rest)
    else:
        check_proxreplay([PLACEHOLDERS.get(word, word) for word in rest])


def require(met: object, otherwise: str) -> None:
    if not met:
        raise WrongCommandError(otherwise)


def check_extras(rest: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for named in re.findall(r"proxreplay\[(\w+)\]", " ".join(rest)):
        require(named in project["optional-dependencies"], f"no extra {named}")


def check_module(rest: list[str]) -> None:
    """A script or module that is there and knows the options."""
    if rest[0] != "-m":
        require((ROOT / rest[0]).exists(), f"no file {rest[0]}")
        return
    file = ROOT.joinpath(*rest[1].split("."))
    file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
    require(file.exists(), f"no module {rest[1]}")
    options = [word for word in rest[2:] if word.startswith("--")]
    known = help_of(file) if options else ""
    for option in options:
        require(re.search(rf"{option}\b(?!-)", known), f"{rest[1]} has no {option}")


@functools.cache
def help_of(file: Path) -> str:
    """What a program says about its options; it gets no further than that."""
    printed = io.StringIO()
    argv, sys.argv = sys.argv, [file.name, "--help"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = argv
    return printed.getvalue()


def check_proxreplay(rest: list[str]) -> None:
    """Parse a call; for those that make runs, also everything that comes before the first run."""
    command = typer.main.get_command(app)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        require(rest[0] in command.commands, f"no command {rest[0]}")
        command, rest = command.commands[rest[0]], rest[1:]
    if not rest or rest == ["--help"]:
        return  # the text only speaks of the command
    if any("..." in word or word.startswith("[") for word in rest):
        options = {option for parameter in command.params for option in parameter.opts}
        named = {word.strip("[]") for word in rest if word.strip("[").startswith("--")}
        require(named <= options, f"{command.name} has no {named - options}")
    elif command.name in MAKE_RUNS:
        outcome = CliRunner().invoke(app, [command.name, *rest])
        what = f"{outcome.exception!r}\n{outcome.output}"
        require(isinstance(outcome.exception, Planned), what)
    else:
        try:
            command.make_context(command.name, rest)
        except Exception as error:  # of whichever click typer uses
            raise WrongCommandError(repr(error)) from error


@pytest.fixture
def _nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def planned(*anything: object) -> None:
        raise Planned

    monkeypatch.setattr(runs, "make", planned)
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", x=np.zeros((40, 3)), y=np.arange(40) % 10)


@pytest.mark.usefixtures("_nothing_is_run")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken(page: Path, tmp_path: Path) -> None:
    (tmp_path / "shell").mkdir()
    for words in commands(page, tmp_path / "shell"):
        try:
            check(words)
        except WrongCommandError as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}\n{error}") from error


def test_commands_are_found(tmp_path: Path) -> None:
    found = {page.name: [w[0] for w in commands(page, tmp_path)] for page in PAGES}
    assert found["README.md"].count("proxreplay") >= 6
    assert {"make", "pip"} <= set(found["README.md"])
    assert found["refreshes.md"].count("proxreplay") >= 5  # by a variable
    assert "torchrun" in found["scale.md"]
    assert "python" in found["speed.md"]


@pytest.mark.usefixtures("_nothing_is_run")
@pytest.mark.parametrize(
    "wrong",
    [
        "proxreplay rum split-digits",
        "proxreplay run split-digts",
        "proxreplay run split-digits --method lprer",
        "proxreplay run split-digits --set lpr.omega=4",
        "proxreplay compare split-digits --methods er --seed 0-4",
        "proxreplay report runs --html",
        "proxreplay serve FOLDER [--learners WHAT] ...",
        "torchrun -m proxreplay run split-digits --job 2",
        "python -m benchmarks.nothing",
        "python -m benchmarks.refresh --thread 1",
        "make everything",
        "pip install 'proxreplay[nothing]'",
    ],
)
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises(WrongCommandError):
        check(shlex.split(wrong))


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, on a short stream and with two seeds."""
    page = ROOT / "docs" / "guides" / "experiments.md"
    found = commands(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("mine.npz", x=rng.normal(size=(400, 6)), y=np.arange(400) % 10)
    short = ["--set", "stream.limit=20", "--eval-every", "10"]
    for _, command, *words in found:
        given = ["0-1" if word == "0-4" else word for word in words]
        given += short if command in MAKE_RUNS else []
        outcome = CliRunner().invoke(app, [command, *given], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "runs/compare-split-digits/report.html").exists()
    assert '"prequential"' in next(tmp_path.glob("runs/custom/*/records.jsonl")).read_text()
