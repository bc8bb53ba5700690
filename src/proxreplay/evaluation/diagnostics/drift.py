"""Representation drift: how far what the network makes of old examples has moved."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from proxreplay.batch import Inputs, length, part
from proxreplay.errors import InputError
from proxreplay.options import one_of
from proxreplay.proximal.layers.calling import with_arguments
from proxreplay.proximal.layers.capture import untouched


class RepresentationDrift:
    """How far the representations of held-out examples have moved, summed over SGD steps.

    The paper's formula, with ``Z_i(j)`` the representation of example i after step j and the mean
    over examples:

        drift = 1/n sum_i sum_j ||Z_i(j+1) - Z_i(j)||_2,

    per layer, and for all layers together with their outputs side by side as one ``Z_i``.
    ``mode="authors"`` is what the authors' code computes instead: the first 100 examples,
    ``||Z(j+1) - Z(j)||_F / n`` over all of them, accumulated as the root of the sum of squares
    over steps, and the first step compared with zero. Of a Linear layer the raw outputs count,
    before any masking; if it has grown, only the outputs that it had before.

    Args:
        model: whose modules are watched.
        inputs: ``[n, ...]``, as the model sees them: held-out examples of the first task.
        layers: names of modules; None for the direct children that have parameters.
        mode: ``paper`` or ``authors``.
        batch_size: examples per forward pass.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> drift = RepresentationDrift(model, torch.randn(5, 2)).attach(optimizer)
    >>> model(torch.randn(4, 2)).sum().backward()
    >>> optimizer.step()
    >>> sorted(drift.layers())
    ['0', '2']
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        layers: Sequence[str] | None = None,
        *,
        mode: str = "paper",
        batch_size: int = 500,
    ) -> None:
        if length(inputs) == 0:
            raise InputError("RepresentationDrift: no inputs; give at least one example.")
        one_of(("paper", "authors"), mode=mode)
        if layers is None:
            layers = [
                name for name, m in model.named_children() if any(True for _ in m.parameters())
            ]
        missing = set(layers) - {name for name, _ in model.named_modules()}
        if missing or not layers:
            raise InputError(
                f"RepresentationDrift: layers {sorted(missing)} are not modules of the model; "
                "choose among model.named_modules()."
            )
        self.model = model
        self.inputs = part(inputs, slice(100)) if mode == "authors" else inputs
        self.names = tuple(layers)
        self.mode = mode
        self.batch_size = batch_size
        # by layer, and of all together for None
        self._sums = {name: torch.zeros((), dtype=torch.float64) for name in (*self.names, None)}
        self._before = self._represent() if mode == "paper" else None

    def attach(self, optimizer: Optimizer) -> "RepresentationDrift":
        """Observe after every ``optimizer.step()`` from now on."""
        self._handle: RemovableHandle = optimizer.register_step_post_hook(lambda *_: self.observe())
        return self

    def detach(self) -> None:
        """Undo `attach`."""
        self._handle.remove()

    def observe(self) -> None:
        """Add what the last step changed."""
        now = self._represent()
        moved = self._changes(now)
        moved[None] = torch.stack(list(moved.values())).square().sum(dim=0).sqrt()
        for name, distances in moved.items():
            if self.mode == "paper":
                self._sums[name] += distances.mean().cpu()
            else:
                frobenius = torch.linalg.vector_norm(distances) / len(distances)  # ||Z||_F / n
                self._sums[name] = torch.hypot(self._sums[name], frobenius.cpu())
        self._before = now

    def total(self) -> float:
        """The drift of all layers together so far."""
        return float(self._sums[None])

    def layers(self) -> dict[str, float]:
        """The drift of each layer so far."""
        return {name: float(self._sums[name]) for name in self.names}

    def record(self) -> dict[str, Any]:
        """What goes into the records: ``kind``, ``total`` and ``layers``."""
        return {"kind": "drift", "total": self.total(), "layers": self.layers()}

    def state_dict(self) -> dict[str, Tensor]:
        """The sums so far and the representations the next step is compared with."""
        before = {f"before.{name}": Z for name, Z in (self._before or {}).items()}
        return {_saved_as(name): value for name, value in self._sums.items()} | before

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of the same layers."""
        wanted = {*map(_saved_as, self.names)}
        if not wanted <= state.keys():
            raise InputError(
                f"RepresentationDrift: the state lacks {sorted(wanted - state.keys())}; it belongs "
                "to other layers."
            )
        self._sums = {name: state[_saved_as(name)].clone() for name in self._sums}
        if f"before.{self.names[0]}" in state:
            self._before = {name: state[f"before.{name}"].clone() for name in self.names}

    def _changes(self, now: Mapping[str, Tensor]) -> dict[str | None, Tensor]:
        """``||Z_i(j+1) - Z_i(j)||_2`` of every layer, ``[n]`` each."""
        changes: dict[str | None, Tensor] = {}
        for name, Z in now.items():
            if self._before is not None:
                old = self._before[name]
                Z = Z[:, : old.shape[1]] - old
            changes[name] = torch.linalg.vector_norm(Z.double(), dim=1)
        return changes

    def _represent(self) -> dict[str, Tensor]:
        """The outputs of the watched modules in evaluation mode, ``[n, features]`` each."""
        parts: dict[str, list[Tensor]] = {name: [] for name in self.names}

        def keep(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if isinstance(module, nn.Linear):
                output = F.linear(args[0], module.weight, module.bias)
            parts[name].append(output.flatten(start_dim=1).clone())

        with ExitStack() as hooks, untouched(self.model):
            for name in self.names:
                module = self.model.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
            for start in range(0, length(self.inputs), self.batch_size):
                some = slice(start, start + self.batch_size)
                with_arguments(self.model, part(self.inputs, some))
        return {name: torch.cat(chunks) for name, chunks in parts.items()}


def _saved_as(layer: str | None) -> str:
    return "total" if layer is None else f"layer.{layer}"
