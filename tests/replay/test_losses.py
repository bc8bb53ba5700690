"""Every loss: one contract, its formula written naively, and the identities between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from proxreplay import (
    Derpp,
    DerppSnapshot,
    ErAce,
    Lode,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)
from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.models.heads import INACTIVE_LOGIT, GrowingHead
from proxreplay.replay.losses import Loss, Needs, logit_distance, needs_of

LOSSES: dict[str, Loss] = {
    "finetune": finetune,
    "er": er,
    "er_ace": er_ace,
    "er_ace alpha=0.3": ErAce(alpha=0.3),
    "lode": lode,
    "lode with tasks": Lode(rho=0.1, classes_per_task=2),
    "derpp": derpp,
    "derpp_snapshot": derpp_snapshot,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
FEATURES = 5


def network(head: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), head).double()


def fixed_network(classes: int = 6) -> nn.Sequential:
    return network(nn.Linear(6, classes))


def growing_network(size: int, active: list[int]) -> nn.Sequential:
    head = GrowingHead(6)
    head.grow(size, torch.Generator().manual_seed(1))
    head.activate(torch.tensor(active))
    return network(head)


def batch(labels: list[int], seed: int = 0, **extras: Tensor) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(len(labels), FEATURES, generator=rng, dtype=torch.float64)
    return Batch(inputs, torch.tensor(labels), extras)


def replayed(labels: list[int], width: int, seed: int = 1) -> Batch:
    """A replayed batch with everything any loss could ask for."""
    rng = torch.Generator().manual_seed(seed + 100)
    shape = (len(labels), width)
    return batch(
        labels,
        seed,
        logits=torch.randn(shape, generator=rng, dtype=torch.float64),
        teacher=torch.randn(shape, generator=rng, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    incoming: list[int]
    replay: list[int] | None
    width: int = 6


CASES = {
    "several classes": Case(fixed_network, [0, 1, 1, 4], [2, 3, 0, 5]),
    "empty memory": Case(fixed_network, [0, 1, 1, 4], None),
    "single class": Case(fixed_network, [2, 2, 2], [2, 2]),
    "single output": Case(lambda: fixed_network(1), [0, 0], [0, 0], width=1),
    "new and old apart": Case(fixed_network, [4, 5, 4], [0, 1, 2, 3]),
    "growing head": Case(lambda: growing_network(7, [0, 2, 5, 6]), [5, 6], [0, 2, 5, 0], width=3),
}


def build(case: Case) -> tuple[nn.Module, Batch, Batch | None]:
    replay = None if case.replay is None else replayed(case.replay, case.width)
    return case.model(), batch(case.incoming), replay


@every_loss
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_a_finite_number(loss: Loss, case: Case) -> None:
    value = loss(*build(case))
    assert value.shape == ()
    assert torch.isfinite(value)
    assert value >= 0


@every_loss
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradient_is_that_of_finite_differences(loss: Loss, case: Case) -> None:
    model, incoming, replay = build(case)
    loss(model, incoming, replay).backward()
    rng = torch.Generator().manual_seed(3)
    step = 1e-6
    for parameter in model.parameters():
        direction = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                values.append(loss(model, incoming, replay))
                parameter.sub_(sign * step * direction)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            (gradient * direction).sum(), (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-8
        )


@every_loss
def test_without_memory_is_plain_cross_entropy(loss: Loss) -> None:
    model, incoming, _ = build(CASES["empty memory"])
    torch.testing.assert_close(loss(model, incoming, None), naive_ce(model, incoming))


@every_loss
def test_looks_at_no_task_and_no_position(loss: Loss) -> None:
    model, incoming, replay = build(CASES["several classes"])
    told = Batch(incoming.inputs, incoming.labels, task=3, position=17)
    assert loss(model, told, replay) == loss(model, incoming, replay)


@every_loss
def test_changes_nothing_but_batchnorm(loss: Loss) -> None:
    model, incoming, replay = build(CASES["several classes"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss(model, incoming, replay)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


FORWARDS = {"finetune": 1, "er": 1, "er_ace": 2, "lode": 2, "derpp": 3, "derpp_snapshot": 2}


@pytest.mark.parametrize("name", FORWARDS)
def test_joint_or_separate_forwards(name: str) -> None:
    model, incoming, replay = build(CASES["several classes"])
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    LOSSES[name](model, incoming, replay)
    assert len(sizes) == FORWARDS[name]
    assert sizes[0] == (8 if name == "er" else 4)


# Naive twins: one example and one class at a time, in plain numbers -------------------------------


def naive_log_prob(logits: list[float], label: int, classes: list[int]) -> float:
    return logits[label] - math.log(sum(math.exp(logits[c]) for c in classes))


def naive_ce(model: nn.Module, examples: Batch, classes: list[int] | None = None) -> Tensor:
    rows = model(examples.inputs).tolist()
    classes = list(range(len(rows[0]))) if classes is None else classes
    terms = [
        -naive_log_prob(row, label, classes)
        for row, label in zip(rows, examples.labels.tolist(), strict=True)
    ]
    return torch.tensor(sum(terms) / len(terms), dtype=torch.float64)


def naive_mse(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    pairs = zip(model(inputs).flatten().tolist(), target.flatten().tolist(), strict=True)
    squares = [(z - t) ** 2 for z, t in pairs]
    return torch.tensor(sum(squares) / len(squares), dtype=torch.float64)


labels_of_batches = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@settings(deadline=None, max_examples=25)
@given(new=labels_of_batches, old=labels_of_batches)
def test_er_is_the_mean_over_all_examples(new: list[int], old: list[int]) -> None:
    model, incoming, replay = fixed_network(), batch(new), replayed(old, 6)
    share = len(new) / (len(new) + len(old))
    expected = share * naive_ce(model, incoming) + (1 - share) * naive_ce(model, replay)
    torch.testing.assert_close(er(model, incoming, replay), expected)


@settings(deadline=None, max_examples=25)
@given(new=labels_of_batches, old=labels_of_batches, alpha=st.floats(0, 1))
def test_er_ace_twin(new: list[int], old: list[int], alpha: float) -> None:
    model, incoming, replay = fixed_network(), batch(new), replayed(old, 6)
    expected = alpha * naive_ce(model, incoming, sorted(set(new)))
    expected = expected + (1 - alpha) * naive_ce(model, replay)
    torch.testing.assert_close(ErAce(alpha)(model, incoming, replay), expected)


@settings(deadline=None, max_examples=25)
@given(new=labels_of_batches, old=labels_of_batches, rho=st.floats(0, 1))
def test_lode_twin(new: list[int], old: list[int], rho: float) -> None:
    model, incoming, replay = fixed_network(), batch(new), replayed(old, 6)
    present = sorted(set(new))
    absent = 6 - len(present)
    within = naive_ce(model, incoming, present)
    between = naive_ce(model, incoming) - within  # cross-entropy = within + between tasks
    beta_2 = rho * len(present) / absent if absent else 0.0
    expected = 0.5 * (within + beta_2 * between + naive_ce(model, replay))
    torch.testing.assert_close(Lode(rho)(model, incoming, replay), expected)


@settings(deadline=None, max_examples=25)
@given(task=st.integers(0, 2), old=labels_of_batches, rho=st.floats(0, 1))
def test_lode_with_known_tasks_twin(task: int, old: list[int], rho: float) -> None:
    model, incoming = fixed_network(), batch([2 * task, 2 * task + 1, 2 * task])
    replay = replayed(old, 6)
    new = list(range(2 * task, 6))  # future classes too
    within = naive_ce(model, incoming, new)
    between = naive_ce(model, incoming) - within
    beta_2 = rho / task if task else 0.0
    expected = 0.5 * (within + beta_2 * between + naive_ce(model, replay))
    loss = Lode(rho, classes_per_task=2)(model, incoming, replay)
    torch.testing.assert_close(loss, expected)
    if task == 0:
        plain = 0.5 * (naive_ce(model, incoming) + naive_ce(model, replay))
        torch.testing.assert_close(loss, plain)


def test_lode_without_rho_is_er_ace() -> None:
    for case in CASES.values():
        gradients = []
        for loss in (Lode(rho=0.0), ErAce(alpha=0.5)):
            model, incoming, replay = build(case)
            loss(model, incoming, replay).backward()
            gradients.append([p.grad for p in model.parameters()])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_derpp_twin_uses_two_draws() -> None:
    model, incoming, replay = fixed_network(), batch([0, 1]), replayed([2, 3, 4, 5], 6)
    first, second = replayed_half(replay, 0), replayed_half(replay, 1)
    expected = naive_ce(model, incoming)
    expected = expected + 0.3 * naive_mse(model, first.inputs, first.extras["logits"])
    expected = expected + 0.7 * naive_ce(model, second)
    loss = Derpp(replay_weight=0.7, logit_weight=0.3)
    torch.testing.assert_close(loss(model, incoming, replay), expected)
    assert needs_of(loss) == Needs(draws=2, stored_logits=True)


def replayed_half(replay: Batch, i: int) -> Batch:
    half = len(replay) // 2
    part = slice(i * half, (i + 1) * half)
    extras = {name: tensor[part] for name, tensor in replay.extras.items()}
    return Batch(replay.inputs[part], replay.labels[part], extras)


def test_derpp_snapshot_twin_uses_the_same_draw_twice() -> None:
    model, incoming, replay = fixed_network(), batch([0, 1]), replayed([2, 3, 4, 5], 6)
    expected = naive_ce(model, incoming)
    expected = expected + 0.3 * naive_mse(model, replay.inputs, replay.extras["teacher"])
    expected = expected + 0.7 * naive_ce(model, replay)
    loss = DerppSnapshot(replay_weight=0.7, logit_weight=0.3, every=4)
    torch.testing.assert_close(loss(model, incoming, replay), expected)
    assert needs_of(loss) == Needs(teacher_every=4)


# Masked and missing classes -----------------------------------------------------------------------


def test_logit_distance_only_counts_classes_the_target_knows() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 9.0]], requires_grad=True)
    target = torch.tensor([[0.0, math.nan, INACTIVE_LOGIT], [1.0, 1.0, math.nan]])
    distance = logit_distance(logits, target)
    torch.testing.assert_close(distance, torch.tensor((1.0 + 9.0 + 16.0) / 3))
    distance.backward()
    known = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    assert logits.grad is not None
    assert (logits.grad[known] != 0).all()
    assert (logits.grad[~known] == 0).all()


def test_logit_distance_without_any_known_class_is_zero() -> None:
    logits = torch.ones(2, 3, requires_grad=True)
    distance = logit_distance(logits, torch.full((2, 1), INACTIVE_LOGIT))
    distance.backward()
    assert distance.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 3))


# The beta_2 of task-free LODE counts every output of the head, as the authors' code does.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lode"])
def test_inactive_outputs_make_no_difference(name: str) -> None:
    """A head of 4 against one of 7 whose last three outputs are inactive."""
    loss = LOSSES[name]
    small, large = growing_network(4, [0, 1, 2, 3]), growing_network(7, [0, 1, 2, 3])
    with torch.no_grad():
        for a, b in zip(small.parameters(), large.parameters(), strict=True):
            b[: len(a)] = a
    incoming, replay = batch([2, 3]), replayed([0, 1, 0, 1], 4)
    torch.testing.assert_close(loss(small, incoming, replay), loss(large, incoming, replay))


# Misuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "name"), [(derpp, "logits"), (derpp_snapshot, "teacher")], ids=["derpp", "snapshot"]
)
def test_missing_targets_are_named(loss: Loss, name: str) -> None:
    with pytest.raises(InputError, match=f"no '{name}'"):
        loss(fixed_network(), batch([0]), batch([1, 2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ErAce(alpha=1.5), "alpha=1.5"),
        (lambda: Lode(rho=-1.0), "rho=-1.0"),
        (lambda: Lode(rho=math.nan), "rho=nan"),
        (lambda: Lode(classes_per_task=0), "classes_per_task=0"),
        (lambda: Derpp(logit_weight=math.inf), "logit_weight=inf"),
        (lambda: DerppSnapshot(every=0), "every=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_check_themselves(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_plain_function_needs_one_draw() -> None:
    assert needs_of(lambda model, incoming, replay: model(incoming.inputs).sum()) == Needs()
    assert needs_of(finetune) == Needs(draws=0)
