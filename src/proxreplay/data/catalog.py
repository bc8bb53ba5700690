"""The data sets that have a name. One declaration says where each is found, checked and loaded.

Nothing here imports numpy or torch before a data set is loaded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxreplay.data.roots import cache_folder, fetch_command
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.errors import DataError

if TYPE_CHECKING:
    from proxreplay.data.cache import Decoded
    from proxreplay.data.datasets import Dataset


@dataclass(frozen=True)
class RemoteFile:
    """A file at its canonical source."""

    url: str  # where it is
    md5: str  # as published
    folder: str = ""  # where it goes, below the data root
    # the folder it is unpacked to, below the data root; None to leave it as it is
    unpack_to: str | None = None

    @property
    def name(self) -> str:
        """File name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Status:
    """What is known about a data set on this machine."""

    name: str  # of the data set
    about: str  # one line
    found: bool  # whether it can be loaded
    source: Path | None  # the file or folder it would be loaded from; None if missing or bundled
    looked_for: tuple[Path, ...]  # every place it was looked for
    cache: Path | None  # the folder with the decoded data, once there is one
    way_out: str | None  # if it is missing: the command to type, or the files to put there
    problems: tuple[str, ...] = ()  # what a full check found; empty without one
    remarks: tuple[str, ...] = ()  # worth knowing, but no problem


@dataclass(frozen=True)
class NamedDataset:
    """A data set with a name. Calling it loads the data."""

    name: str  # as users write it
    about: str  # one line
    # opens the source and decodes it; gets the source and stored_size
    read: "Callable[[Path, int], AbstractContextManager[Decoded]] | None" = None
    places: tuple[str, ...] = ()  # where it is looked for, below the data root
    # what a place must hold to count: one file of each group
    inside: tuple[tuple[str, ...], ...] = ()
    files: tuple[RemoteFile, ...] = ()  # what `fetch` downloads
    by_hand: str = ""  # what to do if it cannot be fetched
    stored_size: int | None = None  # side of the stored images; None for formats with one size
    bundled: "Callable[[], Dataset] | None" = None  # makes a data set that needs no files

    def __call__(
        self, data_root: str | Path | None = None, *, stored_size: int | None = None
    ) -> "Dataset":
        """Load the data set, from its cache if there is one.

        ``stored_size`` is the side of the stored images, for data sets whose images vary in size.
        """
        if self.bundled is not None:
            return self.bundled()
        from proxreplay.data.cache import cached

        root, read = resolve_root(data_root), self.read
        assert read is not None  # it is not bundled
        if stored_size is not None and (self.stored_size is None or stored_size < 1):
            raise DataError(
                f"{self.name}: stored_size={stored_size} is not possible; leave it out."
            )
        source = self.locate(root)
        if source is None:
            raise self._missing(root)
        size = stored_size or self.stored_size or 0
        return cached(self.name, source, lambda: read(source, size), self._key(stored_size))

    def _key(self, stored_size: int | None = None) -> str:
        size = stored_size or self.stored_size
        return f"{self.name}-{size}px" if size else self.name

    def locate(self, root: Path) -> Path | None:
        """The first place below the root that holds the data."""
        for place in self.places:
            path = root / place
            if path.exists() and all(
                any((path / name).is_file() for name in group) for group in self.inside
            ):
                return path
        return None

    def _missing(self, root: Path) -> DataError:
        looked = ", ".join(str(root / place) for place in self.places)
        holding = ", ".join(group[0] for group in self.inside)
        return DataError(
            f"{self.name}: not found; looked for {looked}{holding and f' (with {holding})'}. "
            f"{self.by_hand or f'Get it with: {fetch_command(self.name, root)}'}, or name another "
            "folder with --data-root or PROXREPLAY_DATA."
        )

    def status(self, data_root: str | Path | None = None, *, full: bool = False) -> Status:
        """What is there, where it was looked for, and how to get it.

        ``full`` also reads everything: archives must open, caches must match their checksums.
        """
        root = resolve_root(data_root)
        looked_for = tuple(root / place for place in self.places)
        source = self.locate(root)
        if source is None:
            found = self.bundled is not None
            way_out = None if found else self.by_hand or fetch_command(self.name, root)
            return Status(self.name, self.about, found, None, looked_for, None, way_out)
        folder = cache_folder(self._key(), source)
        cache = folder if folder.exists() else None
        problems, remarks = self._full_check(root, source, cache) if full else ([], [])
        return Status(
            *(self.name, self.about, True, source, looked_for, cache, None),
            problems=tuple(problems),
            remarks=tuple(remarks),
        )

    def _full_check(
        self, root: Path, source: Path, cache: Path | None
    ) -> tuple[list[str], list[str]]:
        from proxreplay.data.archives import open_files
        from proxreplay.data.cache import verify
        from proxreplay.files import file_digest

        problems, remarks = [], []
        for file in self.files:
            path = root / file.folder / file.name
            if path.is_file() and file_digest(path, "md5") != file.md5:
                remarks.append(f"{path} differs from the published file: repacked, or damaged")
        try:
            with open_files(source):
                pass
        except DataError as error:
            problems.append(str(error))
        if cache is not None and (wrong := verify(cache, source)):
            problems.append(f"{cache}: {wrong}; it is rebuilt at the next start")
        return problems, remarks


