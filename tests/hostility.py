"""Hostile inputs by the hundred: ``python -m tests.hostility --inputs 500``.

Each is given to the command line in a process of its own. It may be refused or may work, but there
is no raw traceback, nothing is executed, nothing of somebody else's is changed or deleted, nothing
takes more than a gigabyte or five seconds of CPU time.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from proxreplay.cli import main as command_line
from proxreplay.experiments.configure import configure
from tests.crashes import Run, photos
from tests.data.hostile import deflated, gzipped, npy, png, zip_bomb

GIGABYTE = 1 << 30
SECONDS = 5.0
TAGS = (
    "!!python/object/apply:os.system ['touch {canary}']",
    "!!python/object/new:os.system ['touch {canary}']",
    "!!python/name:os.system ''",
)
WORDS = (
    *("\x1b[31mred\x1b[0m", "[/x]", "[bold]x[/]", "=cmd|'/c calc'!A0", "<script>alert(1)</script>"),
    *("../../etc", "a\nb", "a\rb", "\u202egpj.exe", "x" * 5000, "%s%n", "$(touch {canary})", "~"),
    *("'; touch {canary}; '", "\udcff", "\0", "", " ", "-", "CON", "{canary}"),
)
NUMBERS = (
    *("-1", "0", "1e300", "-1e300", "nan", "inf", "-inf", "1e-320", str(2**40), str(2**63)),
    *(str(2**70), "9" * 5000, "0x" + "f" * 5000, "1_000", "1e9", "300", "1e37", "0.1.2", "true"),
)
VALUES = (*WORDS, *NUMBERS, "none", "[]", "{}", "[[[[1]]]]", "{a: {b: 1}}", "2020-01-01", *TAGS)
OPTIONS = (
    *("--threads", "--seed", "--memory", "--eval-every", "--checkpoint-every", "--tasks", "--out"),
    *("--method", "--data", "--config", "--data-root", "--track", "--set"),
)
SMALL = ["--set", "stream.limit=20", "--set", "stream.first=2", "--eval-every", "10"]


@dataclass
class Case:
    """A command line, and what it must leave alone."""

    arguments: list[str]
    told: str


class Maker:
    """Makes hostile inputs below a folder.

    Args:
        folder: empty; removed afterwards.
        rng: chooses.
        run: a finished run to spoil.
        unfinished: an interrupted one.
    """

    def __init__(self, folder: Path, rng: random.Random, run: Path, unfinished: Path) -> None:
        self.folder, self.rng = folder, rng
        self.whole, self.unfinished = run, unfinished
        self.canary = folder / "canary"
        self.codes: Counter[str] = Counter()
        self.worst = (0.0, 0)

    def word(self, *among: str) -> str:
        return self.rng.choice(among or VALUES).replace("{canary}", str(self.canary))

    def path(self, content: bytes, name: str) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name

    # --- arguments and settings

    def option(self) -> Case:
        option = self.rng.choice(OPTIONS)
        value = self.word()
        command = self.rng.choice((["run", "split-digits"], ["plan", "split-digits"]))
        if command[0] == "plan" and option in ("--seed", "--checkpoint-every", "--out", "--track"):
            command = ["run", "split-digits"]
        out = [] if option == "--out" or command[0] == "plan" else ["--out", str(self.folder / "o")]
        if option == "--out":
            value = str(self.folder / "o") + "/" + value
        return Case([*command, *SMALL, *out, option, value], option)

    def study(self) -> Case:
        which = self.rng.choice(("--methods", "--seeds", "--jobs", "--out"))
        given = {"--methods": "er", "--seeds": "0", "--out": str(self.folder / "o")}
        seeds = ("0-99999999", "5-1", "0,0", "1-", "-1", str(2**70), "0-10-2", "a")
        values = {"--seeds": seeds, "--methods": (*WORDS, "er,er", "," * 5000, "er," * 3000)}
        jobs = ("0", "-1", str(2**40), "99999999", "x", "1e3")
        given[which] = self.word(*values.get(which, jobs if which == "--jobs" else WORDS))
        if which == "--out":
            given[which] = str(self.folder / "o") + "/" + given[which]
        arguments = [part for pair in given.items() for part in pair]
        return Case(["compare", "split-digits", *SMALL, *arguments], which)

    def setting(self) -> Case:
        keys = [k for k in configure("split-digits", "lpr-er").flat() if k not in FREE]
        key = self.rng.choice(keys)
        method = self.rng.choice(("lpr-er", "klpr-er", "gpm", "derpp", "ema", "slda", "er-agem"))
        pair = f"{key}={self.word()}"
        out = str(self.folder / "o")
        return Case(
            ["run", "split-digits", "--method", method, *SMALL, "--set", pair, "--out", out], pair
        )

    def document(self) -> bytes:
        """A hostile YAML or JSON document."""
        n = 20_000
        return self.rng.choice(
            (
                b"a: &a [x,x,x,x,x,x,x,x,x]\n"
                + b"".join(
                    b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9))
                    for c in range(98, 110)
                ),
                *(b"x: " + self.word(tag).encode() for tag in TAGS),
                *(b"[" * n, b'{"a":' * n, b"- " * n, b"? " * n, b"!" * n, b"&a " * 100, b"\0" * 99),
                *(b"{}", b"[]", b"", b"null", b"3", b'"x"', b"\xff\xfe", os.urandom(300)),
                b"<<: *x\n",
                b"a: &a {<<: *a}\n",
                b"method: " + yaml.safe_dump(self.word(*WORDS[:13])).encode(),
                b"benchmark: split-digits\nmethod: er\nlr: " + self.word(*NUMBERS).encode(),
                b"benchmark: split-digits\nmethod: er\ncapacity: " + self.word(*NUMBERS).encode(),
                b"network: %s:net\n" % str(self.evil_module()).encode(),
                b"network: os:system\n",
                b"network: %s:net\nbenchmark: split-digits\nmethod: er\n"
                % str(self.evil_module()).encode(),
            )
        )

    def evil_module(self) -> Path:
        code = f"open({str(self.canary)!r}, 'w')\ndef net(*a, **k): open({str(self.canary)!r}, 'w')"
        return self.path(code.encode(), "evil.py")

    def config(self) -> Case:
        file = self.path(self.document(), "config.yaml")
        command = self.rng.choice((["run", "split-digits"], ["run"], ["plan", "split-digits"]))
        out = [] if command[0] == "plan" else ["--out", str(self.folder / "o")]
        return Case([*command, "--config", str(file), *SMALL, *out], file.read_bytes()[:60].hex())

    # --- run folders

    def run_folder(self) -> Case:
        folder = self.folder / "runs" / self.rng.choice(("run", "[red]x", "\x1b[31m", "=1+1"))
        source = self.rng.choice((self.whole, self.unfinished))
        shutil.copytree(source, folder)
        names = [p for p in folder.rglob("*") if p.is_file()]
        names += [folder / "failure.txt", folder / "tracked.json", folder / "checkpoint"]
        victim = self.rng.choice(names)
        how = self.spoil(victim)
        command = self.rng.choice(
            (
                ["report", str(self.folder / "runs"), "--out", str(self.folder / "r.html")],
                ["report", str(self.folder / "runs"), "--out", str(self.folder / "r.csv")],
                ["report", str(self.folder / "runs"), "--out", str(self.folder / "r.md")],
                ["figure", "accuracy", str(self.folder / "runs"), "--out", str(self.folder)],
                ["resume", str(folder)],
                ["resume", str(self.folder / "runs")],
            )
        )
        return Case(command, f"{victim.name}: {how}")

    def spoil(self, victim: Path) -> str:
        """Put something hostile in place of a file."""
        before = victim.read_bytes() if victim.is_file() else b""
        if victim.is_dir():
            shutil.rmtree(victim)
        victim.unlink(missing_ok=True)
        kinds = (
            "document",
            "fifo",
            "folder",
            "zero",
            "loop",
            "sparse",
            "lines",
            "numbers",
            "state",
        )
        kind = self.rng.choice(kinds)
        if kind == "fifo":
            os.mkfifo(victim)
        elif kind == "folder":
            (victim / "mine").mkdir(parents=True)
        elif kind == "zero":
            victim.symlink_to("/dev/zero")
        elif kind == "loop":
            victim.symlink_to(victim)
        elif kind == "sparse":
            victim.touch()
            os.truncate(victim, 1 << 40)
        elif kind == "lines":
            victim.write_bytes(before + b"".join(self.line() for _ in range(50)))
        elif kind == "digits":
            digits = [i for i, b in enumerate(before) if b in b"0123456789"]
            changed = bytearray(before)
            for i in self.rng.sample(digits, min(len(digits), 40)):
                changed[i] = self.rng.choice(b"0123456789-.e")
            victim.write_bytes(changed)
        elif kind == "state":
            victim.write_bytes(self.state())
        else:
            victim.write_bytes(self.document())
        return kind

    def line(self) -> bytes:
        """A hostile record."""
        number = self.rng.choice((10**8, -1, 1e308, float("nan"), "x", None, [], 2**80))
        record: dict[str, Any] = {"kind": "evaluation", "split": "validation", "position": 3}
        record |= {"task": 1, "accuracy": [0.5, 0.5], "loss": [1, 1]}
        record[self.rng.choice(list(record))] = number
        return json.dumps(record).encode() + b"\n"

    def state(self) -> bytes:
        """A forged state."""
        header = self.rng.choice(
            (
                {"__metadata__": {"format": "proxreplay-state", "version": "2"}},
                {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
                {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
                {"x": {"dtype": "O", "shape": [], "data_offsets": [0, 0]}},
                {"x": None},
                [],
                {
                    "__metadata__": {
                        **{"format": "proxreplay-state", "version": "2", "sha256": "0" * 64},
                        "structure": self.rng.choice(("[" * 9999, "{}", '{"tensor":["y"]}', "NaN")),
                    }
                },
            )
        )
        text = json.dumps(header).encode()
        length = self.rng.choice((len(text), 2**63, 2**30, 0))
        return struct.pack("<Q", length) + text

    # --- data

    def images(self) -> Case:
        source = self.folder / "photos"
        photos(self.folder)
        victim = source / "class0" / self.rng.choice(("0.png", "9.jpg", "9.tif", "9.gif", "9.bmp"))
        kind = self.rng.choice(sorted(IMAGES))
        content = IMAGES[kind](self.rng)
        victim.write_bytes(content)
        return Case(self.custom(source), f"{victim.name}: {kind}")

    def tree(self) -> Case:
        """A folder of images with something else in it."""
        source = photos(self.folder)
        kind = self.rng.choice(("fifo", "device", "loop", "name", "up", "empty", "one", "deep"))
        target = source / "class1" / "x.png"
        if kind == "fifo":
            os.mkfifo(target)
        elif kind == "device":
            target.symlink_to("/dev/zero")
        elif kind == "loop":
            (source / "class1" / "again").symlink_to(source)
        elif kind == "name":
            os.rename(source / "class1", os.fsencode(source) + b"/\xff\x1b[31m")
        elif kind == "up":
            target.symlink_to("/etc/passwd")
        elif kind == "empty":
            shutil.rmtree(source)
            source.mkdir()
        elif kind == "one":
            for image in list((source / "class1").iterdir())[1:]:
                image.unlink()
        elif kind == "deep":
            (source / "/".join("d" * 30)).mkdir(parents=True)
        if self.rng.random() < 0.1:
            source = Path("/proc/self") if self.rng.random() < 0.5 else Path("/dev/zero")
        return Case(self.custom(source), kind)

    def archive(self) -> Case:
        name, content = self.rng.choice(("x.zip", "x.npz")), BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            if name == "x.npz":
                shape = self.rng.choice(((9, 2), (2**40, 2), (-9, 2), (9,), (), (0, 2)))
                kind = self.rng.choice(("f4", "i8", "u1", "c16", "M8[s]", "S3", "U3", "?"))
                labels = self.rng.choice(
                    (np.arange(9) % 3, np.full(9, 2**40), np.full(9, -1), np.full(9, np.nan))
                )
                inputs = np.ones((9, 2)).astype(kind) if kind != "M8[s]" else np.zeros((9, 2), kind)
                file.writestr("train_inputs.npy", npy(inputs, shape))
                file.writestr("train_labels.npy", npy(labels))
                if self.rng.random() < 0.3:
                    file.writestr("test_labels.npy", _pickled(self.canary))
            else:
                place = self.rng.choice(("a/", "../", "/", "a/../../", "a\\", "C:/", "a/\0/", ""))
                for number in range(6):
                    file.writestr(f"{place}{number % 2}/{number}.png", _image(number))
                self.folder.joinpath("0").mkdir()
                self.folder.joinpath("0", "0.png").write_bytes(b"mine")
        data = bytearray(content.getvalue())
        for _ in range(self.rng.choice((0, 1, 5, 50))):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        if self.rng.random() < 0.2:
            del data[self.rng.randrange(len(data)) :]
        return Case(self.custom(self.path(bytes(data), name)), name)

    def bomb(self) -> Case:
        """Little that becomes much."""
        kind = self.rng.choice(("zip", "npz", "gz", "png"))
        if kind == "zip":
            path = zip_bomb(self.folder / "x.zip", "a/b/x.png", b"", 3 * GIGABYTE)
        elif kind == "npz":
            header = npy(np.empty(0, np.uint8), (3 * GIGABYTE, 1))
            path = zip_bomb(self.folder / "x.npz", "train_inputs.npy", header, 3 * GIGABYTE)
        elif kind == "gz":
            root = self.folder / "root"
            root.mkdir()
            (root / "cifar-100-binary.tar.gz").write_bytes(gzipped(b"", GIGABYTE))
            out = ["--data-root", str(root), "--out", str(self.folder / "o")]
            return Case(["run", "split-cifar100", *SMALL, *out], kind)
        else:
            sides = self.rng.choice(((30_000, 30_000), (200_000, 1), (1, 200_000), (2**31 - 1, 1)))
            photos(self.folder)
            path = self.folder / "photos"
            (path / "class0" / "x.png").write_bytes(_header_of_png(*sides))
        return Case(self.custom(path), kind)

    def custom(self, data: Path) -> list[str]:
        out = ["--out", str(self.folder / "o"), "--tasks", "2", "--eval-every", "10"]
        return ["run", "custom", "--data", str(data), *out, "--set", "stream.limit=10"]

    def cache(self) -> Case:
        """Somebody else's things, or forged ones, where the cache is."""
        source = photos(self.folder)
        run(self.custom(source)[:-2], self.folder)
        shutil.rmtree(self.folder / "o", ignore_errors=True)
        (cached,) = (p for p in (self.folder / "cache").iterdir() if p.is_dir())
        victim = self.rng.choice(sorted(cached.iterdir()))
        return Case(self.custom(source), f"{victim.name}: {self.spoil(victim)}")


