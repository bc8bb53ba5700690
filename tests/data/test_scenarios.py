from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.data import (
    IID,
    Blurry,
    ClassIncremental,
    Dataset,
    DomainIncremental,
    Examples,
)
from proxreplay.data.tasks import class_order
from proxreplay.errors import InputError
from tests.data.data_samples import dataset

SCENARIOS = [
    pytest.param(ClassIncremental(3), id="class-incremental"),
    pytest.param(DomainIncremental(), id="domain-incremental"),
    pytest.param(Blurry(3, disjoint=0.5, blur=0.3), id="blurry"),
    pytest.param(IID(tasks=3), id="iid"),
]


def rows(examples):
    return examples.inputs.squeeze(1).long().tolist()


def arrivals(task):
    return rows(task.train[:])


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("per_class", [1, 7, 40])
def test_every_example_appears_exactly_once(scenario, per_class):
    data = dataset(per_class=per_class, classes=6, domains=3)
    stream = scenario.stream(data, seed=3, batch_size=4, short_last="buffer_only")
    streamed = [row for batch in stream for row in rows(batch)]
    held_out = [row for task in stream.tasks for row in rows(task.validation)]
    assert sorted(streamed + held_out) == list(range(len(data.train)))
    test = [row for task in stream.tasks for row in rows(task.test)]
    assert sorted(test) == rows(data.test)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_gives_the_same_stream_and_another_seed_another(scenario):
    data = dataset(per_class=30, classes=6, domains=3)
    prints = [scenario.stream(data, s, 10, "train").fingerprint() for s in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_global_generator_is_left_alone(scenario):
    before = torch.random.get_rng_state()
    scenario.stream(dataset(domains=3), 0, 10, "train")
    assert torch.equal(torch.random.get_rng_state(), before)


@given(
    per_class=st.integers(1, 30),
    classes=st.integers(1, 8),
    tasks=st.integers(1, 8),
    seed=st.integers(0, 100),
    fraction=st.sampled_from([0.0, 0.05, 0.25, 0.5]),
)
@settings(deadline=None, max_examples=60)
def test_class_incremental_against_brute_force(per_class, classes, tasks, seed, fraction):
    data = dataset(per_class=per_class, classes=classes)
    if tasks > classes:
        with pytest.raises(InputError, match=f"{tasks} tasks cannot share the {classes}"):
            ClassIncremental(tasks).stream(data, seed)
        return
    stream = ClassIncremental(tasks).stream(data, seed, validation_fraction=fraction)
    torch.manual_seed(seed)
    order = torch.randperm(classes).tolist()
    sizes = [classes // tasks + (t < classes % tasks) for t in range(tasks)]
    first = 0
    for task, size in zip(stream.tasks, sizes, strict=True):
        of_task = order[first : first + size]
        members = {r for r in range(len(data.train)) if data.train.labels[r].item() in of_task}
        assert set(arrivals(task)) | set(rows(task.validation)) == members
        least = 1 if fraction and len(members) > 1 else 0
        assert len(task.validation) == max(least, int(fraction * len(members)))
        for part, original in ((task.train[:], data.train), (task.validation, data.train)):
            for row, label in zip(rows(part), part.labels.tolist(), strict=True):
                assert order[label] == original.labels[row]
        assert set(task.test.labels.tolist()) == set(range(first, first + size))
        assert task.name == ", ".join(f"class{c}" for c in of_task)
        first += size


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_class_order_is_that_of_the_seeded_global_generator(seed):
    torch.manual_seed(seed)
    assert torch.equal(class_order(100, seed), torch.randperm(100))


def test_validation_is_the_end_of_a_permutation_drawn_task_by_task():
    from proxreplay.seeding import generator

    data = dataset(per_class=40, classes=4)
    stream = ClassIncremental(2).stream(data, seed=5)
    rng, order = generator(5, "validation"), class_order(4, 5)
    for t, task in enumerate(stream.tasks):
        members = torch.isin(data.train.labels, order[2 * t : 2 * t + 2]).nonzero().squeeze(1)
        shuffled = members[torch.randperm(80, generator=rng)]
        assert rows(task.validation) == shuffled[-4:].tolist()


def test_batch_size_changes_the_cuts_but_not_the_order():
    data = dataset(per_class=20)
    one, other = (ClassIncremental(3).stream(data, 0, batch_size=b) for b in (1, 7))
    assert [r for b in one for r in rows(b)] == [r for b in other for r in rows(b)]


def test_a_data_set_with_validation_keeps_it_and_trains_on_everything_else():
    data = dataset(per_class=20, classes=4)
    own = Examples(torch.full((4, 1), -1.0), torch.arange(4))
    data = Dataset(data.name, data.train, data.test, data.classes, validation=own)
    stream = ClassIncremental(2).stream(data, seed=0)
    assert [len(task.train) for task in stream.tasks] == [40, 40]
    assert [sorted(task.validation.labels.tolist()) for task in stream.tasks] == [[0, 1], [2, 3]]
    assert all(rows(task.validation) == [-1, -1] for task in stream.tasks)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        pytest.param("stored", ["domain0", "domain1", "domain2"], id="stored"),
        pytest.param(("domain2", "domain0"), ["domain2", "domain0"], id="chosen"),
    ],
)
def test_domains_come_in_the_order_asked_for_with_labels_kept(order, expected):
    data = dataset(per_class=9, classes=4, domains=3)
    stream = DomainIncremental(order).stream(data, seed=0)
    assert [task.name for task in stream.tasks] == expected
    for task in stream.tasks:
        wanted = data.domains.index(task.name)
        for part in (task.train[:], task.validation[:]):
            assert part.domains.eq(wanted).all()
            assert part.labels.tolist() == data.train.labels[rows(part)].tolist()
        assert task.test[:].domains.eq(wanted).all()


