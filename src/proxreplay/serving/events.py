"""What can happen to a durable learner: events, and what became of each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxreplay.errors import InputError
from proxreplay.replay.inputs import as_tensors
from proxreplay.serialization import to_bytes

LEARN, REMEMBER = "learn", "remember"
FORGET, ROLLBACK = "forget", "rollback"
STOP, RESUME = "stop", "resume"
MARK = "mark"  # changes nothing: gives a second snapshot of the same state a sequence of its own
LONGEST = 200  # characters of a key
Keys = str | Sequence[str] | None  # one per example, one for all, or none


@dataclass(frozen=True)
class Event:
    """One change, with everything that applying it again needs.

    Args:
        kind: one of those above.
        body: what the kind needs. Tensors keep dtype and shape.
        note: a word about why, and where to; kept when the body is deleted.
        token: digest of the caller's idempotency key, or None.
    """

    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    token: bytes | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of an event.

    Args:
        sequence: of the event.
        kind: of the event.
        loss: mean over the steps; None if nothing was learned.
        ids: of the examples in the memory.
        removed: how many examples were deleted.
        refused: why the learner refused it, or None. Replaying it is refused again.
        diverged: whether it was refused because a step was not finite.
        classes: index of every example's label.
        hits: whether the label was predicted before it was learned; empty if not asked.
        refreshed: how many examples the rule was refreshed from.
    """

    sequence: int
    kind: str
    loss: float | None = None
    ids: tuple[int, ...] = ()
    removed: int = 0
    refused: str | None = None
    diverged: bool = False
    classes: tuple[int, ...] = ()
    hits: tuple[bool, ...] = ()
    refreshed: int | None = None


def token_of(idempotency_key: str | None) -> bytes | None:
    """What is kept of an idempotency key: only its digest, so that it may outlive a deletion."""
    if idempotency_key is None:
        return None
    return hashlib.sha256(word("idempotency_key", idempotency_key).encode()).digest()


def request_of(x: Any, y: Any, weights: Any, keys: Any, train: bool, kept: str | None) -> bytes:
    """A digest of a batch as it was given, to know it again."""
    labels = y.tolist() if hasattr(y, "tolist") else y
    counts = weights.tolist() if hasattr(weights, "tolist") else weights
    inputs = as_tensors(x) if kept is None else kept
    given = {"inputs": inputs, "labels": labels, "weights": counts, "keys": keys, "train": train}
    return hashlib.sha256(to_bytes(given)).digest()


def keys_of(keys: str | Sequence[str], examples: int) -> list[str]:
    """One key per example; one string is the key of all of them."""
    if isinstance(keys, str):
        keys = [keys] * examples
    if len(keys) != examples:
        raise InputError(
            f"{examples} examples but {len(keys)} keys; give one each, or one for all."
        )
    return [word("key", key) for key in keys]


def word(what: str, value: Any) -> str:
    """A key or id, if it is one that can be kept."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST:
        raise InputError(f"{what}={value!r:.60}; give a string of 1 to {LONGEST} characters.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what}={value!a:.60}; give text that UTF-8 can hold.") from error
    return value
