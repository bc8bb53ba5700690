"""What OWM, AOP, GPM and SGP leave alone: normalisation layers, if asked to, and tied weights.

OWM, AOP, GPM and SGP were made for networks without normalisation layers or with frozen ones; the
parameters in question are those that are vectors, one number per channel.
"""

from typing import Literal

from torch import nn

from proxreplay.proximal.layers.sites import Site

Norms = Literal["plain", "treat", "freeze"]

PLAIN = "only scales and shifts; follows the plain gradient. norms='treat' treats it."


def is_norm(model: nn.Module, site: Site) -> bool:
    """Whether all trained parameters of a site are vectors."""
    return all(column.parameter(model).ndim == 1 for column in site.columns)


def plain_norm(model: nn.Module, site: Site) -> str | None:
    """Why such a site is left alone by rules that do not treat it."""
    return PLAIN if is_norm(model, site) else None


def tied_weight(model: nn.Module, site: Site) -> str | None:
    """Why a weight is left alone that is read by rows and multiplied with: no one matrix fits."""
    return "an Embedding shares its weight; only LPR treats both." if site.mixed else None