FREE = ("steps_per_batch", "network", "stream.limit", "stream.first", "eval_every", "device")
FAMILIES: tuple[tuple[Callable[[Maker], Case], int], ...] = (
    (Maker.option, 3),
    (Maker.study, 2),
    (Maker.setting, 5),
    (Maker.config, 3),
    (Maker.run_folder, 6),
    (Maker.images, 3),
    (Maker.tree, 1),
    (Maker.archive, 4),
    (Maker.bomb, 1),
    (Maker.cache, 2),
)


def _image(seed: int, mode: str = "RGB", kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (9, 9, 3), dtype=np.uint8)
    content = BytesIO()
    Image.fromarray(pixels).convert(mode).save(content, kind, **options)
    return content.getvalue()


def _header_of_png(width: int, height: int) -> bytes:
    return (
        png(width, height)
        if width * height < 10**6
        else png(1, 1).replace(struct.pack(">II", 1, 1), struct.pack(">II", width, height), 1)
    )


def _cut(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randrange(1, len(changed) + 1)])


def _floats(rng: random.Random) -> bytes:
    content = BytesIO()
    values = np.full((8, 8), rng.choice((np.nan, np.inf, 1e38, -1, 0.5)), np.float32)
    Image.fromarray(values).save(content, "TIFF")
    return content.getvalue()


