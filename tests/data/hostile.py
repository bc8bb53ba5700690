"""Files made to hurt: each builds a file in a folder and tries to load it.

``python -m tests.data.hostile FOLDER`` runs them all and prints by how much memory grew.
"""

import json
import os
import resource
import struct
import sys
import tarfile
import zipfile
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from proxreplay.data import cifar100, clear10, from_npz, image_tree, mnist, tinyimagenet
from proxreplay.data.images import decode
from proxreplay.errors import ProxreplayError
from tests.data.data_samples import (
    cifar100_files,
    clear_files,
    jpeg,
    mnist_files,
    tar_gz,
    tiny_files,
    write,
    write_files,
    zipped,
)

GIGABYTE = 1 << 30
IMAGES = {f"{c}/{i}.png": jpeg((8, 8), i, "PNG") for c in "ab" for i in range(5)}
CASES = {}


def case(function):
    CASES[function.__name__.replace("_", "-")] = function
    return function


def deflated(prefix, size):
    """Raw deflate data of a prefix and then zeros, made without compressing all of them."""
    coder = zlib.compressobj(9, wbits=-15)
    start = coder.compress(prefix) + coder.flush(zlib.Z_FULL_FLUSH)
    block = coder.compress(bytes(1 << 20)) + coder.flush(zlib.Z_FULL_FLUSH)
    return start + block * (size >> 20) + b"\x03\x00"


def gzipped(prefix, size):
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + deflated(prefix, size) + bytes(8)


def zip_bomb(path, name, prefix, size):
    """A zip with one member: zeros behind a prefix."""
    data, announced = deflated(prefix, size), len(prefix) + size
    fields = struct.pack("<HHHHIIIHH", 20, 0, 8, 0, 0, len(data), announced, len(name), 0)
    local = b"PK\x03\x04" + fields + name.encode()
    central = b"PK\x01\x02" + struct.pack("<H", 20) + fields + bytes(10) + bytes(4) + name.encode()
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local) + len(data), 0)
    return write(path, local + data + central + b"PK\x05\x06" + end)


def npy(array, shape=None):
    """An array's bytes, maybe with another shape in its header."""
    buffer = BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    header["shape"] = shape or header["shape"]
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + array.tobytes()


def npz(folder, **members):
    good = {"train_inputs": npy(np.ones((9, 2))), "train_labels": npy(np.arange(9) % 3)}
    return zipped(folder / "x.npz", {f"{n}.npy": c for n, c in (good | members).items()})


@case
def zip_with_a_huge_image(folder):
    image_tree(zip_bomb(folder / "x.zip", "a/x.png", b"", 3 * GIGABYTE))


@case
def npz_with_a_huge_array(folder):
    header = npy(np.empty(0, np.uint8), (3 * GIGABYTE, 1))
    from_npz(zip_bomb(folder / "x.npz", "train_inputs.npy", header, 3 * GIGABYTE))


@case
def npz_with_a_huge_header(folder):
    header = b"\x93NUMPY\x02\x00" + struct.pack("<I", 200 << 20)
    from_npz(zip_bomb(folder / "x.npz", "train_inputs.npy", header, 200 << 20))


@case
def npz_whose_shape_lies(folder):
    from_npz(npz(folder, train_inputs=npy(np.ones(18), (2**40, 2))))


@case
def npz_with_a_negative_shape(folder):
    from_npz(npz(folder, train_inputs=npy(np.ones(18), (-9, -2))))


@case
def npz_with_a_label_of_2_to_the_40(folder):
    from_npz(npz(folder, train_labels=npy(np.array([2**40] * 9))))


@case
def npz_with_a_label_of_2_to_the_64(folder):
    from_npz(npz(folder, train_labels=npy(np.full(9, 2**64 - 1, np.uint64))))


@case
def npz_with_labels_that_are_no_text(folder):
    from_npz(npz(folder, train_labels=npy(np.array([b"\xff"] * 9))))


@case
def npz_with_nan(folder):
    from_npz(npz(folder, train_inputs=npy(np.full((9, 2), np.nan))))


@case
def idx_that_announces_4_gigabytes(folder):
    files = mnist_files(compressed=True)
    header = b"\0\0\x08\x03" + struct.pack(">III", 4 << 20, 32, 32)
    files["train-images-idx3-ubyte.gz"] = gzipped(header, 3 * GIGABYTE)
    write_files(folder / "mnist", files)
    mnist(folder)


@case
def idx_that_is_longer_than_announced(folder):
    files = mnist_files(compressed=True)
    header = b"\0\0\x08\x03" + struct.pack(">III", 30, 28, 28)
    files["train-images-idx3-ubyte.gz"] = gzipped(header, 3 * GIGABYTE)
    write_files(folder / "mnist", files)
    mnist(folder)


@case
def idx_with_nothing_in_a_huge_shape(folder):
    files = mnist_files()
    files["train-images-idx3-ubyte"] = b"\0\0\x08\x04" + bytes(4) + b"\xff" * 12
    write_files(folder / "mnist", files)
    mnist(folder)


@case
def tar_with_a_huge_extended_header(folder):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 3 * GIGABYTE
    write(folder / "cifar-100-binary.tar.gz", gzipped(info.tobuf(), 3 * GIGABYTE))
    cifar100(folder)


