"""What the incoming examples of a step bring to the gradient of every layer.

The gradient of a linear map is a sum over rows, ``G = sum_r delta_r z_r'`` with ``delta`` the
gradient at its output. The rows of the incoming examples are some of them, so

    G_in = sum over incoming rows of delta_r z_r' = left' M

is had from a training step's own passes: nothing is run twice but one product per layer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.hooks import RemovableHandle

from proxreplay.distributed import share_of_call
from proxreplay.proximal.gram.rows import widened
from proxreplay.proximal.layers.batches import count_samples
from proxreplay.proximal.layers.calling import logits_in
from proxreplay.proximal.layers.capture import full_precision
from proxreplay.proximal.layers.hooks import Watcher
from proxreplay.proximal.layers.sites import Site

SMALL = 2**16  # numbers that may be kept from a backward pass until the step


@dataclass(frozen=True)
class Brought:
    """``G_in = left' M`` of one call of one site.

    Args:
        M: ``[groups, k, D]``, columns as those of ``Z``.
        left: ``[groups, k, out]``; None if ``M`` is the gradient itself.
    """

    M: Tensor
    left: Tensor | None = None

    def gradient(self) -> Tensor:
        """``left' M``, ``[groups, out, D]``."""
        return self.M if self.left is None else self.left.mT @ self.M

    def divided(self, by: float) -> "Brought":
        """``G_in / by``."""
        return Brought(self.M / by, self.left)

    def copied(self) -> "Brought":
        """In memory of its own, as rows may be views of a layer's input."""
        return self if self.left is None else Brought(self.M.clone(), self.left.clone())

    def squares(self, *Ms: Tensor) -> list[Tensor]:
        """``|left' M|^2`` for every ``M`` of that shape, by ``k x k`` products."""
        if self.left is None:
            return [torch.dot(M.flatten(), M.flatten()) for M in Ms]
        K = (self.left @ self.left.mT).to(Ms[0].dtype).flatten()
        return [torch.dot(K, (M @ M.mT).flatten()) for M in Ms]


