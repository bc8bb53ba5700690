"""The command line as a person meets it: what it prints, and the exit code."""

import ast
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from proxreplay import __version__
from proxreplay.cli import app, late, main
from proxreplay.cli.display import StudyDisplay
from proxreplay.cli.options import parse_grid, parse_seeds, parse_sets
from proxreplay.errors import InputError
from proxreplay.experiments.config import described, dump_settings, keys
from proxreplay.experiments.configure import configure
from proxreplay.experiments.engines import InlineEngine, Job, Outcome
from proxreplay.experiments.results import read_json
from proxreplay.experiments.run import RunProgress
from proxreplay.files import write_json
from tests.report.synthetic import write_run

COMMANDS = ("demo", "plan", "run", "resume", "compare", "sweep", "reproduce")
COMMANDS += ("benchmarks", "methods", "settings", "report", "figure", "data fetch", "data check")


Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """The command as typed in an empty folder; in this process, where torch is imported already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PROXREPLAY_DATA", "")

    def typed(*words: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr(sys, "argv", ["proxreplay", *words])
        before = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as left:
                main()
        finally:
            signal.signal(signal.SIGINT, before)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(left.value.code or 0), said.out, said.err)

    return typed


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
        (["run", "split-mnist", "--data-root", "nowhere"], "proxreplay data fetch mnist"),
        (["plan", "split-mnist", "--data-root", "nowhere"], "proxreplay data fetch mnist"),
        (["compare", "split-mnist", "--methods", "er"], "5 of 5 runs failed or were stopped"),
        (["run", "custom", "--data", "nowhere"], "nowhere does not exist"),
        (["run", "split-digits", "--sed", "3"], "No such option: --sed"),
        (["rum"], "No such command 'rum'"),
        (["figure", "accuracy", "nowhere"], "nowhere: no such folder"),
        (["resume", "nowhere"], "nowhere: no such folder"),
        (
            ["compare", "split-digits", "--methods", "er", "--engine", "slurm"],
            "--engine slurm: give",
        ),
        (["compare", "split-digits", "--methods", "er", "--address", "auto"], "goes with --engine"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["report", ".", "--watch", "--out", "t.md"], "t.md is a file of tables"),
        (["report", ".", "--out", "t.tabel"], "give one of .html, .md, .tex, .csv"),
        (["compare", "split-digits", "--methods", "er", "--seeds", "4-x"], "--seeds 4-x"),
        (["sweep", "split-digits", "--grid", "lr"], "--grid lr"),
        (["sweep", "split-digits", "--grid", "lr=0.1,0.1"], "--grid lr=0.1,0.1: give each"),
        (["compare", "split-digits", "--methods", "er,er"], "--methods er,er: give each method"),
        (["compare", "split-digits", "--methods", "er", "--seeds", "1,1"], "give each seed once"),
        (["compare", "split-digits", "--methods", "er", "--seeds", "0-99999999"], "10,000 seeds"),
        (["run", "split-digits", "--threads", "100000"], "threads=100000; give at most 1024"),
        (["run", "split-digits", "--set", "lpr.beta=300"], "lpr.beta=300.0; give at most 10"),
        (["run", "split-digits", "--set", "lpr.omega_0=1e300"], "lpr.omega_0=1e+300; give at most"),
        (["run", "split-digits", "--set", "lr=[1"], "cannot be read as a YAML value"),
        (["run", "split-digits", "--set", "lr=1", "--set", "lr=2"], "lr is given twice"),
        (
            ["run", "split-digits", "--method", "er", "--set", "lpr.omega_0=3"],
            "lpr.omega_0 has no effect on er; leave it out",
        ),
        (["run", "split-digits", "--set", "stream.blur=0.3"], "stream.blur has no effect"),
        (["run", "split-digits", "--set", "device=cuda:7"], "device=cuda:7: not usable here"),
        (["run", "split-digits", "--set", "network=resnet50"], "give one of mlp, small_cnn"),
        (["run", "split-digits", "--config", "/dev/zero"], "/dev/zero: not a file"),
        (["run", "split-digits", "--out", "/dev/null"], "/dev/null is not a folder"),
        (["run", "split-digts", "--out", "x/[/x]"], "unknown benchmark"),
        (["reproduce", "table9"], "unknown table or figure 'table9'"),
        (["figure", "pie", "."], "unknown figure 'pie'; there are accuracy"),
        (["data", "fetch", "imagenet"], "data set 'imagenet' is not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line_and_nothing_is_left(
    words: list[str], message: str, tmp_path: Path, call: Call
) -> None:
    outcome = call(*words)
    assert outcome.returncode == 2
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_of_data_ends_the_real_command_with_2(tmp_path: Path) -> None:
    """Typed in a shell: as it is installed, in a process of its own."""
    environment = {**os.environ, "PROXREPLAY_DATA": str(tmp_path / "nowhere")}
    outcome = subprocess.run(
        [sys.executable, "-m", "proxreplay", "run", "split-mnist", "--out", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 2, outcome.stderr
    assert "proxreplay data fetch mnist" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_on_its_way_ends_with_1(tmp_path: Path, call: Call) -> None:
    """It was begun as asked for, so the command was right."""
    words = ["run", "split-digits", "--method", "er", "--out", "run", "--set", "stream.limit=40"]
    outcome = call(*words, "--set", "lr=1e30")
    assert outcome.returncode == 1
    assert "not finite" in outcome.stderr
    assert (tmp_path / "run" / "failure.txt").exists()


def test_a_folder_of_another_run_ends_with_2(tmp_path: Path, call: Call) -> None:
    words = ["run", "split-digits", "--method", "er", "--out", "run", "--set", "stream.limit=20"]
    assert call(*words).returncode == 0
    outcome = call(*words, "--seed", "3")
    assert outcome.returncode == 2
    assert "belongs to another configuration" in outcome.stderr


def test_debug_shows_the_traceback(call: Call) -> None:
    with pytest.raises(InputError, match="split-digts"):
        call("--debug", "run", "split-digts")


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path, call: Call) -> None:
    words = ["compare", "split-digits", "--methods", "er,lpr-er", "--seeds", "0", "--out", "s"]
    words += ["--set", "steps_per_batch=9", "--eval-every", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "proxreplay", *words, "--jobs", "2"],
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
    again = call(*words)  # with another engine
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


def test_a_failing_run_is_told_and_the_exit_code_says_so(tmp_path: Path, call: Call) -> None:
    taken = tmp_path / "s" / "runs" / "er-seed1"
    taken.mkdir(parents=True)
    (taken / "thesis.tex").write_text("precious")
    words = ["compare", "split-digits", "--methods", "er", "--seeds", "0-2", "--out", "s"]
    outcome = call(*words, "--set", "stream.limit=30", "--eval-every", "50")
    assert outcome.returncode == 1
    assert "1 of 3 runs failed" in outcome.stderr
    assert "not empty and holds no run" in outcome.stderr
    assert (tmp_path / "s" / "runs" / "er-seed2" / "result.json").exists()


@pytest.mark.parametrize("words", ["--help", "run --help", "methods", "benchmarks", "settings er"])
def test_what_only_tells_needs_no_torch(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""import sys, atexit
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
sys.argv = ["proxreplay", *{words.split()!r}]
from proxreplay.cli import main
main()"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stderr.strip() == "False"
    assert len(answer.stdout) > 200


@pytest.mark.parametrize("command", ["benchmarks", "methods", "settings"])
def test_lists_cut_no_words_at_80_columns(command: str) -> None:
    outcome = CliRunner().invoke(app, [command], env={"COLUMNS": "80", "PROXREPLAY_DATA": ""})
    assert outcome.exit_code == 0
    assert "\u2026" not in outcome.output
    assert max(map(len, outcome.output.partition("To get")[0].splitlines())) <= 80


def test_the_keys_of_set_are_listed_where_they_have_an_effect() -> None:
    every, er = (CliRunner().invoke(app, ["settings", *m]).output for m in ([], ["er"]))
    assert "lpr.omega_0" in every
    assert "lpr.omega_0" not in er
    assert "capacity" in er
    assert not [key for key in keys() if not described()[key]]


EVIL = """
from pathlib import Path
Path(__file__).with_name("executed").touch()
from proxreplay.models import mlp
def net(num_classes): return mlp(64, num_classes)
"""


def test_code_that_only_a_file_names_is_not_executed(tmp_path: Path, call: Call) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    config = configure("split-digits", "er", {"network": "evil.py:net", "stream.limit": 20})
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    for words in (
        ["resume", "theirs"],
        ["run", "--config", "theirs/config.yaml"],
        ["plan", "split-digits", "--config", "theirs/config.yaml", "--method", "er"],
    ):
        outcome = call(*words)
        assert outcome.returncode == 2
        assert "would be executed: network=evil.py:net" in outcome.stderr
        assert not (tmp_path / "executed").exists()
    assert call("resume", "theirs", "--trust").returncode == 0
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("names", "said"), [(["one"], "Acc "), (["one", "two"], "2 runs complete; see: proxreplay rep")]
)
def test_resume_says_what_there_is_when_nothing_is_left(
    names: list[str], said: str, tmp_path: Path
) -> None:
    for name in names:
        write_run(tmp_path / name)
    outcome = CliRunner().invoke(app, ["resume", str(tmp_path)])
    assert outcome.exit_code == 0
    assert said in outcome.stdout


def odd_folders(root: Path) -> None:
    """What people point at: nothing, runs that have only begun, runs that cannot be read."""
    (root / "empty").mkdir()
    write_run(root / "begun" / "a", stop_after=0)
    cut = write_run(root / "cut" / "a", stop_after=60) / "records.jsonl"
    lines = cut.read_text().splitlines()
    cut.write_text("\n".join([*lines[:9], lines[9][:15], *lines[10:]]) + "\n")
    write_run(root / "failed" / "a", stop_after=0)
    (root / "failed" / "a" / "failure.txt").write_text("out of luck")


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("empty", "empty: no runs here; a run folder holds a config.yaml."),
        ("begun", "begun: no run has anything to draw yet. 1 run is not finished: a."),
        ("cut", "1 run is left out of the tables (1 broken). broken: records.jsonl, line 10: not"),
        ("failed", "1 run is left out of the tables (1 failed). failed: out of luck. (a)"),
    ],
)
def test_a_figure_of_nothing_is_refused_with_the_reason(
    folder: str, message: str, tmp_path: Path, call: Call
) -> None:
    odd_folders(tmp_path)
    outcome = call("figure", "accuracy", folder, "--out", "pictures")
    assert outcome.returncode == 2
    assert message in outcome.stderr
    assert not (tmp_path / "pictures").exists()


def test_a_figure_says_which_runs_are_not_in_it_as_they_should_be(
    tmp_path: Path, call: Call
) -> None:
    odd_folders(tmp_path)
    write_run(tmp_path / "cut" / "whole", seed=1)
    write_run(tmp_path / "cut" / "half", seed=2, stop_after=60)
    outcome = call("figure", "accuracy", "cut", "--out", "pictures")
    assert outcome.returncode == 0
    assert outcome.stdout.splitlines() == ["pictures/accuracy-split-digits-50.png"]
    assert "1 run is left out of the tables (1 broken). broken: records.jsonl" in outcome.stderr
    assert "1 run is not finished: half" in outcome.stderr


def test_a_figure_that_some_streams_lack_is_drawn_of_the_others(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "runs" / "a", settings={"capacity": 20})
    write_run(tmp_path / "runs" / "b", diagnostics=True)
    outcome = call("figure", "drift", "runs", "--out", "pictures")
    assert outcome.returncode == 1  # a part
    assert outcome.stdout.splitlines() == ["pictures/drift-split-digits-50.png"]
    assert "split-digits, memory of 20: no records for 'representation drift'" in outcome.stderr


@pytest.mark.parametrize("ending", ["exe", "", "../x", "bmp"])
def test_a_picture_of_no_known_kind_is_refused(ending: str, tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "run")
    outcome = call("figure", "accuracy", "run", "--out", "pictures", "--ending", ending)
    assert outcome.returncode == 2
    assert f"--ending {ending}: give one of png, pdf, svg." in outcome.stderr
    assert not (tmp_path / "pictures").exists()


def test_a_report_tells_on_the_terminal_what_is_seriously_wrong(tmp_path: Path, call: Call) -> None:
    odd_folders(tmp_path)
    outcome = call("report", "cut")
    assert outcome.returncode == 0
    assert "broken: records.jsonl, line 10: not JSON" in outcome.stdout
    assert "1 run (1 broken): cut/report.html" in outcome.stdout
    write_run(tmp_path / "every" / "a")
    write_run(tmp_path / "every" / "b", seed=1, settings={"eval_every": 7})
    assert "Evaluation intervals differ ([1, 7]): WC-Acc" in call("report", "every").stdout


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    outcome = call("report", "runs", str(tmp_path / "runs"), "runs/a", "link")
    assert "1 run (1 complete): runs/report.html" in outcome.stdout


def test_tables_say_if_their_runs_are_of_different_versions(tmp_path: Path, call: Call) -> None:
    """A study that was begun before an update, and went on after it."""
    words = ["compare", "split-digits", "--methods", "er", "--seeds", "0-2", "--out", "s"]
    words += ["--set", "stream.limit=20"]
    assert "source codes" not in call(*words).stdout
    assert "source codes" not in call("report", "s", "--out", "t.md").stdout
    one = tmp_path / "s" / "runs" / "er-seed1" / "environment.json"
    known = read_json(one)
    write_json(one, {**known, "proxreplay": "0.0.9", "code": "1" * 64})
    said = (
        f"The runs were made with 2 different source codes of proxreplay ({__version__}, code "
        f"{known['code'][:8]}: 2 runs; 0.0.9, code 11111111: 1 run); differences between them may "
        "be that."
    )
    assert call(*words).stdout.count(said) == 1
    for name in ("t.md", "t.tex", "t.csv", "t.html"):
        assert call("report", "s", "--out", name).stdout.count(said) == 1
        assert (tmp_path / name).read_text().count(said) == (name != "t.csv")  # rows only
    one.write_text("{")  # nobody knows, and nothing else is wrong
    assert "source codes" not in call(*words).stdout


def test_methods_lists_both_sides_apart_and_once() -> None:
    lines = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "80"}).stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if "With KLPR" in line)
    named = [i for i, line in enumerate(lines) if line.split()[:1] == ["klpr-der"]]
    assert len(named) == 1
    assert named[0] > start
    assert "loss." not in " ".join(lines[start:])


def test_resume_names_folders_it_cannot_read(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.yaml").write_text("{")
    outcome = CliRunner().invoke(app, ["resume", str(tmp_path)])
    assert outcome.exit_code == 1
    assert f"{tmp_path / 'bad'}: " in outcome.stderr.replace("\n", "")
    assert "1 of 2 run folders cannot be read" in outcome.stderr
    assert CliRunner().invoke(app, ["resume", str(tmp_path / "bad")]).exit_code == 2


def test_names_are_neither_markup_nor_escape_codes(call: Call) -> None:
    name = "x\x1b[31m[/x]"
    outcome = call("run", "split-digits", "--set", "stream.limit=20", "--out", name)
    assert outcome.returncode == 0, outcome.stderr
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert r"x\x1b[31m[/x]" in outcome.stdout


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    outcome = call("figure", "accuracy", "run", "--out", "file")
    assert outcome.returncode == 2
    assert "file" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_where_there_is_no_terminal_a_line_comes_now_and_then() -> None:
    seconds = iter([0.0, 10.0, 31.0, 40.0, 75.0])
    console = Console(file=io.StringIO(), width=200)
    job = Job(configure("split-digits", "er"), Path("runs/[er]"))
    with StudyDisplay(console, 1, clock=lambda: next(seconds)) as display:
        for position in range(1, 6):
            display.on_progress(job, RunProgress(position, 9, 0, 5, 0.5))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[0] for line in lines] == [f"runs/[er]: batch {n}/9" for n in (1, 3, 5)]


def test_earlier_names_of_settings_work_with_a_word(tmp_path: Path) -> None:
    words = ["plan", "split-digits", "--method", "er", "--set", "memory=30"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0
    assert "memory 30" in outcome.stdout
    assert "'memory' is now called 'capacity'" in outcome.stderr


def old_settings(method: str, *dropped: str) -> dict[str, object]:
    """What a run of an earlier version wrote, which had no settings of these names."""
    values = configure("split-digits", method, {"stream.limit": 20, "seed": 3}).to_dict()
    for name in dropped:
        section, _, key = name.partition(".")
        del (values[section] if key else values)[key or section]
    return values


@pytest.mark.parametrize("edited", [False, True], ids=["as written", "a copy with less in it"])
def test_what_an_old_run_does_not_say_is_as_it_was_then(
    edited: bool, tmp_path: Path, call: Call
) -> None:
    old = old_settings("anytime", "companion", "sharded", *(["projection", "seed"] * edited))
    (tmp_path / "config.yaml").write_text(
        dump_settings(old) if edited else yaml.safe_dump(old)  # as version 0.1 wrote it
    )
    outcome = call("run", "--config", "config.yaml", "--out", "again", "--seed", "3")
    assert outcome.returncode == 0
    assert "config.yaml says nothing of companion.weight: 0.0 is taken" in outcome.stderr
    assert "--set companion.weight=1.0" in outcome.stderr
    assert outcome.stderr.count("says nothing of") == 1  # nothing else differs from the recipe
    made = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert made["companion"]["weight"] == 0.0

    words = ["--set", "companion.weight=1", "--seed", "3"]
    call("run", "--config", "config.yaml", "--out", "today", *words)
    made = yaml.safe_load((tmp_path / "today" / "config.yaml").read_text())
    assert made["companion"]["weight"] == 1.0


def test_settings_written_by_hand_are_on_top_of_the_recipe(tmp_path: Path, call: Call) -> None:
    (tmp_path / "mine.yaml").write_text("method: anytime\nlr: 0.5\nstream: {limit: 20}\n")
    outcome = call("run", "split-digits", "--config", "mine.yaml", "--out", "mine")
    assert outcome.returncode == 0
    assert "says nothing of" not in outcome.stderr
    made = yaml.safe_load((tmp_path / "mine" / "config.yaml").read_text())
    assert (made["lr"], made["companion"]["weight"]) == (0.5, 1.0)


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
    with pytest.raises(InputError, match="more than 10,000 combinations"):
        parse_grid(["lr=" + ",".join(["0.1"] * 200), "lpr.beta=" + ",".join("1" * 51)])
    for wrong in ("", "3-1", "1,1", "a"):
        with pytest.raises(InputError, match="--seeds"):
            parse_seeds(wrong)


def test_a_run_that_was_stopped_alone_is_told_by_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a SIGTERM to one worker: no table is printed as if all seeds were there."""

    def make(self: InlineEngine, jobs: Sequence[Job], *args: object) -> list[Outcome]:
        return [Outcome(jobs[0], "interrupted", "stopped"), Outcome(jobs[1], "complete")]

    monkeypatch.setattr(InlineEngine, "make", make)
    words = ["compare", "split-digits", "--methods", "er", "--seeds", "0,1", "--out", str(tmp_path)]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1
    assert "1 of 2 runs failed or were stopped" in answer.stderr
    assert "er-seed0: stopped" in answer.stderr.replace("\n", "")
    assert not answer.stdout


def test_every_module_that_is_declared_late_is_found() -> None:
    """The names are written twice, for the type checker and for the import: they must agree."""
    tree = ast.parse(Path(late.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: f"{one.module}.{alias.name}"
        for one in typed.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    }
    assert declared == {
        name: f"{package}.{name}"
        for package, modules in late._MODULES.items()
        for name in modules.split()
    }
