"""Methods are recipes: which loss, memory, rule and averaging a name stands for."""

from torch import nn

from proxreplay.data import Transform
from proxreplay.errors import InputError
from proxreplay.experiments.config import RunConfig
from proxreplay.proximal import LPR
from proxreplay.replay import ClassBalancedMemory, Learner, er

_LOSSES = {"er": er}


def method_names() -> list[str]:
    """Every method that can be run."""
    return [prefix + name for name in _LOSSES for prefix in ("", "lpr-")]


def label(method: str) -> str:
    """The name as the paper prints it.

    >>> label("er"), label("lpr-er")
    ('ER', 'LPR (ER)')
    """
    base = method.removeprefix("lpr-")
    return f"LPR ({base.upper()})" if method.startswith("lpr-") else base.upper()


def build_learner(config: RunConfig, network: nn.Module, transform: Transform) -> Learner:
    """Compose the parts that the configuration's method names."""
    base = config.method.removeprefix("lpr-")
    if base not in _LOSSES:
        raise InputError(
            f"unknown method '{config.method}'; there are {', '.join(method_names())}."
        )
    rule = None
    if config.method.startswith("lpr-"):
        rule = LPR(network, config.lpr.omega_0, config.lpr.beta)
    return Learner(
        network,
        ClassBalancedMemory(config.memory),
        rule,
        loss=_LOSSES[base],
        lr=config.lr,
        steps_per_batch=config.steps_per_batch,
        replay_batch=config.replay_batch,
        refresh_every=config.refresh.every,
        refresh_samples=config.refresh.samples,
        transform=transform,
        seed=config.seed,
    )
