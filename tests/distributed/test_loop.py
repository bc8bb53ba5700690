"""A training loop of one's own under DDP, against the same loop in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from proxreplay import LPR
from proxreplay.batch import Batch
from proxreplay.distributed import ALONE, Processes, compare
from proxreplay.options import StepOptions
from proxreplay.proximal import OWM, GradientRule, KroneckerLPR
from tests.distributed.pool import Pool

LOOK = StepOptions(every=1, rebuild=2)
RULES: dict[str, Callable[[nn.Module], GradientRule]] = {
    "lpr": lambda model: LPR(model, 1.0),
    "lpr-itself": lambda model: LPR(model),
    "lpr-steps": lambda model: LPR(model, 1.0, statistics=LOOK),
    "klpr": lambda model: KroneckerLPR(model, steps=LOOK),
    "owm": lambda model: OWM(model),
}


def learn(kind: str, processes: Processes) -> tuple[torch.Tensor, GradientRule]:
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
            F.cross_entropy(outputs, torch.cat([incoming.labels, replay.labels])).backward()
        rule.observe(incoming, replay)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), rule


def learn_together(kind: str) -> torch.Tensor:
    processes = Processes.up()
    weights, rule = learn(kind, processes)
    compare(processes, kind, {"weights": weights, "rule": rule.state_dict()})
    assert rule.layers
    assert "2 processes" in repr(rule)
    return weights


@pytest.mark.parametrize("kind", RULES)
def test_shares_under_ddp_learn_what_one_process_learns(two: Pool, kind: str) -> None:
    one, _ = learn(kind, ALONE)
    for found in two.run(learn_together, kind):
        assert float((found - one).abs().max()) < 1e-10
