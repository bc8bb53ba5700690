"""Crashes by the thousand: ``python -m tests.crashes --kills 1000 --losses 500 --damage 2000``.

A subject is something that writes files. It is done once on a disk that records (`tests.disk`).
Then it is done again from what a kill, a power loss or a failing disk would have left after any
operation, or with a damaged file. Nothing may be lost: the outcome is that of an undisturbed run.
"""

import argparse
import errno
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import cycle, islice
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from PIL import Image

from proxreplay.data.fetch import fetch
from proxreplay.data.trees import image_tree
from proxreplay.errors import CheckpointError, DataError, ProxreplayError
from proxreplay.experiments.configure import configure
from proxreplay.experiments.engines import InlineEngine, Job, ProcessEngine, _work
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.results import read_run
from proxreplay.experiments.run import Interrupted, RunOptions, RunProgress, run
from proxreplay.models import mlp
from proxreplay.replay import Learner
from proxreplay.report.grouping import read_study
from proxreplay.report.page import write_report, write_tables
from proxreplay.report.plots import FIGURES, save
from proxreplay.serialization import to_bytes
from tests.data.data_samples import cifar100_files, clear_files, tar_gz, zipped
from tests.data.downloads import QUICK, published, served
from tests.disk import Recorder, after_kill, after_power_loss

TINY = {
    **{"steps_per_batch": 1, "eval_every": 4, "refresh.every": 2, "capacity": 10},
    **{"stream.first": 2, "stream.limit": 40, "batch_size": 10},
}
OPTIONS = RunOptions(checkpoint_every=2)
RESULTS = ("config.yaml", "records.jsonl", "result.json")
COMPLETE = {*RESULTS, "environment.json", "timings.jsonl", "log.txt", "lock"}


