"""Bodies of requests: JSON, ``.npy`` and images become arrays; nothing in them is ever executed."""

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from proxreplay.batch import WHOLE
from proxreplay.data.arrays import read_npy
from proxreplay.data.images import decode
from proxreplay.errors import DataError, InputError
from proxreplay.models.recipes import recipe_of
from proxreplay.replay.inputs import TensorKind, as_tensor
from proxreplay.replay.predicting import Predictor
from proxreplay.serving.events import LONGEST

NPY, JSON = "application/x-npy", "application/json"
Name = Annotated[StrictStr, Field(min_length=1, max_length=LONGEST)]
Integer = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]
Sequence = Annotated[StrictInt, Field(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class Raw:
    """A body that is not JSON: a ``.npy`` file or one image."""

    content_type: str
    data: bytes


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Npy(_Strict):
    """An array in numpy's own format."""

    npy: Annotated[StrictStr, Field(description="A .npy file in base64; never pickled.")]


class Images(_Strict):
    """Images as files, where the learner was made for images."""

    images: Annotated[
        list[StrictStr], Field(description="PNG, JPEG, ... in base64.", max_length=10_000)
    ]


class Named(_Strict):
    """Several tensors per example, where the learner takes a dict of them."""

    named: Annotated[
        dict[Name, list[Any]], Field(description="Nested arrays by name.", max_length=100)
    ]


Inputs = Annotated[
    list[Any] | Npy | Images | Named,
    Field(description="[n, ...] as nested arrays, or a .npy file, images, or named arrays."),
]


class PredictRequest(_Strict):
    """Inputs to predict."""

    inputs: Inputs
    id: Annotated[
        Name | None, Field(description="Keep the inputs under this id until labels arrive.")
    ] = None


class LearnRequest(_Strict):
    """A batch to learn: inputs, or the id of a prediction, and labels."""

    inputs: Inputs | None = None
    id: Name | None = None
    labels: Annotated[list[Integer | Name], Field(max_length=100_000)]
    weights: Annotated[
        list[float] | None, Field(description="How much each example counts.", max_length=100_000)
    ] = None
    keys: Annotated[
        Name | list[Name] | None, Field(description="To delete by: one per example or one for all.")
    ] = None
    idempotency_key: Annotated[
        Name | None, Field(description="The same key again adds nothing.")
    ] = None
    train: Annotated[StrictBool, Field(description="False only remembers.")] = True


class ForgetRequest(_Strict):
    """What to delete: exactly one of the three."""

    label: Integer | Name | None = None
    ids: Annotated[list[Sequence] | None, Field(max_length=100_000)] = None
    key: Name | None = None


class RollbackRequest(_Strict):
    """Where to go back to."""

    to: Annotated[Sequence, Field(description="Sequence of a snapshot or event.")]
    reason: Annotated[StrictStr | None, Field(max_length=LONGEST)] = None


def array_of(inputs: Any, predictor: Predictor) -> Any:
    """Inputs of a request as something that a learner takes.

    Args:
        inputs: nested lists, `Npy`, `Images` or `Named`; or one `Raw` in a list.
        predictor: says whether images are what it takes.
    """
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], Raw):
        if inputs[0].content_type == NPY:
            return _npy(inputs[0].data)
        return _image(inputs[0].data, image_shape(predictor), "the image")[None]
    if isinstance(inputs, Npy):
        return _npy(_from_base64(inputs.npy))
    if isinstance(inputs, Images):
        shape = image_shape(predictor)
        if not inputs.images:
            raise InputError("images=[]; give at least one.")
        return np.stack(
            [_image(_from_base64(i), shape, f"image {n}") for n, i in enumerate(inputs.images)]
        )
    known = {} if predictor.intake.kind is None else predictor.intake.kind.tensors
    if isinstance(inputs, Named):
        return {
            name: _with_dtype(values, known.get(name), predictor)
            for name, values in inputs.named.items()
        }
    return _with_dtype(inputs, known.get(WHOLE), predictor)


def _with_dtype(values: list[Any], kind: TensorKind | None, predictor: Predictor) -> Any:
    """Numbers of JSON, which knows no dtypes, with the dtype of the learner's inputs.

    Before the first batch: whole numbers from 0 to 255 are bytes where there is a transform, which
    makes floats of them, and floats where there is none.
    """
    array = as_tensor(values).numpy()
    if array.dtype.kind != "i":
        return array
    if kind is not None:
        wanted = np.dtype(str(kind.dtype).removeprefix("torch."))
    else:
        wanted = np.dtype("uint8" if predictor.transform is not None else "float32")
    if wanted.kind in "iu" and array.size:
        bounds = np.iinfo(wanted)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise InputError(
                f"inputs from {array.min()} to {array.max()}, but {wanted} holds {bounds.min} to "
                f"{bounds.max}; give those."
            )
    return array.astype(wanted)


def are_images(inputs: Any) -> bool:
    """Whether making an array of inputs may take long: small files can hold many pixels."""
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], Raw):
        return inputs[0].content_type != NPY
    return isinstance(inputs, Images)


def _npy(data: bytes) -> NDArray[Any]:
    try:
        return read_npy(BytesIO(data), len(data), "the .npy file")
    except DataError as error:
        raise InputError(str(error)) from error


def image_shape(predictor: Predictor) -> tuple[int, int]:
    """Channels and side of the images that a learner was made for; refused if it was not."""
    kind, recipe = predictor.intake.kind, recipe_of(predictor.model)
    shape: Any = None
    if kind is not None:
        whole = kind.tensors.get(WHOLE)
        shape = whole.shape if whole and str(whole.dtype) == "torch.uint8" else None
    elif recipe is not None and "image_size" in recipe["arguments"]:
        side = recipe["arguments"]["image_size"]
        shape = (recipe["arguments"]["in_channels"], side, side)
    scale = getattr(predictor.transform, "scale", None)
    fits = shape is not None and len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]
    if not fits or scale != 255:
        raise InputError(
            "this learner was not made for images: it takes "
            f"{'inputs it has not met yet' if kind is None else kind}; images are for square uint8 "
            "inputs [1 or 3, side, side] with Transform(scale=255). Send arrays."
        )
    return int(shape[0]), int(shape[1])


def _image(data: bytes, shape: tuple[int, int], what: str) -> NDArray[np.uint8]:
    channels, side = shape
    try:
        pixels = decode(data, side, what)
    except DataError as error:
        raise InputError(str(error)) from error
    if channels == 3:
        return pixels
    red, green, blue = pixels.astype(np.uint32)
    grey = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16  # as Pillow does
    return np.asarray(grey[None], dtype=np.uint8)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"not base64 ({error}).") from error


def digest(*parts: Any) -> bytes:
    """Of a request, to know the same one again."""
    texts = [p if isinstance(p, bytes) else json.dumps(p, sort_keys=True).encode() for p in parts]
    return hashlib.sha256(b"\0".join(hashlib.sha256(text).digest() for text in texts)).digest()
