"""What a learner is made of is checked when it is made, and can be read."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from proxreplay import (
    LPR,
    ClassBalancedMemory,
    KroneckerLPR,
    Learner,
    ReservoirMemory,
    UnlimitedMemory,
    lode,
)
from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.models import mlp
from proxreplay.options import AveragingOptions
from proxreplay.proximal.rules.base import GradientRule

MODEL = mlp(2)
ADAM = torch.optim.Adam(MODEL.parameters())
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "mlp"}, "model is 'mlp'; give a torch.nn.Module"),
    "rule as memory": ({"memory": LPR(MODEL)}, "LPR is a rule .* hand it in as rule="),
    "capacity as memory": ({"memory": 100}, "memory is 100; give a memory"),
    "optimizer as rule": ({"rule": ADAM}, "give a GradientRule"),
    "optimizer": ({"optimizer": ADAM}, "give a function, such as lambda"),
    "optimizer that makes none": ({"optimizer": list}, "give a function, such as lambda"),
    "both lr and optimizer": ({"optimizer": torch.optim.Adam, "lr": 0.1}, "one of the two"),
    "torch's loss": ({"loss": nn.CrossEntropyLoss()}, r"loss is CrossEntropyLoss\(\); give a func"),
    "name of a loss": ({"loss": "er"}, "loss is 'er'; give a function"),
    "averaging": ({"averaging": 0.9}, "averaging is 0.9; give AveragingOptions"),
    "transform": ({"transform": 3}, "transform is 3; give a function"),
    "steps": ({"steps_per_batch": 2.5}, "steps_per_batch=2.5; give a whole number"),
    "words": ({"replay_batch": "10"}, "replay_batch='10'; give a whole number"),
    "yes": ({"refresh_every": True}, "refresh_every=True; give a whole number"),
    "rate": ({"lr": float("nan")}, "lr=nan"),
    "rate in words": ({"lr": "0.1"}, "lr='0.1'"),
    "device": ({"device": "abacus"}, "device=abacus: not usable here"),
    "absent device": ({"device": "cuda:77"}, "device=cuda:77: not usable here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_part_is_named(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        Learner(**{"model": MODEL} | arguments)


@pytest.mark.parametrize("capacity", ["100", 2.5, 0, -1, True, float("nan")], ids=repr)
def test_a_capacity_is_a_whole_number(capacity: Any) -> None:
    with pytest.raises(InputError, match="capacity="):
        ReservoirMemory(capacity)


def test_a_memory_takes_batches_and_whole_numbers() -> None:
    memory, rng = UnlimitedMemory(), torch.Generator()
    with pytest.raises(InputError, match=r"give a Batch\(inputs, labels\)"):
        memory.add(torch.ones(2, 3), rng)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="labels of type list; give a tensor"):
        Batch(torch.ones(2, 3), [0, 1])  # type: ignore[arg-type]
    memory.add(Batch(torch.ones(2, 3), torch.tensor([0, 1])), rng)
    with pytest.raises(InputError, match="n='2'"):
        memory.sample("2", rng)  # type: ignore[arg-type]
    assert memory.remove(1) == 1


def test_averaging_by_its_options() -> None:
    learner = Learner(mlp(2), averaging=AveragingOptions(0.5))
    assert learner.averaging is not None
    assert learner.averaging.options.momentum == 0.5


def test_memories_can_be_read() -> None:
    memory = ClassBalancedMemory(7)
    memory.add(Batch(torch.ones(4, 1000), torch.tensor([0, 3, 0, 0])), torch.Generator())
    assert repr(memory) == "ClassBalancedMemory(capacity=7): 4 examples of 2 classes, 0.0 MB"
    assert repr(UnlimitedMemory()).startswith("UnlimitedMemory(): 0 examples")
    assert "capacity_bytes=100)" in repr(ReservoirMemory(capacity_bytes=100))


def test_a_learner_can_be_read() -> None:
    model = mlp(2, hidden=(3,))
    learner = Learner(model, rule=LPR(model), loss=lode)
    assert "none yet" in repr(learner)
    learner.learn(torch.ones(2, 2), ["cat", "dog"])
    rows = dict(line.split(maxsplit=1) for line in repr(learner).splitlines()[1:])
    assert repr(learner).startswith("Learner: 1 of 1 stream batches learned")
    assert rows["model"] == "Sequential, 17 parameters on cpu"
    paid = "every 10 batches or more, as work pays for it, from 100 examples"
    assert rows["rule"] == f"LPR, {paid}"
    assert rows["labels"] == "2: cat, dog"
    assert rows["loss"] == "Lode(rho=0.1, classes_per_task=None)"


@pytest.mark.parametrize(
    ("rule", "options", "told"),
    [
        (LPR, {"refresh_every": 5}, "LPR, every 5 batches from 100 examples"),
        (partial(LPR, omega_0=1.0), {}, "LPR, every 10 batches from 100 examples"),
        (partial(LPR, work=0), {}, "LPR, every 10 batches from 100 examples"),
        (LPR, {"refresh_every": None}, "LPR"),
        (partial(LPR, statistics="step"), {}, "LPR"),
        (KroneckerLPR, {}, "KroneckerLPR"),
    ],
)
def test_a_learner_says_when_its_rule_is_refreshed(
    rule: Callable[[nn.Module], GradientRule], options: dict[str, Any], told: str
) -> None:
    model = mlp(2, hidden=(3,))
    lines = repr(Learner(model, rule=rule(model), **options)).splitlines()
    assert f"  rule       {told}" in lines
