"""Deletion through the learner: names, ids, counts, and nothing left in memory and statistics."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from proxreplay import EMA, LPR, ClassBalancedMemory, Learner, UnlimitedMemory
from proxreplay.errors import InputError
from proxreplay.models import mlp
from proxreplay.proximal import OWM
from proxreplay.seeding import seeded
from tests.reference import assert_same_state

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
NAMES = ["ann", "bob", "ann", "cid", "bob", "ann"]


def network(num_classes: int | None = None) -> nn.Module:
    with seeded(0, "model"):
        return mlp(3, num_classes, hidden=(5,))


def learner(rule: Any = None, num_classes: int | None = None, **options: Any) -> Learner:
    model = network(num_classes)
    made = None if rule is None else rule(model)
    return Learner(model, ClassBalancedMemory(20), made, averaging=EMA(model, 0.5), **options)


@pytest.mark.parametrize("num_classes", [None, 4], ids=["growing", "fixed"])
def test_a_name_is_forgotten(num_classes: int | None, tmp_path: Path) -> None:
    one = learner(num_classes=num_classes)
    for _ in range(20):
        one.learn(X, NAMES)
    assert "bob" in one.predict(X).tolist()
    assert one.forget(label="bob") > 0
    assert set(one.predict(X).tolist()) <= {"ann", "cid"}
    assert one.labels == ["ann", None, "cid"]
    assert one.predict_proba(X)[:, 1].max() == 0
    assert 1 not in one.memory.class_counts
    with pytest.raises(InputError, match="'bob' was never met, or is forgotten"):
        one.forget(label="bob")
    one.save(tmp_path / "saved")
    assert not any(b"bob" in file.read_bytes() for file in (tmp_path / "saved").iterdir())
    again = Learner.load(tmp_path / "saved")
    assert again.labels == one.labels
    again.learn(X, NAMES)
    assert again.labels == ["ann", None, "cid", "bob"]


def test_how_many_are_deleted_is_counted() -> None:
    one = learner()
    one.remember(X, NAMES)
    assert one.forget(label="ann") == 3
    assert len(one.memory) == 3


@pytest.mark.parametrize("num_classes", [None, 4], ids=["growing", "fixed"])
def test_an_integer_is_forgotten_and_one_never_met_refused(num_classes: int | None) -> None:
    one = learner(num_classes=num_classes)
    one.learn(X, [0, 2, 0, 2, 0, 2])
    before = one.state_dict()
    for label in (1, 3, 99, -1):
        with pytest.raises(InputError, match=f"label {label} was never met"):
            one.forget(label=label)
    with pytest.raises(InputError, match="labels that are names"):
        one.forget(label="bob")
    assert_same_state(before, one.state_dict())
    assert one.forget(label=2) == 3
    assert one.memory.class_counts == {0: 3}


def test_ids_come_with_what_was_learned_and_take_it_back() -> None:
    one = Learner(network(), UnlimitedMemory())
    learned, remembered = one.learn(X[:3], [0, 1, 2]), one.remember(X[3:], [0, 1, 2])
    assert (learned.ids, remembered.ids) == ((0, 1, 2), (3, 4, 5))
    assert remembered.loss != remembered.loss
    assert one.forget(ids=learned.ids) == 3
    assert torch.equal(one.memory.inputs(), X[3:])
    assert one.forget(ids=[0, 5]) == 1
    for bad, message in (([7], "never given out"), (["a"], "no ids")):
        with pytest.raises(InputError, match=message):
            one.forget(ids=bad)
    for arguments in ({}, {"label": 0, "ids": [1]}):
        with pytest.raises(InputError, match="either"):
            one.forget(**arguments)


RULES = {
    "lpr": lambda model: LPR(model, 4.0),
    "rolling lpr": lambda model: LPR(model, 4.0, rolling=0.9),
    "owm": lambda model: OWM(model, 1e-2),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_statistics_are_those_of_what_remains(rule: Any) -> None:
    """The rule equals one that has only ever seen what remains, at the weights of today."""
    one = learner(rule, refresh_every=2, refresh_samples=None)
    for _ in range(4):
        one.learn(X, NAMES)
    with_bob = copy.deepcopy(one.rule.state_dict())
    one.forget(label="bob")
    fresh = rule(one.model)
    for batch in one.memory.batches(one.replay_batch):
        fresh.observe(batch)
    fresh.refresh(one.memory.inputs(), of=len(one.memory))
    assert_same_state(one.rule.state_dict(), fresh.state_dict())
    with pytest.raises(AssertionError):
        assert_same_state(one.rule.state_dict(), with_bob)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_without_anything_left_the_rule_is_as_it_was_made(rule: Any) -> None:
    one = learner(rule, refresh_every=1)
    one.learn(X, ["ann"] * 6)
    one.forget(label="ann")
    assert len(one.memory) == 0
    assert_same_state(one.rule.state_dict(), rule(one.model).state_dict())
    one.learn(X, NAMES)


def test_a_memory_knows_no_names_and_says_so() -> None:
    learner = Learner(mlp(in_features=3))
    learner.learn(torch.eye(3), ["a", "b", "c"])
    with pytest.raises(InputError, match=r"'b' is no integer.*learner.forget\(label="):
        learner.memory.remove_class("b")  # type: ignore[arg-type]
    assert learner.forget(label="b") == 1
    assert "labels     2: a, c" in repr(learner)
