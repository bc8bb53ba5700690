"""Layers that only scale and shift: what projection methods do with them is a choice.

OWM, AOP, GPM and SGP were made for networks without normalisation layers or with frozen ones; the
parameters in question are those that are vectors, one number a channel.
"""

from typing import Literal

from torch import nn

from proxreplay.errors import InputError
from proxreplay.proximal.layers.sites import Site, Survey

Norms = Literal["plain", "treat", "freeze"]

PLAIN = "only scales and shifts; follows the plain gradient. norms='treat' treats it."


def check_norms(rule: str, norms: Norms, allowed: tuple[Norms, ...]) -> None:
    """Refuse a word the rule does not know."""
    if norms not in allowed:
        raise InputError(f"{rule}: norms={norms!r}; give one of {', '.join(map(repr, allowed))}.")


def is_norm(model: nn.Module, site: Site) -> bool:
    """Whether all trained parameters of a site are vectors."""
    return all(column.parameter(model).ndim == 1 for column in site.columns)


def without_norms(model: nn.Module, survey: Survey) -> Survey:
    """The survey with such sites named as left alone."""
    norms = {name for name, site in survey.sites.items() if is_norm(model, site)}
    return Survey(
        {name: site for name, site in survey.sites.items() if name not in norms},
        survey.untreated | dict.fromkeys(sorted(norms), PLAIN),
    )