class Rowset(NamedTuple):
    """Which rows of a layer's input are those of incoming examples.

    Args:
        dim: of the examples.
        stop: they are the first ones.
    """

    dim: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows, in float32 at least."""
        whole = self.stop == tensor.shape[self.dim]
        return widened(tensor if whole else tensor.narrow(self.dim, 0, self.stop))


Splitter = Callable[[Any, Tensor, Tensor, Rowset, Site], Brought]


class Awaited(NamedTuple):
    """What a call will have brought: the arguments of a splitter."""

    split: Splitter
    layer: nn.Module
    x: Tensor
    delta: Tensor
    incoming: Rowset
    site: Site

    @property
    def rows(self) -> Tensor:
        """Of the input of the incoming examples."""
        return self.incoming.of(self.x)

    @property
    def gradients(self) -> Tensor:
        """At the outputs of these rows."""
        return self.incoming.of(self.delta)

    @property
    def small(self) -> bool:
        """Whether it costs no memory to wait until the step, where all are worked out together."""
        few = self.x.numel() <= SMALL and self.delta.numel() <= SMALL
        return few and isinstance(self.layer, nn.Linear)

    @property
    def few(self) -> bool:
        """Whether it has no more rows than outputs."""
        each = self.delta.numel() // self.delta.shape[self.incoming.dim]
        return self.incoming.stop * each <= self.delta.shape[-1] ** 2

    def divided(self, by: float) -> "Awaited":
        """``G_in / by``."""
        return self._replace(delta=widened(self.delta) / by)

    def copied(self) -> "Awaited":
        """Only the incoming rows, in memory of their own."""
        return self._replace(x=self.rows.clone(), delta=self.gradients.clone())

    @torch.no_grad()
    def now(self) -> Brought:
        """Work it out."""
        with full_precision():
            return self.split(self.layer, self.x, self.delta, self.incoming, self.site)


def summed(brought: Sequence[Brought | Awaited]) -> Sequence[Brought | Awaited]:
    """With all that was worked out as one: rows while they are fewer than outputs, or a matrix."""
    made = [one for one in brought if isinstance(one, Brought)]
    if len(made) < 2:
        return brought
    waiting = [one for one in brought if isinstance(one, Awaited)]
    lefts = [one.left for one in made if one.left is not None]
    if len(lefts) == len(made) and sum(one.shape[1] for one in lefts) <= lefts[0].shape[2]:
        return [*waiting, Brought(torch.cat([one.M for one in made], 1), torch.cat(lefts, 1))]
    with full_precision():
        return [*waiting, Brought(torch.stack([one.gradient() for one in made]).sum(0))]


def together(brought: Sequence[Brought | Awaited]) -> Brought | Awaited:
    """What several calls of a site brought, as one: all rows, or the sum of all gradients."""
    if len(brought) == 1:
        return brought[0]
    calls = [one for one in brought if isinstance(one, Awaited)]
    if len(calls) < len(brought):
        return summed([one.now() if isinstance(one, Awaited) else one for one in brought])[0]
    Zs, Ds = ([getattr(one, n).flatten(0, -2) for one in calls] for n in ("rows", "gradients"))
    if all(torch.equal(Zs[0], Z) for Z in Zs[1:]):  # of a first layer, without augmentation
        Z, D = Zs[0], torch.stack(Ds).sum(0)
    else:
        Z, D = torch.cat(Zs), torch.cat(Ds)
    return calls[0]._replace(x=Z, delta=D, incoming=Rowset(0, len(Z)))


def linear_rows_of(x: Tensor, delta: Tensor, incoming: Rowset, site: Site) -> tuple[Tensor, Tensor]:
    """``Z: [k, D]``, with the column of ones of a bias, and ``D: [k, out]`` of a Linear layer."""
    Z, D = incoming.of(x).flatten(0, -2), incoming.of(delta).flatten(0, -2)
    ones = [Z.new_ones(len(Z), len(site.biases))] if site.biases else []
    pieces = ones if site.weight is None else [Z, *ones]
    return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0], D


def linear_brought(
    layer: nn.Linear, x: Tensor, delta: Tensor, incoming: Rowset, site: Site
) -> Brought:
    """Rows as they are where they are fewer than the outputs, else their product."""
    Z, D = (one[None] for one in linear_rows_of(x, delta, incoming, site))
    return Brought(Z, D) if Z.shape[1] <= layer.out_features else Brought(D.mT @ Z)


def convolution_brought(
    layer: _ConvNd, x: Tensor, delta: Tensor, incoming: Rowset, site: Site
) -> Brought:
    """The backward pass of a convolution over some of its examples, to the weight alone."""
    x, delta, dims = incoming.of(x), incoming.of(delta), len(layer.kernel_size)
    padding = list(layer.padding) if not isinstance(layer.padding, str) else [0] * dims
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        padding = [0] * dims
    weight = layer.weight.to(x.dtype)
    _, to_weight, to_bias = torch.ops.aten.convolution_backward(
        *(delta, x, weight, [layer.out_channels]),
        *(layer.stride, padding, layer.dilation, layer.transposed),
        *(layer.output_padding, layer.groups),
        (False, site.weight is not None, bool(site.biases)),
    )
    parts = []
    if site.weight is not None:
        columns = weight.numel() // layer.out_channels
        parts.append(site.weight.part.read(to_weight, layer.groups, columns))
    if site.biases:
        parts.append(to_bias.reshape(layer.groups, -1, 1))
    return Brought(torch.cat(parts, dim=2))


def norm_brought(
    layer: nn.Module, x: Tensor, delta: Tensor, incoming: Rowset, site: Site
) -> Brought:
    """One group per channel or element: ``sum delta x_hat`` and ``sum delta``."""
    over: tuple[int, ...]
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        shape = layer.normalized_shape
        over = tuple(range(x.ndim - len(shape)))
    else:
        over = (0, *range(2, x.ndim))
    D = incoming.of(delta)
    parts = []
    if site.weight is not None:
        by_all = isinstance(layer, _BatchNorm)  # others normalise every example by itself
        z = incoming.of(_normalised(layer, widened(x))) if by_all else incoming.of(x)
        parts.append((D * (z if by_all else _normalised(layer, z))).sum(over))
    if site.biases:
        parts.append(D.sum(over))
    return Brought(torch.stack([part.reshape(-1, 1) for part in parts], dim=2))


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    """``x_hat``, by all examples where the layer does so."""
    if isinstance(layer, _BatchNorm):
        own = not layer.training and layer.running_mean is not None
        running = (layer.running_mean, layer.running_var) if own else (None, None)
        return F.batch_norm(x, *running, training=not own, momentum=0.0, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    assert isinstance(layer, nn.RMSNorm)
    return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)


def splitter_of(module: nn.Module) -> Splitter | None:
    """How the gradient of a layer is told apart by examples; None where nobody knows."""
    if isinstance(module, nn.Linear):
        return linear_brought
    if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
        return convolution_brought
    norms = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return norm_brought if isinstance(module, norms) else None


@dataclass(frozen=True)
class WatchPlan:
    """What there is to watch in a model, found once and used in many steps.

    Args:
        layers: sites with their layer and how its gradient is told apart.
        norms: the BatchNorm layers of the model.
    """

    layers: tuple[tuple[Site, nn.Module, Splitter], ...]
    norms: tuple[_BatchNorm, ...]

    @classmethod
    def of(cls, model: nn.Module, sites: Iterable[Site]) -> "WatchPlan":
        """For these sites of a model, as `unwrap` gives it."""
        found = []
        for site in sites:
            member, module = site.members[0], site.module(model)
            alone = len(site.members) == 1 and not member.map and not member.lookup
            split = splitter_of(module) if alone else None
            if split is not None:  # one layer, one map, dense
                found.append((site, module, split))
        return cls(tuple(found), tuple(m for m in model.modules() if isinstance(m, _BatchNorm)))


@dataclass
class IncomingWatch(Watcher):
    """Watches the passes of one step, of which the first ``examples`` are incoming.

    Args:
        model: as `unwrap` gives it.
        plan: what to watch.
        examples: how many of those that pass first are incoming; the others are replayed. Where
            processes share a call, those of all of them are counted.
        brought: what incoming rows brought, by site.
        lost: sites whose rows could not be told apart.
        coupled: whether BatchNorm saw incoming and replayed examples together. Then every row of
            the gradient depends on all examples, and no part of it is that of the incoming ones.
        outputs: of the model, in the order of the examples.
    """

    model: nn.Module
    plan: WatchPlan
    examples: int
    brought: defaultdict[str, list[Brought | Awaited]] = field(
        default_factory=lambda: defaultdict(list)
    )
    lost: set[str] = field(default_factory=set)
    coupled: bool = False
    outputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.passed = 0
        self._now: tuple[int, int, int] | None = None  # of this forward: own incoming, own, all

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on the model, for the passes inside; on its layers once they are of use."""
        begin = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        try:
            yield
        finally:
            self.busy = True  # gradients that arrive later are not heeded
            for handle in (begin, *self._handles):
                handle.remove()

    def _look_at_layers(self) -> None:
        self._handles.append(self.model.register_forward_hook(self._end))
        for site, module, split in self.plan.layers:
            self._handles.append(module.register_forward_hook(self._hook(site, split)))

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            self._now = None
            return
        n = count_samples((*args, *kwargs.values()))
        share = share_of_call(n)
        incoming = max(0, min(share.n, self.examples - self.passed))
        self._now = (share.span(0, incoming)[1], n, share.n)
        self.passed += share.n
        if 0 < incoming < share.n and any(norm.training for norm in self.plan.norms):
            self.coupled = True
        if not self._handles and not self.coupled:
            self._look_at_layers()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        now, self._now = self._now, None
        logits = logits_in(output)
        if now is not None and logits is not None and len(logits) == now[2]:
            self.outputs.append(logits.detach())

    @torch.no_grad()
    def losses(self, labels: Tensor) -> tuple[float, float] | None:
        """Mean cross-entropies of the incoming and of the replayed examples of the step.

        Args:
            labels: ``[n]`` of all examples, in the order in which they pass.

        Returns:
            None where outputs are not the logits of classes.
        """
        if not self.outputs or any(one.ndim != 2 for one in self.outputs):
            return None
        logits = widened(self.outputs[0] if len(self.outputs) == 1 else torch.cat(self.outputs))
        classes = labels.dtype == torch.int64 and labels.shape == logits.shape[:1]
        if not classes or not 0 < self.examples < len(labels) or logits.shape[1] < 2:
            return None
        each = F.cross_entropy(logits, labels.to(logits.device), reduction="none").tolist()
        first, others = each[: self.examples], each[self.examples :]
        return sum(first) / len(first), sum(others) / len(others)

    def _hook(self, site: Site, split: Splitter) -> Callable[..., None]:
        def called(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            now = self._now
            if now is None or self.busy or self.coupled or not isinstance(output, Tensor):
                return
            if not output.requires_grad or now[0] == 0:
                return
            x = args[0].detach() if args and isinstance(args[0], Tensor) else None
            own = now[:2]
            output.register_hook(lambda delta: self._arrived(site, split, module, x, delta, own))

        return called

    def _arrived(
        self,
        site: Site,
        split: Splitter,
        module: nn.Module,
        x: Tensor | None,
        delta: Tensor,
        now: tuple[int, int],
    ) -> None:
        if self.busy:
            return
        rows = None if x is None else _rowset(module, x, *now)
        if x is None or rows is None:
            self.lost.add(site.name)
            return
        found = Awaited(split, module, x, delta.detach(), rows, site)
        self.brought[site.name].append(found if found.small else found.now())


def _rowset(module: nn.Module, x: Tensor, incoming: int, n: int) -> Rowset | None:
    """Where the examples of a forward pass are in a layer's input; None if nobody can tell.

    First, also several rows each, one example after the other; or second, as in sequences.
    """
    if x.shape[0] % n == 0 and x.ndim >= 2:
        return Rowset(0, x.shape[0] // n * incoming)
    by_row = isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm)
    return Rowset(1, incoming) if by_row and x.ndim > 2 and x.shape[1] == n else None
