"""A learner in production: every change is on disk before it is applied (docs/serve.md)."""

from proxreplay.options import DurableOptions, GuardOptions, ServeOptions
from proxreplay.serving.durable import DurableLearner
from proxreplay.serving.events import Event, Outcome
from proxreplay.serving.follower import Follower
from proxreplay.serving.snapshots import Snapshot

__all__ = [
    "DurableLearner",
    "DurableOptions",
    "Event",
    "Follower",
    "GuardOptions",
    "Outcome",
    "ServeOptions",
    "Snapshot",
]
