"""The command line as a person meets it: what it prints, and the exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxreplay import __version__
from proxreplay.cli import app
from proxreplay.cli.runs import parse_grid, parse_seeds, parse_sets
from proxreplay.errors import InputError
from tests.report.synthetic import write_run

COMMANDS = ("demo", "plan", "run", "resume", "compare", "sweep", "reproduce")
COMMANDS += ("benchmarks", "methods", "report", "figure", "data fetch", "data check")


def call(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as from a shell."""
    command = [sys.executable, "-m", "proxreplay", *words]
    environment = {**os.environ, "COLUMNS": "100", "PROXREPLAY_DATA": ""}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_and_fits_a_screen(command: str) -> None:
    outcome = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "100"})
    assert outcome.exit_code == 0
    assert f"Example: proxreplay {command}" in outcome.output
    assert len(outcome.output.splitlines()) <= 40


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"proxreplay {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "split-digts"], "unknown benchmark 'split-digts'"),
        (["run", "split-digits", "--method", "lprer"], "unknown method 'lprer'"),
        (["run", "split-digits", "--set", "lpr.omega=4"], "nearest valid one is 'lpr.omega_0'"),
        (["run", "split-digits", "--set", "lr"], "give KEY=VALUE"),
        (["run", "split-digits", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "split-mnist"], "proxreplay data fetch mnist"),
        (["resume", "nowhere"], "nowhere: no such folder"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["report", ".", "--watch", "--out", "t.md"], "t.md is a file of tables"),
        (["report", ".", "--out", "t.tabel"], "give one of .html, .md, .tex, .csv"),
        (["compare", "split-digits", "--methods", "er", "--seeds", "4-x"], "--seeds 4-x"),
        (["sweep", "split-digits", "--grid", "lr"], "--grid lr"),
        (["reproduce", "table9"], "unknown table or figure 'table9'"),
        (["figure", "pie", "."], "unknown figure 'pie'; there are accuracy"),
        (["data", "fetch", "imagenet"], "data set 'imagenet' is not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path
) -> None:
    outcome = call(*words, cwd=tmp_path)
    assert outcome.returncode in (1, 2)
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr + outcome.stdout


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    outcome = call("--debug", "run", "split-digts", cwd=tmp_path)
    assert "Traceback" in outcome.stderr


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = ["compare", "split-digits", "--methods", "er,lpr-er", "--seeds", "0-1", "--out", "s"]
    words += ["--jobs", "2", "--set", "steps_per_batch=5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "proxreplay", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("s/runs/*/records.jsonl")) and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "The same command again goes on" in errors
    assert "Traceback" not in errors
    again = call(*words, cwd=tmp_path)
    assert again.returncode == 0
    assert "LPR (ER)" in again.stdout


def test_a_report_is_a_page_or_the_tables_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    starts = {
        "html": "<!doctype html>",
        "md": "## split-digits",
        "tex": "% split-",
        "csv": "table,",
    }
    for ending, start in starts.items():
        out = tmp_path / f"report.{ending}"
        outcome = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(out)])
        assert outcome.exit_code == 0
        assert out.read_text().lower().startswith(start)


def test_a_failing_run_is_told_and_the_exit_code_says_so(tmp_path: Path) -> None:
    taken = tmp_path / "s" / "runs" / "er-seed1"
    taken.mkdir(parents=True)
    (taken / "thesis.tex").write_text("precious")
    words = ["compare", "split-digits", "--methods", "er", "--seeds", "0-2", "--out", "s"]
    outcome = call(*words, "--set", "steps_per_batch=1", "--eval-every", "50", cwd=tmp_path)
    assert outcome.returncode == 1
    assert "1 of 3 runs failed" in outcome.stderr
    assert "not empty and holds no run" in outcome.stderr
    assert (tmp_path / "s" / "runs" / "er-seed2" / "result.json").exists()


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, proxreplay; heavy = {'matplotlib', 'sklearn', 'wandb', 'mlflow', 'ray', "
        "'tensorboard', 'typer', 'rich', 'yaml', 'PIL', 'jinja2', 'scipy'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_words_become_values() -> None:
    assert parse_seeds("0-2,7") == [0, 1, 2, 7]
    assert parse_sets(["lpr.omega_0=4", "refresh.samples=null"]) == {
        "lpr.omega_0": 4,
        "refresh.samples": None,
    }
    assert parse_grid(["lr=0.1,1", "lpr.beta=2"]) == {"lr": [0.1, 1], "lpr.beta": [2]}
    assert parse_grid(["paper"]) is None
    for wrong in ("", "3-1", "1,1", "a"):
        with pytest.raises(InputError, match="--seeds"):
            parse_seeds(wrong)
