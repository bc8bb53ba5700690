"""Transforms: the batched crop and flip against one image at a time, and their distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from proxreplay.data import Transform
from proxreplay.data.augment import center_crop, crop_and_flip
from proxreplay.errors import InputError


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(1, 200, (n, channels, height, width), generator=rng(n)).to(dtype)


def one_at_a_time(
    batch: Tensor, top: Tensor, left: Tensor, mirror: Tensor, size: tuple[int, int], padding: int
) -> Tensor:
    """Pad, crop, then mirror every image by itself."""
    result = []
    for image, y, x, m in zip(batch, top.tolist(), left.tolist(), mirror.tolist(), strict=True):
        crop = F.pad(image, [padding] * 4)[:, y : y + size[0], x : x + size[1]]
        result.append(crop.flip(2) if m else crop)
    return torch.stack(result)


def draws(
    transform: Transform, batch: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """The random numbers a transform uses, in its order."""
    n, height, width = len(batch), *batch.shape[2:]
    size = (transform.crop_size or height, transform.crop_size or width)
    room = 2 * transform.crop_padding + 1
    top = torch.randint(height - size[0] + room, (n,), generator=generator)
    left = torch.randint(width - size[1] + room, (n,), generator=generator)
    mirror = torch.zeros(n, dtype=torch.int64)
    if transform.flip:
        mirror = torch.randint(2, (n,), generator=generator)
    return top, left, mirror, size


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 5),
    channels=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.integers(0, 3),
    cut=st.integers(0, 4),
    flip=st.booleans(),
    channels_last=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.int16]),
    seed=st.integers(0, 99),
)
def test_equals_one_image_at_a_time(
    n: int,
    channels: int,
    height: int,
    width: int,
    padding: int,
    cut: int,
    flip: bool,
    channels_last: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    crop_size = max(1, min(height, width) + padding - cut) if cut else None
    mean, std = [0.1 * (c + 1) for c in range(channels)], [0.3 + c for c in range(channels)]
    transform = Transform(255.0, mean, std, padding, flip, crop_size)
    batch = images(n, channels, height, width, dtype)
    if channels_last:
        batch = batch.contiguous(memory_format=torch.channels_last)
    result = transform(batch, rng(seed))
    top, left, mirror, size = draws(transform, batch, rng(seed))
    view = one_at_a_time(batch, top, left, mirror, size, padding)
    shape = (-1, 1, 1)
    expected = (view.double() / 255 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(
        shape
    )
    assert result.dtype == (dtype if dtype.is_floating_point else torch.float32)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    same_picture = crop_and_flip(batch, top, left, mirror, size, padding)
    assert torch.equal(same_picture, view)


@pytest.mark.parametrize("flip", [False, True])
def test_channels_last_stays_so_and_changes_no_bit(flip: bool) -> None:
    transform = Transform(255.0, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), crop_padding=2, flip=flip)
    batch = images(6, 3, 8, 7, torch.uint8)
    last = batch.contiguous(memory_format=torch.channels_last)
    for generator in (None, 1):
        plain = transform(batch, generator and rng())
        other = transform(last, generator and rng())
        assert plain.is_contiguous()
        assert other.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(plain, other)


def test_padding_is_black_before_normalisation() -> None:
    white = torch.full((64, 1, 4, 4), 255, dtype=torch.uint8)
    seen = Transform(255.0, (0.5,), (0.25,), crop_padding=2)(white, rng())
    assert set(seen.unique().tolist()) == {-2.0, 2.0}


def test_without_a_generator_nothing_is_random() -> None:
    batch = images(3, 3, 8, 8, torch.uint8)
    augmenting = Transform(255.0, (0.5,), (0.25,), crop_padding=4, flip=True)
    assert torch.equal(augmenting(batch), Transform(255.0, (0.5,), (0.25,))(batch))


def test_nothing_to_do_is_nothing_done() -> None:
    batch = images(3, 2, 5, 6, torch.float32)
    assert torch.equal(Transform()(batch, rng()), batch)
    vectors = torch.randn(4, 7, generator=rng())
    assert torch.equal(Transform()(vectors, rng()), vectors)
    numbers = torch.randn(4, generator=rng())
    assert torch.equal(Transform(scale=2.0)(numbers), numbers / 2)


def test_the_inputs_are_left_as_they_are() -> None:
    for dtype in (torch.uint8, torch.float32):
        batch = images(3, 3, 8, 8, dtype)
        before = batch.clone()
        Transform(2.0, (0.5,), (0.25,), crop_padding=1, flip=True)(batch, rng())
        Transform(2.0, (0.5,), (0.25,), crop_size=4)(batch)
        assert torch.equal(batch, before)


def test_vectors_are_normalised_by_column() -> None:
    vectors = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    result = Transform(mean=(1.0, 10.0), std=(2.0, 20.0))(vectors)
    assert result.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_the_same_generator_gives_the_same_bits_and_goes_on() -> None:
    transform = Transform(255.0, (0.5,), (0.25,), crop_padding=4, flip=True)
    batch = images(20, 3, 8, 8, torch.uint8)
    one, two = rng(), rng()
    first = transform(batch, one)
    assert torch.equal(first, transform(batch, two))
    second = transform(batch, one)
    assert not torch.equal(first, second)
    assert torch.equal(second, transform(batch, two))


def test_the_global_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    transform = Transform(crop_padding=1, flip=True)
    transform(images(4, 1, 3, 3, torch.uint8), rng())
    assert torch.equal(torch.get_rng_state(), before)


def test_every_place_and_both_sides_are_as_likely() -> None:
    # one bright pixel right of the centre tells where the crop was and whether it was mirrored
    dot = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    dot[0, 0, 2, 3] = 1
    n, padding = 9000, 1
    seen = Transform(crop_padding=padding, flip=True)(dot.expand(n, 1, 5, 5), rng(7))
    place = seen.view(n, 25).argmax(dim=1)
    counts = torch.bincount(place, minlength=25).view(5, 5)
    # not mirrored the dot is in columns 2 .. 4, mirrored in 0 .. 2; rows 1 .. 3
    expected = torch.zeros(5, 5)
    expected[1:4, 2:5] += n / 18
    expected[1:4, 0:3] += n / 18
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 60  # 14 degrees of freedom: once in ten million


def test_crop_size_takes_the_centre_without_a_generator() -> None:
    batch = images(2, 3, 9, 6, torch.uint8)
    result = Transform(crop_size=4)(batch)
    assert torch.equal(result, batch[:, :, 2:6, 1:5].float())
    assert center_crop(batch, (9, 6)).data_ptr() == batch.data_ptr()


def test_crop_size_of_larger_images_covers_every_place() -> None:
    numbers = torch.arange(30.0).view(1, 1, 5, 6).expand(600, 1, 5, 6)
    corners = Transform(crop_size=4)(numbers, rng())[:, 0, 0, 0]
    assert set(corners.tolist()) == {0, 1, 2, 6, 7, 8}


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"std": (0.5, 0.0)},
        {"std": ()},
        {"mean": ()},
        {"crop_padding": -1},
        {"crop_size": 0},
        {"scale": float("nan")},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="Transform: "):
        Transform(**options)  # type: ignore[arg-type]


def test_inputs_are_checked() -> None:
    batch = images(2, 3, 4, 4, torch.uint8)
    with pytest.raises(InputError, match="2 means and 1 stds"):
        Transform(mean=(0.1, 0.2))(batch)
    with pytest.raises(InputError, match=r"shape \(2, 5\) cannot be cropped or flipped"):
        Transform(flip=True)(torch.zeros(2, 5), rng())
    with pytest.raises(InputError, match="smaller than crop_size=5"):
        Transform(crop_size=5)(batch, rng())
    assert Transform(crop_size=5, crop_padding=1)(batch, rng()).shape == (2, 3, 5, 5)


def test_an_empty_batch_stays_empty() -> None:
    transform = Transform(255.0, crop_padding=2, flip=True)
    empty = torch.zeros(0, 3, 4, 4, dtype=torch.uint8)
    assert transform(empty, rng()).shape == (0, 3, 4, 4)
    assert transform(empty).shape == (0, 3, 4, 4)


def test_lists_of_constants_are_as_good_as_tuples() -> None:
    assert Transform(mean=[0.5], std=[0.5]) == Transform(mean=(0.5,), std=(0.5,))
    assert hash(Transform(mean=[0.5])) == hash(Transform(mean=(0.5,)))
