"""Memories: one contract for all, quotas and fairness against naive twins, removal, exact state."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.replay.memory import (
    ClassBalancedMemory,
    Memory,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
)
from proxreplay.replay.sampling import distinct
from proxreplay.serialization import load_state, save_state

KINDS: dict[str, Callable[[int], Memory]] = {
    "class-balanced": ClassBalancedMemory,
    "reservoir": ReservoirMemory,
    "ring": RingMemory,
    "unlimited": lambda capacity: UnlimitedMemory(),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())

streams = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=7), min_size=1, max_size=15)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(labels: list[int], first: int = 0, **extras: Tensor) -> Batch:
    """Examples whose inputs say which one in the stream they are."""
    numbers = torch.arange(first, first + len(labels))
    inputs = torch.stack([numbers, numbers % 251], dim=1).to(torch.int32)
    return Batch(inputs, torch.tensor(labels, dtype=torch.int64), extras=extras)


def feed(memory: Memory, stream: list[list[int]], generator: torch.Generator) -> list[int]:
    """Add the batches of a stream; returns all labels in order of arrival."""
    labels: list[int] = []
    for part in stream:
        memory.add(batch(part, first=len(labels)), generator)
        labels += part
    return labels


def everything(memory: Memory) -> dict[str, Tensor]:
    """All fields of all examples in the order of their ids."""
    parts = list(memory)
    if not parts:
        return {}
    fields = {
        "inputs": torch.cat([p.inputs for p in parts]),
        "labels": torch.cat([p.labels for p in parts]),
        **{name: torch.cat([p.extras[name] for p in parts]) for name in parts[0].extras},
    }
    order = fields["id"].argsort()
    return {name: tensor[order] for name, tensor in fields.items()}


def stored_ids(memory: Memory) -> list[int]:
    return sorted(memory.ids.tolist())


class NaiveClassBalanced:
    """The rule written out: a list of (weight, id) per class, sorted by weight, descending."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lists: dict[int, list[tuple[float, int]]] = {}
        self.count = 0

    def add(self, labels: list[int], generator: torch.Generator) -> None:
        weights = torch.rand(len(labels), dtype=torch.float64, generator=generator).tolist()
        for label in labels:
            self.lists.setdefault(label, [])
        share, rest = divmod(self.capacity, len(self.lists))
        for label, weight in zip(labels, weights, strict=True):
            self.lists[label].append((weight, self.count))
            self.count += 1
        for place, label in enumerate(sorted(self.lists)):
            quota = share + 1 if place < rest else share
            self.lists[label] = sorted(self.lists[label], reverse=True)[:quota]

    def ids(self) -> list[int]:
        return sorted(i for entries in self.lists.values() for _, i in entries)


# --- the contract of all memories -----------------------------------------------------------------


@every_kind
@settings(deadline=None, max_examples=40)
@given(stream=streams, capacity=st.integers(1, 12), seed=st.integers(0, 99))
def test_contract(
    make: Callable[[int], Memory], stream: list[list[int]], capacity: int, seed: int
) -> None:
    memory, generator = make(capacity), rng(seed)
    labels = feed(memory, stream, generator)
    assert memory.capacity is None or len(memory) <= capacity
    fields = everything(memory)
    ids = fields["id"]
    assert ids.tolist() == stored_ids(memory)
    assert fields["inputs"][:, 0].tolist() == ids.tolist()
    assert fields["labels"].tolist() == [labels[i] for i in ids.tolist()]
    arrival = [p for p, part in enumerate(stream) for _ in part]
    assert fields["position"].tolist() == [arrival[i] for i in ids.tolist()]
    counts = {label: fields["labels"].tolist().count(label) for label in sorted(set(labels))}
    assert memory.class_counts == {label: n for label, n in counts.items() if n}
    assert list(memory.class_counts) == sorted(memory.class_counts)
    for n in (1, 3, len(memory), len(memory) + 5):
        drawn = memory.sample(n, generator)
        assert len(drawn) == min(n, len(memory))
        assert len(set(drawn.extras["id"].tolist())) == len(drawn)
        assert drawn.inputs[:, 0].tolist() == drawn.extras["id"].tolist()
    assert sorted(memory.inputs()[:, 0].tolist()) == ids.tolist()
    some = memory.inputs(2, generator)[:, 0].tolist()
    assert len(set(some)) == min(2, len(memory))
    assert set(some) <= set(ids.tolist())
    assert all(i in memory for i in ids.tolist())
    assert len(labels) not in memory


