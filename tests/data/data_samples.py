"""Small data sets in the formats of the large ones, written from random numbers."""

import gzip
import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from proxreplay.data import Dataset, Examples


def dataset(
    per_class: int = 10, classes: int = 6, domains: int = 0, test_per_class: int = 2
) -> Dataset:
    """Every input is its own row number, so that an example can be recognised anywhere."""

    def part(count: int, offset: int) -> Examples:
        labels = torch.arange(classes).repeat_interleave(count)
        where = torch.arange(len(labels)) % domains if domains else None
        inputs = (torch.arange(len(labels)) + offset).float().unsqueeze(1)
        return Examples(inputs, labels, where)

    return Dataset(
        name="rows",
        train=part(per_class, 0),
        test=part(test_per_class, 10**6),
        classes=tuple(f"class{i}" for i in range(classes)),
        domains=tuple(f"domain{i}" for i in range(domains)),
    )


def jpeg(size: tuple[int, int] = (8, 8), seed: int = 0, fmt: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, fmt)
    return buffer.getvalue()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        write(root / name, content)
    return root


def everything_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def tar_gz(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def cifar100_files(count: int = 40, classes: int = 4) -> tuple[dict[str, bytes], dict[str, object]]:
    """The members of the archive, and the truth they hold."""
    rng = np.random.default_rng(0)
    files, truth = {}, {}
    for part, n in (("train", count), ("test", count // 2)):
        fine = np.arange(n, dtype=np.uint8) % classes
        images = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
        coarse = 1 - fine % 2
        records = np.concatenate([coarse[:, None], fine[:, None], images.reshape(n, -1)], axis=1)
        files[f"cifar-100-binary/{part}.bin"] = records.tobytes()
        truth[part] = (images, fine)
    names = "\n".join(f"fine{i}" for i in range(classes)) + "\n\n"
    files["cifar-100-binary/fine_label_names.txt"] = names.encode()
    files["cifar-100-binary/coarse_label_names.txt"] = b"a\nb\n"
    return files, truth


def cifar10_files(count: int = 10) -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    files = {}
    for i, name in enumerate(names):
        labels = np.full((count, 1), i, dtype=np.uint8)
        images = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        files[f"cifar-10-batches-bin/{name}"] = np.concatenate([labels, images], 1).tobytes()
    files["cifar-10-batches-bin/batches.meta.txt"] = "\n".join("abcdefghij").encode()
    return files


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def mnist_files(count: int = 30, compressed: bool = False) -> dict[str, bytes]:
    rng = np.random.default_rng(2)
    files = {}
    for part, n in (("train", count), ("t10k", count // 3)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        files[f"{part}-images-idx3-ubyte"] = idx_bytes(images)
        files[f"{part}-labels-idx1-ubyte"] = idx_bytes(np.arange(n) % 10)
    if compressed:
        return {f"{name}.gz": gzip.compress(data) for name, data in files.items()}
    return files


def tiny_files(
    wnids: int = 4, train: int = 5, val: int = 6, image: bytes | None = None
) -> dict[str, bytes]:
    """TinyImageNet as its authors ship it; classes are not in alphabetical order in wnids.txt."""
    top = "tiny-imagenet-200/"
    names = [f"n{90000000 - i}" for i in range(wnids)]
    files = {f"{top}wnids.txt": "\n".join(names).encode()}
    files[f"{top}words.txt"] = f"{names[0]}\tgoldfish, Carassius auratus\nn1\tother\n".encode()
    for name in names:
        files[f"{top}train/{name}/{name}_boxes.txt"] = b"0 0 1 1"
        for i in range(train):
            files[f"{top}train/{name}/images/{name}_{i}.JPEG"] = image or jpeg((64, 64), seed=i)
    lines = []
    for i in range(val):
        files[f"{top}val/images/val_{i}.JPEG"] = image or jpeg((64, 64), seed=100 + i)
        lines.append(f"val_{i}.JPEG\t{names[i % wnids]}\t0\t0\t1\t1")
    files[f"{top}val/val_annotations.txt"] = "\n".join(lines).encode()
    files[f"{top}test/images/test_0.JPEG"] = b"not looked at"
    return files


def clear_files(
    buckets: int = 3,
    classes: tuple[str, ...] = ("bus", "BACKGROUND"),
    per_class: int = 4,
    image: bytes | None = None,
    test_per_class: int = 4,
) -> dict[str, bytes]:
    """CLEAR-10's layout; the buckets of test come in another order than those of train."""
    files = {}
    for part in ("train", "test"):
        files[f"{part}/class_names.txt"] = "\n".join(classes).encode()
        order = range(1, buckets + 1) if part == "train" else range(buckets, 0, -1)
        metadata: dict[str, dict[str, str]] = {}
        for bucket in order:
            metadata[str(bucket)] = {}
            for name in classes:
                listing = f"labeled_metadata/{bucket}/{name}.json"
                metadata[str(bucket)][name] = listing
                records = {}
                for i in range(per_class if part == "train" else test_per_class):
                    path = f"labeled_images/{bucket}/{name}/{i}.jpg"
                    records[str(i)] = {"IMG_PATH": path}
                    files[f"{part}/{path}"] = image or jpeg((12, 9), seed=i)
                files[f"{part}/{listing}"] = json.dumps(records).encode()
        files[f"{part}/labeled_metadata.json"] = json.dumps(metadata).encode()
    return files