class Subject:
    """Something that writes below a folder, and what has to be true after a crash.

    Args:
        home: a folder of its own; what it needs and never changes is kept there.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.marks: list[int] = []  # how many operations there were after each promise

    def prepare(self, place: Path) -> None:
        """What is there before; all of it is safe on the disk."""

    def do(self, place: Path) -> None:
        """What is disturbed."""
        raise NotImplementedError

    def check(self, place: Path, kept: int = 0) -> None:
        """Go on from what is there; ``kept`` promises had been made before the crash."""
        raise NotImplementedError

    def states(self) -> Iterator[tuple[Path, str]]:
        """Folders in which one file is damaged, and what the names of such files begin with."""
        yield self.recorder.root, ""

    @cached_property
    def recorder(self) -> Recorder:
        place = self.home / "whole"
        place.mkdir()
        self.prepare(place)
        with Recorder(place)() as recorder:
            self.recording = recorder
            self.do(place)
        return recorder

    def promise(self) -> None:
        """What was done so far must never be lost."""
        if hasattr(self, "recording"):
            self.marks.append(len(self.recording.operations))

    def kept(self, count: int) -> int:
        return sum(mark <= count for mark in self.marks)


class Run(Subject):
    """A run of one method."""

    def __init__(self, home: Path, method: str, seed: int = 0, **settings: Any) -> None:
        super().__init__(home)
        values = {**TINY, "seed": seed, **{k.replace("__", "."): v for k, v in settings.items()}}
        self.config = configure(self.benchmark, method, values)

    benchmark = "split-digits"

    def do(self, place: Path) -> None:
        run(self.config, place / "run", OPTIONS)
        self.promise()

    @cached_property
    def whole(self) -> Path:
        """The folder of a run that nothing happened to."""
        return self.recorder.root / "run"

    @cached_property
    def contents(self) -> dict[str, Any]:
        return contents(self.whole)

    def check(self, place: Path, kept: int = 0) -> None:
        folder = place / "run"
        if kept:
            stored = read_run(folder).with_records()
            assert stored.status == "complete", stored.problem
        run(self.config, folder, OPTIONS)
        assert contents(folder) == self.contents
        stored = read_run(folder).with_records()
        assert stored.status == "complete", stored.problem
        left = {path.name for path in folder.iterdir()}
        assert left <= COMPLETE, left
        assert COMPLETE - left <= {"timings.jsonl", "log.txt"}, left  # these are not synced

    def interrupt(self, folder: Path) -> None:
        """Stop a run after 7 of its 8 batches; it has checkpoints at 6 and 7 then."""
        stop = StopRequest()

        def watch(progress: RunProgress) -> None:
            if progress.position == 7:
                stop.signal = signal.SIGTERM

        with suppress(Interrupted):
            run(self.config, folder, OPTIONS, stop=stop, on_progress=watch)
        assert len(list((folder / "checkpoint").iterdir())) == 2

    @cached_property
    def interrupted(self) -> Path:
        self.interrupt(self.home / "interrupted" / "run")
        return self.home / "interrupted"

    def states(self) -> Iterator[tuple[Path, str]]:
        yield self.interrupted, ""
        yield self.interrupted, "0"  # checkpoints are most of a run
        yield self.recorder.root, ""


class CustomRun(Run):
    """A run with images of its own; the cache is in the same place."""

    benchmark = "custom"

    def __init__(self, home: Path, method: str, seed: int = 0) -> None:
        data = {"stream__data": str(photos(home)), "stream__tasks": 2, "stream__first": None}
        super().__init__(home, method, seed, **data, batch_size=4, stream__limit=16)

    def do(self, place: Path) -> None:
        with cache_in(place / "cache"):
            super().do(place)

    def check(self, place: Path, kept: int = 0) -> None:
        with cache_in(place / "cache"):
            super().check(place, kept)
            _data_of(self.home)  # a complete run needs no cache, so its leftovers may be there
        check_one_cache(place / "cache")

    def states(self) -> Iterator[tuple[Path, str]]:
        yield self.recorder.root, ""


class Study(Subject):
    """Several runs, one after the other."""

    @staticmethod
    def jobs(place: Path) -> list[Job]:
        return [
            Job(configure("split-digits", method, {**TINY, "seed": 4}), place / method, OPTIONS)
            for method in ("er-ace", "lpr-derpp")
        ]

    def do(self, place: Path) -> None:
        for outcome in InlineEngine().make(self.jobs(place), StopRequest()):
            if outcome.status != "complete":
                raise DataError(str(outcome.problem))

    def check(self, place: Path, kept: int = 0) -> None:
        self.do(place)
        for method in ("er-ace", "lpr-derpp"):
            assert contents(place / method) == contents(self.recorder.root / method)
            assert not (place / method / "failure.txt").exists()


class Saves(Subject):
    """`Learner.save` again and again, to a file and to a folder."""

    names = ("one.safetensors", "folder")

    @staticmethod
    def learner() -> Iterator[Learner]:
        """The same learner at four moments."""
        torch.manual_seed(3)
        learner = Learner(mlp(4, 2, hidden=(6,)), lr=0.1, seed=3)
        for _ in range(4):
            learner.learn(torch.randn(6, 4), torch.arange(6) % 2)
            yield learner

    def do(self, place: Path) -> None:
        for learner in self.learner():
            for name in self.names:
                learner.save(place / name)
            self.promise()

    @cached_property
    def known(self) -> list[str]:
        return [_state_of(learner) for learner in self.learner()]

    def check(self, place: Path, kept: int = 0) -> None:
        for name in self.names:
            try:
                found = self.known.index(_state_of(Learner.load(place / name)))
            except CheckpointError as error:
                if kept or "missing" not in str(error):
                    raise
            else:
                assert found >= kept - 1
        *_, last = self.learner()
        for name in self.names:
            last.save(place / name)
            assert _state_of(Learner.load(place / name)) == self.known[-1]
        left = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        assert left == {"one.safetensors", "folder/state.safetensors"}


class Cache(Subject):
    """Images are decoded into a cache."""

    def prepare(self, place: Path) -> None:
        photos(self.home)

    def do(self, place: Path) -> None:
        with cache_in(place / "cache"):
            image_tree(photos(self.home))

    @cached_property
    def digest(self) -> str:
        with cache_in(self.recorder.root / "cache"):
            return _data_of(self.home)

    def check(self, place: Path, kept: int = 0) -> None:
        with cache_in(place / "cache"):
            assert _data_of(self.home) == self.digest
        check_one_cache(place / "cache")


class Rebuilt(Cache):
    """A cache that belongs to other images is replaced."""

    def prepare(self, place: Path) -> None:
        image = photos(self.home) / "class0" / "0.png"
        os.utime(image, (0, 0))
        super().do(place)
        os.utime(image, (1000, 1000))


class Reports(Subject):
    """A page, tables and a picture about two runs, in place of older ones."""

    names = ("report.html", "tables.md", "tables.csv", "picture.png")

    @cached_property
    def runs(self) -> Path:
        for seed in (5, 6):
            config = configure("split-digits", "er", {**TINY, "seed": seed})
            run(config, self.home / "runs" / f"er-{seed}", OPTIONS)
        return self.home / "runs"

    def prepare(self, place: Path) -> None:
        self.runs  # noqa: B018 (made before the recording)
        for name in self.names:
            (place / name).write_text("an older one")

    def do(self, place: Path) -> None:
        page, *tables, picture = (place / name for name in self.names)
        with mock.patch("proxreplay.report.page.datetime") as clock:
            clock.now().strftime.return_value = "now"
            write_report([self.runs], page)
        for table in tables:
            write_tables([self.runs], table)
        save(FIGURES["accuracy"](read_study([self.runs]).sections[0]), picture)

    @cached_property
    def whole(self) -> dict[str, bytes]:
        return {name: (self.recorder.root / name).read_bytes() for name in self.names}

    def check(self, place: Path, kept: int = 0) -> None:
        for name, new in self.whole.items():
            assert (place / name).read_bytes() in (b"an older one", new), f"{name} is torn"
        self.do(place)
        found = {path.name: path.read_bytes() for path in place.iterdir()}
        assert found.keys() == self.whole.keys(), found.keys()
        assert not [name for name, content in found.items() if content != self.whole[name]]

    def states(self) -> Iterator[tuple[Path, str]]:
        return iter(())  # nobody reads them but people


class Fetched(Subject):
    """A data set is downloaded, another one is unpacked as well."""

    archive = "data/cifar-100-binary.tar.gz"

    @cached_property
    def archives(self) -> dict[str, bytes]:
        clear = {n.replace("train/", "top/train/"): c for n, c in clear_files(buckets=1).items()}
        return {
            "cifar100": tar_gz(self.home / "made.tar.gz", cifar100_files(8)[0]).read_bytes(),
            "clear10": zipped(self.home / "made.zip", clear).read_bytes(),
        }

    def do(self, place: Path) -> None:
        cifar, clear = "/cifar-100-binary.tar.gz", "/clear10-train.zip"
        with served() as server:
            server.files = {cifar: self.archives["cifar100"], clear: self.archives["clear10"]}
            server.cut_after = [1000]
            at = server.address
            with (
                published("cifar100", at + cifar, self.archives["cifar100"]),
                published("clear10", at + clear, self.archives["clear10"], "clear10/train"),
            ):
                for name in self.archives:
                    fetch(name, place / "data", patience=QUICK)
                    self.promise()

    @cached_property
    def whole(self) -> dict[str, bytes]:
        return files_in(self.recorder.root)

    def check(self, place: Path, kept: int = 0) -> None:
        found = files_in(place)
        promised = [] if not kept else [self.archive] if kept == 1 else self.whole
        for name in promised:
            assert found.get(name) == self.whole[name], f"{name} was fetched, and is lost"
        self.do(place)
        assert files_in(place) == self.whole
        assert not list(place.rglob(".*"))

    def states(self) -> Iterator[tuple[Path, str]]:
        part = self.home / "part" / f"{self.archive}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(self.archives["cifar100"][:-500])
        yield self.home / "part", ""
        yield self.recorder.root, "cifar"  # what was unpacked is not looked at again


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "er": lambda home: Run(home, "er"),
    "lpr-er-avg, seed 3": lambda home: Run(home, "lpr-er-avg", 3),
    "derpp, seed 1": lambda home: Run(home, "derpp", 1),
    "klpr-er, seed 2": lambda home: Run(home, "klpr-er", 2),
    "anytime, seed 4": lambda home: Run(home, "anytime", 4),
    "slda": lambda home: Run(home, "slda", 5),
    "lpr-der, prequential": lambda home: Run(home, "lpr-der", 6, diagnostics__prequential=True),
    "lpr-er, diagnosed": lambda home: Run(
        home, "lpr-er", 7, diagnostics__drift="paper", diagnostics__gradients_every=2
    ),
    "er-agem, seed 1": lambda home: Run(home, "er-agem", 1),
    "gpm": lambda home: Run(home, "gpm", 8, refresh__every="task"),
    "ema": lambda home: Run(home, "ema", 9),
    "custom images": lambda home: CustomRun(home, "lpr-er"),
    "study": Study,
    "Learner.save": Saves,
    "cache": Cache,
    "cache rebuilt": Rebuilt,
    "reports": Reports,
    "data fetch": Fetched,
}


# --- crashes --------------------------------------------------------------------------------------


def kill(subject: Subject, rng: random.Random, place: Path) -> str:
    """A kill at any operation, sometimes followed by another while the first is made good."""
    count = rng.randrange(len(subject.recorder.operations) + 1)
    after_kill(subject.recorder, count).write_to(place)
    kept, told = subject.kept(count), f"after {count} operations"
    if rng.random() < 0.3:
        first = place.with_name("first")
        place.rename(first)
        with scratch_removed(first):
            with Recorder(first)() as recorder:
                subject.check(first, kept)
            again = rng.randrange(len(recorder.operations) + 1)
            after_kill(recorder, again).write_to(place)
            told += f", then after {again} more"
    subject.check(place, kept)
    return told


def power_loss(subject: Subject, rng: random.Random, place: Path) -> str:
    """Everything may be lost that was not synced."""
    count = rng.randrange(len(subject.recorder.operations) + 1)
    after_power_loss(subject.recorder, count, rng).write_to(place)
    subject.check(place, subject.kept(count))
    return f"after {count} operations"


def failing_disk(subject: Subject, rng: random.Random, place: Path) -> str:
    """One operation fails, or everything that needs room from then on."""
    at = rng.randrange(len(subject.recorder.operations))
    code, lasting = rng.choice((errno.ENOSPC, errno.EIO)), rng.random() < 0.5
    subject.prepare(place)
    recorder = Recorder(place, at, lambda: OSError(code, os.strerror(code)), lasting)
    try:
        with recorder():
            subject.do(place)
    except (ProxreplayError, OSError) as error:
        assert os.strerror(code) in str(error), error  # noqa: PT017
    subject.check(place)
    return f"{os.strerror(code)} at operation {at}{' and later' * lasting}"


def damaged(subject: Subject, rng: random.Random, place: Path) -> str:
    """One file is damaged: the outcome is exact or older, or the file is named."""
    states = list(subject.states())
    if not states:
        return "nothing to damage"
    state, prefix = rng.choice(states)
    shutil.copytree(state, place, dirs_exist_ok=True)
    files = sorted(path for path in place.rglob(f"{prefix}*") if path.is_file())
    victim = rng.choice(files)
    told = f"{victim.relative_to(place)}: {damage(victim, rng)}"
    try:
        subject.check(place)
    except ProxreplayError as error:
        named = (victim.name, victim.parent.name)
        assert any(name in str(error) for name in named), f"{told}: {error}"  # noqa: PT017
        told = f"refused {told}"
    return told


def damage(path: Path, rng: random.Random) -> str:
    """Flip a bit, cut the end off, overwrite a region, or lose the file's content."""
    content = bytearray(path.read_bytes())
    if not content:
        return "empty already"
    at = rng.randrange(len(content))
    kind = rng.choice(("flip", "digit", "cut", "zeros", "empty", "swap"))
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "digit":
        digits = [i for i, byte in enumerate(content) if byte in b"0123456789"] or [at]
        at = rng.choice(digits)
        content[at] = ord("7") if content[at] != ord("7") else ord("3")
    elif kind == "cut":
        del content[at:]
    elif kind == "zeros":
        content[at : at + 50] = bytes(len(content[at : at + 50]))
    elif kind == "empty":
        content.clear()
    else:
        half = len(content) // 2
        content[:half], content[half:] = content[half:], content[:half]
    path.write_bytes(content)
    return f"{kind} at {at}"


