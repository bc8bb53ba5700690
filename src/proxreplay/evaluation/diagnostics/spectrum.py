"""The spectrum of each layer's shrinkage: which directions a rule leaves free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.errors import InputError
from proxreplay.evaluation.diagnostics.borrow import borrowed_gradients
from proxreplay.proximal.rules.base import GradientRule


def shrinkage_matrix(model: nn.Module, name: str, rule: GradientRule) -> Tensor:
    """``Lambda`` of one layer as the rule applies it, ``[groups, d, d]`` in float64.

    The rows of the identity are handed to the rule as if they were gradients, ``out`` at a time,
    so any rule that multiplies every row of ``[G_weight | G_bias]`` by a matrix can be looked at.

    Args:
        model: the rule's.
        name: of a Linear, convolution or BatchNorm in it whose weight is trained.
        rule: refreshed.
    """
    layer = model.get_submodule(name)
    trained = {n: p for n, p in layer.named_parameters(recurse=False) if p.requires_grad}
    if "weight" not in trained:
        raise InputError(
            f"shrinkage_matrix: {type(layer).__name__} '{name}' has no weight that is trained."
        )
    weight = trained["weight"]
    groups = len(weight) if weight.ndim == 1 else int(getattr(layer, "groups", 1))
    out = len(weight) // groups
    widths = [p.numel() // (groups * out) for p in trained.values()]
    d = sum(widths)
    eye = torch.eye(d, dtype=weight.dtype, device=weight.device)
    rows = []
    for start in range(0, d, out):
        G = F.pad(eye[start : start + out], (0, 0, 0, max(0, start + out - d)))
        columns = G.expand(groups, out, d).split(widths, dim=2)
        gradients = {
            f"{name}.{n}" if name else n: g.reshape(p.shape)
            for (n, p), g in zip(trained.items(), columns, strict=True)
        }
        with borrowed_gradients(model, gradients):
            rule.precondition_()
            after = [p.grad for p in trained.values() if p.grad is not None]
            parts = [g.reshape(groups, out, w) for g, w in zip(after, widths, strict=True)]
            rows.append(torch.cat(parts, dim=2)[:, : d - start].double())
    return torch.cat(rows, dim=1)


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of one layer's shrinkage: 1 leaves a direction free, 0 closes it."""

    eigenvalues: Tensor  # [groups * d], ascending

    def shrunk_by(self, share: float) -> int:
        """How many directions lose more than this share of their gradient."""
        return int((self.eigenvalues < 1 - share).sum())

    def record(self, points: int = 50) -> dict[str, Any]:
        """Counts, and the eigenvalues at evenly spaced quantiles."""
        at = torch.linspace(0, 1, points, dtype=torch.float64)
        return {
            "directions": len(self.eigenvalues),
            "shrunk_by_1_percent": self.shrunk_by(0.01),
            "shrunk_by_10_percent": self.shrunk_by(0.1),
            "shrunk_by_half": self.shrunk_by(0.5),
            "quantiles": torch.quantile(self.eigenvalues, at).tolist(),
        }


def shrinkage_spectrum(
    model: nn.Module, rule: GradientRule, layers: Sequence[str]
) -> dict[str, Spectrum]:
    """The spectrum of the shrinkage of each named layer, by a rule that is refreshed."""
    spectra = {}
    for name in layers:
        Lambda = shrinkage_matrix(model, name, rule)
        eigenvalues = torch.linalg.eigvalsh((Lambda + Lambda.mT) / 2)
        spectra[name] = Spectrum(eigenvalues.flatten().sort().values)
    return spectra


def spectrum_record(spectra: Mapping[str, Spectrum]) -> dict[str, Any]:
    """What goes into the records."""
    return {"kind": "spectrum", "layers": {n: s.record() for n, s in spectra.items()}}
