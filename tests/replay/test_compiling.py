"""A compiled step learns what the plain one learns."""

import pytest
import torch

from proxreplay import LPR, Learner
from proxreplay.errors import InputError
from proxreplay.models import mlp, slim_resnet18
from proxreplay.replay.placement import check_compiler, parts_that_stay
from tests.reference import random

CPU = torch.device("cpu")


def compiler_is_missing() -> bool:
    try:
        check_compiler(CPU)
    except InputError:
        return True
    return False


def make(compile: bool) -> Learner:
    torch.manual_seed(0)
    model = mlp(6, hidden=(8,))
    return Learner(model, rule=LPR(model), refresh_every=2, seed=1, compile=compile)


@pytest.mark.filterwarnings("ignore")  # what torch says to itself while it compiles
@pytest.mark.skipif(compiler_is_missing(), reason="there is no C++ compiler here")
def test_a_compiled_learner_follows_the_plain_one_and_growth_compiles_nothing_anew() -> None:
    plain, fast = make(compile=False), make(compile=True)
    from torch._dynamo.utils import counters

    counters.clear()
    graphs = []
    for i in range(6):
        x, y = random(10, 6, seed=i).float(), torch.arange(10) % (i + 2)  # a class more each time
        losses = [float(learner.learn(x, y)) for learner in (plain, fast)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] >= 1, "nothing was compiled"
    assert graphs[2] == graphs[-1], "it was compiled again as the head grew"
    for a, b in zip(plain.model.parameters(), fast.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    x = random(4, 6, seed=9).float()
    torch.testing.assert_close(plain.logits(x), fast.logits(x), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs[-1], "predicting was compiled"


def test_parts_without_a_growing_head_are_as_large_as_they_can_be() -> None:
    model = slim_resnet18(width=8)
    parts = list(parts_that_stay(model))
    assert parts == [child for name, child in model.named_children() if name != "head"]
    fixed = slim_resnet18(num_classes=3, width=8)
    assert list(parts_that_stay(fixed)) == [fixed]


def test_without_a_compiler_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no-such-compiler"):
        make(compile=True)
