"""A-GEM: no step may go against the gradient of the remembered examples.

With ``g`` the gradient of the loss and ``r`` that of the cross-entropy on a sample of the memory,
all parameters as one vector,

    g <- g - min(g.r, 0) / (r.r + eps) r,

after which ``g.r >= 0``: to first order, the loss on the memory does not grow.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from proxreplay.batch import Batch
from proxreplay.distributed import mean_, shared_calls
from proxreplay.errors import InputError, RefreshError
from proxreplay.options import at_least, count, one_of
from proxreplay.proximal.layers.calling import logits_of, logits_without_trace
from proxreplay.proximal.layers.sites import check_materialised, unwrap
from proxreplay.proximal.rules.base import GradientRule

BatchNorms = Literal["batch", "update", "running"]


class AGEM(GradientRule):
    """Projects the gradient so that it does not go against that of remembered examples.

    `observe` takes the reference gradient, which stays in force until the next call. Parameters
    that have no gradient, or are not the optimizer's, do not move and are left out of both vectors.

    Args:
        model: any module from inputs to logits, also compiled or wrapped for data parallelism.
        samples: remembered examples that `observe` asks for; None for those the loss replays.
        batchnorm: how BatchNorm layers treat the reference: "batch" normalises it by its own
            statistics and leaves the running ones as they are, "update" changes them too, as the
            LPR authors' code does, "running" normalises by them, as in evaluation.
        eps: added to ``r.r``.
        loss: from logits ``[n, classes]`` and labels ``[n]`` to a number.

    >>> model = nn.Linear(4, 3)
    >>> agem = AGEM(model, samples=50)
    >>> F.cross_entropy(model(torch.randn(10, 4)), torch.zeros(10, dtype=torch.int64)).backward()
    >>> agem.observe(None, Batch(torch.randn(50, 4), torch.ones(50, dtype=torch.int64)))
    >>> agem.precondition_()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int | None = 200,
        batchnorm: BatchNorms = "batch",
        eps: float = 0.0,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        count(1, **{"AGEM: samples": samples})
        one_of(get_args(BatchNorms), **{"AGEM: batchnorm": batchnorm})
        at_least(0, **{"AGEM: eps": eps})
        check_materialised(model, "AGEM")
        self.model = model
        self.reference_samples = samples
        self.batchnorm: BatchNorms = batchnorm
        self.eps = eps
        self.loss = loss
        self._reference: dict[str, Tensor] = {}

    @classmethod
    def joint(cls, model: nn.Module, *, eps: float = 1e-7) -> Self:
        """The variant for use with a replay loss (Hess, Tuytelaars and van de Ven, 2023).

        The joint gradient of incoming and replayed examples is projected; the reference gradient
        comes from the same replayed examples, BatchNorm layers in evaluation mode.
        """
        return cls(model, samples=None, batchnorm="running", eps=eps)

    def refresh(self, examples: Any, of: int | None = None) -> None:
        """Nothing: the reference gradient belongs to one step and comes with `observe`."""

    def observe(self, incoming: Batch | None = None, reference: Batch | None = None) -> None:
        """Take the reference gradient at the present weights; gradients already there stay.

        Args:
            incoming: not looked at.
            reference: remembered examples as the model sees them; None lets the next steps be free.
        """
        counts = self._counts(reference)
        if reference is None or not sum(counts):
            self._reference = {}
            return
        trained = {n: p for n, p in unwrap(self.model).named_parameters() if p.requires_grad}
        processes, labels, weight = self.processes, reference.labels, reference.weight
        if not processes.replicated:
            (labels,) = processes.gather([labels], counts)
            weight = weight if weight is None else processes.gather([weight], counts)[0]
        shared = shared_calls([unwrap(self.model)], processes)
        call = logits_of if self.batchnorm == "update" else logits_without_trace
        with torch.enable_grad(), self._reference_mode(), shared:
            logits = call(unwrap(self.model), reference.inputs, self._call)
            loss = self._loss_of(logits, labels, weight)
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        means = mean_(dict(zip(trained, gradients, strict=True)), trained, processes)
        found = {n: r for n, r in means.items() if r is not None}
        for name, r in found.items():
            _check_dense(name, r)
        self._reference = found

    @torch.no_grad()
    def precondition_(self, only: Collection[int] | None = None) -> None:
        """``g <- g - min(g.r, 0) / (r.r + eps) r``; nothing without a reference."""
        pairs = self._pairs(only)
        if not pairs:
            return
        device = pairs[0][0].device
        along = torch.stack([_dot(g, r).to(device) for g, r in pairs]).sum()
        square = torch.stack([_dot(r, r).to(device) for _, r in pairs]).sum() + self.eps
        share = torch.where(along < 0, along / square, 0)  # no value is read by the host
        for g, r in pairs:
            g.sub_((share.to(r.device) * r).to(g.dtype))

    def _pairs(self, only: Collection[int] | None) -> list[tuple[Tensor, Tensor]]:
        """Gradient and reference gradient of every parameter that moves and has both."""
        parameters = dict(unwrap(self.model).named_parameters())
        pairs = []
        for name, r in self._reference.items():
            parameter = parameters[name]
            g = parameter.grad
            if g is None or (only is not None and id(parameter) not in only):
                continue
            _check_dense(name, g)
            if g.shape != r.shape:
                raise RefreshError(
                    f"AGEM: the reference gradient of '{name}' is {list(r.shape)}, but the "
                    f"parameter is {list(g.shape)} now; observe again after a layer has changed."
                )
            pairs.append((g, r.to(g.device)))
        return pairs

    def _counts(self, reference: Batch | None) -> list[int]:
        """The reference examples of every process: all have some, or none has."""
        n, processes = 0 if reference is None else len(reference), self.processes
        counts = [n] * processes.size if processes.replicated else processes.tell(n)
        if any(counts) and not all(counts):
            raise InputError(
                f"AGEM: process {counts.index(0)} of {processes.size} has no reference examples, "
                "but others have; hand each at least one."
            )
        return counts

    def _loss_of(self, logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return self.loss(logits, labels)
        if self.loss is not F.cross_entropy:
            raise InputError(
                "AGEM: the remembered examples have weights, which the loss of your own knows "
                "nothing of; leave loss=F.cross_entropy, or learn without sample_weight."
            )
        apart = F.cross_entropy(logits, labels, reduction="none")
        return (weight * apart).sum() / weight.sum()

    @contextmanager
    def _reference_mode(self) -> Iterator[None]:
        """Modes for the reference; they and the RNG are as before on leaving."""
        model = unwrap(self.model)
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=devices), ExitStack() as stack:
            for module in model.modules():
                if self.batchnorm == "running" and isinstance(module, _BatchNorm):
                    stack.callback(setattr, module, "training", module.training)
                    module.training = False
            yield

    def state_dict(self) -> dict[str, Any]:
        """The reference gradient in force."""
        return {"rule": type(self).__name__, "reference": dict(self._reference)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` on a model of the same shape gave."""
        rule = type(self).__name__
        if state["rule"] != rule:
            raise InputError(f"{rule}.load_state_dict: this is the state of {state['rule']}.")
        parameters = dict(unwrap(self.model).named_parameters())
        for name, r in state["reference"].items():
            if name not in parameters or parameters[name].shape != r.shape:
                raise InputError(
                    f"{rule}.load_state_dict: a reference gradient {list(r.shape)} for '{name}', "
                    "which the model does not have in that shape; build it as it was saved."
                )
        self._reference = {
            name: r.to(parameters[name].device, copy=True) for name, r in state["reference"].items()
        }


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """``a.b``, added up in float32 at least."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.dot(a.to(dtype).reshape(-1), b.to(dtype).reshape(-1))


def _check_dense(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise InputError(f"AGEM: '{name}' has a sparse gradient; use an Embedding with dense ones.")
