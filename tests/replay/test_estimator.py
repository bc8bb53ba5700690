"""The scikit-learn way: its own checks, then what a stream asks for."""

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from proxreplay import Derpp, Lode, ReplayClassifier
from proxreplay.errors import InputError
from proxreplay.options import AveragingOptions
from proxreplay.replay.estimator import Standardised

# One check is exempt. Some skip themselves where this runs: without the environment variable
# SCIPY_ARRAY_API, or without pandas.
EXEMPT = {
    "check_sample_weight_equivalence_on_dense_data": "it learns by batches of 10 examples: one of "
    "weight 2 takes one place in its batch, the same example twice takes two",
}


# Two epochs are as true as five, and quicker.
@parametrize_with_checks(
    [ReplayClassifier(n_epochs=2)], expected_failed_checks=lambda estimator: EXEMPT
)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


BLOBS = make_blobs(n_samples=200, centers=4, cluster_std=1.0, center_box=(-12, 12), random_state=3)


def test_a_stream_of_classes_is_learned_without_naming_them() -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0)
    for label in range(4):
        classifier.partial_fit(X[y == label], y[y == label])
        assert classifier.classes_.tolist() == list(range(label + 1))
    assert classifier.score(X, y) > 0.95


def test_lpr_and_replay_on_digits_in_order_of_class() -> None:
    X, y = load_digits(return_X_y=True)
    order = np.argsort(y % 5, kind="stable")  # classes arrive two at a time
    replay = ReplayClassifier(random_state=0, capacity=200).partial_fit(X[order], y[order])
    assert replay.score(X, y) > 0.8


def test_labels_of_any_kind_come_back() -> None:
    X, y = BLOBS
    for names in (
        np.array(["d", "c", "b", "a"]),
        np.array([-3, 7, 0, 100]),
        np.array([4.0, 1.0, 2.0, 3.0]),
    ):
        classifier = ReplayClassifier(random_state=0, n_epochs=3).fit(X, names[y])
        assert classifier.classes_.tolist() == sorted(names.tolist())
        assert classifier.predict(X).dtype == names.dtype
        assert classifier.score(X, names[y]) > 0.95
        most_probable = classifier.classes_[classifier.predict_proba(X).argmax(axis=1)]
        assert (most_probable == classifier.predict(X)).all()


def test_named_classes_fix_the_columns() -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0)
    classifier.partial_fit(X[y == 2], y[y == 2], classes=[0, 1, 2, 3])
    assert classifier.predict_proba(X[:5]).tolist() == [[0, 0, 1, 0]] * 5
    with pytest.raises(InputError, match=r"labels \[9\] are not in classes=\[0, 1, 2, 3\]"):
        classifier.partial_fit(X[:2], [9, 2])
    with pytest.raises(InputError, match="with the first call"):
        classifier.partial_fit(X[:2], [1, 2], classes=[0, 1, 2])
    classifier.partial_fit(X[:2], [1, 2], classes=[3, 2, 1, 0])


def test_fit_forgets_and_partial_fit_goes_on() -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0, n_epochs=2).fit(X, y)
    once = classifier.predict_proba(X)
    assert np.array_equal(classifier.fit(X, y).predict_proba(X), once)
    classifier.partial_fit(X + 30, y + 4)
    assert classifier.classes_.tolist() == list(range(8))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": Lode(rho=0.05)},
        {"loss": Derpp()},
        {"omega_0": 0.0},
        {"averaging": AveragingOptions(0.9)},
        {"hidden": (16, 16)},
    ],
    ids=["lode", "derpp", "without lpr", "averaging", "two layers"],
)
def test_options(options: dict[str, Any]) -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0, n_epochs=5, **options)
    assert clone(classifier).get_params() == classifier.get_params()
    assert classifier.fit(X, y).score(X, y) > 0.9


def test_pickled_it_goes_on_exactly() -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0, loss=Derpp(), averaging=AveragingOptions(0.9))
    classifier.partial_fit(X[:100], y[:100])
    again = pickle.loads(pickle.dumps(classifier))
    for one in (classifier, again):
        one.partial_fit(X[100:], y[100:])
    assert np.array_equal(classifier.predict_proba(X), again.predict_proba(X))


def test_in_a_pipeline_and_cross_validation() -> None:
    X, y = BLOBS
    pipeline = make_pipeline(StandardScaler(), ReplayClassifier(random_state=0, n_epochs=2))
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.9


