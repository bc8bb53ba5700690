"""The learner: order of the algorithm, fair comparisons, snapshots, growth, prediction."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from proxreplay import (
    EMA,
    LPR,
    Batch,
    ClassBalancedMemory,
    DerppSnapshot,
    Learner,
    RingMemory,
    UnlimitedMemory,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)
from proxreplay.data import Transform
from proxreplay.errors import InputError
from proxreplay.models import mlp, small_cnn
from proxreplay.proximal import GradientRule
from proxreplay.replay.losses import Loss
from proxreplay.seeding import generator, seeded

LOSSES: dict[str, Loss] = {
    "finetune": finetune,
    "er": er,
    "er_ace": er_ace,
    "lode": lode,
    "derpp": derpp,
    "derpp_snapshot": derpp_snapshot,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def stream(batches: int = 12, n: int = 6, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Small images whose classes come two at a time, the labels in any order."""
    rng = torch.Generator().manual_seed(seed)
    result = []
    for i in range(batches):
        labels = torch.randint(0, 2, (n,), generator=rng) + 2 * (i // 4)
        images = torch.randint(0, 256, (n, 1, 8, 8), generator=rng, dtype=torch.uint8)
        result.append((images, labels.flip(0)))
    return result


def network(num_classes: int | None = None, seed: int = 0) -> nn.Module:
    with seeded(seed, "model"):
        return small_cnn(1, num_classes, widths=(4, 6))


AUGMENT = Transform(scale=255.0, crop_padding=1, flip=True)


def make(
    loss: Loss = er,
    *,
    lpr: bool = False,
    ema: bool = False,
    model: nn.Module | None = None,
    **options: Any,
) -> Learner:
    model = network() if model is None else model
    options = {"lr": 0.05, "steps_per_batch": 2, "replay_batch": 4, "refresh_every": 3} | options
    return Learner(
        model,
        options.pop("memory", ClassBalancedMemory(12)),
        LPR(model, omega_0=4.0) if lpr else None,
        loss=loss,
        averaging=EMA(model, 0.9) if ema else None,
        transform=options.pop("transform", AUGMENT),
        **options,
    )


def everything(learner: Learner) -> dict[str, Any]:
    """All tensors and numbers that decide what a learner does next, flattened."""
    flat: dict[str, Any] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{name}/{key}")
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                visit(item, f"{name}/{i}")
        else:
            flat[name] = value.clone() if isinstance(value, Tensor) else value

    visit(learner.state_dict(), "")
    return flat


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit, with NaN equal to itself."""
    return one.keys() == other.keys() and all(_identical(one[k], other[k]) for k in one)


def _identical(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and np.array_equal(
        one.numpy(), other.numpy(), equal_nan=one.is_floating_point()
    )


# The algorithm ------------------------------------------------------------------------------------


def test_er_step_by_step() -> None:
    """The learner against the algorithm box in plain torch: no transform, fixed head, SGD."""
    torch.manual_seed(0)
    model = mlp(3, num_classes=4, hidden=(5,))
    twin = copy.deepcopy(model)
    learner = Learner(model, UnlimitedMemory(), lr=0.1, steps_per_batch=2, replay_batch=3, seed=7)
    stored_x, stored_y = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    memory, replay_rng = UnlimitedMemory(), generator(7, "replay")
    for i in range(5):
        x, y = torch.randn(4, 3), torch.randint(0, 4, (4,))
        losses = []
        for _ in range(2):
            inputs, labels = x, y
            if i > 0:
                drawn = memory.sample(3, replay_rng)
                inputs, labels = torch.cat([x, drawn.inputs]), torch.cat([y, drawn.labels])
            loss = F.cross_entropy(twin(inputs), labels)
            gradients = torch.autograd.grad(loss, list(twin.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
            losses.append(loss.item())
        memory.add(Batch(x, y), torch.Generator())
        stored_x, stored_y = torch.cat([stored_x, x]), torch.cat([stored_y, y])
        assert float(learner.learn(x, y)) == pytest.approx(sum(losses) / 2)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(learner.memory.inputs(), stored_x)


def test_the_rule_is_refreshed_every_t_learned_batches_with_the_updated_memory() -> None:
    class Recorder(GradientRule):
        def __init__(self) -> None:
            self.events: list[Any] = []

        def refresh(self, inputs: Tensor, of: int | None = None) -> None:
            self.events.append(("refresh", len(inputs)))

        def precondition_(self, only: Any = None) -> None:
            self.events.append("step")

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    rule = Recorder()
    learner = Learner(
        mlp(2), UnlimitedMemory(), rule, steps_per_batch=2, refresh_every=2, refresh_samples=5
    )
    for i in range(4):
        learner.learn(torch.randn(3, 2), torch.tensor([0, 1, 2]))
        learner.remember(torch.randn(1, 2), torch.tensor([i]))
    four_steps = ["step"] * 4
    assert rule.events == [*four_steps, ("refresh", 5), *four_steps, ("refresh", 5)]
    assert learner.batches_learned == 4
    assert learner.batches_seen == 8


@pytest.mark.parametrize(("options", "made"), [({}, [10, 30]), ({"refresh_every": 5}, None)])
def test_only_the_default_interval_is_stretched(
    options: dict[str, int], made: list[int] | None
) -> None:
    """60 steps are 20 batches, which is the longest that an unpaid refresh is put off."""
    model = mlp(2)
    learner = Learner(model, rule=LPR(model), refresh_samples=5, **options)
    refreshed = [
        batch
        for batch in range(1, 31)
        if learner.learn(torch.randn(3, 2), torch.tensor([0, 1, 2])).refreshed
    ]
    assert refreshed == (made or [5, 10, 15, 20, 25, 30])


def test_a_rolling_rule_is_told_how_much_there_is_to_remember() -> None:
    model = mlp(2)
    learner, twin = (
        Learner(m, UnlimitedMemory(), LPR(m, rolling=0.8), refresh_every=1, refresh_samples=5)
        for m in (model, copy.deepcopy(model))
    )
    told: list[tuple[int, int | None]] = []
    assert isinstance(twin.rule, LPR)
    refresh = twin.rule.refresh

    def recording(inputs: Tensor, of: int | None = None) -> None:
        told.append((len(inputs), of))
        refresh(inputs, of)

    twin.rule.refresh = recording  # type: ignore[method-assign]
    for _ in range(3):
        x, y = torch.randn(3, 2), torch.tensor([0, 1, 2])
        learner.learn(x, y)
        twin.learn(x, y)
    assert told == [(3, 3), (5, 6), (5, 9)]
    for a, b in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_observing_rule_sees_the_incoming_batch_and_a_reference() -> None:
    class Watcher(GradientRule):
        reference_samples = 4

        def __init__(self) -> None:
            self.seen: list[tuple[int, int | None]] = []

        def observe(self, incoming: Batch, reference: Batch | None = None) -> None:
            self.seen.append((len(incoming), None if reference is None else len(reference)))

        def refresh(self, inputs: Tensor, of: int | None = None) -> None: ...

        def precondition_(self, only: Any = None) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    rule = Watcher()
    learner = Learner(mlp(2), None, rule, loss=finetune, steps_per_batch=1)
    for _ in range(2):
        learner.learn(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert rule.seen == [(6, None), (6, 4)]


def test_averaging_follows_every_step() -> None:
    learner = make(ema=True, steps_per_batch=3)
    calls = []
    update = learner.averaging.update_
    learner.averaging.update_ = lambda: (calls.append(1), update())[1]
    for x, y in stream(4):
        learner.learn(x, y)
    assert len(calls) == 12


@every_loss
def test_an_average_changes_nothing_in_training(loss: Loss) -> None:
    plain, averaged = make(loss), make(loss, ema=True)
    for x, y in stream():
        assert plain.learn(x, y) == averaged.learn(x, y)
    images = stream(1)[0][0]
    assert torch.equal(plain.logits(images), averaged.logits(images, online=True))
    assert not torch.equal(plain.logits(images), averaged.logits(images))


# Determinism and fair comparison ------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("lpr", [False, True], ids=["plain", "lpr"])
def test_same_seed_same_trajectory_whatever_the_global_generator(loss: Loss, lpr: bool) -> None:
    runs = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        learner = make(loss, lpr=lpr, ema=True, model=with_dropout(), seed=5)
        losses = [learner.learn(x, y) for x, y in stream()]
        runs.append((losses, everything(learner)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), network())


def test_the_global_generator_is_left_alone() -> None:
    learner = make(derpp, lpr=True, model=with_dropout())
    before = torch.get_rng_state()
    for x, y in stream(4):
        learner.learn(x, y)
        learner.predict(x)
    learner.learn_stream(TensorDataset(*stream(1)[0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_is_another_trajectory() -> None:
    runs = []
    for seed in (1, 2):
        learner = make(seed=seed)
        runs.append([learner.learn(x, y) for x, y in stream()])
    assert runs[0] != runs[1]


class Seen:
    """A loss that notes what it is shown."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        self.inputs += [incoming.inputs] + ([] if replay is None else [replay.inputs])
        return er(model, incoming, replay)


def test_with_and_without_lpr_the_same_replay_and_augmentation_are_seen() -> None:
    seen = []
    for lpr in (False, True):
        loss = Seen()
        learner = make(loss, lpr=lpr, refresh_samples=5)
        for x, y in stream():
            learner.learn(x, y)
        seen.append(loss.inputs)
    assert len(seen[0]) == len(seen[1]) == 12 * 2 * 2 - 2
    for plain, preconditioned in zip(*seen, strict=True):
        assert torch.equal(plain, preconditioned)


def test_each_step_is_augmented_anew() -> None:
    loss = Seen()
    make(loss, steps_per_batch=2).learn(*stream(1)[0])
    assert not torch.equal(loss.inputs[0], loss.inputs[1])


def test_refresh_sees_augmented_inputs_unless_told_otherwise() -> None:
    x, y = stream(1)[0]
    for augment in (True, False):
        learner = make(lpr=True, refresh_augment=augment, refresh_every=1, memory=RingMemory(6))
        seen = []
        refresh = learner.rule.refresh
        learner.rule.refresh = lambda inputs, of=None, seen=seen, go=refresh: (
            seen.append(inputs),
            go(inputs, of),
        )
        learner.learn(x, y)
        assert torch.equal(seen[0], AUGMENT(x)) is not augment


# DER ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [10, 3], ids="every {}".format)
def test_der_snapshot_schedule(every: int) -> None:
    """After stream batches 0, every, 2 every, ..., remembered ones included."""
    learner = make(DerppSnapshot(every=every), model=network(6), steps_per_batch=1)
    taken_after = []
    before = learner.provider.teacher
    for i in range(25):
        x, y = stream(1, seed=i)[0]
        if i % 4 == 3:
            learner.remember(x, y)
        else:
            learner.learn(x, y)
        if learner.provider.teacher is not before:
            taken_after.append(i)
            before = learner.provider.teacher
            for a, b in zip(
                learner.provider.teacher.state_dict().values(),
                learner.model.state_dict().values(),
                strict=True,
            ):
                assert torch.equal(a, b)
    assert taken_after == list(range(0, 25, every))


def test_der_teacher_is_in_train_mode_on_the_same_augmented_inputs() -> None:
    shown: list[Batch] = []

    class Spy(DerppSnapshot):
        def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
            if replay is not None:
                shown.append(replay)
            return super().__call__(model, incoming, replay)

    learner = make(Spy(), model=network(6))
    for x, y in stream(3):
        learner.learn(x, y)
    assert learner.provider.teacher.training
    assert not any(p.requires_grad for p in learner.provider.teacher.parameters())
    with torch.no_grad():
        expected = learner.provider.teacher(shown[-1].inputs)
    torch.testing.assert_close(shown[-1].extras["teacher"], expected)
    assert not shown[-1].extras["teacher"].requires_grad


def test_stored_logits_are_those_of_the_last_step_before_it_was_taken() -> None:
    outputs: list[Tensor] = []

    def spy(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        logits = model(incoming.inputs)
        outputs.append(logits.detach())
        return F.cross_entropy(logits, incoming.labels)

    spy.needs = derpp.needs
    learner = make(spy, model=network(6), memory=UnlimitedMemory(), steps_per_batch=3)
    for x, y in stream(2):
        learner.learn(x, y)
    stored = next(learner.memory.batches(12)).extras["logits"]
    torch.testing.assert_close(stored, torch.cat([outputs[2], outputs[5]]))


def test_storing_logits_leaves_no_trace_in_batchnorm() -> None:
    def plain(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        return F.cross_entropy(model(incoming.inputs), incoming.labels)

    def storing(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        return plain(model, incoming, replay)

    storing.needs = derpp.needs
    learners = [make(loss, steps_per_batch=2) for loss in (plain, storing)]
    for learner in learners:
        for x, y in stream(3):
            learner.learn(x, y)
    states = [learner.model.state_dict() for learner in learners]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_derpp_gets_two_independent_draws() -> None:
    ids: list[Tensor] = []

    def spy(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        if replay is not None:
            ids.append(replay.extras["id"])
        return derpp(model, incoming, replay)

    spy.needs = derpp.needs
    learner = make(spy, replay_batch=4, memory=UnlimitedMemory())
    for x, y in stream(6):
        learner.learn(x, y)
    assert all(len(drawn) == 8 for drawn in ids)
    assert all(len(set(half.tolist())) == 4 for drawn in ids for half in drawn.split(4))
    assert any(set(d[:4].tolist()) & set(d[4:].tolist()) for d in ids)  # not without replacement
    assert any(not torch.equal(d[:4], d[4:]) for d in ids)


# Labels and heads ---------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("num_classes", [None, 8], ids=["growing", "fixed"])
def test_labels_in_any_order_with_gaps(loss: Loss, num_classes: int | None) -> None:
    learner = make(loss, ema=True, lpr=True, model=network(num_classes))
    for label_set in ([5, 2], [2, 7], [0, 7], [5, 0]):
        labels = torch.tensor(label_set).repeat(3)
        assert np.isfinite(learner.learn(stream(1)[0][0], labels).loss)
    assert learner.logits(stream(1)[0][0]).shape == (6, 8)
    if num_classes is None:
        assert learner.model.head.active.nonzero().flatten().tolist() == [0, 2, 5, 7]
        assert set(learner.predict(stream(1)[0][0]).tolist()) <= {0, 2, 5, 7}


@pytest.mark.parametrize("num_classes", [None, 6], ids=["growing", "fixed"])
def test_names_as_labels(num_classes: int | None) -> None:
    learner = make(model=network(num_classes))
    images = stream(1)[0][0]
    learner.learn(images, ["cat", "dog", "cat", "cat", "dog", "dog"])
    learner.learn(images, np.array(["emu", "dog", "cat", "emu", "dog", "dog"]))
    assert learner.labels == ["cat", "dog", "emu"]
    predicted = learner.predict(images)
    assert predicted.shape == (6,)
    assert set(predicted.tolist()) <= {"cat", "dog", "emu"}
    probabilities = learner.predict_proba(images)
    assert probabilities.shape == (6, 3)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(6))
    accuracy = learner.evaluate(images, predicted)
    assert accuracy == 1.0
    assert learner.evaluate(images, ["yak"] * 6) == 0.0


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["momentum", "adamw"],
)
def test_any_optimizer_goes_on_when_the_head_grows(optimizer: Callable[..., Any]) -> None:
    learner = make(lpr=True, optimizer=optimizer, lr=None)
    for x, y in stream():
        assert np.isfinite(learner.learn(x, y).loss)
    owned = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert owned == {id(p) for p in learner.model.parameters()}
    assert all(p in learner.optimizer.state for p in learner.model.parameters())


def test_a_memory_that_already_holds_examples_is_met() -> None:
    memory = UnlimitedMemory()
    x, y = stream(1)[0]
    memory.add(Batch(x, y + 5), torch.Generator())
    learner = make(memory=memory)
    assert learner.model.head.active.nonzero().flatten().tolist() == sorted(set((y + 5).tolist()))
    assert learner.learn(x, y).loss < 100  # no inactive output among the replayed labels


# Prediction ---------------------------------------------------------------------------------------


def test_prediction_disturbs_nothing() -> None:
    learner = make(derpp, lpr=True, ema=True)
    batches = stream()
    for x, y in batches[:5]:
        learner.learn(x, y)
    learner.model.norm1.eval()  # a mode of its own
    before = everything(learner)
    modes = [m.training for m in learner.model.modules()]
    x, y = batches[5]
    for online in (False, True):
        learner.predict(x, online=online)
        learner.predict_proba(x, online=online)
        learner.evaluate(x, y, online=online)
    assert same(before, everything(learner))
    assert modes == [m.training for m in learner.model.modules()]


def test_evaluate_in_parts_is_accuracy() -> None:
    learner = make()
    for x, y in stream(4):
        learner.learn(x, y)
    x, y = torch.cat([x for x, _ in stream()]), torch.cat([y for _, y in stream()])
    expected = (learner.predict(x) == y.numpy()).mean()
    assert learner.evaluate(x, y, batch_size=7) == pytest.approx(expected)
    assert learner.evaluate(x, y, batch_size=1000) == pytest.approx(expected)
    data = TensorDataset(x, y)
    for source in (data, DataLoader(data, batch_size=5), Batch(x, y), zip(x, y, strict=True)):
        assert learner.evaluate(source) == pytest.approx(expected)
    with pytest.raises(InputError, match="no example"):
        learner.evaluate([])


def test_each_predictor_is_what_its_name_says() -> None:
    learner = make(ema=True)
    for x, y in stream(5):
        learner.learn(x, y)
    images = stream(1)[0][0]
    seen = AUGMENT(images).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        average = learner.averaging.model(seen)
        assert torch.equal(learner.logits(images, predictor="average"), average)
        learner.model.eval()
        online = learner.model(seen)
    assert torch.equal(learner.logits(images, online=True), online)
    weight = learner.averaging.weights(online.shape[1]).float()
    assert (weight > 0).all()
    assert (weight < 0.9).all()
    blend = weight * average.softmax(1) + (1 - weight) * online.softmax(1)
    torch.testing.assert_close(learner.predict_proba(images), blend / blend.sum(1, keepdim=True))
    both = (average.softmax(1) + online.softmax(1)) / 2
    torch.testing.assert_close(learner.predict_proba(images, predictor="both"), both)
    with pytest.raises(InputError, match="predictor=best; give one of average, online"):
        learner.predict(images, predictor="best")
    with pytest.raises(InputError, match="no average of the weights"):
        make().logits(images, predictor="both")


def test_channels_last_computes_the_same() -> None:
    losses = []
    for channels_last in (False, True):
        learner = make(lpr=True, channels_last=channels_last)
        losses.append([learner.learn(x, y).loss for x, y in stream()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# Sources ------------------------------------------------------------------------------------------


def sources() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    def pairs(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(x.split(6), y.split(6), strict=True))

    return {
        "tensors": lambda x, y: (x, y),
        "arrays": lambda x, y: (x.numpy(), y.numpy()),
        "lists": lambda x, y: (x.tolist(), y.tolist()),
        "dataset": lambda x, y: (TensorDataset(x, y),),
        "dataloader": lambda x, y: (DataLoader(TensorDataset(x, y), batch_size=6),),
        "single examples": lambda x, y: (zip(x, y, strict=True),),
        "single arrays": lambda x, y: (zip(x.numpy(), y.tolist(), strict=True),),
        "generator": lambda x, y: ((pair for pair in pairs(x, y)),),
        "batches": lambda x, y: ([Batch(*pair) for pair in pairs(x, y)],),
    }


@pytest.mark.parametrize("name", sources())
def test_every_source_gives_the_same_learner(name: str) -> None:
    x = torch.randn(33, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(33) % 3

    def learner() -> Learner:
        with seeded(0, "model"):
            return Learner(mlp(4), steps_per_batch=1)

    expected, actual = learner(), learner()
    for part in zip(x.split(6), y.split(6), strict=True):
        expected.learn(*part)
    actual.learn_stream(*sources()[name](x, y), batch_size=6)
    assert same(everything(expected), everything(actual))


def test_a_batch_that_is_not_for_training_is_only_remembered() -> None:
    learner = make(memory=UnlimitedMemory())
    x, y = stream(1)[0]
    learner.learn(x, y)
    weights = copy.deepcopy(learner.model.state_dict())
    assert np.isnan(learner.learn(Batch(x, y, train=False, task=3, position=9)).loss)
    assert all(torch.equal(v, weights[k]) for k, v in learner.model.state_dict().items())
    assert len(learner.memory) == 12


# Errors before anything changes -------------------------------------------------------------------

with warnings.catch_warnings():  # torch calls nested tensors a prototype
    warnings.simplefilter("ignore")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
GOOD_X, GOOD_Y = torch.rand(3, 4), torch.tensor([0, 1, 2])
BAD_BATCHES: dict[str, tuple[Any, Any, str]] = {
    "empty": (torch.empty(0, 4), torch.empty(0, dtype=torch.int64), "no example"),
    "scalar": (torch.tensor(1.0), GOOD_Y, "no example"),
    "nan": (torch.full((3, 4), torch.nan), GOOD_Y, "NaN"),
    "infinite": (torch.full((3, 4), torch.inf), GOOD_Y, "infinity"),
    "too large for float32": (np.full((3, 4), 1e300), GOOD_Y, "cannot hold"),
    "other shape": (torch.rand(3, 5), GOOD_Y, r"\[5\] float32 each, but earlier ones were \[4\]"),
    "other dtype": (torch.ones(3, 4, dtype=torch.int64), GOOD_Y, "int64 each"),
    "complex": (torch.ones(3, 4, dtype=torch.complex64), GOOD_Y, "complex"),
    "text": (np.array([["a"] * 4] * 3), GOOD_Y, "dtype <U1"),
    "negative label": (GOOD_X, torch.tensor([0, -1, 2]), "label -1"),
    "float labels": (GOOD_X, torch.tensor([0.0, 1.0, 2.0]), "a label 0.0 of type float"),
    "names after integers": (GOOD_X, ["a", "b", "c"], "earlier ones were integers"),
    "missing label": (GOOD_X, ["a", None, "c"], "a label None"),
    "unhashable label": (GOOD_X, [["a"], ["b"], ["c"]], "of type list"),
    "too few labels": (GOOD_X, torch.tensor([0, 1]), "3 inputs but 2 labels"),
    "labels of two dimensions": (GOOD_X, torch.zeros(3, 1, dtype=torch.int64), "one per example"),
    "one label for all": (GOOD_X, 3, r"\[3, 4\] float32 each"),
    "ragged": ([[1.0, 2.0], [3.0]], GOOD_Y, "the same shape"),
    "sparse": (torch.eye(4).to_sparse(), GOOD_Y, "give a dense tensor"),
    "sparse matrix of scipy": (csr_matrix(np.eye(4)), GOOD_Y, "dense"),
    "nested": (nested, GOOD_Y, "give a dense tensor"),
    "meta": (torch.empty(3, 4, device="meta"), GOOD_Y, "meta device"),
    "a set of labels": (GOOD_X, {0, 1, 2}, "labels of type set"),
    "label beyond the head": (GOOD_X, torch.tensor([0, 1, 9]), "10 classes.*5 outputs"),
    "no labels": (GOOD_X, None, "inputs and labels"),
    "batch and labels": (Batch(GOOD_X, GOOD_Y), GOOD_Y, "or one Batch"),
}


@pytest.mark.parametrize("action", ["learn", "remember"])
@pytest.mark.parametrize("bad", BAD_BATCHES, ids=BAD_BATCHES)
def test_a_bad_batch_is_refused_before_anything_changes(bad: str, action: str) -> None:
    model = mlp(4, num_classes=5)
    learner = Learner(model, None, LPR(model), loss=derpp, averaging=EMA(model), refresh_every=1)
    learner.learn(GOOD_X, GOOD_Y)
    before = everything(learner)
    x, y, message = BAD_BATCHES[bad]
    with pytest.raises(InputError, match=message):
        getattr(learner, action)(x, y)
    assert same(before, everything(learner))


FIRST_BATCHES: dict[str, tuple[Any, Any, str]] = {
    "shape the model cannot take": (torch.rand(3, 7), GOOD_Y, "cannot take inputs of \\[7\\]"),
    "dtype the model cannot take": (torch.ones(3, 4, dtype=torch.uint8), GOOD_Y, "4\\] uint8"),
    "label beyond the head": (GOOD_X, torch.tensor([0, 1, 9]), "10 classes.*5 outputs"),
    "more names than outputs": (torch.rand(6, 4), list("abcdef"), "6 classes.*5 outputs"),
}


@pytest.mark.parametrize("bad", FIRST_BATCHES, ids=FIRST_BATCHES)
def test_a_bad_first_batch_is_refused_before_anything_changes(bad: str) -> None:
    learner = Learner(mlp(4, num_classes=5))
    before = everything(learner)
    x, y, message = FIRST_BATCHES[bad]
    with pytest.raises(InputError, match=message):
        learner.learn(x, y)
    assert same(before, everything(learner))
    learner.learn(GOOD_X, GOOD_Y)


def test_a_model_that_gives_no_logits_is_named() -> None:
    with pytest.raises(InputError, match=r"gives \[1, 2, 2\]"):
        Learner(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))).learn(GOOD_X, GOOD_Y)
    with pytest.raises(InputError, match="no parameters"):
        Learner(nn.Flatten())


@pytest.mark.parametrize(
    "option", ["steps_per_batch", "replay_batch", "refresh_every", "refresh_samples"]
)
def test_options_are_checked(option: str) -> None:
    with pytest.raises(InputError, match=f"{option}=0"):
        Learner(mlp(2), **{option: 0})


def test_parts_made_for_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="rule was made for another model"):
        Learner(mlp(2), rule=LPR(mlp(2)))
    with pytest.raises(InputError, match="averaging was made for another model"):
        Learner(mlp(2), averaging=EMA(mlp(2)))


def test_arrays_of_different_length_are_refused_before_anything_is_learned() -> None:
    learner = Learner(mlp(4))
    with pytest.raises(InputError, match="30 inputs but 29 labels"):
        learner.learn_stream(torch.rand(30, 4), torch.zeros(29, dtype=torch.int64))
    assert learner.batches_seen == 0
    with pytest.raises(InputError, match="learn_stream: a int"):
        learner.learn_stream(3)


def test_inputs_to_predict_are_checked() -> None:
    learner = Learner(mlp(4))
    for action in (learner.predict, learner.predict_proba, lambda x: learner.evaluate(x, GOOD_Y)):
        with pytest.raises(InputError, match="nothing was learned or remembered yet"):
            action(GOOD_X)
    learner.learn(GOOD_X, GOOD_Y)
    with pytest.raises(InputError, match="earlier ones"):
        learner.predict(torch.rand(2, 3))
    with pytest.raises(InputError, match="NaN"):
        learner.predict(torch.full((1, 4), torch.nan))
    with pytest.raises(InputError, match="3 inputs but 2 labels"):
        learner.evaluate(GOOD_X, GOOD_Y[:2])


# Long streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [derpp, derpp_snapshot], ids=["derpp", "derpp_snapshot"])
def test_a_long_stream_keeps_nothing_but_the_memory(loss: Loss) -> None:
    """Live objects, tensors and stored bytes are the same after 50 and after 350 batches."""
    model = mlp(3, hidden=(4,))
    learner = Learner(
        model,
        ClassBalancedMemory(20),
        LPR(model),
        loss=loss,
        averaging=EMA(model),
        steps_per_batch=1,
        replay_batch=2,
        refresh_every=25,
    )
    rng = torch.Generator().manual_seed(0)

    def run(batches: int) -> tuple[int, int, int]:
        for _ in range(batches):
            learner.learn(
                torch.randn(2, 3, generator=rng), torch.randint(0, 4, (2,), generator=rng)
            )
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(issubclass(type(thing), Tensor) for thing in objects)
        return len(objects), tensors, learner.memory.nbytes

    early, late = run(50), run(300)
    assert early[1:] == late[1:]
    assert late[0] - early[0] < 60  # fewer than one in five batches


def test_predictions_do_not_depend_on_how_many_are_made_at_once() -> None:
    learner = Learner(small_cnn(3))
    x = torch.randn(90, 3, 64, 64)
    learner.learn(x[:6], torch.arange(6))
    logits = learner.logits(x)  # 25 at once
    for batch_size in (1, 7, 90, 500):
        torch.testing.assert_close(learner.logits(x, batch_size=batch_size), logits)
    with pytest.raises(InputError, match="batch_size=0"):
        learner.logits(x, batch_size=0)


def test_nothing_is_predicted_when_all_labels_are_forgotten() -> None:
    learner = make(ema=True)
    x, y = stream(1)[0]
    learner.learn(x, y)
    for label in sorted(set(y.tolist())):
        learner.forget(label=label)
    with pytest.raises(InputError, match="all labels that were learned have been forgotten"):
        learner.predict(x)
    learner.learn(x, y)
    assert set(learner.predict(x)) <= set(y.tolist())


def test_two_predictors_at_once_are_refused() -> None:
    learner = make(ema=True)
    x, y = stream(1)[0]
    learner.learn(x, y)
    with pytest.raises(InputError, match="online=True, but predictor='blend'; give one of the two"):
        learner.predict_proba(x, online=True, predictor="blend")
    with pytest.raises(InputError, match=r"predictor=none; give one of average, online.*blend\."):
        learner.predict(x, predictor="none")
