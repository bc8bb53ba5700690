"""The scikit-learn way: ``partial_fit`` and ``predict`` on a table of numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from proxreplay.errors import InputError
from proxreplay.models.networks import mlp
from proxreplay.options import (
    AveragingOptions,
    LearnerOptions,
    LPROptions,
    RefreshOptions,
    at_least,
    count,
    one_of,
)
from proxreplay.proximal.rules.lpr import LPR
from proxreplay.replay.learner import Learner
from proxreplay.replay.losses import Loss, er
from proxreplay.replay.memory import ClassBalancedMemory
from proxreplay.replay.weights import as_weights
from proxreplay.seeding import seeded

LIVE = ("lr", "steps_per_batch", "replay_batch", "refresh_every", "refresh_samples")
AT_ANY_TIME = ("batch_size", "n_epochs")  # read when they are needed


class ReplayClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A multi-layer perceptron that learns from a stream with replay and LPR.

    Inputs are standardised with the mean and standard deviation of everything seen so far. New
    classes may arrive at any time: `partial_fit` needs no ``classes``. If they are given, with the
    first call, they fix the columns of `predict_proba`, and other labels are an error. Between two
    calls of `partial_fit`, ``set_params`` may change ``lr`` and how many examples, steps and
    batches there are; everything else is refused until `fit`.

    Args:
        hidden: width of each hidden layer.
        loss: the replay loss, such as `proxreplay.er` or ``Lode(rho=0.05)``.
        omega_0: the paper's strength of LPR; None for one that sets itself, 0 for replay alone.
        beta: see `proxreplay.LPR`; without effect on an MLP.
        capacity: how many examples are remembered.
        averaging: whether an average of the weights predicts too, or how:
            ``AveragingOptions(0.99)``.
        lr: learning rate of SGD.
        batch_size: examples per stream batch.
        steps_per_batch: SGD steps per stream batch.
        replay_batch: examples replayed per step.
        refresh_every: stream batches between refreshes of LPR; only the default may be stretched
            (`proxreplay.Learner`).
        refresh_samples: remembered examples per refresh; None for all.
        n_epochs: how often `fit` goes through the data, newly shuffled each time. `partial_fit`
            goes through it once, in the order given.
        class_weight: by label, what the weights of its examples are multiplied with; or
            ``"balanced"`` for ``n / (classes * examples of the class)``, in `fit` only.
        random_state: an int makes everything repeatable.

    >>> classifier = ReplayClassifier(random_state=0)
    >>> classifier = classifier.partial_fit([[0.0, 1.0], [0.2, 1.1]], ["a", "a"])
    >>> classifier = classifier.partial_fit([[5.0, 3.0], [5.2, 2.9]], ["b", "b"])
    >>> classifier.classes_.tolist()
    ['a', 'b']
    """

    def __init__(
        self,
        hidden: Sequence[int] = (100,),
        *,
        loss: Loss = er,
        omega_0: float | None = LPROptions.omega_0,
        beta: float = LPROptions.beta,
        capacity: int = LearnerOptions.capacity,
        averaging: AveragingOptions | bool = True,
        lr: float = LearnerOptions.lr,
        batch_size: int = LearnerOptions.batch_size,
        steps_per_batch: int = LearnerOptions.steps_per_batch,
        replay_batch: int = LearnerOptions.replay_batch,
        refresh_every: int | None = RefreshOptions().interval,
        refresh_samples: int | None = LearnerOptions.refresh_samples,
        n_epochs: int = 5,
        class_weight: Mapping[Any, float] | str | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden = hidden
        self.loss = loss
        self.omega_0 = omega_0
        self.beta = beta
        self.capacity = capacity
        self.averaging = averaging
        self.lr = lr
        self.batch_size = batch_size
        self.steps_per_batch = steps_per_batch
        self.replay_batch = replay_batch
        self.refresh_every = refresh_every
        self.refresh_samples = refresh_samples
        self.n_epochs = n_epochs
        self.class_weight = class_weight
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Forget everything and learn from ``X [n, features]``, ``y [n]``, shuffled each epoch.

        ``sample_weight [n]`` is how much each example counts; one of weight 0 is left out.
        """
        count(n_epochs=self.n_epochs)
        inputs, labels, weights = self._examples(X, y, sample_weight, first=True)
        rng = check_random_state(self.random_state)
        self._start(inputs.shape[1], unique_labels(labels), int(rng.randint(2**31)))
        self.scaler_.partial_fit(inputs, sample_weight=weights)
        for _ in range(self.n_epochs):
            order = rng.permutation(len(labels))
            self._learn(inputs[order], labels[order], None if weights is None else weights[order])
        return self

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Learn from the next part of the stream: ``X [n, features]`` and ``y [n]``, in order."""
        first = not hasattr(self, "learner_")
        if not first:
            self._take_over_changes()
        if isinstance(self.class_weight, str):
            raise InputError(
                f"ReplayClassifier: class_weight={self.class_weight!r} needs all labels at once; "
                "give weights by label, or use fit."
            )
        inputs, labels, weights = self._examples(X, y, sample_weight, first=first)
        seen = unique_labels(labels)
        known = self._agreed_classes(seen, classes, first)
        if first:
            rng = check_random_state(self.random_state)
            self._start(inputs.shape[1], known, int(rng.randint(2**31)))
            self._fixed_classes = classes is not None
        self.classes_ = known
        self.scaler_.partial_fit(inputs, sample_weight=weights)
        self._learn(inputs, labels, weights)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The probability of every class, ``[n, classes_]``; 0 for those not seen yet."""
        check_is_fitted(self, "learner_")
        inputs = validate_data(self, X, reset=False, dtype=np.float64)
        seen = self.learner_.predict_proba(inputs).numpy()[:, : len(self._arrived)]
        result = np.zeros((len(inputs), len(self.classes_)))
        result[:, np.searchsorted(self.classes_, np.array(list(self._arrived)))] = seen
        return result

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of every row, ``[n]``."""
        check_is_fitted(self, "learner_")
        return np.asarray(self.classes_[self.predict_proba(X).argmax(axis=1)])

    def _examples(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, *, first: bool
    ) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.float64] | None]:
        """The examples that count, with their weights: those given, times those of the classes."""
        inputs, labels = validate_data(self, X, y, reset=first, dtype=np.float64, y_numeric=False)
        check_classification_targets(labels)
        labels = column_or_1d(labels, warn=True)
        given = as_weights(sample_weight, len(labels), torch.float64)
        weights = None if given is None else given.numpy()
        if self.class_weight is not None:
            classes = _weights_by_class(self.class_weight, labels)
            weights = classes if weights is None else classes * weights
        if weights is None:
            return inputs, labels, None
        counts = weights > 0
        if not counts.any():
            raise InputError(
                "ReplayClassifier: the weights of all examples are zero; none is left."
            )
        return inputs[counts], labels[counts], weights[counts]

    def _agreed_classes(self, seen: NDArray[Any], classes: ArrayLike | None, first: bool) -> Any:
        """What ``classes_`` will be; an error if labels and classes contradict each other."""
        given = None if classes is None else unique_labels(classes)
        if first:
            known = seen if given is None else given
            fixed = given is not None
        else:
            known, fixed = self.classes_, self._fixed_classes
            if given is not None and not np.array_equal(given, known):
                raise InputError(
                    f"ReplayClassifier: classes={given.tolist()}, but they are "
                    f"{known.tolist()}; give classes with the first call of partial_fit only."
                )
        if not fixed:
            return unique_labels(known, seen)
        strangers = np.setdiff1d(seen, known)
        if len(strangers):
            raise InputError(
                f"ReplayClassifier: labels {strangers.tolist()} are not in classes="
                f"{known.tolist()}; name all classes, or none, with the first call of partial_fit."
            )
        return known

    def _start(self, features: int, classes: NDArray[Any], seed: int) -> None:
        self.classes_ = classes
        self._fixed_classes = False
        self._began_with = self.get_params(deep=False)
        self._arrived: dict[Any, int] = {}  # label -> output of the head
        self.scaler_ = StandardScaler()
        with seeded(seed, "model"):
            # In float64, so that a prediction does not depend on which others are made with it.
            model = mlp(features, hidden=self.hidden).double()
        self.learner_ = Learner(
            model,
            ClassBalancedMemory(self.capacity),
            None if self.omega_0 == 0 else LPR(model, self.omega_0, self.beta),
            loss=self.loss,
            averaging=AveragingOptions() if self.averaging is True else self.averaging or None,
            lr=self.lr,
            steps_per_batch=self.steps_per_batch,
            replay_batch=self.replay_batch,
            refresh_every=self.refresh_every,
            refresh_samples=self.refresh_samples,
            transform=Standardised(self.scaler_),
            seed=seed,
        )

    def _take_over_changes(self) -> None:
        """Let parameters that were set since take effect, or refuse them."""
        learner, began = self.learner_, self._began_with
        for name, value in self.get_params(deep=False).items():
            if name in AT_ANY_TIME or value is began[name] or np.array_equal(value, began[name]):
                continue
            if name not in LIVE:
                raise InputError(
                    f"ReplayClassifier: {name}={value!r}, but learning began with "
                    f"{began[name]!r}; call fit to start anew, or set it back."
                )
            if name == "lr":
                at_least(0, lr=value)
            else:
                count(**{name: value})
            setattr(learner, name, value)
            began[name] = value
        for group in learner.optimizer.param_groups:
            group["lr"] = learner.lr

    def _learn(
        self, inputs: NDArray[np.float64], labels: NDArray[Any], weights: NDArray[np.float64] | None
    ) -> None:
        names = labels.tolist()
        for name in names:
            self._arrived.setdefault(name, len(self._arrived))
        indices = torch.tensor([self._arrived[name] for name in names])
        self.learner_.learn_stream(
            inputs, indices, batch_size=self.batch_size, sample_weight=weights
        )


def _weights_by_class(
    class_weight: Mapping[Any, float] | str, labels: NDArray[Any]
) -> NDArray[np.float64]:
    """The weight of every example's class; 1 where nothing is said."""
    if isinstance(class_weight, str):
        one_of(("balanced",), class_weight=class_weight)
        return np.asarray(compute_sample_weight(class_weight, labels))
    if not isinstance(class_weight, Mapping):
        raise InputError(f"class_weight={class_weight!r}; give a dict by label, or 'balanced'.")
    at_least(0, **{f"class_weight[{label!r}]": weight for label, weight in class_weight.items()})
    return np.array([float(class_weight.get(label, 1.0)) for label in labels.tolist()])


class Standardised:
    """``(x - mean) / std`` of every feature, by a scaler that goes on learning both."""

    def __init__(self, scaler: StandardScaler) -> None:
        self.scaler = scaler

    def __call__(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Standardised inputs; constant features are only centred."""
        mean, scale = torch.from_numpy(self.scaler.mean_), torch.from_numpy(self.scaler.scale_)
        return (inputs - mean) / scale