def killed_workers(subject: Subject, rng: random.Random, place: Path) -> str:
    """The worker processes of a study are really killed, each at one of its operations."""
    assert isinstance(subject, Study)
    at = rng.randrange(len(subject.recorder.operations) // 2)
    with (
        mock.patch("proxreplay.experiments.engines._work", work_until_killed),
        mock.patch.dict(os.environ, {"KILLED_IN": str(place), "KILLED_AT": str(at)}),
    ):
        outcomes = ProcessEngine(2).make(subject.jobs(place), StopRequest())
    killed = [outcome for outcome in outcomes if outcome.status == "failed"]
    assert killed, f"nobody came to operation {at}"
    assert all("exit code -9" in str(outcome.problem) for outcome in killed), killed
    subject.check(place)
    return f"{len(killed)} at operation {at}"


def work_until_killed(connection: Connection, event: Event) -> None:
    """What a worker does, up to one of its file operations."""

    def die() -> BaseException:
        os.kill(os.getpid(), signal.SIGKILL)
        return SystemExit()

    with Recorder(Path(os.environ["KILLED_IN"]), int(os.environ["KILLED_AT"]), die)():
        _work(connection, event)


CRASHES = {
    **{"kills": kill, "losses": power_loss, "errors": failing_disk, "damage": damaged},
    "workers": killed_workers,
}


def can_be(kind: str, subject: Subject) -> bool:
    """Whether a crash is one for this subject."""
    return kind != "workers" or isinstance(subject, Study)


def crash(subject: Subject, kind: str, seed: int) -> str | None:
    """One crash; None if nothing was lost, else what was."""
    place = subject.home / "place"
    place.mkdir()
    with scratch_removed(place):
        try:
            CRASHES[kind](subject, random.Random(seed), place)
        except Exception:
            return traceback.format_exc()
    return None


# --- tools ----------------------------------------------------------------------------------------


@contextmanager
def scratch_removed(place: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"PROXREPLAY_CACHE": str(folder)}):
        yield


