"""Calls of a model that all processes make together, each with a share of the rows.

Inside `shared_calls`, ``model(inputs)`` gives the outputs of all rows in every process, but each
process runs its own share only. A loss is then computed from all outputs, the same in every process
and whatever it is. With ``D = dL/d outputs`` each process sends ``N D`` of its own rows backwards,
and the mean of all gradients (`mean_`) is that of the whole batch:

    1/N sum_r N D_r J_r = D J.

What a loss makes of the parameters without a call, such as a penalty, has the same gradient in all
processes, and so in the mean.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.batch import tensors_in, with_tensors
from proxreplay.distributed.processes import Processes, start_of
from proxreplay.errors import InputError

STAND_INS = 2  # rows that a process without a share runs, so that BatchNorm is not given one


@dataclass(frozen=True)
class CallShare:
    """The rows of a call that this process runs: row ``i`` is row ``first + i step`` of all."""

    n: int  # rows of all processes
    own: int  # rows of this process
    first: int = 0  # number of its first row
    step: int = 1  # to the next one
    scale: int = 1  # what the gradients of its rows are multiplied with

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the own rows, from and to, are among the rows ``start`` to ``stop`` of all."""
        return self._before(start), self._before(stop)

    def _before(self, row: int) -> int:
        return min(self.own, max(0, -((self.first - row) // self.step)))


_call: ContextVar[CallShare | None] = ContextVar("call", default=None)


def share_of_call(n: int) -> CallShare:
    """The share of the shared call that is under way; all ``n`` rows if there is none."""
    return _call.get() or CallShare(n, n)


@contextmanager
def shared_calls(models: Iterable[nn.Module], processes: Processes) -> Iterator[None]:
    """Let every call of these models inside be made by all processes together.

    Args:
        models: from inputs ``[n, ...]`` to outputs ``[n, ...]``.
        processes: if `replicated`, each call is made with the same rows in all processes, of which
            each takes a share; otherwise each has rows of its own.
    """
    if processes.alone:
        yield
        return
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_sharing(model, processes))
        yield


@contextmanager
def _sharing(model: nn.Module, processes: Processes) -> Iterator[None]:
    calls: list[list[int]] = []  # rows of each process in the calls under way

    def take_share(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        n = rows_of((args, kwargs))
        counts = processes.shares(n) if processes.replicated else processes.tell(n)
        calls.append(counts)
        rank, mine = processes.rank, counts[processes.rank]
        if not processes.replicated:
            _call.set(CallShare(sum(counts), mine, start_of(counts, rank), 1, processes.size))
            return args, kwargs
        _call.set(CallShare(n, mine, rank, processes.size, processes.size))
        own = processes.share(n)
        if own.start >= n:
            _check_empty(module, n, processes)
            own = slice(0, min(n, STAND_INS))
        return taken(args, n, own), taken(kwargs, n, own)

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        _call.set(None)
        return _joined(output, processes, calls.pop())

    before = model.register_forward_pre_hook(take_share, with_kwargs=True, prepend=True)
    after = model.register_forward_hook(join)
    with before, after:
        try:
            yield
        finally:
            _call.set(None)


def _joined(output: Any, processes: Processes, counts: list[int]) -> Any:
    """An output with the rows of all processes: a tensor, or a tuple, dict or object with some."""
    n = counts[processes.rank] or STAND_INS
    if isinstance(output, Tensor):
        if output.ndim == 0 or len(output) not in (n, 1):
            return output
        own = output[: counts[processes.rank]]
        joined: Tensor = _Joined.apply(own, processes, counts)  # type: ignore[no-untyped-call]
        return joined
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return type(output)(_joined(one, processes, counts) for one in output)
    if isinstance(output, MutableMapping):
        filled = copy.copy(output)
        for name in list(filled):
            filled[name] = _joined(filled[name], processes, counts)
        return filled
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model gives a {type(output).__name__}; with several processes it has to give a "
            "tensor with a row for every example, or something with logits."
        )
    whole = copy.copy(output)
    whole.logits = _joined(logits, processes, counts)
    return whole


class _Joined(torch.autograd.Function):
    """The rows of all processes; backwards, ``N`` times what belongs to the own ones."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, processes: Processes, counts: list[int]) -> Tensor:
        start = start_of(counts, processes.rank)
        ctx.own, ctx.size = slice(start, start + len(own)), processes.size
        (rows,) = processes.gather([own], counts)
        if processes.replicated:
            ctx.own = processes.share(len(rows))
            rows = processes.in_order(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own] * ctx.size, None, None


@torch.no_grad()
def mean_(
    gradients: Mapping[str, Tensor | None],
    like: Mapping[str, Tensor],
    processes: Processes,
    beside: Sequence[Tensor] = (),
) -> dict[str, Tensor | None]:
    """The mean of gradients over all processes, in their memory.

    None counts as zeros where another process has a gradient, and stays None where none has;
    ``like`` are the parameters. Tensors ``beside`` them are summed in the same message.
    """
    if processes.alone:
        return dict(gradients)
    for name, g in gradients.items():
        if g is not None and g.is_sparse:
            raise InputError(
                f"'{name}' has a sparse gradient, which several processes cannot add up here; use "
                "an Embedding with dense ones."
            )
    first = next(iter(like.values()))
    there = [float(g is not None) for g in gradients.values()]
    flags = torch.tensor(there, dtype=first.dtype, device=first.device)
    dense = {n: torch.zeros_like(like[n]) if g is None else g for n, g in gradients.items()}
    processes.sum_([*dense.values(), flags, *beside])
    torch._foreach_div_(list(dense.values()), float(processes.size))
    return {
        n: g if n_has else None for (n, g), n_has in zip(dense.items(), flags.tolist(), strict=True)
    }


def rows_of(arguments: Any) -> int:
    """The number of rows in the first tensor among the arguments of a call."""
    for value in tensors_in(arguments):
        if value.ndim > 0:
            return len(value)
    raise InputError("a call with no tensor among its arguments cannot be shared by processes.")


def taken(value: Any, n: int, rows: slice) -> Any:
    """Some rows of every tensor that has ``n`` of them; everything else as it is."""
    return with_tensors(value, lambda x: x[rows] if x.ndim > 0 and len(x) == n else x)


def _check_empty(model: nn.Module, n: int, processes: Processes) -> None:
    """Refuse a call without rows for a process whose statistics would be taken for others'."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise InputError(
            f"{n} examples for {processes.size} processes and SyncBatchNorm; give at least one "
            "example to every process."
        )
