"""The command that makes a run again."""

import json
import shlex

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
        text = value if isinstance(value, str) else json.dumps(value)
        own = key in _OPTIONS and value is not None  # no option stands for no limit
        words += [_OPTIONS[key], text] if own else ["--set", f"{key}={text}"]
    return shlex.join(words)