@every_kind
def test_ids_count_up_whether_stored_or_not(make: Callable[[int], Memory]) -> None:
    memory, generator = make(2), rng()
    assert memory.add(batch([0, 1, 2]), generator).tolist() == [0, 1, 2]
    ids = memory.add(batch([0]), generator)
    assert ids.tolist() == [3]
    assert ids.dtype == torch.int64


@every_kind
def test_what_is_handed_out_is_a_copy(make: Callable[[int], Memory]) -> None:
    memory, generator = make(10), rng()
    memory.add(batch([0, 1, 2]), generator)
    before = everything(memory)
    memory.sample(3, generator).inputs.zero_()
    memory.inputs().zero_()
    next(iter(memory)).labels.fill_(9)
    memory.state_dict()["fields"]["inputs"].zero_()
    after = everything(memory)
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_kind
def test_what_is_taken_in_is_a_copy(make: Callable[[int], Memory]) -> None:
    memory = make(10)
    given_inputs = torch.ones(3, 2, requires_grad=True)
    memory.add(Batch(given_inputs, torch.tensor([0, 1, 2])), rng())
    with torch.no_grad():
        given_inputs.zero_()
    assert memory.inputs().tolist() == [[1.0, 1.0]] * 3
    assert not memory.inputs().requires_grad


@every_kind
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.bool]
)
def test_dtypes_are_kept(make: Callable[[int], Memory], dtype: torch.dtype) -> None:
    memory, generator = make(3), rng()
    images = torch.randint(0, 2, (8, 1, 2, 2)).to(dtype)
    memory.add(Batch(images, torch.arange(8) % 2), generator)
    drawn = memory.sample(2, generator)
    assert drawn.inputs.dtype == dtype
    assert torch.equal(drawn.inputs, images[drawn.extras["id"]])


@every_kind
def test_the_position_of_the_stream_is_stored(make: Callable[[int], Memory]) -> None:
    memory = make(10)
    memory.add(Batch(torch.zeros(2, 1), torch.tensor([0, 1]), position=41), rng())
    memory.add(Batch(torch.zeros(1, 1), torch.tensor([0])), rng())
    assert everything(memory)["position"].tolist() == [41, 41, 1]


@every_kind
def test_an_empty_batch_changes_nothing(make: Callable[[int], Memory]) -> None:
    memory = make(4)
    assert memory.add(Batch(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)), rng()).shape == (
        0,
    )
    assert len(memory) == 0
    memory.add(Batch(torch.zeros(2, 2), torch.tensor([0, 1])), rng())
    assert len(memory) == 2


def other_inputs(inputs: Tensor) -> Batch:
    return Batch(inputs, torch.tensor([0, 9]), {"logits": torch.zeros(2, 3)})


@every_kind
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (other_inputs(torch.zeros(2, 2)), "inputs of dtype torch.float32"),
        (other_inputs(torch.zeros(2, 3).int()), r"inputs of shape \(3,\)"),
        (other_inputs(torch.zeros(2, 2, 1).int()), r"inputs of shape \(2, 1\)"),
        (batch([0, 9], logits=torch.zeros(2, 3, dtype=torch.float64)), "logits of dtype"),
        (batch([0, 9], logits=torch.zeros(2)), r"logits of shape \(\)"),
        (batch([0, 9]), "fields"),
        (batch([0, 9], logits=torch.zeros(2, 3), more=torch.zeros(2)), "fields"),
        (batch([0, 9], logits=torch.zeros(2, 3), id=torch.zeros(2)), r"extras named \['id'\]"),
        (Batch(torch.zeros(2, 2).int(), torch.zeros(2)), "labels of dtype torch.float32"),
    ],
    ids=[
        *("inputs-dtype", "inputs-width", "inputs-ndim", "extra-dtype", "extra-ndim"),
        *("extra-missing", "extra-new", "reserved", "labels-dtype"),
    ],
)
def test_a_batch_that_does_not_fit_changes_nothing(
    make: Callable[[int], Memory], wrong: Batch, message: str
) -> None:
    memory, generator = make(4), rng()
    memory.add(batch([0, 1, 2], logits=torch.zeros(3, 3)), generator)
    before, state = everything(memory), generator.get_state()
    counts, quotas = memory.class_counts, memory.quotas()
    with pytest.raises(InputError, match=message):
        memory.add(wrong, generator)
    after = everything(memory)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(generator.get_state(), state)
    assert (memory.class_counts, memory.quotas()) == (counts, quotas)
    assert memory.add(batch([5], logits=torch.zeros(1, 3)), generator).tolist() == [3]


