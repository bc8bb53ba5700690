"""One learner in several threads: changes one after the other, predictions between them."""

import copy
import pickle
import threading
from collections.abc import Callable

import torch
from torch import nn

from proxreplay import LPR, ClassBalancedMemory, Learner
from proxreplay.models import mlp
from proxreplay.seeding import seeded

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 4


def make() -> Learner:
    with seeded(0, "model"):
        model = nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(6), mlp(6, hidden=(8,)))
    return Learner(model, ClassBalancedMemory(20), LPR(model), refresh_every=2, seed=1)


def together(*actions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def caught(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([v.flatten().double() for v in learner.model.state_dict().values()])


def test_predictions_beside_learning_change_nothing_and_are_of_whole_batches() -> None:
    alone, shared = make(), make()
    allowed = []
    for learner in (alone, shared):
        learner.learn(X, Y)
    for _ in range(30):
        allowed.append(alone.logits(X))
        alone.learn(X, Y)
    allowed.append(alone.logits(X))
    seen: list[torch.Tensor] = []
    together(
        lambda: [shared.learn(X, Y) for _ in range(30)],
        lambda: [seen.append(shared.logits(X)) for _ in range(40)],
        lambda: [shared.predict(X) for _ in range(40)],
    )
    assert torch.equal(weights(alone), weights(shared))
    assert all(any(torch.equal(one, other) for other in allowed) for one in seen)


def test_many_threads_learn_one_after_the_other() -> None:
    learner = make()
    together(*[lambda: [learner.learn(X, Y) for _ in range(10)]] * 4)
    assert learner.batches_learned == 40
    assert weights(learner).isfinite().all()


def test_two_learners_in_two_threads_learn_as_if_alone() -> None:
    alone, one, other = make(), make(), make()
    for _ in range(20):
        alone.learn(X, Y)
    before = torch.get_rng_state()
    together(*[lambda each=each: [each.learn(X, Y) for _ in range(20)] for each in (one, other)])
    assert torch.equal(weights(one), weights(alone))
    assert torch.equal(weights(other), weights(alone))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_learner_can_be_copied_and_pickled() -> None:
    learner = make()
    learner.learn(X, Y)
    for twin in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert twin.learn(X, Y) == copy.deepcopy(learner).learn(X, Y)
