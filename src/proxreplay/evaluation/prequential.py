"""Prequential evaluation: every batch is first predicted, then learned (Gama et al., 2013).

Nothing is held out; the stream itself is the test. Numbers are over all examples so far, in the
order in which they came. Everything a prediction may use, the learner's and the baselines' alike,
is what was known before its batch.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.options import PREQUENTIAL_FADING, below, count
from proxreplay.replay.batching import stream_batches
from proxreplay.replay.inputs import as_batch_of_one
from proxreplay.replay.labels import is_one_label, plain
from proxreplay.replay.parts import Learned

MAJORITY, NO_CHANGE = "majority", "no_change"
SO_FAR = ("accuracy", "fading", "kappa", "recall", "baselines", "regret")  # of `Score` in a `Step`


class Score:
    """Running numbers over labels and what was predicted for them.

    Args:
        fading: ``alpha``: what an example counts for after each later one; the horizon is
            ``1 / (1 - alpha)`` examples.

    >>> score = Score()
    >>> score.update(["a", "b", "b"], ["a", "a", "b"])
    >>> round(score.accuracy, 3), score.recall
    (0.667, {'a': 1.0, 'b': 0.5})
    """

    def __init__(self, fading: float = PREQUENTIAL_FADING) -> None:
        below(1, fading=fading)
        self.fading_factor = fading
        self.hits = 0
        self._faded = 0.0  # sum of alpha^age over the examples that were hit
        self._weight = 0.0  # the same over all
        self._true: Counter[Hashable] = Counter()
        self._predicted: Counter[Hashable] = Counter()
        self._recalled: Counter[Hashable] = Counter()
        self._baseline_hits = {MAJORITY: 0, NO_CHANGE: 0}
        self._majority: Hashable = None
        self._last: Hashable = None

    @property
    def examples(self) -> int:
        """How many there were."""
        return self._true.total()

    def update(self, labels: Sequence[Hashable], predictions: Sequence[Hashable]) -> None:
        """Take in a batch; None as a prediction is always wrong."""
        if len(labels) != len(predictions):
            raise InputError(
                f"{len(labels)} labels but {len(predictions)} predictions; give one each."
            )
        for label, prediction in zip(labels, predictions, strict=True):
            hit = prediction is not None and label == prediction
            self.hits += hit
            self._faded = hit + self.fading_factor * self._faded
            self._weight = 1 + self.fading_factor * self._weight
            self._predicted[prediction] += 1
            self._recalled[label] += hit
            self._baseline_hits[MAJORITY] += label == self._majority
            self._baseline_hits[NO_CHANGE] += label == self._last
            self._true[label] += 1
        if len(labels):
            self._majority = max(self._true, key=self._true.__getitem__)  # the first to have come
            self._last = labels[-1]

    @property
    def accuracy(self) -> float:
        """``sum_i hit_i / n``; NaN before the first example."""
        return _share(self.hits, self.examples)

    @property
    def fading(self) -> float:
        """``sum_i alpha^(n-i) hit_i / sum_i alpha^(n-i)``: the accuracy of late."""
        return _share(self._faded, self._weight)

    @property
    def kappa(self) -> float:
        """Cohen's ``(p - p_e) / (1 - p_e)`` with ``p_e = sum_c true_c predicted_c / n^2``.

        0 is what guessing with the same frequencies gets; 0 also where ``p_e = 1``.
        """
        n = self.examples
        expected = _share(sum(c * self._predicted[k] for k, c in self._true.items()), n * n)
        return 0.0 if expected == 1 else (self.accuracy - expected) / (1 - expected)

    @property
    def recall(self) -> dict[Hashable, float]:
        """By label, the share of its examples that were hit."""
        return {label: self._recalled[label] / n for label, n in self._true.items()}

    @property
    def baselines(self) -> dict[str, float]:
        """Accuracy of predicting the most frequent label so far, and of repeating the last one."""
        return {name: _share(hits, self.examples) for name, hits in self._baseline_hits.items()}

    @property
    def regret(self) -> dict[str, int]:
        """How many more errors were made than each of the `baselines` made; below 0 is better."""
        return {name: hits - self.hits for name, hits in self._baseline_hits.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values; labels have to be integers or strings."""
        return {
            "fading": self.fading_factor,
            "faded": (self._faded, self._weight),
            "counts": [
                [label, n, self._predicted[label], self._recalled[label]]
                for label, n in self._true.items()
            ],
            "others": [
                [label, n] for label, n in self._predicted.items() if label not in self._true
            ],
            "baselines": dict(self._baseline_hits),
            "majority": self._majority,
            "last": self._last,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Score":
        """A score that goes on where `state_dict` was taken."""
        score = cls(state["fading"])
        score._faded, score._weight = state["faded"]
        for label, n, predicted, recalled in state["counts"]:
            score._true[label] = n
            score._predicted[label] = predicted
            score._recalled[label] = recalled
        score._predicted.update(dict(state["others"]))
        score.hits = sum(score._recalled.values())
        score._baseline_hits = dict(state["baselines"])
        score._majority, score._last = state["majority"], state["last"]
        return score

    def record(self) -> dict[str, Any]:
        """What goes into the records after a batch."""
        return {
            "kind": "prequential",
            "examples": self.examples,
            "accuracy": self.accuracy,
            "fading": self.fading,
            "kappa": self.kappa,
            "regret": self.regret,
        }


@dataclass(frozen=True)
class Step:
    """A batch that was predicted and then learned; numbers are over all examples so far.

    Args:
        number: of the batch, from 0.
        examples: how many there were.
        labels: of this batch.
        predictions: what was predicted for it; None where nothing was known yet.
        learned: what learning it gave: `Learned` for a `Learner`.
        accuracy: see `Score.accuracy`; so for all others.
        fading: the accuracy of late.
        kappa: Cohen's kappa.
        recall: by label.
        baselines: accuracy of ``majority`` and ``no_change``.
        regret: how many more errors than each of them; below 0 is better.
    """

    number: int
    examples: int
    labels: tuple[Hashable, ...]
    predictions: tuple[Hashable, ...]
    learned: Learned | Any
    accuracy: float
    fading: float
    kappa: float
    recall: Mapping[Hashable, float]
    baselines: Mapping[str, float]
    regret: Mapping[str, int]


def prequential(
    learner: Any,
    source: Any,
    y: Any = None,
    *,
    batch_size: int = 1,
    fading: float = PREQUENTIAL_FADING,
) -> Iterator[Step]:
    """Predict every batch of a stream, then learn it.

        for step in prequential(learner, X, y):
            print(step.examples, step.accuracy, step.regret["no_change"])

    Args:
        learner: a `Learner`, or anything with ``predict`` and ``partial_fit``.
        source: as for `Learner.learn_stream`.
        y: labels, where ``source`` is the inputs.
        batch_size: examples per batch, where the source holds single examples.
        fading: see `Score`.
    """
    count(batch_size=batch_size)
    return _steps(learner, stream_batches(source, y, batch_size), Score(fading))


def _steps(learner: Any, batches: Any, score: Score) -> Iterator[Step]:
    for number, (x, y, weight) in enumerate(batches):
        inputs, labels = (x.inputs, x.labels) if isinstance(x, Batch) else (x, y)
        if is_one_label(labels):
            inputs, labels = as_batch_of_one(inputs), [labels]
        truth = _as_list(labels)
        predictions = predictions_of(learner, inputs, len(truth), began=number > 0)
        learned = _learn(learner, x if isinstance(x, Batch) else inputs, labels, weight)
        score.update(truth, predictions)
        so_far: dict[str, Any] = {name: getattr(score, name) for name in SO_FAR}
        yield Step(number, score.examples, tuple(truth), tuple(predictions), learned, **so_far)


def predictions_of(learner: Any, inputs: Any, n: int, *, began: bool) -> list[Hashable]:
    """What a learner predicts for ``n`` inputs; None for all while it knows no label at all.

    If it ``began``, it has learned a batch and has to predict.
    """
    try:
        return _as_list(learner.predict(inputs))
    except (ValueError, AttributeError):  # InputError and scikit-learn's NotFittedError are both
        if began:
            raise
        return [None] * n


def _learn(learner: Any, x: Any, y: Any, weight: Any) -> Any:
    weights = {} if weight is None else {"sample_weight": weight}
    if not hasattr(learner, "learn"):
        return learner.partial_fit(x, y, **weights)
    if isinstance(x, Batch):
        return learner.learn(x)
    return learner.learn(x, y, **weights)


def _as_list(values: Any) -> list[Hashable]:
    values = plain(values)
    listed: list[Hashable] = values.tolist() if hasattr(values, "tolist") else list(values)
    return listed


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
