import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.data import ClassIncremental, Stream, Subset, Task
from proxreplay.errors import InputError
from tests.data.data_samples import dataset


def make_stream(sizes=(7, 5), batch_size=3, short_last="buffer_only"):
    data = dataset(per_class=10, classes=2)
    rows = torch.arange(sum(sizes)).split(list(sizes))
    empty = Subset(data.test, torch.arange(0))
    tasks = [Task(f"t{i}", Subset(data.train, r), empty, empty) for i, r in enumerate(rows)]
    return Stream(tasks, batch_size, short_last)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda s: sum(s) <= 20),
    batch_size=st.integers(1, 10),
    short_last=st.sampled_from(["buffer_only", "train", "drop"]),
)
@settings(deadline=None, max_examples=100)
def test_batches_are_consecutive_chunks_of_each_task(sizes, batch_size, short_last):
    expected, first = [], 0
    for task, size in enumerate(sizes):
        rows = list(range(first, first + size))
        first += size
        while rows:
            chunk, rows = rows[:batch_size], rows[batch_size:]
            full = len(chunk) == batch_size
            if full or short_last != "drop":
                expected.append((chunk, task, full or short_last == "train"))
    stream = make_stream(tuple(sizes), batch_size, short_last)
    assert len(stream) == len(expected)
    assert [stream.task_at(p) for p in range(len(stream))] == [task for _, task, _ in expected]
    seen = [(b.inputs.squeeze(1).long().tolist(), b.task, b.train) for b in stream]
    assert seen == expected
    assert stream.trained_batches == sum(train for _, _, train in expected)
    for task in range(len(sizes)):
        came = [row for chunk, t, _ in expected if t == task for row in chunk]
        assert stream.arriving(task).rows.tolist() == came
        last = [p for p, (_, t, _) in enumerate(expected) if t == task][-1:]
        ends = [p for p in range(len(stream)) if stream.task_at(p) == task and stream.ends_task(p)]
        assert ends == last


def test_positions_count_batches_and_survive_a_restore_exactly():
    whole = list(ClassIncremental(3).stream(dataset(), seed=1, batch_size=4))
    assert [b.position for b in whole] == list(range(len(whole)))
    stream = ClassIncremental(3).stream(dataset(), seed=1, batch_size=4)
    for _ in itertools.islice(stream, 5):
        pass
    state = stream.state_dict()
    again = ClassIncremental(3).stream(dataset(), seed=1, batch_size=4)
    again.load_state_dict(state)
    rest = list(again)
    assert len(rest) == len(whole) - 5
    for batch, truth in zip(rest, whole[5:], strict=True):
        assert torch.equal(batch.inputs, truth.inputs)
        assert torch.equal(batch.labels, truth.labels)
        assert (batch.task, batch.position, batch.train) == (
            truth.task,
            truth.position,
            truth.train,
        )


@pytest.mark.parametrize("position", [-1, 6, "2", 1.5, None])
def test_a_position_outside_the_stream_is_refused_and_changes_nothing(position):
    stream = make_stream()
    next(stream)
    with pytest.raises(InputError, match="positions 0 to 5"):
        stream.load_state_dict({"position": position})
    assert stream.position == 1


def test_the_end_of_the_stream_can_be_restored():
    stream = make_stream()
    stream.load_state_dict({"position": len(stream)})
    assert list(stream) == []


def test_the_position_of_another_stream_is_refused():
    state = ClassIncremental(3).stream(dataset(), seed=1).state_dict()
    with pytest.raises(InputError, match="another stream"):
        ClassIncremental(3).stream(dataset(), seed=2).load_state_dict(state)


@pytest.mark.parametrize("position", [-1, 5])
def test_task_at_refuses_positions_outside(position):
    with pytest.raises(InputError, match=f"position {position} of 5"):
        make_stream().task_at(position)


def test_nothing_is_copied_before_it_is_asked_for():
    data = dataset()
    stream = ClassIncremental(3).stream(data, seed=0)
    pointer = data.train.inputs.data_ptr()
    assert all(task.train.source.inputs.data_ptr() == pointer for task in stream.tasks)


def test_impossible_options_are_refused():
    with pytest.raises(InputError, match="batch_size=0"):
        make_stream(batch_size=0)
    with pytest.raises(InputError, match="short_last=keep"):
        make_stream(short_last="keep")
