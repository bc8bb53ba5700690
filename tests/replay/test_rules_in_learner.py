"""Every rule with every loss and every memory, through the learner; and exact resumption."""

import math

import pytest
import torch

from proxreplay import (
    LPR,
    ClassBalancedMemory,
    Learner,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)
from proxreplay.models import small_cnn
from proxreplay.proximal import AGEM, AOP, GPM, OWM, SGP, AdaptiveAlpha, StreamProgress
from proxreplay.serialization import load_state, save_state

RULES = {
    "lpr": lambda model: LPR(model, 4.0),
    "lpr by itself": LPR,
    "agem": lambda model: AGEM(model, samples=5),
    "er-agem": AGEM.joint,
    "owm": lambda model: OWM(model, 1e-2),
    "aop": lambda model: AOP(model, AdaptiveAlpha(StreamProgress(12))),
    "gpm": lambda model: GPM(model, 0.9),
    "sgp": lambda model: SGP(model, 0.9, accumulate=True, norms="treat"),
}
LOSSES = {
    "finetune": finetune,
    "er": er,
    "er_ace": er_ace,
    "lode": lode,
    "derpp": derpp,
    "derpp_snapshot": derpp_snapshot,
}
MEMORIES = {
    "class-balanced": lambda: ClassBalancedMemory(8),
    "reservoir": lambda: ReservoirMemory(8),
    "ring": lambda: RingMemory(8),
    "unlimited": lambda: UnlimitedMemory(),
}


def stream(batches=6):
    rng = torch.Generator().manual_seed(0)
    for i in range(batches):
        yield torch.randn(4, 1, 5, 5, generator=rng), torch.arange(4) % 2 + 2 * (i // 3)


def learner_with(rule, loss, memory=MEMORIES["class-balanced"], replay_batch=4):
    torch.manual_seed(0)
    model = small_cnn(1, widths=(3, 4))
    made = None if rule is None else rule(model)
    return Learner(
        model,
        memory(),
        made,
        loss=loss,
        steps_per_batch=2,
        replay_batch=replay_batch,
        refresh_every=2,
        lr=0.05,
    )


def weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


# Every rule meets every loss and every memory, though not every pair of those two.
CASES = {
    f"{rule}-{loss}-{memory}": (RULES[rule], LOSSES[loss], MEMORIES[memory])
    for i, rule in enumerate(RULES)
    for j, loss in enumerate(LOSSES)
    for k, memory in enumerate(MEMORIES)
    if (i + j) % len(MEMORIES) == k
    and (rule, loss) != ("er-agem", "finetune")  # refused, tested with A-GEM
}


@pytest.mark.parametrize(("rule", "loss", "memory"), CASES.values(), ids=CASES.keys())
def test_every_rule_with_every_loss_goes_on_where_it_was_saved(rule, loss, memory, tmp_path):
    learner = learner_with(rule, loss, memory)
    batches = list(stream())
    for x, y in batches[:3]:
        assert math.isfinite(learner.learn(x, y).loss)
    save_state(tmp_path, learner.state_dict())
    resumed = learner_with(rule, loss, memory)
    resumed.load_state_dict(load_state(tmp_path))
    for x, y in batches[3:]:
        assert learner.learn(x, y) == resumed.learn(x, y)
    assert torch.equal(weights(learner), weights(resumed))
    assert weights(learner).isfinite().all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_every_rule_changes_what_is_learned(rule):
    # One replayed example has little weight in the joint gradient, so that A-GEM has work to do.
    learner, plain = (learner_with(one, er, replay_batch=1) for one in (rule, None))
    for one in (learner, plain):
        for x, y in stream(20):
            one.learn(x, y)
    assert not torch.equal(weights(learner), weights(plain))
