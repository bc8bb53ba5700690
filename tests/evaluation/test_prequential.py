"""Test, then train: numbers against naive twins, and against river on the same stream."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import cohen_kappa_score, recall_score

from proxreplay import Batch, Learner, ReplayClassifier, prequential
from proxreplay.errors import InputError
from proxreplay.evaluation import Score
from proxreplay.models import mlp
from proxreplay.seeding import seeded

X, Y = load_digits(return_X_y=True)
X, Y = X[:150] / 16.0, Y[:150]


def learner(seed: int = 0) -> Learner:
    with seeded(seed, "model"):
        model = mlp(64, hidden=(16,))
    return Learner(model, steps_per_batch=1, seed=seed)


pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(pairs=pairs, size=st.integers(1, 7))
def test_numbers_are_those_of_the_formulas(pairs: list[tuple[int, int]], size: int) -> None:
    labels, predictions = [label for label, _ in pairs], [guess for _, guess in pairs]
    score = Score(fading=0.9)
    majority = no_change = 0
    for start in range(0, len(pairs), size):
        before = labels[:start]
        batch = labels[start : start + size]
        if before:
            most = max(Counter(before).values())
            favourite = next(k for k, n in Counter(before).items() if n == most)
            majority += sum(label == favourite for label in batch)
            no_change += sum(label == before[-1] for label in batch)
        score.update(batch, predictions[start : start + size])
    n, hits = len(pairs), [a == b for a, b in pairs]
    assert score.examples == n
    assert score.accuracy == sum(hits) / n
    ages = [0.9 ** (n - 1 - i) for i in range(n)]
    faded = sum(a * h for a, h in zip(ages, hits, strict=True)) / sum(ages)
    assert score.fading == pytest.approx(faded)
    assert score.regret == {"majority": majority - sum(hits), "no_change": no_change - sum(hits)}
    assert score.baselines == {"majority": majority / n, "no_change": no_change / n}
    for label, recall in score.recall.items():
        truth = recall_score(labels, predictions, labels=[label], average=None, zero_division=0)
        assert recall == pytest.approx(truth[0])
    if len({*labels, *predictions}) > 1:
        kappa = cohen_kappa_score(labels, predictions)
        assert score.kappa == pytest.approx(0.0 if math.isnan(kappa) else kappa, abs=1e-12)
    again = Score.from_state(score.state_dict())
    for one in (score, again):
        one.update([0, 1, 2], [0, 0, None])
    assert again.record() == score.record()
    assert again.recall == score.recall


def test_before_the_first_example() -> None:
    score = Score()
    assert math.isnan(score.accuracy)
    assert math.isnan(score.fading)
    assert score.regret == {"majority": 0, "no_change": 0}


def test_each_batch_is_predicted_before_it_is_learned() -> None:
    one, twin = learner(), learner()
    for step in prequential(one, X, Y, batch_size=10):
        rows = slice(10 * step.number, 10 * step.number + 10)
        assert step.labels == tuple(Y[rows])
        if step.number == 0:
            assert step.predictions == (None,) * 10
        else:
            assert step.predictions == tuple(twin.predict(X[rows]))
        assert step.learned.loss == twin.learn(X[rows], Y[rows]).loss
    assert step.examples == 150
    assert step.accuracy > step.baselines["majority"]
    assert step.regret["majority"] < 0
    assert step.fading > step.accuracy  # it learns


def test_predicting_changes_nothing_about_learning() -> None:
    one, twin = learner(), learner()
    for _ in prequential(one, X, Y, batch_size=10):
        pass
    twin.learn_stream(X, Y, batch_size=10)
    for a, b in zip(one.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_kind_of_stream_and_label() -> None:
    names = np.array([f"digit {label}" for label in Y])
    batches = [
        Batch(torch.from_numpy(X[i : i + 10]), torch.from_numpy(Y[i : i + 10]))
        for i in range(0, 150, 10)
    ]
    weighted = [(x, int(y), 1.0) for x, y in zip(X, Y, strict=True)]
    accuracies = set()
    for source, labels in ((X, Y), (X, names), (batches, None), (weighted, None)):
        *_, last = prequential(learner(), source, labels, batch_size=10)
        accuracies.add(last.accuracy)
    assert len(accuracies) == 1


def as_river(learner: Learner) -> Any:
    """A learner with the methods that river calls."""
    base = pytest.importorskip("river.base", reason="river is not installed")

    class AsRiver(base.Classifier):
        began = False

        def predict_one(self, x: dict[int, float]) -> Hashable:
            if not self.began:
                return "nothing yet"  # river leaves out what is predicted as None
            return learner.predict(np.array([list(x.values())])).tolist()[0]

        def learn_one(self, x: dict[int, float], y: int) -> None:
            learner.learn(np.array([list(x.values())]), [y])
            self.began = True

    return AsRiver()


def by_river(model: Any, metric: Any, labels: Sequence[int]) -> Any:
    river = pytest.importorskip("river.evaluate", reason="river is not installed")
    stream = ((dict(enumerate(x)), int(y)) for x, y in zip(X, labels, strict=True))
    return river.progressive_val_score(stream, model, metric)


def test_agrees_with_progressive_val_score_of_river() -> None:
    metrics = pytest.importorskip("river.metrics", reason="river is not installed")
    *_, last = prequential(learner(), X, Y)
    assert last.examples == 150
    several = metrics.Accuracy() + metrics.CohenKappa() + metrics.MacroRecall()
    accuracy, kappa, recall = (one.get() for one in by_river(as_river(learner()), several, Y))
    assert last.accuracy == pytest.approx(accuracy, abs=1e-12)
    assert last.kappa == pytest.approx(kappa, abs=1e-12)
    labels = len(last.recall) + 1  # river counts 'nothing yet' as a label too
    assert sum(last.recall.values()) / labels == pytest.approx(recall, abs=1e-12)


def test_baselines_are_those_of_river() -> None:
    dummy = pytest.importorskip("river.dummy", reason="river is not installed")
    metrics = pytest.importorskip("river.metrics", reason="river is not installed")
    calm = np.sort(Y)  # long runs of one label, where repeating the last one is strong
    *_, last = prequential(learner(), X, calm)
    for name, model in (
        ("majority", dummy.PriorClassifier()),
        ("no_change", dummy.NoChangeClassifier()),
    ):
        counted = by_river(model, metrics.Accuracy(), calm)
        # river does not count the first example, for which its baselines predict nothing
        assert last.baselines[name] * 150 == pytest.approx(counted.get() * 149)
        assert last.regret[name] == round((last.baselines[name] - last.accuracy) * 150)


def test_estimators_of_scikit_learn() -> None:
    mine = ReplayClassifier(random_state=0, steps_per_batch=1)
    *_, last = prequential(mine, X, Y, batch_size=10)
    assert last.accuracy > last.baselines["majority"]
    with pytest.raises(ValueError, match="classes"):
        list(prequential(SGDClassifier(), X, Y, batch_size=10))
    linear = SGDClassifier(random_state=0).partial_fit(X[:1], Y[:1], classes=np.unique(Y))
    *_, last = prequential(linear, X[1:], Y[1:], batch_size=10)
    assert last.examples == 149


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InputError, match="batch_size=0"):
        prequential(learner(), X, Y, batch_size=0)
    with pytest.raises(InputError, match="fading=1"):
        prequential(learner(), X, Y, fading=1.0)
    with pytest.raises(InputError, match="150 inputs but 3 labels"):
        prequential(learner(), X, Y[:3])
    with pytest.raises(InputError, match="2 labels but 1 predictions"):
        Score().update([1, 2], [1])
    one = learner()
    with pytest.raises(InputError, match="NaN"):
        list(prequential(one, np.full((3, 64), np.nan), [0, 1, 2]))
    assert one.batches_seen == 0
