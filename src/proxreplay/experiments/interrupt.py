"""Ctrl-C and SIGTERM ask a run to save and stop; a second Ctrl-C stops at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """Whether somebody asked to stop, and with which signal; ``also`` is another way to ask."""

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        self.signal: int | None = None
        self._also = also

    def __bool__(self) -> bool:
        return self.signal is not None or self._also()

    def ask(self, number: int, frame: object = None) -> None:
        """Ask to stop; a handler of signals."""
        self.signal = number

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process stopped by this signal."""
        return 128 + (self.signal or 0)


@contextmanager
def handled_by(handle: Any, *numbers: int) -> Iterator[dict[int, Any]]:
    """Handle signals in one way inside; gives the handlers that there were, which come back."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request that a loop can look at between batches."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT and callable(before[number]):
            before[number](number, frame)
        request.ask(number)

    with handled_by(handle, signal.SIGINT, signal.SIGTERM) as before:
        yield request
