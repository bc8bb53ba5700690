"""Prediction: a model, or the average of its weights, in evaluation mode and left as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.options import at_least
from proxreplay.proximal.layers.capture import as_written, untouched
from proxreplay.replay.averaging import EMA
from proxreplay.replay.intake import InputKind, Intake
from proxreplay.replay.placement import Placement

Transform = Callable[[Tensor, torch.Generator | None], Tensor]

ELEMENTS_PER_PASS = 100 * 3 * 32 * 32  # of inputs that are predicted at once on a CPU


class Predictor:
    """The half of a `Learner` that changes nothing.

    Args:
        model: from inputs to logits.
        averaging: an average of its weights, which predicts in its place.
        transform: from stored inputs to what the model sees.
        device: where the model goes; None for where it is.
        channels_last: whether 4-d tensors are kept in NHWC order.
    """

    def __init__(
        self,
        model: nn.Module,
        averaging: EMA | None,
        transform: Transform | None,
        device: torch.device | str | None,
        channels_last: bool,
    ) -> None:
        self.model = model
        self.averaging = averaging
        self.transform = transform
        self.channels_last = channels_last
        self.placement = Placement.of(model, device, channels_last)
        self.placement.place_([model] if averaging is None else [model, averaging.model])
        self.heads = [m for m in model.modules() if isinstance(m, GrowingHead)]
        self.intake = Intake(self.placement.dtype, growing=bool(self.heads))

    @property
    def labels(self) -> list[Any]:
        """The label that each column of `predict_proba` stands for."""
        known = self.intake.labels
        if known.kind == "names":
            return list(known.names)
        return list(range(self.heads[0].out_features if self.heads else self.intake.outputs or 0))

    @torch.no_grad()
    def logits(self, x: Any, *, online: bool = False, batch_size: int | None = None) -> Tensor:
        """Logits in evaluation mode, ``[n, outputs]``.

        Args:
            x: inputs ``[n, ...]``.
            online: with the model that is trained, even where there is an average of it.
            batch_size: inputs per forward pass; None for 500, or as many as suit a CPU's cache.
        """
        at_least(1, batch_size=batch_size)
        inputs = self.intake.check(x)
        size = self._inputs_per_pass(inputs) if batch_size is None else batch_size
        model = self.model if online or self.averaging is None else self.averaging.model
        with evaluating(model), as_written():
            return torch.cat([model(self._see(part)) for part in inputs.split(size)])

    def predict_proba(self, x: Any, *, online: bool = False) -> Tensor:
        """The probability of every label in `labels`, ``[n, labels]``."""
        return self._known(self.logits(x, online=online)).softmax(dim=1)

    def predict(self, x: Any, *, online: bool = False) -> Tensor | NDArray[Any]:
        """The most probable label of every input: int64 ``[n]``, or an array of names."""
        return self.intake.labels.decode(self._known(self.logits(x, online=online)).argmax(dim=1))

    @torch.inference_mode()
    def evaluate(
        self, x: Any, y: Any, *, batch_size: int | None = None, online: bool = False
    ) -> float:
        """The share of inputs whose label is predicted; labels never met count as errors."""
        indices = self.intake.labels.find(y)
        logits = self._known(self.logits(x, online=online, batch_size=batch_size))
        if len(indices) != len(logits):
            raise InputError(
                f"Learner: {len(logits)} inputs but {len(indices)} labels; give one each."
            )
        return float((logits.argmax(dim=1).cpu() == indices).double().mean())

    def view(self, x: Any) -> Tensor:
        """Inputs as the model sees them when it predicts: transformed, not augmented."""
        return self._see(self.intake.check(x))

    def _see(self, inputs: Tensor, rng: torch.Generator | None = None) -> Tensor:
        inputs = inputs.to(self.placement.device)
        if self.transform is not None:
            inputs = self.transform(inputs, rng)
        return self.placement.ordered(inputs)

    def _try_out(self, inputs: Tensor) -> int:
        """The number of outputs the model has for inputs it has never seen."""
        try:
            with untouched(self.model):
                logits = self.model(self._see(inputs))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InputError(
                f"Learner: the model cannot take inputs of {InputKind.of(inputs)} each ({error}); "
                "give what it was built for, or a transform from one to the other."
            ) from error
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(
                f"Learner: for one input the model gives {shape}; let it give logits [1, classes]."
            )
        return logits.shape[1]

    def _inputs_per_pass(self, inputs: Tensor) -> int:
        """Measured with a slim ResNet18 on 32x32: 100 are a quarter faster than 500 on a CPU."""
        if self.placement.device.type != "cpu":
            return 500
        return min(500, max(20, ELEMENTS_PER_PASS // max(1, inputs[:1].numel())))

    def _known(self, logits: Tensor) -> Tensor:
        """Without the outputs of a fixed head that have no name yet."""
        known = self.intake.labels
        return logits[:, : len(known.names)] if known.kind == "names" else logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module is in its own mode again on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