def test_shuffled_domains_are_a_permutation_that_depends_on_the_seed():
    data = dataset(per_class=9, domains=3)
    orders = {
        tuple(t.name for t in DomainIncremental("shuffled").stream(data, seed=s).tasks)
        for s in range(20)
    }
    assert len(orders) > 2
    assert all(sorted(order) == ["domain0", "domain1", "domain2"] for order in orders)


@pytest.mark.parametrize("order", [("domain9",), ("domain0", "domain0"), (), "reversed"])
def test_an_impossible_order_of_domains_is_refused(order):
    with pytest.raises(InputError, match="domain0, domain1, domain2"):
        DomainIncremental(order).stream(dataset(domains=3), seed=0)


def test_data_without_domains_is_refused():
    with pytest.raises(InputError, match="has no domains"):
        DomainIncremental().stream(dataset(), seed=0)


@given(
    disjoint=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    blur=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    tasks=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 50),
)
@settings(deadline=None, max_examples=40)
def test_blurry_leaks_exactly_as_much_as_it_says(disjoint, blur, tasks, seed):
    data = dataset(per_class=20, classes=6)
    clean = ClassIncremental(tasks).stream(data, seed)
    mixed = Blurry(tasks, disjoint, blur).stream(data, seed)
    home = {row: t for t, task in enumerate(clean.tasks) for row in arrivals(task)}
    label = {
        row: label
        for task in clean.tasks
        for row, label in zip(arrivals(task), task.train.labels.tolist(), strict=True)
    }
    away = Counter(
        label[row] for t, task in enumerate(mixed.tasks) for row in arrivals(task) if home[row] != t
    )
    size = Counter(label.values())
    if tasks == 1:
        assert not away
        return
    leaking = 6 - round(disjoint * 6)
    assert len(away) == (leaking if blur else 0)
    assert all(count == int(blur * size[c]) for c, count in away.items())
    for a, b in zip(clean.tasks, mixed.tasks, strict=True):
        assert rows(a.validation) == rows(b.validation)
        assert rows(a.test) == rows(b.test)


def test_blurry_without_leaks_is_class_incremental():
    data = dataset(per_class=20)
    clean = ClassIncremental(3).stream(data, seed=4)
    assert Blurry(3, disjoint=1.0).stream(data, 4).fingerprint() == clean.fingerprint()


@pytest.mark.parametrize(("name", "value"), [("disjoint", 1.5), ("blur", -0.1)])
def test_blurry_refuses_what_is_no_fraction(name, value):
    with pytest.raises(InputError, match=f"{name}={value}"):
        Blurry(3, **{name: value})


def test_parts_of_an_iid_stream_look_alike():
    data = dataset(per_class=300, classes=4, test_per_class=30)
    stream = IID(tasks=4).stream(data, seed=0)
    for task in stream.tasks:
        counts = torch.bincount(task.train.labels, minlength=4)
        assert len(task.train) == 285
        assert counts.min() > 45
        assert len(task.test) == 30
        assert task.train[:].labels.tolist() == data.train.labels[arrivals(task)].tolist()


def test_iid_refuses_no_tasks():
    with pytest.raises(InputError, match="tasks=0"):
        IID(tasks=0)


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_an_impossible_validation_fraction_is_refused(fraction):
    with pytest.raises(InputError, match="validation_fraction"):
        ClassIncremental(3).stream(dataset(), 0, validation_fraction=fraction)
