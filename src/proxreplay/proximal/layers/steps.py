"""Rows and output gradients of every layer, from a training step's own forward and backward.

Nothing is run twice. A call counts when the gradient arrives at its output: an evaluation, a
forward pass that nobody goes back through, and the second forward of activation checkpointing
leave nothing behind. What is waited for is held by the graph, and goes when the graph goes.

Padded tokens are left out by the ``attention_mask`` that the model is called with, or the first of
its parts that takes one.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from proxreplay.batch import tensors_in, with_tensors
from proxreplay.distributed import CallShare, share_of_call
from proxreplay.errors import InputError
from proxreplay.proximal.gram.rows import Rows, span_of
from proxreplay.proximal.layers.calling import logits_in
from proxreplay.proximal.layers.capture import full_precision, rows_function, untouched
from proxreplay.proximal.layers.hooks import ModuleHook, Watcher
from proxreplay.proximal.layers.layout import MASK, Layout, has_two_sides
from proxreplay.proximal.layers.outputs import find_output
from proxreplay.proximal.layers.registry import RowsFunction, rows_by_map
from proxreplay.proximal.layers.sites import Member, Site, members_by_module
from proxreplay.proximal.layers.verify import Verifier


@dataclass(frozen=True)
class Origin:
    """Examples of a step that count alike: the incoming ones, or those that are replayed.

    Args:
        name: of the part.
        stop: the number of the first example of the step that comes after it.
        weight: of its examples; those of weight 0 are not looked at.
    """

    name: str
    stop: float
    weight: float = 1.0


EVERYTHING = (Origin("all", float("inf")),)
_Span = tuple[Origin, int, int]  # of examples of one forward pass, in this process


@dataclass(frozen=True)
class StepCall:
    """One call of one linear map in a step, or the part of it that counts alike.

    Args:
        site: whose statistic it belongs to.
        member: which of the site's maps was called.
        parts: which examples; several only with rows that are weighed.
        rows: ``Z: [groups, rows, d]``; None if they were handed on before, with an earlier
            gradient.
        gradients: ``[groups, rows, out]`` at the output, for every part; None where nobody knows
            its layout.
    """

    site: Site
    member: Member
    parts: tuple[Origin, ...]
    rows: Rows | None
    gradients: tuple[Tensor, ...] | None


@dataclass
class _Forward:
    """One forward pass of the model, with ``n`` rows, from example number ``first`` of the step on.

    Where several processes share the call, the examples of all of them are counted.
    """

    first: int
    n: int
    share: CallShare
    whole: bool  # the model itself was called, not only a part of it
    back: bool = False
    backward: int = -1  # the number of its backward pass; checkpoints call layers inside of it
    calls: list[tuple["_Call", GradientEdge]] = field(default_factory=list)

    def over(self) -> bool:
        """Whether a call of a part begins another pass: its own backward pass is over."""
        return self.back and not self.whole and self.backward != _backward()


@dataclass
class StepWatch(Watcher):
    """Hooks on a model that hand on the calls of training steps.

    Args:
        model: as `unwrap` gives it.
        sites: what to watch.
        on_call: receives every call, as the gradients arrive.
        gradients: whether the gradients at the outputs are asked for.
        fisher: "loss" for those of the backward pass as it comes; "sampled" and "exact" for those
            of the log-likelihood of one label, or of all, each weighted by its probability, under
            the model's own predictions. The model's output is then ``[n, classes]`` logits, and its
            graph is gone back through at the end of every forward pass, without weight gradients.
        labels: from which labels are drawn.
        widest: columns up to which rows of all parts are handed on together, each example
            multiplied with the root of its weight.
        active: whether the step that is under way is to be looked at.
        instead: rows functions to use for these types, in place of the registered ones.
        verifier: looks at the first call of every layer.
    """

    model: nn.Module
    sites: Mapping[str, Site]
    on_call: Callable[[StepCall], None]
    gradients: bool
    fisher: str
    labels: torch.Generator
    widest: int
    active: Callable[[], bool]
    instead: Mapping[type[nn.Module], RowsFunction]
    verifier: Verifier

    def __post_init__(self) -> None:
        self.parts: Sequence[Origin] = EVERYTHING
        self.examples: defaultdict[str, int] = defaultdict(int)  # of the step, by part
        self.own: defaultdict[str, int] = defaultdict(int)  # the same, of this process
        self.scale = 1  # of the gradients, beside that of the loss
        self._started = 0
        self._forward: _Forward | None = None
        self._layout = Layout(1)  # of what was called last
        self._at = members_by_module(self.sites.values())
        self._two = has_two_sides(self._at)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The hooks are there inside; gradients that arrive later are not heeded."""
        with ExitStack() as hooks:

            def put(module: nn.Module, then: Callable[..., None], *name: str, pre: bool) -> None:
                put_on = module.register_forward_pre_hook if pre else module.register_forward_hook
                handle = put_on(ModuleHook(module, then, *name), with_kwargs=True)
                hooks.callback(handle.remove)

            for module in dict.fromkeys([self.model, *_takers(self.model)]):
                put(module, self._begin, pre=True)
            for name in self._at:
                put(self.model.get_submodule(name), self._called, name, pre=False)
            if self.fisher != "loss":
                put(self.model, self._end, pre=False)
            try:
                yield
            finally:
                self.busy, self._forward = True, None

    def begin_step(self) -> None:
        """Forget the examples of the step before."""
        self.examples.clear()
        self.own.clear()
        self._started, self._forward = 0, None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called, or a part of it that takes a mask, by the model or by itself."""
        if not self._watching():
            return
        if module is not self.model and self._forward is not None and self._forward.whole:
            self._layout = self._layout_of(module, args, kwargs)
        else:
            self._start(module, args, kwargs)

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> _Forward:
        """A forward pass begins: all calls are its own until the next one."""
        self._layout = self._layout_of(module, args, kwargs)
        n = self._layout.n
        share, whole = share_of_call(n), module is self.model
        self._forward = _Forward(self._started, n, share, whole, backward=_backward())
        self._started += share.n
        self.scale = share.scale
        return self._forward

    def _layout_of(self, module: nn.Module, args: Any, kwargs: Any) -> Layout:
        """How a call is laid out; one example if there is no tensor to tell."""
        names = _parameters(module)[: len(args)]
        call = {str(i): value for i, value in enumerate(args[len(names) :])}
        call |= dict(zip(names, args, strict=False)) | kwargs
        if not any(isinstance(one, Tensor | PackedSequence) for one in call.values()):
            return Layout(1)
        return Layout.of(call, two=self._two, where="statistics from steps")

    def _called(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._watching():
            return
        outputs = [one for one in tensors_in(output) if one.requires_grad]
        if not outputs:
            return
        forward = self._forward
        if forward is None or forward.over():  # some call parts of a model only
            forward = self._start(module, args, kwargs)
        whole = isinstance(output, Tensor)
        args, kwargs = with_tensors((args, kwargs), Tensor.detach)
        call = _Call(self, forward, self._layout, name, module, args, kwargs, whole)
        for at in outputs:  # of a recurrent layer, a model may use the last states alone
            if self.fisher == "loss":
                at.register_hook(call.arrived)
            else:
                forward.calls.append((call, get_gradient_edge(at)))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Go back from the model's own predictions."""
        forward = self._forward
        if forward is None or not forward.calls:
            return
        calls, forward.calls = forward.calls, []
        logits = logits_in(output)
        if logits is None or logits.ndim != 2:
            raise InputError(
                f"fisher={self.fisher!r} takes the model's output as logits [n, classes], but it "
                f"is {_described(output)}; use fisher='loss'."
            )
        edges = [edge for _, edge in calls]
        for likelihood in self._likelihoods(logits):
            found = torch.autograd.grad(likelihood, edges, retain_graph=True, allow_unused=True)
            for (call, _), gradient in zip(calls, found, strict=True):
                if gradient is not None:
                    call.arrived(gradient)

    def _likelihoods(self, logits: Tensor) -> Iterator[Tensor]:
        """Sums over the examples, of which the gradients make the Fisher matrix."""
        logs = logits.float().log_softmax(dim=1) if logits.itemsize < 4 else logits.log_softmax(1)
        p = logs.detach().exp()
        if self.fisher == "sampled":
            drawn = torch.multinomial(p.cpu(), 1, generator=self.labels).to(p.device)
            yield logs.gather(1, drawn).sum()
            return
        for label in (p.amax(dim=0) > 0).nonzero()[:, 0].tolist():
            yield (p[:, label].sqrt() * logs[:, label]).sum()

    def _watching(self) -> bool:
        seen = torch.is_grad_enabled() and self.model.training
        return seen and not self.busy and self.active()

    def split(self, forward: _Forward) -> Iterator[tuple[Origin, int, int]]:
        """The parts of a forward pass that count, with their examples in it, of all processes."""
        start = forward.first
        for part in self.parts:
            stop = int(min(part.stop, forward.first + forward.share.n))
            if stop > start:
                if part.weight > 0:
                    yield part, start - forward.first, stop - forward.first
                start = stop

    def note(self, forward: _Forward) -> None:
        """Count the examples of a forward pass that is gone back through."""
        if not forward.back:
            forward.back = True
            if forward.backward < 0:
                forward.backward = _backward()
            for part, start, stop in self.split(forward):
                self.examples[part.name] += stop - start
                first, end = forward.share.span(start, stop)
                self.own[part.name] += end - first

    def rows_of(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> list[tuple[Site, Member, Rows]]:
        """The rows of a call, for every map of the module that is treated."""
        function, registered = rows_function(module, self.instead)
        here, look = self._at[name], self.verifier
        if registered and not all(look.knows(module, m, function) for _, m in here):
            call = (module, args, kwargs)
            with untouched(module):
                here = [two for two in here if look.trusts(self.model, *two, function, call)]
        again = isinstance(module, nn.MultiheadAttention)  # its rows come from another call of it
        with untouched(module) if again else nullcontext():
            rows = rows_by_map(function(module, *args, **kwargs))
        return [(site, member, rows[member.map]) for site, member in here]


@dataclass
class _Call:
    """A call that waits for the gradient at its output."""

    watch: StepWatch
    forward: _Forward
    layout: Layout
    name: str
    module: nn.Module
    args: Any
    kwargs: Any
    whole: bool
    seen: bool = False
    trusted: list[tuple[Site, Member, Tensor | None]] = field(default_factory=list)

    def arrived(self, gradient: Tensor) -> None:
        """Hand on rows, the first time, and gradient."""
        if not self.watch.busy:
            with self.watch.paused(), torch.no_grad(), full_precision():  # rows may call the layer
                self._hand_on(gradient)

    def _hand_on(self, gradient: Tensor) -> None:
        watch = self.watch
        if self.seen and not watch.gradients:
            return
        watch.note(self.forward)
        layout = find_output(self.module) if watch.gradients and self.whole else None
        D = None if layout is None else layout(self.module, gradient)
        found = [(*three, None) for three in self.trusted] if self.seen else [*self._rows()]
        self.trusted = [(site, member, real) for site, member, real, _ in found]
        spans = [
            (part, start, stop)
            for part, *span in watch.split(self.forward)
            for start, stop in [self.forward.share.span(*span)]
            if start < stop  # else other processes have these examples
        ]
        for site, member, real, rows in found:
            at = None if member.map or member.lookup else D
            together = self._weighed(site, rows, spans) if real is None else None
            if together is not None:
                deltas = [self._part(at, start, stop, None) for _, start, stop in spans]
                known = tuple(one for one in deltas if one is not None)
                gradients = known if len(known) == len(spans) else None
                parts = tuple(part for part, _, _ in spans)
                watch.on_call(StepCall(site, member, parts, together, gradients))
                continue
            for span in spans:
                self._hand_on_part(site, member, real, rows, at, span)
        self.seen = True

    def _weighed(self, site: Site, rows: Rows | None, spans: Sequence[_Span]) -> Rows | None:
        """The rows of all parts, where they can be weighed in one matrix; None to part them."""
        if len(spans) < 2 or rows is None or site.width(rows.shape[2]) > self.watch.widest:
            return None
        if site.mixed or sum(stop - start for _, start, stop in spans) < self.forward.n:
            return None
        return rows.weighed(_weights(tuple(spans)))

    def _hand_on_part(
        self,
        site: Site,
        member: Member,
        real: Tensor | None,
        rows: Rows | None,
        D: Tensor | None,
        span: _Span,
    ) -> None:
        """Rows and gradient of examples that count alike, without padding."""
        part, start, stop = span
        n = self.forward.n
        whole = (start, stop) == (0, n)
        own = rows if rows is None or whole else rows.part(start, stop, n)
        keep = real if real is None or whole else real[span_of(len(real), start, stop, n)]
        if own is not None and keep is not None:
            own = own.only(keep)
        if rows is not None and (own is None or own.shape[1] == 0):
            return  # nobody can tell; or an expert that is given nothing to do
        delta = self._part(D, start, stop, keep)
        gradients = None if delta is None else (delta,)
        self.watch.on_call(StepCall(site, member, (part,), own, gradients))

    def _rows(self) -> Iterator[tuple[Site, Member, Tensor | None, Rows | None]]:
        """The rows of every map, and which of them are no padding; None if all."""
        given = self.args, self.kwargs
        for site, member, rows in self.watch.rows_of(self.name, self.module, *given):
            seen, real = self.layout.real(self.name, *given, rows)
            yield site, member, real, seen

    def _part(self, D: Tensor | None, start: int, stop: int, keep: Tensor | None) -> Tensor | None:
        """The gradient of some of the examples, without padding."""
        span = None if D is None else span_of(D.shape[1], start, stop, self.forward.n)
        if D is None or span is None:
            return None
        return D[:, span] if keep is None else D[:, span][:, keep]


@lru_cache(maxsize=64)
def _weights(spans: tuple[_Span, ...]) -> tuple[float, ...]:
    """Of every example; the same for all layers of a forward pass."""
    return tuple(part.weight for part, start, stop in spans for _ in range(start, stop))


def _backward() -> int:
    """The number of the backward pass that is running; -1 for none."""
    return torch._C._current_graph_task_id()


def _described(output: Any) -> str:
    return str(list(output.shape)) if isinstance(output, Tensor) else type(output).__name__


def _parameters(module: nn.Module) -> list[str]:
    """The names of a module's arguments; traced modules have none."""
    forward = module.forward
    try:
        if isinstance(forward, MethodType):
            return _names(forward.__func__)[1:]
        return [*inspect.signature(forward).parameters]
    except ValueError:
        return []


@lru_cache(maxsize=1024)
def _names(function: FunctionType) -> list[str]:
    return [*inspect.signature(function).parameters]


def _takers(model: nn.Module) -> Iterator[nn.Module]:
    """The model if its forward takes a mask of padding, else the first of its parts that do."""
    if MASK in _parameters(model):
        yield model
        return
    for child in model.children():
        yield from _takers(child)