def _pickled(canary: Path) -> bytes:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    content = BytesIO()
    np.save(content, np.array([Evil()] * 9, dtype=object), allow_pickle=True)
    return content.getvalue()


IMAGES: dict[str, Callable[[random.Random], bytes]] = {
    "cut png": lambda rng: _cut(_image(1), rng),
    "cut jpeg": lambda rng: _cut(_image(1, kind="JPEG"), rng),
    "cut gif": lambda rng: _cut(_image(1, kind="GIF"), rng),
    "cut bmp": lambda rng: _cut(_image(1, kind="BMP"), rng),
    "cut tiff": lambda rng: _cut(_image(1, kind="TIFF"), rng),
    "floats": _floats,
    "postscript": lambda rng: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(canary) run\n",
    "svg": lambda rng: b"<svg><script>alert(1)</script></svg>",
    "nothing": lambda rng: b"",
    "noise": lambda rng: rng.randbytes(500),
    "zeros": lambda rng: bytes(500),
    "zip in png": lambda rng: _image(1) + b"PK\x03\x04" + rng.randbytes(99),
    "1 bit": lambda rng: _image(1, "1"),
    "palette": lambda rng: _image(1, "P"),
    "CMYK": lambda rng: _image(1, "CMYK", "JPEG"),
    "16 bit": lambda rng: _image(1, "I", "TIFF") if rng.random() < 0.5 else _image(1, "I;16"),
    "icc": lambda rng: _image(1, icc_profile=rng.randbytes(300)),
    "exif": lambda rng: _image(1, kind="JPEG", exif=b"Exif\0\0" + rng.randbytes(200)),
    "text": lambda rng: png(8, 8, (b"zTXt", b"key\0\0\x78\xda" + deflated(b"", 1 << 28))),
}


