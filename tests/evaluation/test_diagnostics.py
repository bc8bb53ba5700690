"""Diagnostics against their formulas written out, and a run that does not notice them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.evaluation.diagnostics import (
    GradientRatios,
    Ratios,
    RepresentationDrift,
    shrinkage_matrix,
    shrinkage_spectrum,
    spectrum_record,
)
from proxreplay.models import mlp, small_cnn
from proxreplay.proximal import LPR, GradientRule
from proxreplay.replay import ClassBalancedMemory, Learner, er


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(count: int, shape: tuple[int, ...] = (6,), n: int = 8) -> list[Batch]:
    rng = generator(3)
    return [
        Batch(torch.randn(n, *shape, generator=rng), torch.randint(0, 4, (n,), generator=rng))
        for _ in range(count)
    ]


class Halve(GradientRule):
    """A rule that halves the gradient of one parameter, or of all."""

    def __init__(self, model: nn.Module, only: str = "") -> None:
        self.parameters = [p for n, p in model.named_parameters() if n.startswith(only)]

    def refresh(self, inputs: Tensor, of: int | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...

    def precondition_(self, only: Any = None) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


# Representation drift


def test_drift_is_the_mean_of_path_lengths_over_steps() -> None:
    model, x = mlp(6, 4, hidden=(5,)), torch.randn(9, 6, generator=generator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    drift = RepresentationDrift(model, x, batch_size=4).attach(optimizer)

    def represent() -> dict[str, Tensor]:
        with torch.no_grad():
            hidden = model.linear1(x)
            return {"linear1": hidden, "head": model.head(hidden.relu())}

    length = {"linear1": torch.zeros(9), "head": torch.zeros(9), "both": torch.zeros(9)}
    for batch in batches(4):
        before = represent()
        optimizer.zero_grad()
        er(model, batch, None).backward()
        optimizer.step()
        moved = {name: Z - before[name] for name, Z in represent().items()}
        for name, difference in moved.items():
            length[name] += difference.norm(dim=1)
        length["both"] += torch.cat(list(moved.values()), dim=1).norm(dim=1)
    layers = drift.layers()
    assert layers["linear1"] == pytest.approx(float(length["linear1"].mean()), rel=1e-5)
    assert layers["head"] == pytest.approx(float(length["head"].mean()), rel=1e-5)
    assert drift.total() == pytest.approx(float(length["both"].mean()), rel=1e-5)
    assert drift.record()["kind"] == "drift"

    drift.detach()
    optimizer.step()
    assert drift.layers() == layers


def test_the_authors_drift_is_frobenius_over_n_in_quadrature_from_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    x = torch.randn(150, 3, generator=generator())
    drift = RepresentationDrift(model, x, mode="authors")
    first = x[:100]
    weights = [torch.randn(2, 3, generator=generator(seed)) for seed in (1, 2, 3)]
    squares, previous = 0.0, torch.zeros(100, 2)
    for weight in weights:
        with torch.no_grad():
            model[0].weight.copy_(weight)
        drift.observe()
        now = first @ weight.T
        squares += float(((now - previous).norm() / 100) ** 2)
        previous = now
    assert drift.total() == pytest.approx(squares**0.5, rel=1e-5)


def test_a_head_that_grows_and_wakes_outputs_does_not_jump() -> None:
    model = mlp(6, hidden=(5,))
    model.head.grow(2, generator())
    model.head.activate(torch.tensor([0, 1]))
    drift = RepresentationDrift(model, torch.randn(4, 6, generator=generator()))
    model.head.grow(4, generator(1))
    model.head.activate(torch.tensor([2, 3]))
    drift.observe()
    drift.observe()
    assert drift.total() == pytest.approx(0.0, abs=1e-5)  # another shape, another rounding


def test_drift_goes_on_from_a_saved_state() -> None:
    def walk(drift: RepresentationDrift, model: nn.Sequential, seeds: range) -> None:
        for seed in seeds:
            with torch.no_grad():
                model[0].weight.copy_(torch.randn(2, 3, generator=generator(seed)))
            drift.observe()

    x = torch.randn(5, 3, generator=generator())
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    whole, first = RepresentationDrift(model, x), RepresentationDrift(model, x)
    start = model[0].weight.detach().clone()
    walk(whole, model, range(6))
    with torch.no_grad():
        model[0].weight.copy_(start)
    walk(first, model, range(3))
    second = RepresentationDrift(model, x)
    second.load_state_dict(first.state_dict())
    walk(second, model, range(3, 6))
    assert second.record() == whole.record()
    with pytest.raises(InputError, match="other layers"):
        second.load_state_dict({"total": torch.zeros(())})


def test_layers_that_do_not_exist_and_empty_inputs_are_refused() -> None:
    model = mlp(6)
    with pytest.raises(InputError, match="conv9"):
        RepresentationDrift(model, torch.zeros(1, 6), ["conv9"])
    with pytest.raises(InputError, match="at least one example"):
        RepresentationDrift(model, torch.zeros(0, 6))
    with pytest.raises(InputError, match="mode=mean"):
        RepresentationDrift(model, torch.zeros(1, 6), mode="mean")  # type: ignore[arg-type]


# Gradient ratios


def two_forwards(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
    """A loss that calls the model for each part on its own, replay first."""
    parts = [b for b in (replay, incoming) if b is not None]
    losses = [nn.functional.cross_entropy(model(b.inputs), b.labels) for b in parts]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("loss", [er, two_forwards], ids=["one joint forward", "two forwards"])
@pytest.mark.parametrize("make", [lambda: mlp(6, 4, hidden=(5,)), lambda: small_cnn(1, 4, (3, 4))])
def test_ratios_equal_norms_of_dense_gradients_a_part(
    loss: Callable[..., Tensor], make: Callable[[], nn.Module]
) -> None:
    model = make()
    shape = (6,) if hasattr(model, "linear1") else (1, 5, 5)
    incoming, replay, memory = batches(3, shape)
    rule = LPR(model, omega_0=3.0)
    rule.refresh(memory.inputs)
    found: list[Ratios] = []
    probe = GradientRatios(model, rule, found.append)
    probe.measure(loss, incoming, replay)

    parameters = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    if loss is er:  # the joint mean, cut in two by hand; BatchNorm sees all examples in both
        logits = model(torch.cat([incoming.inputs, replay.inputs]))
        ce = nn.functional.cross_entropy(
            logits, torch.cat([incoming.labels, replay.labels]), reduction="none"
        )
        parts = {"new": ce[:8].sum() / 16, "replay": ce[8:].sum() / 16, "all": ce.mean()}
    else:
        single = {
            name: nn.functional.cross_entropy(model(b.inputs), b.labels)
            for name, b in (("replay", replay), ("new", incoming))
        }
        parts = {**single, "all": single["new"] + single["replay"]}
    for part, value in parts.items():
        before = torch.autograd.grad(value, parameters, retain_graph=True)
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient.clone()
        rule.precondition_()
        norm = torch.cat([g.flatten() for g in before]).norm()
        after = torch.cat([p.grad.flatten() for p in parameters]).norm()
        assert found[0].overall[part] == pytest.approx(float(after / norm), rel=1e-4)
        head = list(model.head.parameters())
        own = torch.cat([p.grad.flatten() for p in head]).norm()
        theirs = torch.cat([g.flatten() for g in before[-len(head) :]]).norm()
        assert found[0].layers["head"][part] == pytest.approx(float(own / theirs), rel=1e-4)


def test_only_layers_that_the_rule_changes_count() -> None:
    model = mlp(6, 4, hidden=(5,))
    found: list[Ratios] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    probe = GradientRatios(model, Halve(model, "head"), found.append, optimizer=optimizer)
    incoming, replay = batches(2)
    probe.measure(er, incoming, replay)
    assert list(found[0].layers) == ["head"]
    assert found[0].overall == pytest.approx({"new": 0.5, "replay": 0.5, "all": 0.5})
    assert found[0].effective_lr == pytest.approx(0.1)


def test_without_replay_its_ratio_does_not_exist_and_an_idle_rule_has_ratio_one() -> None:
    model = mlp(6, 4, hidden=(5,))
    found: list[Ratios] = []
    ratios = GradientRatios(model, LPR(model), found.append)
    with pytest.warns(UserWarning, match="every gradient stays as it is"):
        ratios.measure(er, batches(1)[0], None)
    record = found[0].record()
    assert record["new"] == record["all"] == 1.0
    assert record["replay"] is None
    assert record["layers"] == {}


def test_a_watched_loss_measures_every_so_often_and_keeps_what_it_needs() -> None:
    class Needy:
        needs = "two draws"

        def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
            return er(model, incoming, replay)

    model = mlp(6, 4)
    found: list[Ratios] = []
    watched: Any = GradientRatios(model, Halve(model), found.append, every=3).around(Needy())
    assert watched.needs == "two draws"
    for batch in batches(7):
        watched(model, batch, None)
    assert len(found) == 3
    with pytest.raises(InputError, match="every=0"):
        GradientRatios(model, Halve(model), found.append, every=0)


# Spectra


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(6, 4), nn.Linear(4, 9, bias=False), nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(4)],
    ids=lambda layer: f"{type(layer).__name__}",
)
def test_the_shrinkage_matrix_is_what_gradients_are_multiplied_with(layer: nn.Module) -> None:
    model = nn.Sequential(layer).double()
    conv = not isinstance(layer, nn.Linear)
    columns = 4 if conv else layer.in_features
    shape = (10, 4, 5, 5) if conv else (10, columns)
    x = torch.randn(*shape, generator=generator(), dtype=torch.float64)
    rule = LPR(model, omega_0=2.0)
    rule.refresh(x)
    Lambda = shrinkage_matrix(model, "0", rule)
    model(x).square().sum().backward()
    groups = len(Lambda)
    names = [n for n, p in layer.named_parameters()]

    def matrix() -> Tensor:
        parts = [getattr(layer, n).grad.reshape(groups, -1, 1) for n in names if n == "bias"]
        weight = layer.weight.grad
        rows = weight.shape[0] // groups
        return torch.cat([weight.reshape(groups, rows, -1), *parts], dim=2).clone()

    before = matrix()
    rule.precondition_()
    torch.testing.assert_close(matrix(), before @ Lambda)
    (spectrum,) = shrinkage_spectrum(model, rule, ["0"]).values()
    expected = torch.linalg.eigvalsh(Lambda).flatten().sort().values
    torch.testing.assert_close(spectrum.eigenvalues, expected)
    assert spectrum.shrunk_by(0.5) == int((expected < 0.5).sum())
    record = spectrum_record({"0": spectrum})["layers"]["0"]
    assert record["directions"] == len(expected)
    assert record["quantiles"][0] == pytest.approx(float(expected[0]))


def test_layers_without_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    with pytest.raises(InputError, match="ReLU '1' has no weight"):
        shrinkage_matrix(model, "1", Halve(model))


def test_gradients_that_are_there_are_left_alone() -> None:
    model = mlp(6, 4, hidden=(5,))
    rule = LPR(model, omega_0=2.0)
    rule.refresh(batches(1)[0].inputs)
    er(model, batches(1)[0], None).backward()
    before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    shrinkage_spectrum(model, rule, ["linear1"])
    GradientRatios(model, rule, lambda _: None).measure(er, *batches(2))
    for name, parameter in model.named_parameters():
        same, value = before[name]
        assert parameter.grad is same
        assert torch.equal(parameter.grad, value), name


# The run does not notice


def learn(diagnosed: bool) -> tuple[dict[str, Tensor], list[float], Tensor, int]:
    torch.manual_seed(0)
    network = small_cnn(1, None, (3, 4))
    model = nn.Sequential(nn.Dropout(0.2), network)
    rule = LPR(model, omega_0=2.0)
    drift, found = None, []
    observers = [GradientRatios(model, rule, found.append)] if diagnosed else []
    memory = ClassBalancedMemory(20)
    learner = Learner(model, memory, rule, refresh_every=2, observers=observers, seed=1)
    if diagnosed:
        x = torch.randn(7, 1, 5, 5, generator=generator(5))
        drift = RepresentationDrift(model, x, ["1.conv1", "1.norm2", "1.head"])
        drift.attach(learner.optimizer)
    losses = []
    for batch in batches(8, (1, 5, 5)):
        losses.append(learner.learn(batch.inputs, batch.labels).loss)
        if diagnosed:
            shrinkage_spectrum(model, rule, ["1.conv2", "1.head"])
    if drift is not None:
        assert drift.total() > 0
        assert len(found) == 24
        assert found[-1].overall["new"] < 1
        assert found[-1].lr == learner.lr
    return model.state_dict(), losses, torch.get_rng_state(), len(found)


def test_a_run_is_bit_identical_with_and_without_diagnostics() -> None:
    state, losses, rng, _ = learn(diagnosed=False)
    watched_state, watched_losses, watched_rng, _ = learn(diagnosed=True)
    assert losses == watched_losses
    assert torch.equal(rng, watched_rng)
    assert state.keys() == watched_state.keys()
    for name, value in state.items():
        assert torch.equal(value, watched_state[name]), name


def test_a_run_with_a_wide_layer_is_bit_identical_with_and_without_diagnostics() -> None:
    """Steps are counted to choose between two forms of Lambda; looking must not count."""
    states = []
    for diagnosed in (False, True):
        torch.manual_seed(0)
        model = mlp(600, 4, hidden=(64,))
        rule = LPR(model, omega_0=2.0, tolerance=0.05)
        observers = [GradientRatios(model, rule, lambda _: None)] if diagnosed else []
        memory = ClassBalancedMemory(200)
        learner = Learner(model, memory, rule, refresh_every=2, observers=observers, seed=1)
        for batch in batches(3, (600,), n=55):
            learner.learn(batch.inputs, batch.labels)
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