def test_the_global_generators_are_left_alone() -> None:
    X, y = BLOBS
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    ReplayClassifier(random_state=0, n_epochs=1).fit(X, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_scaler_has_the_statistics_of_everything() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(3.0, 5.0, (50, 4)) + 1e6
    X[:, 2] = 7.0
    scaler = StandardScaler()
    for part in np.split(X, [1, 10, 11, 40]):
        scaler.partial_fit(part)
    scaled = Standardised(scaler)(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(scaled.std(axis=0), [1, 1, 0, 1], atol=1e-9)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-6)


def test_options_are_checked_when_fitting() -> None:
    with pytest.raises(InputError, match="n_epochs=0"):
        ReplayClassifier(n_epochs=0).fit(*BLOBS)


def test_parameters_set_between_two_calls_take_effect() -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(averaging=False, random_state=0).partial_fit(X[:50], y[:50])
    before = classifier.predict_proba(X)
    classifier.set_params(lr=0.0, steps_per_batch=1, batch_size=50).partial_fit(X[50:], y[50:])
    assert classifier.learner_.batches_learned == 5 + 3
    after = ReplayClassifier(averaging=False, random_state=0).partial_fit(X[:50], y[:50])
    after.scaler_.partial_fit(X[50:])
    np.testing.assert_array_equal(classifier.predict_proba(X), after.predict_proba(X))
    assert not np.array_equal(before, after.predict_proba(X))  # by the scaler alone
    with pytest.raises(InputError, match="steps_per_batch=0"):
        classifier.set_params(steps_per_batch=0).partial_fit(X, y)


@pytest.mark.parametrize(
    "changed",
    [{"hidden": (5,)}, {"loss": Lode()}, {"omega_0": 0.5}, {"capacity": 7}, {"random_state": 1}],
    ids=str,
)
def test_parameters_that_cannot_change_are_refused(changed: dict[str, Any]) -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0).partial_fit(X[:20], y[:20])
    classifier.set_params(**changed)
    with pytest.raises(InputError, match=f"{next(iter(changed))}=.*learning began with"):
        classifier.partial_fit(X[20:], y[20:])
    classifier.fit(X[:20], y[:20])


def test_a_loss_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="loss is 'foo'; give a function"):
        ReplayClassifier(loss="foo").fit(*BLOBS)


def test_importing_proxreplay_imports_no_scikit_learn() -> None:
    code = (
        "import sys, proxreplay; print('sklearn' in sys.modules); "
        "proxreplay.ReplayClassifier; print('sklearn' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert output.stdout.split() == ["False", "True"]


def test_weight_zero_is_absence() -> None:
    X, y = BLOBS
    weight = np.ones(len(y))
    weight[::3] = 0
    kept = weight > 0
    for way in ("fit", "partial_fit"):
        one, two = (
            ReplayClassifier(random_state=0, n_epochs=1),
            ReplayClassifier(random_state=0, n_epochs=1),
        )
        getattr(one, way)(X, y, sample_weight=weight)
        getattr(two, way)(X[kept], y[kept])
        assert np.allclose(one.predict_proba(X), two.predict_proba(X))


def test_class_weights_are_weights_of_examples() -> None:
    X, y = BLOBS
    one = ReplayClassifier(random_state=0, n_epochs=1, class_weight={1: 5.0, 2: 0.5})
    two = ReplayClassifier(random_state=0, n_epochs=1)
    one.fit(X, y)
    two.fit(X, y, sample_weight=np.where(y == 1, 5.0, np.where(y == 2, 0.5, 1.0)))
    assert np.array_equal(one.predict_proba(X), two.predict_proba(X))
    stream = ReplayClassifier(random_state=0, class_weight={3: 2.0, 17: 1.0})
    for label in range(4):  # not every class is in every part
        stream.partial_fit(X[y == label], y[y == label])
    balanced = ReplayClassifier(random_state=0, class_weight="balanced", n_epochs=1).fit(X, y)
    plain = ReplayClassifier(random_state=0, n_epochs=1).fit(X, y)  # classes are equally frequent
    assert np.allclose(balanced.predict_proba(X), plain.predict_proba(X))


@pytest.mark.parametrize(
    ("options", "weight", "message"),
    [
        ({}, [-1.0] * 200, r"sample_weight -1.0 of example 0"),
        ({}, [np.nan] * 200, r"sample_weight nan"),
        ({}, [1.0], r"sample_weight of shape \[1\] for 200 examples"),
        ({}, [0.0] * 200, "the weights of all examples are zero"),
        ({"class_weight": "even"}, None, "class_weight"),
        ({"class_weight": {1: -2.0}}, None, r"class_weight\[1\]=-2.0"),
        ({"class_weight": [1.0, 2.0]}, None, "give a dict by label"),
    ],
)
def test_bad_weights_are_refused(options: Any, weight: Any, message: str) -> None:
    X, y = BLOBS
    classifier = ReplayClassifier(random_state=0, **options)
    with pytest.raises(InputError, match=message):
        classifier.fit(X, y, sample_weight=weight)
    assert not hasattr(classifier, "learner_")


def test_balanced_needs_all_labels_at_once() -> None:
    X, y = BLOBS
    with pytest.raises(InputError, match="needs all labels at once"):
        ReplayClassifier(class_weight="balanced").partial_fit(X, y)