@case
def tar_with_a_huge_member(folder):
    info = tarfile.TarInfo("cifar-100-binary/train.bin")
    info.size = 3 * GIGABYTE
    write(folder / "cifar-100-binary.tar.gz", gzipped(info.tobuf(), 3 * GIGABYTE))
    cifar100(folder)


@case
def tar_with_very_many_members(folder):
    header = tarfile.TarInfo("x").tobuf()
    names = b"".join(tarfile.TarInfo(f"d{i}").tobuf() for i in range(2000))
    write(folder / "cifar-100-binary.tar.gz", gzipped(names + header, 1 << 20))
    cifar100(folder)


@case
def tar_with_names_that_are_no_text(folder):
    files, _ = cifar100_files()
    tar_gz(folder / "cifar-100-binary.tar.gz", files | {"\udcff.bin": b""})
    cifar100(folder)


@case
def cifar_with_class_names_that_are_no_text(folder):
    files, _ = cifar100_files()
    files["cifar-100-binary/fine_label_names.txt"] = b"\xff\xfe"
    tar_gz(folder / "cifar-100-binary.tar.gz", files)
    cifar100(folder)


@case
def tiny_imagenet_with_text_that_is_none(folder):
    zipped(
        folder / "tiny-imagenet-200.zip", tiny_files() | {"tiny-imagenet-200/wnids.txt": b"\xff"}
    )
    tinyimagenet(folder)


@case
def clear_with_nested_json(folder):
    files = clear_files() | {"train/labeled_metadata.json": b'{"1":' + b"[" * 10**6}
    write_files(folder / "clear10", files)
    clear10(folder, stored_size=8)


@case
def clear_with_a_listing_that_is_none(folder):
    metadata = {str(b): {"bus": 3, "BACKGROUND": None} for b in (1, 2, 3)}
    files = clear_files() | {"train/labeled_metadata.json": json.dumps(metadata).encode()}
    write_files(folder / "clear10", files)
    clear10(folder, stored_size=8)


@case
def encrypted_zip(folder):
    path = zipped(folder / "x.zip", IMAGES)
    content = bytearray(path.read_bytes())
    start = -1
    while (start := content.find(b"PK\x01\x02", start + 1)) >= 0:
        content[start + 8] |= 1
    image_tree(write(path, bytes(content)))


@case
def zip_of_an_unknown_compression(folder):
    path = zipped(folder / "x.zip", IMAGES)
    content = bytearray(path.read_bytes())
    content[content.find(b"PK\x01\x02") + 10] = 99
    image_tree(write(path, bytes(content)))


@case
def zip_with_names_that_are_no_text(folder):
    path = folder / "x.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/é.png", b"")
    content = path.read_bytes().replace("é".encode(), b"\xff\xff")
    image_tree(write(path, content))


@case
def folder_with_a_name_that_is_no_text(folder):
    write_files(folder / "x", IMAGES)
    os.mkdir(os.fsencode(folder / "x") + b"/\xff\xfe")
    image_tree(folder / "x")


@case
def pipe_among_the_images(folder):
    write_files(folder / "x", IMAGES)
    os.mkfifo(folder / "x" / "a" / "pipe.png")
    image_tree(folder / "x")


@case
def pipe_in_place_of_a_zip(folder):
    os.mkfifo(folder / "x.zip")
    image_tree(folder / "x.zip")


@case
def pipe_in_place_of_an_npz(folder):
    os.mkfifo(folder / "x.npz")
    from_npz(folder / "x.npz")


@case
def pipe_in_place_of_an_archive(folder):
    os.mkfifo(folder / "cifar-100-binary.tar.gz")
    cifar100(folder)


@case
def device_in_place_of_a_folder(folder):
    image_tree("/dev/zero")


@case
def broken_link_among_the_images(folder):
    write_files(folder / "x", IMAGES)
    (folder / "x" / "a" / "gone.png").symlink_to(folder / "nowhere")
    image_tree(folder / "x")


def png(width, height, *chunks):
    """A PNG of grey zeros, made without compressing all of them."""
    zeros = deflated(b"", max(1 << 20, (width + 1) * height))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), *chunks]
    parts += [(b"IDAT", b"\x78\xda" + zeros + bytes(4)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


@case
def png_of_many_pixels(folder):
    decode(png(30_000, 30_000), 64, "x.png")


@case
def png_of_one_line(folder):
    decode(png(200_000, 1), 64, "x.png")


@case
def png_with_a_huge_text(folder):
    text = b"key\0\0\x78\xda" + deflated(b"", GIGABYTE) + bytes(4)
    decode(png(8, 8, (b"zTXt", text)), 64, "x.png")


@case
def tiff_of_floats(folder):
    buffer = BytesIO()
    Image.fromarray(np.ones((8, 8), np.float32)).save(buffer, "TIFF")
    decode(buffer.getvalue(), 8, "x.tif")


def main(folder):
    """Print the growth of memory in bytes, over all cases, and those without a named error."""
    Path(folder).mkdir()
    image_tree(write_files(Path(folder, "warm"), IMAGES))  # imports everything
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    survived = []
    for name, function in CASES.items():
        own = Path(folder, name)
        own.mkdir()
        try:
            function(own)
            survived.append(name)
        except ProxreplayError:
            pass
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(name, grown >> 10, "MB", file=sys.stderr)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"kilobytes": grown, "survived": survived}))


if __name__ == "__main__":
    main(sys.argv[1])
