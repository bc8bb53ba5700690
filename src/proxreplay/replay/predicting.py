"""Prediction: a model, its average and its companion, in evaluation mode and left as they were."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxreplay import seeding
from proxreplay.batch import Batch, Inputs, length, named, part
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.options import COMPANY, PREDICTORS, count, one_of
from proxreplay.proximal.layers.calling import Called, Caller, logits_of
from proxreplay.proximal.layers.capture import as_written, untouched
from proxreplay.replay.averaging import EMA
from proxreplay.replay.batching import stream_batches
from proxreplay.replay.companion import Companion
from proxreplay.replay.inputs import InputKind
from proxreplay.replay.intake import Intake, Outputs
from proxreplay.replay.placement import Placement

Transform = Callable[[Any, torch.Generator | None], Any]

ELEMENTS_PER_PASS = 100 * 3 * 32 * 32  # of inputs that are predicted at once on a CPU
# what a model that is given something it cannot take raises
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


_Method = TypeVar("_Method", bound=Callable[..., Any])
_NOBODY = nullcontext()


def locked(method: _Method, *, alone: AbstractContextManager[Any] = _NOBODY) -> _Method:
    """Let a method wait until no other thread is inside the same object."""

    @functools.wraps(method)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock, alone:
            return method(self, *args, **kwargs)

    return cast(_Method, waiting)


def changing(method: _Method) -> _Method:
    """The same for a method that changes something; all objects share torch's generators."""
    return locked(method, alone=seeding.alone)