def contents(folder: Path) -> dict[str, Any]:
    """What must be the same: settings, measures, and the records to the last byte."""
    result = json.loads((folder / "result.json").read_bytes())
    return {
        "config.yaml": yaml.safe_load((folder / "config.yaml").read_bytes()),
        "result.json": {key: value for key, value in result.items() if key != "sha256"},
        "records.jsonl": (folder / "records.jsonl").read_bytes(),
    }


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file by its name below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def check_one_cache(folder: Path) -> None:
    """One cache and nothing else."""
    (only,) = folder.iterdir()
    assert not only.name.endswith((".building", ".lock"))


def photos(home: Path) -> Path:
    """A few small images of four classes."""
    folder = home / "photos"
    rng = np.random.default_rng(0)
    for label in range(4) if not folder.exists() else ():
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.png")
    return folder


def _data_of(home: Path) -> str:
    """A digest of everything that is read from a cache."""
    data = image_tree(photos(home))
    digest = hashlib.sha256(repr((data.name, data.classes, data.domains, data.digest())).encode())
    for part in (data.train, data.test):
        every = part[torch.arange(len(part))]
        digest.update(every.inputs.numpy().tobytes() + every.labels.numpy().tobytes())
    return digest.hexdigest()


def _state_of(learner: Learner) -> str:
    return hashlib.sha256(to_bytes(learner.state_dict())).hexdigest()


def main() -> int:
    """Crash every subject in turn; prints a count of what was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    for kind in CRASHES:
        parser.add_argument(f"--{kind}", type=int, default=0, help="how many")
    parser.add_argument("--only", help="subjects whose name begins so")
    parser.add_argument("--seed", type=int, default=0, help="other crashes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # downloads tell what went wrong before it was made good
    lost: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        subjects = {}
        for number, (name, make) in enumerate(SUBJECTS.items()):
            if name.startswith(asked.only or ""):
                home = Path(scratch) / str(number)
                home.mkdir()
                subjects[name] = make(home)
                assert subjects[name].recorder.operations
        for kind in CRASHES:
            suited = [one for one in subjects.items() if can_be(kind, one[1])]
            for number, (name, subject) in islice(enumerate(cycle(suited)), getattr(asked, kind)):
                problem = crash(subject, kind, 10**6 * asked.seed + number)
                if problem:
                    lost[kind] += 1
                    print(f"{kind} {number} of {name}\n{problem}", flush=True)
            print(f"{kind}: {getattr(asked, kind)}, of which lost: {lost[kind]}", flush=True)
    return min(sum(lost.values()), 1)


if __name__ == "__main__":
    sys.exit(main())
