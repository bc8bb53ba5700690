"""The oldest version of every framework that is supported."""

import re
import sys

from proxreplay.errors import InputError

OLDEST = {"transformers": "4.46", "lightning": "2.2", "pytorch_lightning": "2.2"}


def check_version(framework: str) -> None:
    """Refuse a framework, imported already, that is older than supported."""
    found = str(getattr(sys.modules.get(framework), "__version__", "unknown"))
    if _numbers(found) < _numbers(OLDEST[framework]):
        raise InputError(
            f"{framework} {found} is older than supported; proxreplay needs {OLDEST[framework]} or "
            f"newer: pip install --upgrade {framework.replace('_', '-')}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; a development version counts as what it will be."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
