"""The command that makes a run again."""

import shlex
from typing import Any

from proxreplay.errors import ProxreplayError
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.configure import configure

_OPTIONS = {"capacity": "--memory", "eval_every": "--eval-every", "threads": "--threads"}


def run_command(config: RunConfig) -> str:
    """What to type for exactly this configuration; what the defaults give is left out.

    >>> run_command(configure("split-digits", "lpr-er", {"seed": 3, "lpr.omega_0": 4.0}))
    'proxreplay run split-digits --method lpr-er --seed 3 --set lpr.omega_0=4.0'
    """
    try:
        given = configure(config.benchmark, config.method).flat()
    except ProxreplayError:  # not declared here: say everything
        given = {}
    words = ["proxreplay", "run", config.benchmark, "--method", config.method]
    words += ["--seed", str(config.seed)]
    for key, value in config.flat().items():
        if key in ("benchmark", "method", "seed") or (key in given and given[key] == value):
            continue
        option = _OPTIONS.get(key)
        words += [option, str(value)] if option else ["--set", f"{key}={_yaml(value)}"]
    return shlex.join(words)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