@every_kind
def test_wrong_requests_are_named(make: Callable[[int], Memory]) -> None:
    memory, generator = make(4), rng()
    for ask in (lambda: memory.sample(1, generator), memory.inputs):
        with pytest.raises(InputError, match="nothing is stored"):
            ask()
    memory.add(batch([0, 1, 2]), generator)
    with pytest.raises(InputError, match="n=0"):
        memory.sample(0, generator)
    with pytest.raises(InputError, match="n=2 without a generator"):
        memory.inputs(2)
    with pytest.raises(InputError, match="size=0"):
        next(memory.batches(0))


@every_kind
def test_iteration_notices_a_change(make: Callable[[int], Memory]) -> None:
    memory, generator = make(5), rng()
    memory.add(batch([0, 1, 2, 3]), generator)
    batches = memory.batches(1)
    next(batches)
    memory.add(batch([0]), generator)
    with pytest.raises(InputError, match="changed while being iterated"):
        next(batches)


@pytest.mark.parametrize("make", [ClassBalancedMemory, ReservoirMemory, RingMemory])
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": 0}, {"capacity": 5, "capacity_bytes": 5}, {"capacity_bytes": -1}],
    ids=["none", "zero", "both", "negative"],
)
def test_capacities_are_checked(make: Callable[..., Memory], options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="capacity"):
        make(**options)


# --- who stays ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(stream=streams, capacity=st.integers(1, 12), seed=st.integers(0, 999))
def test_class_balanced_equals_its_naive_twin_at_every_moment(
    stream: list[list[int]], capacity: int, seed: int
) -> None:
    memory, twin = ClassBalancedMemory(capacity), NaiveClassBalanced(capacity)
    generator, twin_generator = rng(seed), rng(seed)
    seen: dict[int, int] = defaultdict(int)
    for part in stream:
        memory.add(batch(part), generator)
        twin.add(part, twin_generator)
        assert stored_ids(memory) == twin.ids()
        for label in part:
            seen[label] += 1
        quotas = {
            label: math.ceil((capacity - place) / len(seen))
            for place, label in enumerate(sorted(seen))
        }
        assert memory.quotas() == quotas
        expected = {label: min(seen[label], max(0, quotas[label])) for label in sorted(seen)}
        assert memory.class_counts == {label: n for label, n in expected.items() if n}
        assert len(memory) == sum(expected.values())


@settings(deadline=None, max_examples=60)
@given(stream=streams, capacity=st.integers(1, 12), seed=st.integers(0, 999))
def test_reservoir_keeps_the_largest_weights(
    stream: list[list[int]], capacity: int, seed: int
) -> None:
    memory, twin_generator = ReservoirMemory(capacity), rng(seed)
    feed(memory, stream, rng(seed))
    weights = [
        w
        for part in stream
        for w in torch.rand(len(part), dtype=torch.float64, generator=twin_generator).tolist()
    ]
    largest = sorted(range(len(weights)), key=lambda i: -weights[i])[:capacity]
    assert stored_ids(memory) == sorted(largest)


@settings(deadline=None, max_examples=60)
@given(stream=streams, capacity=st.integers(1, 12))
def test_ring_keeps_the_last(stream: list[list[int]], capacity: int) -> None:
    memory = RingMemory(capacity)
    total = len(feed(memory, stream, rng()))
    assert stored_ids(memory) == list(range(max(0, total - capacity), total))