# --- one process each -----------------------------------------------------------------------------


def run(arguments: list[str], folder: Path) -> tuple[int, str, float, int]:
    """Exit code, what was said, seconds of CPU time and kilobytes of a command line."""
    said = folder / "said.txt"
    if (child := os.fork()) == 0:
        code = 99
        try:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.environ.update(PROXREPLAY_CACHE=str(folder / "cache"), COLUMNS="80")
            os.chdir(folder)
            signal.alarm(200)
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            sys.argv = ["proxreplay", *arguments]
            command_line()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            os.write(2, traceback.format_exc().encode("utf-8", "replace"))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    text = said.read_bytes().decode("utf-8", "backslashreplace")
    return code, text, used.ru_utime + used.ru_stime, used.ru_maxrss


def foreign(folder: Path) -> dict[str, bytes | str]:
    """Everything that is somebody else's: all but what a command may write."""
    found = {}
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts[0]
        if inside in ("o", "cache", "said.txt", "runs") or not path.is_file():
            continue
        found[str(path)] = path.read_bytes() if path.stat().st_size < 10**6 else "large"
    for path in (folder / "runs").rglob("mine"):
        found[str(path)] = "there"
    return found


def attempt(maker: Maker, family: Callable[[Maker], Case]) -> str | None:
    """One hostile input; None if it was met well, else what went wrong."""
    case = family(maker)
    before = foreign(maker.folder)
    code, said, seconds, kilobytes = run(case.arguments, maker.folder)
    after = foreign(maker.folder)
    maker.codes[f"exit {code}"] += 1
    maker.worst = seconds, kilobytes
    wrong = []
    if "Traceback" in said or code not in (0, 1, 2):
        wrong.append(f"exit code {code}")
    if "\x1b[31m" in said:
        wrong.append("an escape code on the terminal")
    if seconds > SECONDS:
        wrong.append(f"{seconds:.1f} s")
    if kilobytes > GIGABYTE >> 10:
        wrong.append(f"{kilobytes >> 10} MB")
    if maker.canary.exists():
        wrong.append("executed")
    if changed := [name for name in before if after.get(name) != before[name]]:
        wrong.append(f"changed {changed}")
    if code and not said.strip():
        wrong.append("refused without a word")
    told = f"{family.__name__} ({case.told[:200]!r}): {', '.join(wrong)}\n{case.arguments!r:.600}"
    return f"{told}\n{said[-1500:]}" if wrong else None


