"""Ctrl-C and SIGTERM ask a run to save and stop; a second Ctrl-C stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """Whether somebody asked to stop, and with which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process stopped by this signal."""
        return 128 + (self.signal or 0)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request that a loop can look at between batches."""
    request = StopRequest()
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT and callable(before[number]):
            before[number](number, frame)
        request.signal = number

    for watched in (signal.SIGINT, signal.SIGTERM):
        before[watched] = signal.signal(watched, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
