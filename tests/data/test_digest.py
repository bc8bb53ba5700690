"""The checksum that goes into every run's folder changes with any example."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from proxreplay.data import Examples, digits
from proxreplay.data.arrays import from_arrays
from proxreplay.data.trees import image_tree


def test_a_single_changed_pixel_changes_the_digest() -> None:
    data = digits()
    inputs = data.train.inputs.clone()
    inputs[17, 0, 3, 3] ^= 1
    other = replace(data, train=Examples(inputs, data.train.labels))
    assert data.digest() == digits().digest() != other.digest()


def test_labels_count_too() -> None:
    inputs = np.arange(8.0).reshape(4, 2)
    digests = {
        from_arrays("toy", (inputs, labels), (inputs, [0, 1, 0, 1])).digest()
        for labels in ([0, 1, 0, 1], [1, 0, 0, 1])
    }
    assert len(digests) == 2


def test_a_cached_set_knows_its_digest_without_reading_it(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(6):
        folder = tmp_path / "tree" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(folder / f"{number}.png")
    first = image_tree(tmp_path / "tree")
    again = image_tree(tmp_path / "tree")
    assert first.checksum is not None
    assert first.digest() == again.digest() == again.checksum
