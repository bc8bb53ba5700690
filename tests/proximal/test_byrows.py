"""Wide Linear layers in watched steps: multiplied by rows, as the dense product does it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from proxreplay import LPR, KroneckerLPR
from proxreplay.batch import Batch
from proxreplay.options import StepOptions
from proxreplay.proximal.rules.stepwise import StepwiseRule

D = 600
STEPS = StepOptions(1, 1, 0.5, 1.0)
RULES: dict[str, Callable[[nn.Module], StepwiseRule]] = {
    "lpr": lambda model: LPR(model, 4.0),
    "lpr from steps": lambda model: LPR(model, 4.0, statistics=STEPS),
    "klpr": lambda model: KroneckerLPR(model, steps=STEPS),
    "klpr, tau": lambda model: KroneckerLPR(model, tau=0.1, steps=STEPS),
}


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(D, 130, bias=bias), nn.Tanh(), nn.Linear(130, 130), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(130, 3)).double()


def batch(n: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(n, D, dtype=torch.float64, generator=rng), torch.arange(n) % 3)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def backward(model: nn.Module, *batches: Batch) -> None:
    model.zero_grad()
    for one in batches:
        nn.functional.cross_entropy(model(one.inputs), one.labels).backward()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", RULES)
def test_a_watched_step_is_the_dense_one(name: str, bias: bool) -> None:
    model = network(bias)
    rule = RULES[name](model)
    rule.refresh(batch(30, 1).inputs)
    for seed in (2, 3):  # by now there are factors
        with rule.watched(batch(10, seed)):
            backward(model, batch(10, seed))
        rule.step_()
    with rule.watched():
        backward(model, batch(10, 4), batch(5, 5))
    plain = gradients(model)
    rule.step_()
    by_rows = gradients(model)
    for parameter, own in zip(model.parameters(), plain, strict=True):
        parameter.grad = own.clone()
    rule.precondition_()
    torch.testing.assert_close(by_rows, gradients(model))
    assert not torch.allclose(by_rows[0], plain[0], rtol=1e-2)


def test_rows_are_what_was_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    rule = LPR(model, 4.0)
    rule.refresh(batch(30, 1).inputs)
    with rule.watched():
        backward(model, batch(10, 2))
    seen: list[frozenset[str]] = []
    monkeypatch.setattr(rule, "precondition_", lambda only=None: seen.append(rule._without))
    rule.step_()
    assert seen == [frozenset({"0"})]
    assert not [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_passes_that_are_not_of_the_step_do_not_count() -> None:
    model = network()
    rule = LPR(model, 4.0)
    rule.refresh(batch(30, 1).inputs)
    with rule.watched():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(batch(10, 2).inputs), batch(10, 2).labels)
        with rule.paused():
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
    plain = gradients(model)
    rule.step_()
    by_rows = gradients(model)
    for parameter, own in zip(model.parameters(), plain, strict=True):
        parameter.grad = own.clone()
    rule.precondition_()
    torch.testing.assert_close(by_rows, gradients(model))


@pytest.mark.parametrize("change", ["clipped", "scaled", "by value"])
def test_gradients_that_were_changed_are_multiplied_as_they_are(change: str) -> None:
    model = network()
    rule = LPR(model, 4.0)
    rule.refresh(batch(30, 1).inputs)
    with rule.watched():
        backward(model, batch(10, 2))
    for parameter in model.parameters():
        assert parameter.grad is not None
        if change == "by value":
            parameter.grad.clamp_(-1e-3, 1e-3)
        else:
            parameter.grad.mul_(0.3 if change == "clipped" else 1024.0)
    plain = gradients(model)
    rule.step_()
    changed = gradients(model)
    for parameter, own in zip(model.parameters(), plain, strict=True):
        parameter.grad = own.clone()
    rule.precondition_()
    torch.testing.assert_close(changed, gradients(model))
