"""A training loop of one's own under DDP, against the same loop in one process."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from proxreplay import LPR, er
from proxreplay.batch import Batch
from proxreplay.distributed import ALONE, Processes, compare, mean_
from proxreplay.options import StepOptions
from proxreplay.proximal import OWM, GradientRule, KroneckerLPR
from proxreplay.proximal.rules.share import Share
from tests.distributed.pool import Pool, problem_of

LOOK = StepOptions(every=1, rebuild=2)
RULES: dict[str, Callable[[nn.Module], GradientRule]] = {
    "lpr": lambda model: LPR(model, 1.0),
    "lpr-itself": lambda model: LPR(model),
    "lpr-steps": lambda model: LPR(model, 1.0, statistics=LOOK),
    "klpr": lambda model: KroneckerLPR(model, steps=LOOK),
    "owm": lambda model: OWM(model),
}


def learn(
    kind: str,
    processes: Processes,
    *,
    scale: float = 1.0,
    norm: float = math.inf,
    value: float = math.inf,
) -> tuple[torch.Tensor, GradientRule]:
    """Eight steps on this process's share of batches [incoming, replay]."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3)),
    ).double()
    wrapped = model if processes.alone else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = RULES[kind](wrapped)
    rule = (rule.among(ALONE) if processes.alone else rule).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=3, enabled=scale != 1)
    rng, own = torch.Generator().manual_seed(1), processes.share(8)
    for step in range(8):
        x = torch.randn(2, 8, 1, 4, 4, generator=rng).double() + step / 4
        y = torch.randint(0, 3, (2, 8), generator=rng)
        incoming, replay = (Batch(x[i][own], y[i][own]) for i in range(2))
        if step % 3 == 0:
            rule.refresh(replay.inputs)
        optimizer.zero_grad()
        with rule.watched(incoming, replay):
            outputs = wrapped(torch.cat([incoming.inputs, replay.inputs]))
            loss = F.cross_entropy(outputs, torch.cat([incoming.labels, replay.labels]))
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        nn.utils.clip_grad_value_(model.parameters(), value)
        rule.observe(incoming, replay)
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), rule


def learn_together(kind: str, scale: float = 1.0, norm: float = math.inf) -> torch.Tensor:
    processes = Processes.up()
    weights, rule = learn(kind, processes, scale=scale, norm=norm)
    compare(processes, kind, {"weights": weights, "rule": rule.state_dict()})
    assert rule.layers
    assert "2 processes" in repr(rule)
    return weights


@pytest.mark.parametrize("kind", RULES)
def test_shares_under_ddp_learn_what_one_process_learns(two: Pool, kind: str) -> None:
    one, _ = learn(kind, ALONE)
    for found in two.run(learn_together, kind):
        assert float((found - one).abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("kind", "scale", "norm"),
    [
        ("lpr-itself", 2.0**16, math.inf),
        ("lpr-itself", 1.0, 0.1),
        ("lpr-itself", 2.0**16, 0.1),
        ("klpr", 2.0**16, math.inf),
    ],
    ids=["scaled", "clipped", "both", "klpr-scaled"],
)
def test_scaled_losses_and_clipped_gradients_are_followed(
    two: Pool, kind: str, scale: float, norm: float
) -> None:
    one, _ = learn(kind, ALONE, norm=norm)
    for found in two.run(learn_together, kind, scale, norm):
        assert float((found - one).abs().max()) < 1e-10


def clip_by_value() -> str:
    return problem_of(lambda: learn("lpr-itself", Processes.up(), scale=2.0, value=1e-3))


def test_gradients_that_were_changed_otherwise_are_refused_in_all_processes(two: Pool) -> None:
    for problem in two.run(clip_by_value):
        assert "LPR: gradients were changed between backward and the step" in problem


def learn_opposites(processes: Processes, noise: float = 0.0) -> torch.Tensor:
    """The gradient of a step whose parts in two processes cancel, but for a millionth.

    Args:
        processes: of the step.
        noise: that comes with the mean, as from a compressed message; not in what is returned.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, own = torch.randn(1, 5).double().expand(8, 5), processes.share(8)
    signs = torch.tensor([1.0, -1 + 1e-6] * 4).double()  # every other row is of process 1
    rule = LPR(model).among(processes)
    rule.refresh(torch.randn(6, 5).double())
    incoming, replay = (Batch(rows, torch.zeros(len(rows))) for rows in x[own].chunk(2))
    with rule.watched(incoming, replay):
        (model(x[own]).sum(1) * signs[own]).mean().backward()
    parameters = dict(model.named_parameters())
    added = {name: noise * torch.randn_like(p.detach()) for name, p in parameters.items()}
    for name, g in mean_({n: p.grad for n, p in parameters.items()}, parameters, processes).items():
        parameters[name].grad = g + added[name]
    rule.step_()
    return torch.cat([(p.grad - added[name]).reshape(-1) for name, p in parameters.items()])


def cancel(noise: float) -> torch.Tensor:
    return learn_opposites(Processes.up(), noise)


@pytest.mark.parametrize("noise", [0.0, 1e-3], ids=["exact", "rounded"])
def test_gradients_that_cancel_are_not_taken_for_scaled_ones(two: Pool, noise: float) -> None:
    one = learn_opposites(ALONE)
    assert 0 < float(one.abs().max()) < 1e-5
    for found in two.run(cancel, noise):
        # squares of what cancels but for a millionth, by which lengths are kept, lose 12 digits
        torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-15)


def learn_dead(
    processes: Processes, scale: float = 1.0, alive: bool = True, order: int = 1
) -> torch.Tensor:
    """The gradient of two passes in which the hidden units are dead, but for half of the second.

    Args:
        processes: of the step; the half is that of process 0.
        scale: of the loss.
        alive: whether there is that half.
        order: -1 for the second pass first, which makes no difference.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)).double()
    for p in model.parameters():
        nn.init.uniform_(p, 0.1, 0.9)
    wrapped = model if processes.alone else DistributedDataParallel(model)
    rule = LPR(wrapped).among(processes)
    rule.refresh(torch.randn(20, 2).double())
    own, y = processes.share(8), torch.randint(0, 3, (2, 2, 8))
    x = -9 - torch.rand(2, 2, 8, 2).double()
    if alive:
        x[1, :, ::2] *= -1  # every other row is of process 1
    for i in (0, 1)[::order]:
        incoming, replay = (Batch(x[i, part][own], y[i, part][own]) for part in range(2))
        with rule.watched(incoming, replay):
            (scale * er(wrapped, incoming, replay)).backward()
    rule._share = Share()  # of the last pass: act fully
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= scale
    rule.step_()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def learn_dead_together(scale: float, alive: bool) -> torch.Tensor:
    return learn_dead(Processes.up(), scale, alive)


@pytest.mark.parametrize("alive", [True, False], ids=["half", "none"])
@pytest.mark.parametrize("scale", [1.0, 1024.0], ids=["plain", "scaled"])
def test_units_that_are_dead_in_a_pass_or_a_process_hide_nothing(
    two: Pool, scale: float, alive: bool
) -> None:
    one = learn_dead(ALONE, alive=alive, order=-1)
    for found in two.run(learn_dead_together, scale, alive):
        torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-12)
