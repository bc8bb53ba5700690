"""A guard stops learning or goes back, once, and says so."""

import re
from pathlib import Path

import pytest
import torch

from proxreplay.cli.serve import _guard
from proxreplay.errors import DivergenceError, InputError, StoppedError
from proxreplay.options import DurableOptions, GuardOptions
from proxreplay.serving import DurableLearner
from proxreplay.serving.events import Outcome
from proxreplay.serving.guards import Guard
from tests.serving.streams import batches, make, poison

FEW = DurableOptions(snapshot_every=4)


def learned(tmp_path: Path, guard: GuardOptions | None) -> DurableLearner:
    durable = DurableLearner(tmp_path / "d", make(), options=FEW, guard=guard)
    for x, y in batches(10):
        durable.learn(x, y)
    return durable


def test_a_loss_that_is_not_finite_stops_learning_until_resumed(tmp_path: Path) -> None:
    x, y = batches(1)[0]
    with learned(tmp_path, GuardOptions()) as durable:
        with pytest.raises(DivergenceError):
            durable.learn(*poison())
        with pytest.raises(StoppedError, match="event 11 diverged"):
            durable.learn(x, y)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        with pytest.raises(StoppedError, match="event 11 diverged"):
            durable.learn(x, y)
        durable.resume()
        assert durable.learn(x, y).sequence == 14


def test_a_stop_outlives_a_deletion_and_a_restart(tmp_path: Path) -> None:
    """A deletion drops the reasons of earlier stops, which may name somebody; not the stops."""
    with learned(tmp_path, None) as durable:
        durable.rollback(9, "ada sent it")
        durable.stop("ada called")
        durable.forget(label=0)
        durable.forget(label=1)
        notes = [note for _, _, _, note, _ in durable.history()]
        assert notes[:2] == ["to 9", "the reason is deleted"]
        assert all(re.fullmatch(r"\d+ ids", str(note)) for note in notes[2:])
    durable = DurableLearner(tmp_path / "d", make(), options=FEW)
    with durable, pytest.raises(StoppedError, match="the reason is deleted"):
        durable.learn(*batches(1)[0])


def test_a_guard_goes_back_to_the_last_good_snapshot(tmp_path: Path) -> None:
    with learned(tmp_path, GuardOptions(action="rollback")) as durable:
        good = durable.snapshots.load(8)["model"]["linear1.weight"]
        with pytest.raises(DivergenceError):
            durable.learn(*poison())
        durable._worker.drain()
        assert torch.equal(durable.learner.model.linear1.weight, good)
        assert durable.history()[-1][3].startswith("to 8: guard: event 11 diverged")
        durable.learn(*batches(1)[0])
        live = durable.fingerprint()
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.fingerprint() == live


@pytest.mark.parametrize(
    "guard",
    [GuardOptions(accuracy=0.6, window=12), GuardOptions(recall=((0, 0.6),), window=12)],
    ids=["accuracy", "recall"],
)
def test_a_guard_watches_accuracy_and_recall_also_across_a_restart(
    tmp_path: Path, guard: GuardOptions
) -> None:
    x = torch.zeros(4, 8)
    x[:, 0] = 5
    with DurableLearner(tmp_path / "d", make(), options=FEW, guard=guard) as durable:
        for _ in range(8):
            durable.learn(torch.cat([x, -x]), [0] * 4 + [1] * 4)
        assert durable.stopped is None
    with DurableLearner(tmp_path / "d", make(), options=FEW, guard=guard) as durable:
        told = []
        for _ in range(3):  # what was 0 is called 1 now, and the other way round
            try:
                durable.learn(torch.cat([x, -x]), [1] * 4 + [0] * 4)
            except StoppedError as error:
                told.append(str(error))
            durable._worker.drain()
        assert told
        assert "is below 0.6" in told[0]
    with DurableLearner(tmp_path / "d", make(), options=FEW, guard=guard) as durable:
        durable.resume()  # somebody has looked: a new window starts, also across a restart
        durable.learn(x, [1] * 4)
    with DurableLearner(tmp_path / "d", make(), options=FEW, guard=guard) as durable:
        durable.learn(-x, [0] * 4)
        durable._worker.drain()
        assert durable.stopped is None


def test_a_snapshot_that_nobody_has_judged_is_not_good(tmp_path: Path) -> None:
    """Otherwise every return keeps some of what was wrong, and the next one more of it."""
    guard = GuardOptions(action="rollback", accuracy=0.6, window=16)
    x, states = torch.zeros(4, 8), []
    x[:, 0] = 5
    few = DurableOptions(snapshot_every=1)
    with DurableLearner(tmp_path / "d", make(), options=few, guard=guard) as durable:
        for _ in range(8):
            durable.learn(torch.cat([x, -x]), [0] * 4 + [1] * 4)
        for _ in range(12):  # what was 0 is called 1 now, and the other way round
            durable.learn(torch.cat([x, -x]), [1] * 4 + [0] * 4)
            if durable.history()[-1:] and durable.history()[-1][0] == durable.applied:
                states.append(durable.learner.model.linear1.weight.clone())
    assert len(states) > 2
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_command_line_names_labels_whatever_they_are() -> None:
    """``--recall 7=0.5`` is about the number 7, and about a label that is called "7"."""
    watched = _guard("stop", None, ["7=0.5"], 2)
    assert watched is not None
    for labels in (["6", "7"], [6, 7]):
        outcome = Outcome(1, "learn", classes=(1, 1), hits=(False, False))
        assert "recall 0.000 of" in str(Guard(watched).judge(outcome, labels))


def test_options_check_themselves() -> None:
    for wrong in (
        {"action": "pray"},
        {"accuracy": 1.5},
        {"window": 0},
        {"recall": (("a", -1.0),)},
    ):
        with pytest.raises(InputError):
            GuardOptions(**wrong)  # type: ignore[arg-type]
    for wrong in ({"keep_snapshots": 1}, {"snapshot_every": 0}, {"keep_days": -1}):
        with pytest.raises(InputError):
            DurableOptions(**wrong)  # type: ignore[arg-type]