def chi_square_bound(degrees: int, z: float = 5.0) -> float:
    """A value that chi-square exceeds about once in three million (Wilson-Hilferty)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + z * math.sqrt(a)) ** 3


def chi_square(counts: Tensor, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_class_balanced_is_uniform_within_every_class() -> None:
    # class 1 appears late and cuts the quota of class 0; every example of a class is as likely
    stream = [[0] * 7, [0] * 5, [1, 0, 1, 1], [2, 0, 1, 1, 1, 1]]
    labels = torch.tensor([label for part in stream for label in part])
    generator, kept, runs = rng(1), torch.zeros(len(labels)), 1500
    for _ in range(runs):
        memory = ClassBalancedMemory(7)
        feed(memory, stream, generator)
        kept[memory.ids] += 1
    for label, quota in {0: 3, 1: 2, 2: 1}.items():
        of_class = kept[labels == label]
        p = quota / len(of_class)
        assert of_class.sum() == runs * quota
        if p < 1:  # inclusion indicators of a draw without replacement are correlated: (1 - p)
            statistic = chi_square(of_class, runs * p) / (1 - p)
            assert statistic < chi_square_bound(len(of_class) - 1) * len(of_class) / (
                len(of_class) - 1
            )


def test_reservoir_is_uniform() -> None:
    stream = [[0] * 3, [1] * 4, [0, 1, 2], [5] * 5]
    generator, kept, runs = rng(2), torch.zeros(15), 1500
    for _ in range(runs):
        memory = ReservoirMemory(4)
        feed(memory, stream, generator)
        kept[memory.ids] += 1
    assert chi_square(kept, runs * 4 / 15) / (1 - 4 / 15) < chi_square_bound(14) * 15 / 14


@pytest.mark.parametrize(("n", "total"), [(2, 5), (1, 7), (3, 4), (2, 4)])
def test_every_ordered_choice_is_as_likely(n: int, total: int) -> None:
    generator, runs = rng(3), 6000
    choices = {choice: i for i, choice in enumerate(itertools.permutations(range(total), n))}
    counts = torch.zeros(len(choices))
    for _ in range(runs):
        counts[choices[tuple(distinct(n, total, generator).tolist())]] += 1
    assert chi_square(counts, runs / len(choices)) < chi_square_bound(len(choices) - 1)


def test_drawing_few_of_many_is_uniform_and_distinct() -> None:
    generator, total = rng(4), 1_000_000
    draws = torch.cat([distinct(500, total, generator) for _ in range(100)])
    assert int(draws.min()) >= 0
    assert int(draws.max()) < total
    counts = torch.bincount(draws * 50 // total, minlength=50).float()
    assert chi_square(counts, len(draws) / 50) < chi_square_bound(49)
    assert all(len(distinct(500, 1001, generator).unique()) == 500 for _ in range(20))


# --- deletion -------------------------------------------------------------------------------------


def raw_bytes(memory: Memory) -> bytes:
    """Every byte the memory has allocated for rows, behind the last row too."""
    return b"".join(
        tensor.view(torch.uint8).numpy().tobytes() for tensor in memory._storage.tensors.values()
    )


@every_kind
@settings(deadline=None, max_examples=25)
@given(
    stream=streams,
    capacity=st.integers(1, 12),
    victims=st.sets(st.integers(0, 30), max_size=12),
    seed=st.integers(0, 99),
)
def test_removed_examples_are_gone_to_the_last_byte(
    make: Callable[[int], Memory],
    stream: list[list[int]],
    capacity: int,
    victims: set[int],
    seed: int,
) -> None:
    memory, generator = make(capacity), rng(seed)
    secrets, total = {}, 0
    for part in stream:
        inputs = torch.randint(1, 256, (len(part), 16), dtype=torch.uint8, generator=generator)
        secrets |= {total + i: bytes(row) for i, row in enumerate(inputs.tolist())}
        memory.add(Batch(inputs, torch.tensor(part)), generator)
        total += len(part)
    wanted = {i for i in victims if i < total}
    before = everything(memory)
    stored = set(stored_ids(memory))
    assert memory.remove(sorted(wanted)) == len(wanted & stored)
    assert memory.remove(torch.tensor(sorted(wanted), dtype=torch.int64)) == 0
    content = raw_bytes(memory)
    assert all((secrets[i] in content) == (i in stored - wanted) for i in secrets)
    assert set(stored_ids(memory)) == stored - wanted
    assert not any(i in memory for i in wanted)
    kept = torch.tensor([i not in wanted for i in before["id"].tolist()], dtype=torch.bool)
    after = everything(memory)
    assert all(torch.equal(after[name], before[name][kept]) for name in after)
    assert sum(memory.class_counts.values()) == len(memory)
    memory.add(Batch(torch.zeros(3, 16, dtype=torch.uint8), torch.tensor([0, 1, 9])), generator)
    assert stored_ids(memory) == everything(memory)["id"].tolist()


@every_kind
def test_evicted_examples_leave_no_bytes_either(make: Callable[[int], Memory]) -> None:
    memory, generator = make(6), rng(5)
    inputs = torch.randint(1, 256, (300, 16), dtype=torch.uint8, generator=generator)
    for i in range(0, 300, 10):
        memory.add(Batch(inputs[i : i + 10], torch.arange(i, i + 10) // 60), generator)
    content = raw_bytes(memory)
    assert [i for i in range(300) if bytes(inputs[i].tolist()) in content] == stored_ids(memory)


@every_kind
def test_ids_never_given_out_are_an_error_and_nothing_is_removed(
    make: Callable[[int], Memory],
) -> None:
    memory = make(5)
    memory.add(batch([0, 1, 2]), rng())
    for wrong in ([0, 3], [-1, 0]):
        with pytest.raises(InputError, match="never given out; the last one was 2"):
            memory.remove(wrong)
    assert len(memory) == 3


@every_kind
def test_removing_a_class(make: Callable[[int], Memory]) -> None:
    memory, generator = make(6), rng()
    feed(memory, [[0, 1, 2, 1, 0, 1], [2, 2, 1]], generator)
    stored = memory.class_counts
    assert memory.remove_class(1) == stored.get(1, 0)
    assert memory.remove_class(1) == 0
    assert memory.remove_class(77) == 0
    assert 1 not in memory.class_counts
    assert everything(memory)["labels"].tolist().count(1) == 0


def test_the_quota_of_a_removed_class_is_shared_by_the_others() -> None:
    memory, generator = ClassBalancedMemory(6), rng()
    feed(memory, [[0, 1, 2] * 4], generator)
    memory.remove_class(1)
    assert memory.quotas() == {0: 3, 2: 3}
    for _ in range(40):
        memory.add(batch([0, 2]), generator)
    assert memory.class_counts == {0: 3, 2: 3}
    memory.add(batch([1] * 5), generator)
    assert memory.class_counts == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("make", [ClassBalancedMemory, ReservoirMemory])
def test_an_emptied_memory_starts_anew(make: Callable[[int], Memory]) -> None:
    memory, generator = make(3), rng()
    memory.add(batch([0] * 50), generator)
    memory.remove(memory.ids)
    assert len(memory) == 0
    memory.add(batch([0] * 3), generator)
    assert stored_ids(memory) == [50, 51, 52]


def test_after_removals_a_class_is_still_a_uniform_sample_of_the_rest() -> None:
    # half of what was seen is removed; newcomers are no likelier to stay than those before them
    generator, kept, runs = rng(6), torch.zeros(70), 400
    for _ in range(runs):
        memory = ClassBalancedMemory(20)
        memory.add(batch([0] * 60), generator)
        memory.remove(range(30))
        memory.add(batch([0] * 10), generator)
        kept[memory.ids] += 1
        assert len(memory) <= 20
    rest = kept[30:]
    assert kept[:30].sum() == 0
    assert chi_square(rest, float(rest.mean())) < chi_square_bound(39)


# --- bytes, growth, extras ------------------------------------------------------------------------


def test_a_capacity_in_bytes_becomes_one_in_items_at_the_first_batch() -> None:
    row = 3 * 4 * 4 + 3 * 8  # uint8 image, label, id, position
    memory = ClassBalancedMemory(capacity_bytes=10 * row + row // 2)
    assert memory.capacity is None
    images = torch.zeros(40, 3, 4, 4, dtype=torch.uint8)
    memory.add(Batch(images, torch.arange(40) % 3), rng())
    assert memory.capacity == len(memory) == 10
    assert memory.nbytes == 10 * row
    with pytest.raises(InputError, match="but one example takes 72"):
        RingMemory(capacity_bytes=71).add(Batch(images, torch.arange(40)), rng())


def test_bytes_are_kept_when_the_rows_grow_wider() -> None:
    memory, generator = ReservoirMemory(capacity_bytes=2000), rng()
    for width in (1, 2, 5, 20, 60):
        extras = {"logits": torch.zeros(30, width)}
        memory.add(Batch(torch.zeros(30, 2), torch.arange(30), extras), generator)
        assert memory.capacity == 2000 // (8 + 24 + 4 * width)
        assert len(memory) == min(30, memory.capacity) or len(memory) == memory.capacity
        assert memory.nbytes <= 2000


@every_kind
def test_extras_grow_with_the_head_and_are_padded_with_nan(make: Callable[[int], Memory]) -> None:
    memory, generator = make(50), rng()
    widths = [2, 3, 3, 5, 4]
    given_logits = {}
    for step, width in enumerate(widths):
        logits = torch.randn(4, width, requires_grad=True)
        ids = memory.add(batch([0, 1, 2, 3], logits=logits, age=torch.full((4,), step)), generator)
        given_logits |= dict(zip(ids.tolist(), logits.detach(), strict=True))
    drawn = memory.sample(12, generator)
    for i, stored, age in zip(
        drawn.extras["id"].tolist(), drawn.extras["logits"], drawn.extras["age"], strict=True
    ):
        width = widths[int(age)]
        assert torch.equal(stored[:width], given_logits[i])
        assert stored.shape == (5,)
        assert torch.isnan(stored[width:]).all()


def test_growth_is_in_chunks_and_never_beyond_the_capacity() -> None:
    memory, generator = UnlimitedMemory(), rng()
    sizes = set()
    for _ in range(300):
        memory.add(Batch(torch.zeros(7, 3), torch.zeros(7, dtype=torch.int64)), generator)
        rows = memory.nbytes // (3 * 4 + 24)
        sizes.add(rows)
        assert len(memory) <= rows <= max(256, 1.5 * len(memory) + 7)
    assert len(sizes) < 10
    bounded = RingMemory(300)
    for _ in range(100):
        bounded.add(Batch(torch.zeros(7, 3), torch.zeros(7, dtype=torch.int64)), generator)
    assert bounded.nbytes == 300 * (3 * 4 + 24)


@pytest.mark.parametrize(
    ("make", "adds"),
    [(ClassBalancedMemory, 10_000), (ReservoirMemory, 5_000), (RingMemory, 5_000)],
)
def test_thousands_of_small_batches_leave_nothing_but_what_is_stored(
    make: Callable[[int], Memory], adds: int
) -> None:
    memory, generator = make(50), rng()
    batches = [Batch(torch.zeros(2, 4), torch.tensor([i % 7, i % 3])) for i in range(21)]
    for i in range(adds):
        memory.add(batches[i % 21], generator)
    assert len(memory) == 50
    assert memory.nbytes == 50 * (16 + 24)
    assert len(memory._storage.ids) == len(memory._storage.slots) == 50
    assert sum(len(group.heap) for group in memory._groups.values()) == 50
    assert sum(memory.class_counts.values()) == 50


# --- state ----------------------------------------------------------------------------------------


@every_kind
@settings(deadline=None, max_examples=25)
@given(
    before=streams,
    after=streams,
    capacity=st.integers(1, 12),
    victims=st.sets(st.integers(0, 20), max_size=4),
    seed=st.integers(0, 99),
)
def test_a_restored_memory_goes_on_identically(
    make: Callable[[int], Memory],
    before: list[list[int]],
    after: list[list[int]],
    capacity: int,
    victims: set[int],
    seed: int,
) -> None:
    memory, generator = make(capacity), rng(seed)
    total = len(feed(memory, before, generator))
    memory.remove(i for i in victims if i < total)
    twin = make(capacity)
    twin.load_state_dict(memory.state_dict())
    twin_generator = rng()
    twin_generator.set_state(generator.get_state())
    for part in after:
        assert torch.equal(
            memory.add(batch(part), generator), twin.add(batch(part), twin_generator)
        )
        assert memory.class_counts == twin.class_counts
        assert memory.quotas() == twin.quotas()
        if len(memory) == 0:  # a removal emptied it, and the classes since then have no quota
            continue
        a, b = memory.sample(3, generator), twin.sample(3, twin_generator)
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.labels, b.labels)
        assert all(torch.equal(a.extras[name], b.extras[name]) for name in a.extras)
        assert torch.equal(memory.inputs(), twin.inputs())
        assert memory.nbytes >= twin.nbytes


@every_kind
def test_state_survives_the_disk(make: Callable[[int], Memory], tmp_path: Path) -> None:
    memory, generator = make(5), rng()
    for width in (2, 4):
        memory.add(batch([0, 1, 0], logits=torch.randn(3, width)), generator)
    save_state(tmp_path, {"memory": memory.state_dict()})
    twin = make(5)
    twin.load_state_dict(load_state(tmp_path)["memory"])
    mine, theirs = everything(memory), everything(twin)
    assert all(torch.equal(mine[k].nan_to_num(7), theirs[k].nan_to_num(7)) for k in mine)
    assert twin.add(batch([0], logits=torch.zeros(1, 4)), generator).tolist() == [6]


def test_a_memory_that_goes_back_goes_on_as_it_did() -> None:
    """What it met meanwhile (more classes, smaller quotas) has no effect."""
    memory = ClassBalancedMemory(8)
    rng = torch.Generator().manual_seed(0)
    first = Batch(torch.arange(3.0)[:, None], torch.tensor([0, 0, 1]))
    then = Batch(torch.arange(4.0)[:, None], torch.tensor([0, 0, 0, 0]))
    memory.add(first, rng)
    early, noise = memory.state_dict(), rng.get_state()
    memory.add(then, rng)
    straight = memory.state_dict()
    memory.add(Batch(torch.zeros(4, 1), torch.tensor([2, 3, 4, 5])), rng)
    memory.load_state_dict(early)
    rng.set_state(noise)
    memory.add(then, rng)
    assert torch.equal(memory.state_dict()["fields"]["id"], straight["fields"]["id"])
    memory.skip_ids(100)
    assert memory.add(first, rng).tolist() == [100, 101, 102]
    memory.skip_ids(5)
    assert memory.next_id == 103


def test_state_of_a_memory_in_bytes_and_of_an_empty_one() -> None:
    memory = RingMemory(capacity_bytes=1000)
    twin = RingMemory(capacity_bytes=1000)
    twin.load_state_dict(memory.state_dict())
    assert len(twin) == 0
    memory.add(batch([0] * 50), rng())
    twin.load_state_dict(memory.state_dict())
    assert twin.capacity == memory.capacity == 1000 // 32
    assert stored_ids(twin) == stored_ids(memory)


def test_another_kind_or_capacity_is_refused_and_nothing_changes() -> None:
    memory = ClassBalancedMemory(5)
    memory.add(batch([0, 1]), rng())
    for other in (ClassBalancedMemory(6), RingMemory(5), ClassBalancedMemory(capacity_bytes=5)):
        other_state = other.state_dict()
        with pytest.raises(InputError, match="was saved; make the memory as it was"):
            memory.load_state_dict(other_state)
    assert len(memory) == 2


@every_kind
def test_to_another_device(make: Callable[[int], Memory]) -> None:
    memory = make(5)
    memory.add(batch([0, 1, 2]), rng())
    assert memory.to("cpu") is memory
    assert memory.inputs()[:, 0].tolist() == [0, 1, 2]
