"""Weights of examples and of classes: weight 2 is the example twice, weight 0 is no example."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay import (
    LPR,
    Batch,
    ClassBalancedMemory,
    Derpp,
    DerppSnapshot,
    Distilled,
    ErAce,
    Learner,
    Lode,
    ReservoirMemory,
    UnlimitedMemory,
    er,
    finetune,
)
from proxreplay.errors import InputError
from proxreplay.models import mlp
from proxreplay.proximal import AGEM
from proxreplay.replay.losses import Er, Finetune, Loss, logit_distance
from proxreplay.replay.saving import describe
from proxreplay.replay.weights import as_class_weight, joint_weight, weighted_mean
from proxreplay.seeding import seeded

MAKERS: dict[str, Callable[..., Loss]] = {
    "finetune": Finetune,
    "er": Er,
    "er_ace": ErAce,
    "lode": Lode,
    "lode with tasks": lambda **options: Lode(rho=0.1, classes_per_task=2, **options),
    "derpp": Derpp,
    "derpp_snapshot": DerppSnapshot,
    "distilled": lambda **options: Distilled(Er(**options), on="all"),
}
every_loss = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
CLASSES, FEATURES = 5, 4


def network(classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, classes)
    return nn.Sequential(*layers).double()


def batch(n: int, seed: int) -> Batch:
    """With everything that any loss could ask for."""
    rng = torch.Generator().manual_seed(seed)
    logits = {
        name: torch.randn(n, CLASSES, generator=rng, dtype=torch.float64)
        for name in ("logits", "teacher", "average")
    }
    logits["logits"][: n // 2, 2:] = math.nan  # classes that were not there
    x = torch.randn(n, FEATURES, generator=rng, dtype=torch.float64)
    return Batch(x, torch.randint(0, CLASSES, (n,), generator=rng), logits)


def repeated(batch: Batch, times: list[int]) -> Batch:
    rows = torch.tensor([i for i, n in enumerate(times) for _ in range(n)], dtype=torch.int64)
    extras = {name: tensor[rows] for name, tensor in batch.extras.items()}
    return Batch(batch.inputs[rows], batch.labels[rows], extras)


def weighted(batch: Batch, times: list[int]) -> Batch:
    return batch.with_extras(weight=torch.tensor(times, dtype=torch.float64))


@every_loss
@settings(max_examples=15, deadline=None)
@given(
    new=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    old=st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_an_example_of_weight_n_is_n_examples(
    make: Callable[..., Loss], new: list[int], old: list[int]
) -> None:
    loss, model = make(), network()
    incoming, draw = batch(4, 1), batch(3, 2)
    # both draws of the replay alike, so that repetition keeps the halves
    replay = Batch.joined([draw, draw])
    value = loss(model, weighted(incoming, new), weighted(replay, old * 2))
    twice = Batch.joined([repeated(draw, old)] * 2)
    torch.testing.assert_close(value, loss(model, repeated(incoming, new), twice))
    alone = loss(model, weighted(incoming, new), None)
    torch.testing.assert_close(alone, loss(model, repeated(incoming, new), None))


@every_loss
def test_equal_weights_change_nothing(make: Callable[..., Loss]) -> None:
    loss, model = make(), network()
    incoming, replay = batch(4, 1), batch(6, 2)
    plain = loss(model, incoming, replay)
    for size in (1, 7):
        value = loss(model, weighted(incoming, [size] * 4), weighted(replay, [size] * 6))
        torch.testing.assert_close(value, plain)


@every_loss
def test_one_batch_may_be_without_weights(make: Callable[..., Loss]) -> None:
    loss, model = make(), network()
    incoming, replay = batch(4, 1), batch(6, 2)
    torch.testing.assert_close(
        loss(model, incoming, weighted(replay, [2, 1, 1, 3, 1, 1])),
        loss(model, weighted(incoming, [1] * 4), weighted(replay, [2, 1, 1, 3, 1, 1])),
    )


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "distilled"])
def test_class_weight_is_the_weight_of_its_examples(name: str) -> None:
    make, model = MAKERS[name], network()
    incoming, replay = batch(4, 1), batch(6, 2)
    given = {0: 3.0, 2: 0.5, 17: 9.0}

    def by_hand(one: Batch) -> Batch:
        return one.with_extras(
            weight=torch.tensor([given.get(int(label), 1.0) for label in one.labels])
        )

    expected = make()(model, by_hand(incoming), by_hand(replay))
    forms: list[Any] = [given, tuple(given.items())]
    forms += [[3.0, 1.0, 0.5], torch.tensor([3.0, 1.0, 0.5]), np.array([3.0, 1.0, 0.5])]
    for form in forms:
        torch.testing.assert_close(make(class_weight=form)(model, incoming, replay), expected)


def test_class_weight_is_that_of_torch() -> None:
    model, incoming = network(), batch(8, 3)
    weights = torch.tensor([0.1, 2.0, 3.0, 1.0, 0.7], dtype=torch.float64)
    value = Er(class_weight=weights)(model, incoming, None)
    truth = F.cross_entropy(model(incoming.inputs), incoming.labels, weight=weights)
    torch.testing.assert_close(value, truth, rtol=1e-6, atol=0)


def test_weights_of_examples_and_classes_multiply() -> None:
    model, incoming = network(), batch(4, 1)
    sizes = [1, 2, 3, 4]
    both = Er(class_weight={c: 2.0 + c for c in range(CLASSES)})(
        model, weighted(incoming, sizes), None
    )
    product = [n * (2.0 + int(c)) for n, c in zip(sizes, incoming.labels, strict=True)]
    torch.testing.assert_close(both, er(model, weighted(incoming, product), None))


def test_nothing_of_weight_is_no_loss() -> None:
    model, incoming = network(), batch(4, 1)
    assert Er(class_weight=[0.0] * CLASSES)(model, incoming, None) == 0
    assert weighted_mean(torch.ones(2), torch.zeros(2)) == 0
    assert logit_distance(torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2)) == 0
    assert joint_weight(incoming, incoming) is None


BAD_CLASS_WEIGHTS = {
    "negative": {0: -1.0},
    "nan": [1.0, math.nan],
    "infinite": {1: math.inf},
    "a name": {"cat": 2.0},
    "text": {0: "heavy"},
    "a negative output": {-1: 1.0},
}


@pytest.mark.parametrize("given", BAD_CLASS_WEIGHTS.values(), ids=BAD_CLASS_WEIGHTS)
def test_bad_class_weights_are_named(given: Any) -> None:
    with pytest.raises(InputError, match=r"class_weight: .* for output .*; give finite numbers"):
        Lode(class_weight=given)


def test_a_loss_without_class_weights_is_described_as_before() -> None:
    assert describe(Lode(rho=0.05))["fields"] == {"rho": 0.05, "classes_per_task": None}
    assert describe(Lode(class_weight={1: 2.0}))["fields"]["class_weight"] == ((1, 2.0),)
    assert as_class_weight(None) is None
    assert hash(Er(class_weight={1: 2.0})) == hash(Er(class_weight={1: 2}))


# --- in a learner ---------------------------------------------------------------------------------


def learner(loss: Loss = er, rule: Any = None, memory: Any = None, **options: Any) -> Learner:
    with seeded(0, "model"):
        model = mlp(FEATURES, hidden=(6,)).double()
    return Learner(
        model,
        UnlimitedMemory() if memory is None else memory,
        None if rule is None else rule(model),
        loss=loss,
        replay_batch=4,
        refresh_every=2,
        **options,
    )


def data(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    one = batch(n, seed)
    return one.inputs, one.labels


def same_weights(one: Learner, other: Learner, **tolerance: float) -> None:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0, "atol": 0}))


def test_weight_two_is_learned_as_the_example_twice() -> None:
    x, y = data(6)
    one, two = learner(finetune, averaging=None), learner(finetune, averaging=None)
    one.learn(x, y, sample_weight=[2, 1, 1, 3, 1, 1])
    times = repeated(Batch(x, y), [2, 1, 1, 3, 1, 1])
    two.learn(times.inputs, times.labels)
    same_weights(one, two, rtol=1e-10, atol=1e-12)


@every_loss
def test_weight_zero_is_absence_to_the_last_bit(make: Callable[..., Loss]) -> None:
    loss = make()
    memory = lambda: ClassBalancedMemory(7)  # noqa: E731
    one = learner(loss, lambda m: LPR(m, omega_0=2.0), memory())
    two = learner(loss, lambda m: LPR(m, omega_0=2.0), memory())
    for seed in range(4):
        x, y = data(6, seed)
        y[0] = 4  # a class that comes with weight 0 only
        y[1:] %= 4
        weight = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.5, 1.0])
        ids = one.learn(x, y, sample_weight=weight).ids
        kept = weight > 0
        expected = two.learn(x[kept], y[kept], sample_weight=weight[kept]).ids
        assert ids == (-1, expected[0], -1, *expected[1:])
    same_weights(one, two)
    assert one.labels == two.labels
    assert torch.equal(one.memory.ids, two.memory.ids)


def test_a_batch_without_weight_leaves_no_trace() -> None:
    one, two = learner(), learner()
    x, y = data(6)
    learned = one.learn(x, y, sample_weight=np.zeros(6))
    assert math.isnan(learned.loss)
    assert learned.ids == (-1,) * 6
    assert one.batches_seen == len(one.memory) == 0
    assert one.remember(x, y, sample_weight=np.zeros(6)).ids == (-1,) * 6
    one.learn(x, y)
    two.learn(x, y)
    same_weights(one, two)


@every_loss
def test_weights_are_stored_and_used_at_replay(make: Callable[..., Loss]) -> None:
    seen: list[Batch] = []
    loss = make()

    class Spy:
        needs = getattr(loss, "needs", None)

        def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
            seen.extend([] if replay is None else [replay])
            return loss(model, incoming, replay)

    one = learner(Spy())
    x, y = data(6)
    one.learn(x, y, sample_weight=torch.arange(1.0, 7.0))
    one.learn(*data(3, 1))  # without weights: they are 1
    one.learn(*data(3, 2))
    if one.provider.needs.draws == 0:
        assert not seen
        return
    assert seen
    for replay in seen:
        assert replay.weight is not None
        truth = [float(i + 1) if i < 6 else 1.0 for i in replay.extras["id"].tolist()]
        assert replay.weight.tolist() == truth


def test_weights_may_come_late() -> None:
    memory = ReservoirMemory(8)
    one = learner(memory=memory)
    one.learn(*data(6))
    assert memory.sample(6, torch.Generator()).weight is None
    one.learn(*data(6, 1), sample_weight=[0.5] * 6)
    stored = memory.sample(8, torch.Generator())
    assert stored.weight is not None
    truth = [1.0 if i < 6 else 0.5 for i in stored.extras["id"].tolist()]
    assert stored.weight.tolist() == truth
    memory.remove(memory.ids)
    assert memory._storage.tensors["weight"].eq(0).all()


def test_a_capacity_in_bytes_counts_weights() -> None:
    memory = ReservoirMemory(capacity_bytes=10 * (FEATURES * 8 + 24))
    one = learner(memory=memory)
    one.learn(*data(12))
    assert len(memory) == 10
    one.learn(*data(12, 1), sample_weight=[2.0] * 12)
    assert len(memory) == 10 * (FEATURES * 8 + 24) // (FEATURES * 8 + 32)


def test_a_learner_with_weights_goes_on_exactly(tmp_path: Path) -> None:
    make = lambda: learner(Er(class_weight={1: 3.0}), memory=ClassBalancedMemory(8))  # noqa: E731
    one = make()
    for seed in range(3):
        one.learn(*data(6, seed), sample_weight=torch.rand(6) + 0.1)
    one.save(tmp_path)
    two = Learner.load(tmp_path, make().model)
    assert two.loss == one.loss
    for seed in range(3, 6):
        weight = torch.rand(6)
        a = one.learn(*data(6, seed), sample_weight=weight)
        assert a.loss == two.learn(*data(6, seed), sample_weight=weight).loss
    same_weights(one, two)


def test_every_way_to_give_weights_is_the_same() -> None:
    x, y = data(6)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])
    ways: list[Callable[[Learner], Any]] = [
        lambda one: one.learn(x, y, sample_weight=weight),
        lambda one: one.learn(x, y, sample_weight=weight.tolist()),
        lambda one: one.learn(Batch(x, y, {"weight": weight})),
        lambda one: one.learn_stream(x, y, batch_size=6, sample_weight=weight.numpy()),
        lambda one: one.learn_stream([(x, y, weight)]),
        lambda one: one.learn_stream(list(zip(x, y.tolist(), weight, strict=True)), batch_size=6),
    ]
    first = None
    for way in ways:
        one = learner()
        way(one)
        first = first or one
        same_weights(first, one)
    one = learner()
    one.learn(x[0], int(y[0]), sample_weight=2.0)
    assert one.memory.sample(1, torch.Generator()).weight.tolist() == [2.0]


BAD: dict[str, tuple[Any, str]] = {
    "negative": ([1, 1, -0.5, 1, 1, 1], "sample_weight -0.5 of example 2; give finite"),
    "nan": ([1, math.nan, 1, 1, 1, 1], "sample_weight nan of example 1"),
    "infinite": ([1, 1, 1, 1, 1, math.inf], "sample_weight inf of example 5"),
    "too few": ([1, 1], r"sample_weight of shape \[2\] for 6 examples"),
    "a table": (np.ones((6, 1)), r"sample_weight of shape \[6, 1\]"),
    "text": (["a"] * 6, "sample_weight of dtype"),
}


@pytest.mark.parametrize(("weight", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("began", [False, True], ids=["first batch", "later"])
def test_bad_weights_are_named_before_anything_changes(
    weight: Any, message: str, began: bool
) -> None:
    one, two = learner(), learner()
    x, y = data(6)
    if began:
        one.learn(x, y)
        two.learn(x, y)
    for method in (one.learn, one.remember):
        with pytest.raises(InputError, match=message):
            method(x, y, sample_weight=weight)
    assert one.batches_seen == int(began)
    assert (one.intake.kind is None) != began
    one.learn(x, y)
    two.learn(x, y)
    same_weights(one, two)


def test_weights_without_labels_are_refused() -> None:
    with pytest.raises(InputError, match="sample_weight without y"):
        learner().learn_stream([data(2)], sample_weight=[1, 1])
    with pytest.raises(InputError, match="6 inputs but 2 weights"):
        learner().learn_stream(*data(6), sample_weight=[1, 1])


def test_agem_weighs_its_reference() -> None:
    x, y = data(6)
    times = [2, 1, 1, 3, 1, 1]
    gradients = []
    for reference in (weighted(Batch(x, y), times), repeated(Batch(x, y), times)):
        model = network()
        rule = AGEM(model, samples=6)
        rule.observe(None, reference)
        gradients.append(rule._reference)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])
    model = network()
    mine = AGEM(model, samples=6, loss=lambda z, labels: F.cross_entropy(z, labels))
    with pytest.raises(InputError, match="which the loss of your own knows"):
        mine.observe(None, weighted(Batch(x, y), times))
