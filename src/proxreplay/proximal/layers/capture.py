"""Rows of every layer during a forward pass; hooks, modes, buffers and RNG are always put back."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal.gram.rows import Rows
from proxreplay.proximal.layers.bare import Tracer
from proxreplay.proximal.layers.batches import Padded
from proxreplay.proximal.layers.batches import call as call_usual
from proxreplay.proximal.layers.calling import Caller
from proxreplay.proximal.layers.hooks import Watcher
from proxreplay.proximal.layers.layout import Layout, has_two_sides
from proxreplay.proximal.layers.registry import RowsFunction, find_layer, rows_by_map
from proxreplay.proximal.layers.sites import Member, Site, members_by_module
from proxreplay.proximal.layers.verify import Verifier

NOTHING = "refresh: no examples; give at least one batch with one example."
OnCall = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class Call:
    """One call of one linear map during a forward pass."""

    site: Site  # whose statistic the rows belong to
    member: Member  # which of the site's maps was called
    # Z: [groups, rows, d] of this call, examples first, then positions; without those of padding
    rows: Rows
    batch: int  # number of the batch, from 0


def visit(
    model: nn.Module,
    sites: Mapping[str, Site],
    batches: Iterable[Any],
    on_call: Callable[[Call], None],
    *,
    batch_dim: int = 0,
    instead: Mapping[type[nn.Module], RowsFunction] | None = None,
    verifier: Verifier | None = None,
    call: Caller | None = None,
) -> int:
    """Run the model over batches without a trace and hand on the rows of every site.

    Args:
        model: as `unwrap` gives it.
        sites: what to watch, from `find_sites`.
        batches: anything the model can be called with, see `call`.
        on_call: receives every call of every site, in the order they happen.
        batch_dim: the dimension of the examples in a batch.
        instead: rows functions to use for these types, in place of the registered ones.
        verifier: looks at the first call of every layer; calls it does not trust are not handed on.
        call: how the model is called with a batch; None for the usual way.

    Returns:
        ``n``, the number of examples.
    """
    at = members_by_module(sites.values())
    number = most = 0
    layout, two = Layout(0), has_two_sides(at)
    bare = [site for site in sites.values() if site.bare]
    tracer = Tracer(model, bare, lambda s, rows: on_call(Call(s, s.members[0], rows, number)))

    def hand_on(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal most
        function, registered = rows_function(module, instead or {})
        here = at[name]
        if verifier is not None and registered:
            call_of = (module, args, kwargs)
            with tracer.paused():
                here = [two for two in here if verifier.trusts(model, *two, function, call_of)]
        with full_precision(), tracer.paused():
            rows = rows_by_map(function(module, *args, **kwargs))
            most = max(most, *(one.shape[1] for one in rows.values()))
            seen = {id(one): layout.seen(name, args, kwargs, one) for one in rows.values()}
            for site, member in here:
                if member.map not in rows:
                    raise RefreshError(
                        f"{site}: its rows function returned {sorted(rows)} without '{member.map}'."
                    )
                real = seen[id(rows[member.map])]
                if real.shape[1] > 0:  # an expert may be given nothing to do
                    on_call(Call(site, member, real, number))

    if verifier is not None:
        verifier.wrong = {}
    samples = 0
    modules = {name: model.get_submodule(name) for name in at}
    with untouched(model), watching(modules, hand_on):
        for batch in batches:
            layout = Layout.of(batch, batch_dim, two=two)
            samples += layout.n
            most = 0
            seen_by_model = batch.call if isinstance(batch, Padded) else batch
            with tracer.on(layout) if bare else nullcontext():
                (call or call_usual)(model, seen_by_model)
            number += 1
            if isinstance(batch, Tensor) and batch.ndim == 1 and most == 1 < len(batch):
                raise InputError(
                    f"refresh: a batch of shape {list(batch.shape)} is one example without a "
                    "dimension of examples; give [n, ...], such as torch.stack(examples)."
                )
    if verifier is not None:
        verifier.wrong |= tracer.wrong
    if samples == 0:
        raise InputError(NOTHING)
    return samples


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluate the model inside; its modes, buffers and the RNG are as before on leaving.

    Compiled parts run as they were written and attention takes its plain path, so that every
    submodule is really called.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, dict(module._buffers), {k: _copied(b) for k, b in module._buffers.items()})
        for module in model.modules()
    ]
    renormed = [
        (module.weight, _copied(module.weight))
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]  # looking up a token changes the weight of these, also in evaluation
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.callback(_restore_, modes, buffers, renormed)
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_plain_attention())
        stack.enter_context(as_written())
        model.eval()
        yield


@contextmanager
def as_written() -> Iterator[None]:
    """Without what ``torch.compile`` made of a model.

    That may know of no hooks, and takes minutes for every other size of a batch.
    """
    if "torch._dynamo" not in sys.modules:  # else nothing can be compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def watching(modules: Mapping[str, nn.Module], on_call: OnCall) -> Iterator[None]:
    """Call ``on_call(name, module, args, kwargs)`` before every forward of every module.

    Calls that ``on_call`` itself makes are not watched.
    """
    watcher = Watcher()

    def watch(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not watcher.busy:
            with watcher.paused():
                on_call(name, module, args, kwargs)

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: watch(name, module, args, kwargs),
                with_kwargs=True,
            )
            stack.callback(handle.remove)
        yield


def rows_function(
    module: nn.Module, instead: Mapping[type[nn.Module], RowsFunction]
) -> tuple[RowsFunction, bool]:
    """The rows function of a module, and whether it is the registered one."""
    for ancestor in type(module).__mro__:
        if ancestor in instead:
            return instead[ancestor], False
    layer = find_layer(module)
    if layer is None:
        raise RefreshError(f"{type(module).__name__} is not known; teach it with register_layer().")
    return layer.rows, True


def _copied(tensor: Tensor | None) -> tuple[int, Tensor] | None:
    """A tensor's version and a copy of its values."""
    return None if tensor is None else (tensor._version, tensor.detach().clone())


def _restore_(
    modes: list[tuple[nn.Module, bool]],
    buffers: list[tuple[nn.Module, dict[str, Tensor | None], dict[str, Any]]],
    renormed: list[tuple[Tensor, Any]],
) -> None:
    """Put modes and values back; what was not written to is not, as a backward may wait for it."""
    for module, training in modes:
        module.training = training
    changed: list[tuple[Tensor | None, Any]] = [*renormed]
    for module, tensors, copies in buffers:
        module._buffers.clear()
        module._buffers.update(tensors)
        changed += [(tensor, copies[name]) for name, tensor in tensors.items()]
    with torch.no_grad():
        for tensor, copy in changed:
            if tensor is not None and copy is not None and tensor._version != copy[0]:
                tensor.copy_(copy[1])


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without the fused evaluation path of transformers, which calls no submodule."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def full_precision() -> Iterator[None]:
    """Without autocast on any device, so that statistics are not rounded to half precision."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
