import io

import numpy as np
import pytest
import torch
from PIL import Image

from proxreplay.data import images
from proxreplay.data.images import decode
from proxreplay.errors import DataError
from tests.data.data_samples import jpeg


def test_an_image_of_the_right_size_is_left_as_it_is():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    assert np.array_equal(decode(buffer.getvalue(), 8, "x"), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (21, 20), (9, 33)], ids=str)
def test_the_shorter_side_is_resized_and_the_centre_kept(size):
    """The twin: resize, then torch's own slicing around the middle."""
    data = jpeg(size, fmt="PNG")
    image = Image.open(io.BytesIO(data))
    width, height = (int(10 * s / min(size)) for s in size)
    whole = torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BILINEAR)))
    top, left = round((height - 10) / 2), round((width - 10) / 2)
    expected = whole[top : top + 10, left : left + 10].permute(2, 0, 1)
    assert np.array_equal(decode(data, 10, "x"), expected.numpy())


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_colour_mode_becomes_rgb(mode):
    buffer = io.BytesIO()
    Image.new(mode, (6, 6)).save(buffer, "TIFF")
    assert decode(buffer.getvalue(), 6, "x").shape == (3, 6, 6)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no image at all", id="text"),
        pytest.param(jpeg((64, 64))[:300], id="truncated"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", id="postscript"),
    ],
)
def test_what_is_no_image_is_named(data):
    with pytest.raises(DataError, match=r"cat\.jpg: .*replace or remove it"):
        decode(data, 8, "cat.jpg")


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 63)
    with pytest.raises(DataError, match="8x8 is more than 63 pixels"):
        decode(jpeg((8, 8)), 8, "bomb.jpg")


def test_pillow_s_own_limit_is_an_error_too():
    png = bytearray(jpeg((8, 8), fmt="PNG"))
    png[16:24] = (60000).to_bytes(4, "big") * 2
    with pytest.raises(DataError, match=r"bomb\.png"):
        decode(bytes(png), 8, "bomb.png")


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_keeps_its_upper_half(fmt):
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    buffer = io.BytesIO()
    Image.fromarray(deep).save(buffer, fmt)
    seen = decode(buffer.getvalue(), 8, "x")
    assert np.abs(seen.astype(int) - deep // 256).max() <= 1
    assert np.array_equal(seen[0], seen[2])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_a_known_range_are_refused(dtype):
    buffer = io.BytesIO()
    Image.fromarray(np.ones((8, 8), dtype)).save(buffer, "TIFF")
    with pytest.raises(DataError, match=r"x\.tif: pixels of type '[FI]' have no known range"):
        decode(buffer.getvalue(), 8, "x.tif")


@pytest.mark.parametrize("size", [(200_000, 1), (1, 200_000)], ids=str)
def test_an_image_that_would_grow_beyond_measure_is_refused_first(size, monkeypatch):
    buffer = io.BytesIO()
    Image.new("L", size).save(buffer, "PNG")
    monkeypatch.setattr(Image.Image, "resize", lambda *args: pytest.fail("resized"))
    with pytest.raises(DataError, match=r"line\.png: .* is too narrow"):
        decode(buffer.getvalue(), 64, "line.png")


def test_no_message_shows_an_object_s_address():
    with pytest.raises(DataError) as caught:
        decode(b"no image at all", 8, "cat.jpg")
    assert "0x" not in str(caught.value)
