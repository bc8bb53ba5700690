"""`Distilled` against its formula, written out example by example in float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from proxreplay import EMA, Batch, ErAce, Learner, Lode, derpp, derpp_snapshot, er, finetune
from proxreplay.errors import InputError
from proxreplay.models import mlp
from proxreplay.options import AveragingOptions
from proxreplay.replay.distillation import Distilled
from proxreplay.replay.losses import Loss

LOSSES = {
    "er": er,
    "er-ace": ErAce(0.3),
    "lode": Lode(),
    "derpp": derpp,
    "der": derpp_snapshot,
    "finetune": finetune,
}


def example(n: int, seed: int, classes: int = 4) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    said = {
        name: torch.randn(n, classes, generator=rng, dtype=torch.float64)
        for name in ("average", "logits", "teacher")
    }
    return Batch(inputs, torch.randint(classes, (n,), generator=rng), said)


def divergence(p: Tensor, q: Tensor, temperature: float) -> float:
    """``KL(softmax(p / T) || softmax(q / T))`` of two rows of logits, one class at a time."""
    exp_p = [math.exp(v / temperature) for v in p.tolist()]
    exp_q = [math.exp(v / temperature) for v in q.tolist()]
    pairs = [(a / sum(exp_p), b / sum(exp_q)) for a, b in zip(exp_p, exp_q, strict=True)]
    return sum(a * math.log(a / b) for a, b in pairs if a > 0)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    on=st.sampled_from(["replay", "all"]),
    weight=st.floats(0, 8),
    temperature=st.floats(0.5, 8),
    replayed=st.booleans(),
)
def test_the_loss_and_the_mean_divergence(
    name: str, on: str, weight: float, temperature: float, replayed: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    incoming, replay = example(5, 1), example(6, 2) if replayed and name != "finetune" else None
    loss = Distilled(LOSSES[name], weight, temperature, on)
    taught = ([incoming] if on == "all" else []) + ([replay] if replay is not None else [])
    distances = [
        divergence(said, z, temperature)
        for batch in taught
        for said, z in zip(batch.extras["average"], model(batch.inputs), strict=True)
    ]
    plain = LOSSES[name](model, incoming, replay).item()
    expected = plain + (weight * sum(distances) / len(distances) if distances else 0)
    assert loss(model, incoming, replay).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not model._forward_hooks


def test_inactive_classes_take_no_part() -> None:
    model = mlp(3).double()
    model.head.grow(4)
    model.head.activate(torch.tensor([0, 2]))
    batch = example(5, 1)
    batch = dataclasses.replace(batch, labels=batch.labels // 2 * 2)
    said = batch.extras["average"].clone()
    said[:, [1, 3]] = -1000.0
    replay = batch.with_extras(average=said)
    loss = Distilled(er, weight=3.0, temperature=4.0)
    rows = zip(said[:, [0, 2]], model(batch.inputs)[:, [0, 2]], strict=True)
    distance = sum(divergence(p, q, 4.0) for p, q in rows) / 5
    expected = er(model, batch, replay).item() + 3 * distance
    assert loss(model, batch, replay).item() == pytest.approx(expected, rel=1e-9)


def twice(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
    return er(model, incoming, replay) + er(model, incoming, replay)


@pytest.mark.parametrize(
    ("loss", "names", "message"),
    [(twice, ("average",), "each example through the model once"), (er, (), "no 'average'")],
    ids=["a loss with two passes", "nothing to stay close to"],
)
def test_what_cannot_be_distilled_is_refused(
    loss: Loss, names: tuple[str, ...], message: str
) -> None:
    batch = example(4, 1)
    batch = Batch(batch.inputs, batch.labels, {n: batch.extras[n] for n in names})
    with pytest.raises(InputError, match=message):
        Distilled(loss)(nn.Linear(3, 4).double(), batch, batch)


@pytest.mark.parametrize("options", [{"weight": -1.0}, {"temperature": 0.0}, {"on": "new"}])
def test_options_are_checked(options: dict[str, float | str]) -> None:
    with pytest.raises(InputError, match=f"distillation.{next(iter(options))}"):
        Distilled(er, **options)  # type: ignore[arg-type]


def learner_on(loss: Loss, averaging: AveragingOptions | None) -> Learner:
    torch.manual_seed(0)
    return Learner(mlp(2), loss=loss, averaging=averaging, steps_per_batch=1, lr=0.5)


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 2, generator=rng), torch.randint(i // 2 + 2, (8,), generator=rng))
        for i in range(n)
    ]


@pytest.mark.parametrize("on", ["replay", "all"])
def test_in_a_learner_the_teacher_is_the_average_before_the_step(on: str) -> None:
    """A spy in place of the loss sees what it is given; the average is computed again by hand."""
    seen: list[tuple[Batch, Batch | None, Tensor]] = []
    learner: Learner

    @dataclasses.dataclass(frozen=True)
    class Spy:
        needs = Distilled(er, on=on).needs

        def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
            assert learner.averaging is not None
            both = [incoming] if replay is None else [incoming, replay]
            by_hand = learner.averaging.model(torch.cat([b.inputs for b in both]))
            seen.append((incoming, replay, by_hand))
            return er(model, incoming, replay)

    learner = learner_on(Spy(), AveragingOptions())
    for x, y in batches(4):
        learner.learn(x, y)
    for number, (incoming, replay, by_hand) in enumerate(seen):
        assert ("average" in incoming.extras) == (on == "all")
        if on == "all":
            torch.testing.assert_close(incoming.extras["average"], by_hand[: len(incoming)])
        assert (replay is None) == (number == 0)
        if replay is not None:
            torch.testing.assert_close(replay.extras["average"], by_hand[len(incoming) :])


def test_a_learner_without_an_average_is_refused() -> None:
    with pytest.raises(InputError, match="averaging"):
        learner_on(Distilled(er), None)


def test_teaching_leaves_no_trace_in_the_average_and_changes_the_network() -> None:
    plain = learner_on(er, AveragingOptions())
    idle = learner_on(Distilled(er, weight=0.0), AveragingOptions())
    taught = learner_on(Distilled(er, weight=4.0), AveragingOptions())
    for x, y in batches(6):
        for learner in (plain, idle, taught):
            learner.learn(x, y)
    x = batches(1)[0][0]
    assert torch.equal(plain.logits(x), idle.logits(x))
    assert not torch.equal(plain.logits(x), taught.logits(x))


def test_a_saved_learner_goes_on_exactly(tmp_path: object) -> None:
    whole, parts = (learner_on(Distilled(ErAce(0.3), 2.0), AveragingOptions()) for _ in range(2))
    stream = batches(8)
    for x, y in stream[:5]:
        whole.learn(x, y)
        parts.learn(x, y)
    parts.save(f"{tmp_path}/saved")
    parts = Learner.load(f"{tmp_path}/saved")
    for x, y in stream[5:]:
        whole.learn(x, y)
        parts.learn(x, y)
    assert isinstance(parts.averaging, EMA)
    for predict in ("online", "average", "both", "blend"):
        x = stream[0][0]
        assert torch.equal(whole.logits(x, predictor=predict), parts.logits(x, predictor=predict))