IDX_FILES = tuple(
    f"{part}-{kind}"
    for part in ("train", "t10k")
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)


def _module(name: str) -> Any:
    """A module of this package, imported only when a data set is loaded."""
    return import_module(f"proxreplay.data.{name}")


def _idx(name: str, about: str, places: tuple[str, ...], url: str, *md5s: str) -> NamedDataset:
    return NamedDataset(
        name,
        about,
        lambda source, size: _module("idx").read(source, IDX_FILES, _module("idx").CLASSES[name]),
        places,
        inside=tuple((file, f"{file}.gz") for file in IDX_FILES),
        files=tuple(
            RemoteFile(f"{url}/{file}.gz", md5, name)
            for file, md5 in zip(IDX_FILES, md5s, strict=True)
        ),
    )


def _cifar(name: str, about: str, places: tuple[str, ...], md5: str) -> NamedDataset:
    return NamedDataset(
        name,
        about,
        lambda source, size: _module("cifar").read(source, _module("cifar").LAYOUTS[name]),
        places,
        files=(RemoteFile(f"https://www.cs.toronto.edu/~kriz/{places[0]}", md5),),
    )


_CLEAR = "https://clear-challenge.s3.us-east-2.amazonaws.com"

digits = NamedDataset(
    "digits",
    "1,797 grey 8x8 digits, bundled with scikit-learn",
    bundled=lambda: _module("bundled").load(),
)
mnist = _idx(
    "mnist",
    "70,000 grey 28x28 digits",
    ("mnist", "MNIST/raw", "MNIST"),
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
fashion_mnist = _idx(
    "fashion-mnist",
    "70,000 grey 28x28 pictures of clothes",
    ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
cifar10 = _cifar(
    "cifar10",
    "60,000 colour 32x32 photographs in 10 classes",
    ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "cifar-10-binary"),
    "c32a1d4ab5d03f1284b67883e8d87530",
)
cifar100 = _cifar(
    "cifar100",
    "60,000 colour 32x32 photographs in 100 classes",
    ("cifar-100-binary.tar.gz", "cifar-100-binary"),
    "03b5dce01913d631647c71ecec9e9cb8",
)
tinyimagenet = NamedDataset(
    "tinyimagenet",
    "110,000 colour 64x64 photographs in 200 classes",
    lambda source, size: _module("tiny_imagenet").read(source),
    ("tiny-imagenet-200.zip", "tiny-imagenet-200"),
    files=(
        RemoteFile(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"
        ),
    ),
)
clear10 = NamedDataset(
    "clear10",
    "photographs of 11 classes over ten years, stored at 224x224",
    lambda source, size: _module("clear").read(source, size),
    ("clear10", "CLEAR10", "clear-10"),
    inside=(
        ("train/labeled_metadata.json", "train_image_only/labeled_metadata.json"),
        ("test/labeled_metadata.json",),
    ),
    files=(
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
    stored_size=224,
)
pacs = NamedDataset(
    "pacs",
    "9,991 pictures of 7 classes in four styles",
    lambda source, size: _module("trees").read(source, size),
    ("pacs", "PACS", "pacs64"),
    by_hand="Its authors publish no file with a checksum: put the images into one of these folders "
    "as <domain>/<class>/<image>, domains art_painting, cartoon, photo and sketch",
    stored_size=64,
)
_ALL = (digits, mnist, fashion_mnist, cifar10, cifar100, tinyimagenet, clear10, pacs)
CATALOG = {dataset.name: dataset for dataset in _ALL}


def find_dataset(name: str) -> NamedDataset:
    """The data set of that name."""
    if name not in CATALOG:
        raise DataError(f"data set '{name}' is not known; choose from {', '.join(CATALOG)}.")
    return CATALOG[name]


def check(data_root: str | Path | None = None, *, full: bool = False) -> list[Status]:
    """The status of every data set; see `NamedDataset.status`."""
    return [dataset.status(data_root, full=full) for dataset in CATALOG.values()]
