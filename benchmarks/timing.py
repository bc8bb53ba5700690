"""Interleaved timing: what is compared runs turn by turn, so that load hits both alike."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class Settings:
    """How everything is timed.

    Args:
        threads: of torch.
        cpu: count the CPU time of the main thread instead of wall time. With one thread this is
            what a busy machine leaves of the truth.
        rounds: multiplies the number of rounds.
    """

    threads: int = 2
    cpu: bool = False
    rounds: float = 1.0

    def clock(self) -> float:
        """Seconds."""
        return time.thread_time() if self.cpu else time.perf_counter()


SETTINGS = Settings()


@dataclass(frozen=True)
class Claim:
    """One number that a script stands for.

    Args:
        name: what was measured.
        value: the number.
        unit: "x" for a ratio, "%" for a share, "" for a bare number.
        target: what it should be at the most (or at the least).
        at_least: whether the target is a lower bound.
    """

    name: str
    value: float
    unit: str = "x"
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"met": self.met}


class Times:
    """Seconds of several functions, round by round."""

    def __init__(self, seconds: Mapping[str, list[float]]) -> None:
        self.seconds = dict(seconds)

    def median(self, name: str) -> float:
        """The median seconds of one function."""
        return statistics.median(self.seconds[name])

    def ratio(self, of: str, to: str) -> float:
        """The median over rounds of the ratio within a round."""
        pairs = zip(self.seconds[of], self.seconds[to], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, *, warm: bool = True
) -> Times:
    """Call every function once a round, after one round that is not counted if ``warm``."""
    torch.set_num_threads(SETTINGS.threads)
    rounds = max(1, round(rounds * SETTINGS.rounds))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for counted in range(0 if warm else 1, rounds + 1):
        for name, function in functions.items():
            start = SETTINGS.clock()
            function()
            if counted:
                seconds[name].append(SETTINGS.clock() - start)
    return Times(seconds)


def main(title: str, run: Callable[[], list[Claim]]) -> None:
    """The command line of one script."""
    parse()
    show(title, run())


def parse(*extra: tuple[str, str]) -> argparse.Namespace:
    """Read the settings, and any further options given as ``(name, help)``."""
    parser = argparse.ArgumentParser(description="Ratios within one run.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread, not wall time")
    parser.add_argument("--rounds", type=float, default=1.0, help="multiplies the rounds")
    for name, text in extra:
        parser.add_argument(name, help=text)
    options = parser.parse_args()
    if options.cpu and options.threads != 1:
        parser.error("--cpu counts one thread only; give --threads 1 with it.")
    SETTINGS.threads, SETTINGS.cpu, SETTINGS.rounds = options.threads, options.cpu, options.rounds
    return options


def show(title: str, claims: list[Claim]) -> None:
    """Print a table of claims."""
    print(f"\n{title}")
    for claim in claims:
        number = f"{claim.value:.1e}" if 0 < claim.value < 1e-3 else f"{claim.value:.2f}"
        line = f"  {claim.name:<72} {number:>8} {claim.unit:<1}"
        if claim.target is not None:
            sign = ">=" if claim.at_least else "<="
            line += f"  target {sign} {claim.target:g}: {'met' if claim.met else 'MISSED'}"
        print(line)
