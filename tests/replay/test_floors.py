"""Floors against brute force and scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.experiments.build import build_stream
from proxreplay.experiments.configure import configure, declared, refuse_without_effect
from proxreplay.experiments.run import run
from proxreplay.models.random_features import RandomFeatures
from proxreplay.options import FloorOptions
from proxreplay.replay import ClassBalancedMemory, UnlimitedMemory
from proxreplay.replay.class_statistics import ClassCounts, ClassMeans, SharedCovariance
from proxreplay.replay.floors import Floor

SHAPE = (6,)


def examples(n: int = 90, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Unequal classes; none is missing."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.arange(1.0, classes + 1), n, replacement=True, generator=rng)
    y[:classes] = torch.arange(classes)
    centres = torch.randn(classes, *SHAPE, generator=rng)
    return centres[y] + torch.randn(n, *SHAPE, generator=rng), y


def taught(statistic, memory, x, y, size: int = 7) -> Floor:
    floor = Floor(statistic, memory, SHAPE)
    for start in range(0, len(x), size):
        floor.learn(x[start : start + size], y[start : start + size])
        floor.predict(x[:2])  # looking at it on the way changes nothing
    return floor


def test_majority_is_the_most_frequent_class() -> None:
    x, y = examples()
    floor = taught(ClassCounts(), ClassBalancedMemory(10), x, y)
    assert set(floor.predict(x).tolist()) == {int(torch.bincount(y).argmax())}
    expected = (torch.bincount(y) / len(y)).float()
    torch.testing.assert_close(floor.predict_proba(x)[0], expected)


def test_nearest_mean_is_that_of_scikit_learn_on_the_memory() -> None:
    x, y = examples()
    memory = ClassBalancedMemory(20)
    floor = taught(ClassMeans(), memory, x, y)
    (kept,) = memory.batches(1000)
    assert len(kept) == 20
    theirs = NearestCentroid().fit(kept.inputs.numpy(), kept.labels.numpy())
    assert floor.predict(x).tolist() == theirs.predict(x.numpy()).tolist()


@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
def test_streaming_lda_is_that_of_scikit_learn(shrinkage: float) -> None:
    x, y = examples()
    statistic = SharedCovariance(FloorOptions(filters=1, shrinkage=shrinkage))
    floor = taught(statistic, ClassBalancedMemory(5), x, y)
    z = floor.model[0](x).double().numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(z, y.numpy())
    weight, bias = (part.numpy() for part in statistic.rows())
    intercept = theirs.intercept_ - np.log(theirs.priors_)  # ours has equal priors
    np.testing.assert_allclose(centred(weight), centred(theirs.coef_), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(centred(bias), centred(intercept), rtol=1e-7, atol=1e-9)
    equal = z @ theirs.coef_.T + intercept
    assert floor.predict(x).tolist() == equal.argmax(axis=1).tolist()


def centred(rows: np.ndarray) -> np.ndarray:
    """Without what all classes have in common, which decides nothing."""
    return rows - rows.mean(axis=0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), size=st.integers(1, 40), classes=st.integers(1, 5))
def test_running_moments_are_those_of_all_examples(seed: int, size: int, classes: int) -> None:
    x, y = examples(60, classes, seed)
    running, at_once = SharedCovariance(), torch.zeros(6, 6, dtype=torch.float64)
    for start in range(0, 60, size):
        running.observe_(x[start : start + size], y[start : start + size])
    for label in range(classes):
        own = x[y == label].double()
        torch.testing.assert_close(running.means[label], own.mean(dim=0))
        at_once += (own - own.mean(dim=0)).T @ (own - own.mean(dim=0))
    torch.testing.assert_close(running.scatter, at_once)


def small_lda() -> SharedCovariance:
    return SharedCovariance(FloorOptions(filters=1))


@pytest.mark.parametrize("statistic", [ClassCounts, ClassMeans, small_lda])
def test_a_saved_floor_goes_on_as_if_nothing_had_happened(statistic) -> None:
    x, y = examples()
    torch.manual_seed(0)  # of random features
    whole = taught(statistic(), ClassBalancedMemory(20), x, y)
    torch.manual_seed(0)
    half = taught(statistic(), ClassBalancedMemory(20), x[:42], y[:42])
    again = Floor(statistic(), ClassBalancedMemory(20), SHAPE)
    again.load_state_dict(half.state_dict())
    for start in range(42, 90, 7):
        again.learn(x[start : start + 7], y[start : start + 7])
    assert torch.equal(again.logits(x), whole.logits(x))


def test_what_is_only_remembered_is_not_counted() -> None:
    x, y = examples()
    floor = Floor(ClassCounts(), UnlimitedMemory(), SHAPE)
    floor.learn(Batch(x[:10], y[:10]))
    floor.learn(Batch(x[10:15], y[10:15], train=False))
    assert (int(floor.statistic.counts.sum()), len(floor.memory)) == (10, 15)


def test_random_features_of_images_see_no_constant() -> None:
    features = RandomFeatures((3, 12, 12), filters=8)
    image = torch.randn(2, 3, 12, 12)
    assert features(image).shape == (2, 128)
    inner = features(torch.full((1, 3, 12, 12), 5.0)).view(8, 4, 4)[:, 1:3, 1:3]
    torch.testing.assert_close(inner, torch.zeros_like(inner), atol=1e-4, rtol=0)


def test_drift_of_a_floor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ncm trains no network that could drift"):
        run(configure("split-digits", "ncm", {"diagnostics.drift": "paper"}), tmp_path / "run")


def test_settings_of_training_are_refused_for_a_floor() -> None:
    config = configure("split-digits", "slda", {"floor.shrinkage": 0.2})
    refuse_without_effect(["floor.shrinkage", "capacity"], [config])
    for key in ("lr", "steps_per_batch", "network", "lpr.omega_0"):
        with pytest.raises(InputError, match=f"{key} has no effect on slda"):
            refuse_without_effect([key], [config])


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_shrinkage_that_is_no_share_is_refused(value: float) -> None:
    with pytest.raises(InputError, match=rf"floor\.shrinkage={value}"):
        FloorOptions(shrinkage=value)


def test_the_ceiling_sees_the_same_examples_in_random_order() -> None:
    streams = []
    for method in ("er", "iid"):
        config = configure("split-digits", method, {"stream.first": 3})
        benchmark = declared(config)
        streams.append(build_stream(config, benchmark, benchmark.load(None)))
    ours, mixed = (torch.cat([t.train.rows for t in stream.tasks]) for stream in streams)
    assert len(streams[0]) == len(streams[1])
    assert torch.equal(ours.sort().values, mixed.sort().values)
    first = {stream.tasks[0].train.labels.unique().numel() for stream in streams}
    assert first == {2, 6}
    for a, b in zip(streams[0].tasks, streams[1].tasks, strict=True):
        assert torch.equal(a.test.rows, b.test.rows)
