"""What a gradient rule is."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from proxreplay.batch import Batch
from proxreplay.distributed import Processes, current
from proxreplay.errors import InputError
from proxreplay.proximal.layers.calling import Caller


class GradientRule(ABC):
    """Changes gradients between the backward pass and the optimizer's step.

    The only interface between rules and whoever trains: a loop of your own by `attach`, `Learner`
    by `observe`, `step_` and `refresh`, diagnostics by `precondition_`. Public attributes are a
    rule's options; what it has learned is private and in `state_dict`.
    """

    reference_samples: int | None = 0
    """Remembered examples that `observe` asks for; None for those that the loss replays."""

    _call: Caller | None = None
    _handle: RemovableHandle | None = None
    _optimizer: Optimizer | None = None
    _warned = False
    _processes: Processes | None = None

    def among(self, processes: Processes | None) -> Self:
        """Work together with these processes from now on (docs/scale.md).

        Args:
            processes: `Processes.up`, with ``replicated=True`` if every process will hand in all
                examples and not only its share; `ALONE` for this process alone; None for those of
                torch's default process group, each with its share, if one is up.
        """
        self._processes = processes
        return self

    @property
    def processes(self) -> Processes:
        """Those that work together."""
        return current() if self._processes is None else self._processes

    @property
    def needs_refresh(self) -> bool:
        """Whether `refresh` is of use; not where statistics come from the training steps."""
        return True

    @property
    def leaves_out(self) -> bool:
        """Whether `due` may say no."""
        return False

    def due(self, examples: int) -> bool:
        """Whether a refresh is worth its cost by now; asked where nobody has set the interval.

        Args:
            examples: of a training step.
        """
        return True

    @abstractmethod
    def refresh(self, examples: Any, of: int | None = None) -> None:
        """Rebuild from inputs that must not be forgotten; nothing for rules that only observe.

        Args:
            examples: inputs as the model sees them.
            of: how many examples they were drawn from; None for many more.
        """

    def observe(self, incoming: Batch, reference: Batch | None = None) -> None:
        """See the data of a step after its backward pass; most rules do not look.

        Args:
            incoming: the stream batch as the model sees it.
            reference: `reference_samples` remembered examples; None if there are none.
        """
        return None

    def watched(
        self, incoming: Batch | None = None, replay: Batch | None = None
    ) -> AbstractContextManager[None]:
        """Look at the forward and backward passes inside; most rules do not."""
        return nullcontext()

    def paused(self) -> AbstractContextManager[None]:
        """Backward passes inside are not those of a step."""
        return nullcontext()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings that decide what happens next."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def precondition_(self, only: Collection[int] | None = None) -> None:
        """Change the gradients where they are. It may be called any number of times.

        Args:
            only: ids of the parameters to treat as moving; None for all that have a gradient.
        """

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_` for a step that will be made; call it once before each step."""
        if self._optimizer is None:
            self._say_if_idle()
        self.precondition_(only)

    def wait_(self) -> None:
        """`step_`, for a step that more steps on the same stream batch follow.

        A rule may put off what it does until the last of them, which `step_` is called for.
        """
        self.step_()

    def abandon_(self) -> None:
        """A step that was begun will not be made: forget what was seen of its stream batch."""
        return None

    def called_by(self, call: Caller | None) -> Self:
        """Say how the model is called with inputs; None for the usual way. `Learner` does so."""
        self._call = call
        self._warned = True  # `Learner` refreshes by itself, and its first steps come before
        return self

    def attach(self, optimizer: Optimizer) -> Self:
        """Precondition inside every ``optimizer.step()`` from now on, or until `detach`.

        Only parameters of that optimizer are touched. A closure given to ``step`` is wrapped, so
        that the gradients it makes are preconditioned too. An optimizer for the same parameters
        takes the place of one attached before. Copies of a rule are not attached.

        Args:
            optimizer: torch's, also wrapped as Accelerate and Lightning do it.
        """
        rule = type(self).__name__
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"{rule}.attach: {optimizer!r:.80} is no optimizer; give one of torch's, such as "
                "SGD(model.parameters())."
            )
        held = _parameters_of(optimizer)
        model = getattr(self, "model", None)
        if isinstance(model, nn.Module) and held.isdisjoint(map(id, model.parameters())):
            raise InputError(
                f"{rule}.attach: the optimizer holds no parameter of the rule's model; make it "
                "with model.parameters() of the model that the rule was made for."
            )
        if self._optimizer is not None and _parameters_of(self._optimizer) != held:
            raise InputError(
                f"{rule}.attach: attached already; detach() first. For several optimizers, call "
                "step_() once before their steps."
            )
        self.detach()
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        self._optimizer = optimizer
        return self

    def detach(self) -> None:
        """Undo `attach`; nothing happens if it was not attached."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handle": None, "_optimizer": None}

    def idle(self) -> str | None:
        """Why nothing is changed yet; None if something is, or will never be."""
        return None

    def _say_if_idle(self) -> None:
        """Warn once in a rule's life."""
        if not self._warned and (why := self.idle()) is not None:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: every gradient stays as it is; {why}", stacklevel=3
            )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Precondition now, or after the closure has made the gradients."""
        only = _parameters_of(optimizer)
        self._say_if_idle()

        def then_precondition(closure: Callable[[], Any]) -> Callable[[], Any]:
            def wrapped() -> Any:
                loss = closure()
                self.step_(only)
                return loss

            return wrapped

        itself, *rest = args  # torch hands the optimizer on as the first argument of step
        if rest and callable(rest[0]):
            return (itself, then_precondition(rest[0]), *rest[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": then_precondition(kwargs["closure"])}
        self.step_(only)
        return None


@contextmanager
def leaving_nothing(rule: GradientRule | None) -> Iterator[None]:
    """`GradientRule.abandon_` if anything is raised inside."""
    try:
        yield
    except BaseException:
        if rule is not None:
            rule.abandon_()
        raise


def seen_by(
    rule: GradientRule | None, incoming: Batch, replay: Batch | None
) -> AbstractContextManager[None]:
    """`GradientRule.watched` of a rule that there may be."""
    return nullcontext() if rule is None else rule.watched(incoming, replay)


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