def main() -> int:
    """Try so many hostile inputs; prints a count of those that did harm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="other inputs")
    parser.add_argument("--only", help="one family")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    families = [f for f, weight in FAMILIES for _ in range(weight)]
    families = [f for f in families if asked.only in (None, f.__name__)]
    met: Counter[str] = Counter()
    harm, worst = 0, [0.0, 0.0]
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch, "home")
        home.mkdir()
        subject = Run(home, "lpr-er")
        subject.check(home / "again")
        for number in range(asked.inputs):
            folder = Path(scratch, "place")
            folder.mkdir()
            family = families[number % len(families)]
            rng = random.Random(10**6 * asked.seed + number)
            maker = Maker(folder, rng, subject.whole, subject.interrupted / "run")
            problem = attempt(maker, family)
            met[family.__name__] += 1
            met.update(maker.codes)
            worst = [max(pair) for pair in zip(worst, maker.worst, strict=True)]
            if problem:
                harm += 1
                print(f"{number}: {problem}", flush=True)
            shutil.rmtree(folder)
    print(f"{asked.inputs} hostile inputs: {dict(met)}", flush=True)
    print(f"the worst: {worst[0]:.1f} s of CPU time, {int(worst[1]) >> 10} MB")
    print(f"did harm: {harm}")
    return min(harm, 1)


if __name__ == "__main__":
    sys.exit(main())
