"""The data sets that have a name: where they lie, where they come from, what is there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxreplay.data import cache, cifar, clear, idx, tiny_imagenet, trees
from proxreplay.data.archives import open_files
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.data.roots import fetch_command, first_existing
from proxreplay.data.sources import file_digest
from proxreplay.errors import DataError


@dataclass(frozen=True)
class RemoteFile:
    """A file at its canonical source.

    Args:
        url: where it is.
        md5: as published.
        folder: where it goes, below the data root.
        unpack_to: the folder it is unpacked to, below the data root; None to leave it as it is.
    """

    url: str
    md5: str
    folder: str = ""
    unpack_to: str | None = None

    @property
    def name(self) -> str:
        """File name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Entry:
    """A data set with a name.

    Args:
        name: as users write it.
        about: one line.
        locate: its files or folders below the data root; raises `DataError` where they are missing.
        places: where it is looked for, below the data root.
        cache_key: names its cache.
        files: what `fetch` gets.
        by_hand: what to do where it cannot be fetched.
    """

    name: str
    about: str
    locate: Callable[[Path], list[Path]]
    places: tuple[str, ...] = ()
    cache_key: str = ""
    files: tuple[RemoteFile, ...] = ()
    by_hand: str = ""


def _at(name: str, places: Sequence[str]) -> Callable[[Path], list[Path]]:
    return lambda root: [first_existing(name, root, places)]


def _idx_files(base: str, folder: str, md5s: Sequence[str]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{base}/{name}.gz", md5, folder)
        for name, md5 in zip(idx.FILES, md5s, strict=True)
    )


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_CLEAR = "https://clear-challenge.s3.us-east-2.amazonaws.com"
_ENTRIES = (
    Entry("digits", "1,797 grey 8x8 digits, bundled with scikit-learn", lambda root: []),
    Entry(
        "mnist",
        "70,000 grey 28x28 digits",
        lambda root: idx.locate(idx.MNIST, root),
        idx.MNIST.folders,
        "mnist",
        _idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "mnist",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    Entry(
        "fashion-mnist",
        "70,000 grey 28x28 pictures of clothes",
        lambda root: idx.locate(idx.FASHION, root),
        idx.FASHION.folders,
        "fashion-mnist",
        _idx_files(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "fashion-mnist",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    Entry(
        "cifar10",
        "60,000 colour 32x32 photographs in 10 classes",
        _at("cifar10", cifar.CIFAR10.places),
        cifar.CIFAR10.places,
        "cifar10",
        (RemoteFile(f"{_TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
    Entry(
        "cifar100",
        "60,000 colour 32x32 photographs in 100 classes",
        _at("cifar100", cifar.CIFAR100.places),
        cifar.CIFAR100.places,
        "cifar100",
        (RemoteFile(f"{_TORONTO}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    ),
    Entry(
        "tinyimagenet",
        "110,000 colour 64x64 photographs in 200 classes",
        _at("tinyimagenet", tiny_imagenet.PLACES),
        tiny_imagenet.PLACES,
        "tinyimagenet",
        (
            RemoteFile(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
    ),
    Entry(
        "clear10",
        "photographs of 11 classes over ten years, stored at 224x224",
        clear.locate,
        clear.PLACES,
        "clear10-224px",
        (
            RemoteFile(
                f"{_CLEAR}/clear10-train-image-only.zip",
                "5171f720810d60b471c308dee595d430",
                unpack_to="clear10/train",
            ),
            RemoteFile(
                f"{_CLEAR}/clear10-test.zip",
                "bf9a85bfb78fe742c7ed32648c9a3275",
                unpack_to="clear10/test",
            ),
        ),
    ),
    Entry(
        "pacs",
        "9,991 pictures of 7 classes in four styles",
        _at("pacs", trees.PACS_PLACES),
        trees.PACS_PLACES,
        f"pacs-{trees.DEFAULT_SIZE}px",
        by_hand=trees.PACS_BY_HAND,
    ),
)
CATALOG = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True)
class Status:
    """What is known about a data set on this machine.

    Args:
        name: of the data set.
        about: one line.
        found: whether it can be loaded.
        sources: the files or folders it would be loaded from.
        looked_for: every place it was looked for.
        cache: the folder with the decoded data, once there is one.
        way_out: where it is missing: the command to type, or the files to put there.
        problems: what a full check found; empty without one.
        remarks: what is worth knowing but no problem.
    """

    name: str
    about: str
    found: bool
    sources: tuple[Path, ...]
    looked_for: tuple[Path, ...]
    cache: Path | None
    way_out: str | None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def entry(name: str) -> Entry:
    """The data set of that name."""
    if name not in CATALOG:
        raise DataError(f"data set '{name}' is not known; choose from {', '.join(CATALOG)}.")
    return CATALOG[name]


def check(data_root: str | Path | None = None, *, full: bool = False) -> list[Status]:
    """What is there of every data set, where it was looked for, and how to get what is missing.

    Args:
        data_root: the folder that holds the data.
        full: also read everything: archives must open, caches must match their checksums.
    """
    root = resolve_root(data_root)
    return [status(e, root, full=full) for e in CATALOG.values()]


def status(what: Entry, root: Path, *, full: bool = False) -> Status:
    """What is there of one data set; see `check`."""
    looked_for = tuple(root / place for place in what.places)
    try:
        sources = tuple(what.locate(root))
    except DataError:
        way_out = fetch_command(what.name, root) if what.files else what.by_hand
        return Status(what.name, what.about, False, (), looked_for, None, way_out)
    found_cache = None
    if sources:
        folders = cache.cache_folders(what.cache_key, sources[0])
        found_cache = next((folder for folder in folders if folder.exists()), None)
    problems, remarks = _full_check(what, sources, found_cache) if full else ((), ())
    return Status(
        what.name, what.about, True, sources, looked_for, found_cache, None, problems, remarks
    )


def _full_check(
    what: Entry, sources: Sequence[Path], found_cache: Path | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    problems, remarks = [], []
    published = {file.name: file.md5 for file in what.files}
    for source in sources:
        if source.name in published and file_digest(source, "md5") != published[source.name]:
            remarks.append(f"{source} differs from the published file: repacked, or damaged")
        if source.name.endswith((".zip", ".tar.gz")):
            try:
                with open_files(source):
                    pass
            except DataError as error:
                problems.append(str(error))
    if found_cache is not None:
        wrong = cache.verify(found_cache, sources)
        if wrong:
            problems.append(f"{found_cache}: {wrong}; it is rebuilt at the next start")
    return tuple(problems), tuple(remarks)
