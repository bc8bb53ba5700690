"""Group commit: callers that wait at the same time share one write to the disk."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass
class _Waiting(Generic[_Item]):
    item: _Item
    done: bool = False
    error: BaseException | None = field(default=None)


class GroupCommit(Generic[_Item]):
    """Writes items in the order of `enqueue`, as many at a time as wait.

    One of those who wait writes for all; whoever comes meanwhile is in the next group. If a write
    fails, all who wait are told, also those behind the group: they were numbered after it.

    Args:
        write: puts items on disk, all or none.
        on_failure: called once per failed write, before anybody is told.
    """

    def __init__(
        self, write: Callable[[Sequence[_Item]], None], on_failure: Callable[[], None]
    ) -> None:
        self._write = write
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[_Item]] = []
        self._writing = False

    def enqueue(self, item: _Item) -> _Waiting[_Item]:
        """Take a place in the order."""
        with self._changed:
            place = _Waiting(item)
            self._waiting.append(place)
            return place

    def wait(self, place: _Waiting[_Item]) -> None:
        """Return when the item is on disk; raise if it could not be written."""
        with self._changed:
            while not place.done and self._writing:
                self._changed.wait()
            if place.done:
                if place.error is not None:
                    raise place.error
                return
            self._writing = True
            group, self._waiting = self._waiting, []
        error: BaseException | None = None
        try:
            self._write([member.item for member in group])
        except BaseException as failure:
            error = failure
        with self._changed:
            self._writing = False
            if error is not None:
                group += self._waiting
                self._waiting = []
                self._on_failure()
            for member in group:
                member.done, member.error = True, error
            self._changed.notify_all()
        if error is not None:
            raise error
