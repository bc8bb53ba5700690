"""Schedules of alpha against the formulas written out."""

import pytest
import torch
from torch import nn

from proxreplay.errors import InputError
from proxreplay.proximal import (
    AdaptiveAlpha,
    ConstantAlpha,
    DecayingAlpha,
    StreamProgress,
    TaskProgress,
)
from tests.reference import random

LINEAR, CONVOLUTION = nn.Linear(6, 2), nn.Conv2d(1, 1, 3)


def test_stream_progress_stops_at_one():
    assert [StreamProgress(4)(step) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]


def test_task_progress_starts_again_at_every_task():
    assert [TaskProgress(2)(step) for step in range(5)] == [0, 0.5, 0, 0.5, 0]


def test_tasks_may_differ_in_length_and_the_last_one_repeats():
    progress = TaskProgress((2, 4))
    assert [progress(step) for step in range(8)] == [0, 0.5, 0, 0.25, 0.5, 0.75, 0, 0.25]


def test_constant_alpha_never_changes():
    alpha = ConstantAlpha(0.01)(LINEAR, random(1, 3, 6), 99)
    assert torch.equal(alpha, torch.full((1, 3), 0.01, dtype=torch.float64))


def test_decaying_alpha_goes_from_one_to_its_base():
    alpha = DecayingAlpha(1e-4, StreamProgress(10))
    values = [alpha(LINEAR, random(1, 1, 6), step).item() for step in (0, 5, 10)]
    assert values == pytest.approx([1.0, 1e-2, 1e-4])


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_adaptive_alpha_of_a_linear_layer(progress):
    R = random(1, 3, 6) + 0.7
    alpha = AdaptiveAlpha(lambda observed: progress)(LINEAR, R, 5)
    for row, value in zip(R[0], alpha[0], strict=True):
        outer = torch.outer(row, row)
        mean, variance = outer.mean(), ((row - row.mean()) ** 2).sum() / 5
        torch.testing.assert_close(value, (mean**2 + variance) ** progress)


def test_adaptive_alpha_knows_how_many_steps_were_made():
    alpha = AdaptiveAlpha(StreamProgress(4))
    R = random(1, 1, 6)
    assert alpha(LINEAR, R, 0).item() == 1
    torch.testing.assert_close(alpha(LINEAR, R, 2) ** 2, AdaptiveAlpha()(LINEAR, R, 2))


def test_adaptive_alpha_leaves_convolutions_to_their_base():
    alpha = AdaptiveAlpha(StreamProgress(2), base=1e-4)(CONVOLUTION, random(2, 5, 9), 1)
    torch.testing.assert_close(alpha, torch.full((2, 5), 1e-2).double())


@pytest.mark.parametrize("d", [1, 4])
def test_adaptive_alpha_of_dead_units_is_not_zero(d):
    alpha = AdaptiveAlpha()(LINEAR, torch.zeros(1, 2, d), 3)
    assert (alpha > 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: StreamProgress(0),
        lambda: TaskProgress(0),
        lambda: TaskProgress(()),
        lambda: TaskProgress((3, 0)),
        lambda: ConstantAlpha(0.0),
        lambda: ConstantAlpha(float("nan")),
        lambda: ConstantAlpha(float("inf")),
        lambda: DecayingAlpha(0.0, StreamProgress(1)),
        lambda: DecayingAlpha(2.0, StreamProgress(1)),
        lambda: AdaptiveAlpha(base=0.0),
    ],
    ids=["stream", "task", "no tasks", "one task", "zero", "nan", "inf", "base 0", "base 2", "aop"],
)
def test_values_are_checked(make):
    with pytest.raises(InputError, match="give"):
        make()