class Predictor:
    """The half of a `Learner` that changes nothing; it takes those arguments of the learner's."""

    def __init__(
        self,
        model: nn.Module,
        averaging: EMA | None,
        transform: Transform | None,
        device: torch.device | str | None,
        channels_last: bool,
        call: Caller | None = None,
        companion: Companion | None = None,
    ) -> None:
        self.model = model
        self.call = call
        self.averaging = averaging
        self.companion = companion
        self.transform = transform
        self.channels_last = channels_last
        self.placement = Placement.of(model, device, channels_last)
        self.placement.place_([model] if averaging is None else [model, averaging.model])
        self.heads = [m for m in model.modules() if isinstance(m, GrowingHead)]
        self.intake = Intake(self.placement.dtype, self.heads)
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def labels(self) -> list[Any]:
        """The label that each column of `predict_proba` stands for; None for a forgotten one."""
        known = self.intake.labels
        if known.kind != "integers":
            return list(known.names)
        return list(range(self.heads[0].out_features if self.heads else self.intake.outputs or 0))

    @locked
    @torch.no_grad()
    def logits(
        self,
        x: Any,
        *,
        online: bool = False,
        predictor: str | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Logits in evaluation mode, ``[n, outputs]``; of a mean, the logarithms of probabilities.

        Args:
            x: inputs ``[n, ...]``; one example counts as a batch of one.
            online: short for ``predictor="online"``: the model that is trained.
            predictor: where there is an average of the model: ``average``, ``online``, ``both``
                (the mean of their probabilities) or ``blend`` (a weighted mean); None for what the
                average was made for (``averaging.predict``). Where there is a companion:
                ``companion`` for it alone, ``joint`` (then the default) for it and the networks.
            batch_size: inputs per forward pass; None for 500, or as many as suit a CPU's cache.
        """
        name = self._predictor(predictor, online=online)
        return self.logits_of_each(x, [name], batch_size)[name]

    @locked
    @torch.no_grad()
    def logits_of_each(
        self, x: Any, predictors: Sequence[str], batch_size: int | None = None
    ) -> dict[str, Tensor]:
        """Logits by predictor, as in `logits`; networks and companion are asked at most once."""
        average, companion, own = self.averaging, self.companion, self._own
        asked = {own if name == "joint" else name for name in predictors} - {"companion"}
        found: dict[str, Tensor] = {}
        if asked - {"average"}:
            found["online"] = self._logits(self.model, x, batch_size)
        if average is not None and asked - {"online"}:
            found["average"] = self._logits(average.model, x, batch_size)
            for name in asked - found.keys():
                found[name] = average.combined(found["average"], found["online"], name)
        if companion is not None and set(COMPANY) & set(predictors):
            widths = [logits.shape[1] for logits in found.values()]
            alone = self._of_companion(companion, x, batch_size, *widths[:1])
            found["companion"] = alone
            if "joint" in predictors:
                found["joint"] = companion.joined(found[own], alone)
        return {name: found[name] for name in predictors}

    def _predictor(self, name: str | None, *, online: bool) -> str:
        """The predictor of that name; for None, the learner's own."""
        if online and name not in (None, "online"):
            raise InputError(f"Learner: online=True, but predictor={name!r}; give one of the two.")
        if online:
            name = "online"
        elif name is None:
            name = self._own if self.companion is None else "joint"
        if self.companion is None and name in COMPANY:
            raise InputError(
                f"Learner: predictor={name!r}, but there is no companion; make the learner with "
                "companion=CompanionOptions()."
            )
        one_of((*PREDICTORS, *COMPANY) if self.companion else PREDICTORS, predictor=name)
        if self.averaging is None and name not in ("online", *COMPANY):
            raise InputError(
                f"Learner: predictor={name!r}, but there is no average of the weights; make the "
                "learner with averaging=AveragingOptions()."
            )
        return name

    @property
    def _own(self) -> str:
        """The predictor of the networks by themselves."""
        return "online" if self.averaging is None else self.averaging.options.predict

    def _logits(self, model: nn.Module, x: Any, batch_size: int | None) -> Tensor:
        with evaluating(model), as_written():
            views = self._views(x, batch_size)
            return torch.cat([logits_of(model, view, self.call) for view in views])

    def _of_companion(
        self, companion: Companion, x: Any, batch_size: int | None, outputs: int | None = None
    ) -> Tensor:
        if outputs is None:
            outputs = self.heads[0].out_features if self.heads else self.intake.outputs
        if outputs is None:
            outputs = self._try_out(part(self.intake.check(x), slice(1))).number
        found = []
        for view in self._views(x, batch_size):
            companion.check(view)
            found.append(companion.logits(cast(Tensor, view), outputs))
        return torch.cat(found)

    def _views(self, x: Any, batch_size: int | None) -> Iterator[Inputs]:
        """Inputs as the model sees them, so many at a time."""
        count(batch_size=batch_size)
        inputs = self.intake.check(x)
        if self.intake.kind is None:
            self._try_out(part(inputs, slice(1)))
        size = self._inputs_per_pass(inputs) if batch_size is None else batch_size
        for start in range(0, length(inputs), size):
            yield self._see(part(inputs, slice(start, start + size)))

    @locked
    def predict_proba(
        self, x: Any, *, online: bool = False, predictor: str | None = None
    ) -> Tensor:
        """The probability of every label in `labels`, ``[n, labels]``; see `logits`."""
        return self._known(self.logits(x, online=online, predictor=predictor)).softmax(dim=1)

    @locked
    def predict(
        self, x: Any, *, online: bool = False, predictor: str | None = None
    ) -> NDArray[Any]:
        """The most probable label of every input: an array ``[n]`` of integers or of names."""
        logits = self.logits(x, online=online, predictor=predictor)
        return self.intake.labels.decode(self._known(logits).argmax(dim=1))

    @locked
    @torch.inference_mode()
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        online: bool = False,
        predictor: str | None = None,
    ) -> float:
        """The share of inputs whose label is predicted; labels never met count as errors.

        Without ``y``, ``x`` is any source that `Learner.learn_stream` takes. For the others see
        `logits`.
        """
        name = self._predictor(predictor, online=online)
        hits = total = 0
        source = [(x, y, None)] if y is not None else stream_batches(x, None, 500)
        for inputs, labels, _ in source:
            if isinstance(inputs, Batch):
                batch: Batch = inputs
                inputs, labels = batch.inputs, batch.labels
            indices = self.intake.labels.find(labels)
            logits = self._known(self.logits(inputs, predictor=name, batch_size=batch_size))
            if len(indices) != len(logits):
                raise InputError(
                    f"Learner: {len(logits)} inputs but {len(indices)} labels; give one each."
                )
            hits += int((logits.argmax(dim=1).cpu() == indices).sum())
            total += len(indices)
        if total == 0:
            raise InputError("Learner.evaluate: the source holds no example.")
        return hits / total

    def view(self, x: Any) -> Inputs:
        """Inputs as the model sees them when it predicts: transformed, not augmented."""
        return self._see(self.intake.check(x))

    def _see(self, inputs: Inputs, rng: torch.Generator | None = None) -> Inputs:
        inputs = self.placement.taken(inputs)
        if self.transform is not None:
            inputs = self.transform(inputs, rng)
        return self.placement.ordered(inputs)

    @property
    def network(self) -> nn.Module:
        """The model as losses call it, ``model(inputs) -> logits``: itself, wherever it does so."""
        plain = self.call is None and (self.intake.kind is None or self.intake.kind.plain)
        direct = plain and self.intake.direct is not False
        return self.model if direct else Called(self.model, self.call)

    def _try_out(self, inputs: Inputs) -> Outputs:
        """What the model gives for inputs it has never seen."""
        seen = self._see(inputs)
        outputs: list[Any] = []
        watch = self.model.register_forward_hook(lambda module, args, out: outputs.append(out))
        try:
            with watch, untouched(self.model):
                logits = logits_of(self.model, seen, self.call)
        except MODEL_ERRORS as error:
            if isinstance(error, InputError) and outputs:
                raise
            raise InputError(
                f"Learner: the model cannot take inputs of {InputKind.of(inputs)} each ({error}); "
                "give what it was built for (a dict of its keyword arguments, or a tuple), a "
                "transform from one to the other, or say how it is called with call=..."
            ) from error
        if logits.ndim != 2:
            raise InputError(
                f"Learner: for one input the model gives {list(logits.shape)}; let it give logits "
                "[1, classes]."
            )
        return Outputs(logits.shape[1], direct=any(out is logits for out in outputs))

    def _inputs_per_pass(self, inputs: Inputs) -> int:
        """Measured with a slim ResNet18 on 32x32: 100 are a quarter faster than 500 on a CPU."""
        if self.placement.device.type != "cpu":
            return 500
        elements = sum(tensor[:1].numel() for tensor in named(inputs).values())
        return min(500, max(20, ELEMENTS_PER_PASS // max(1, elements)))

    def _known(self, logits: Tensor) -> Tensor:
        """Without the outputs of a fixed head that have no name yet; forgotten names at -inf."""
        known = self.intake.labels
        if known.kind == "unknown" or (known.names and not known.met):
            raise InputError(
                "Learner: nothing was learned or remembered yet, so there is no label to predict; "
                "learn first, or take logits() of a model that was trained elsewhere."
            )
        if known.kind == "integers":
            if self.heads and not any(bool(head.active.any()) for head in self.heads):
                raise InputError(
                    "Learner: all labels that were learned have been forgotten, so there is none "
                    "to predict; learn again first."
                )
            return logits
        logits = logits[:, : len(known.names)]
        forgotten = [name is None for name in known.names]
        if not any(forgotten):
            return logits
        return logits.masked_fill(torch.tensor(forgotten, device=logits.device), float("-inf"))


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
