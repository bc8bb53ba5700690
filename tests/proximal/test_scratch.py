"""Memory that is used again holds nobody's result."""

import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.scratch import reusing, scratch
from tests.proximal.test_gram import brute_force, energy, patch_rows, paths


def test_the_same_use_gets_the_same_memory() -> None:
    like = torch.zeros(1)
    with reusing():
        first = scratch("a", (3, 4), like)
        assert scratch("a", (2, 5), like).data_ptr() == first.data_ptr()
        assert scratch("b", (3, 4), like).data_ptr() != first.data_ptr()
        larger = scratch("a", (5, 5), like)
        assert larger.shape == (5, 5)
        with reusing():  # a refresh inside of another one
            assert scratch("a", (1,), like).data_ptr() == larger.data_ptr()
        assert scratch("a", (1,), like).data_ptr() == larger.data_ptr()


def test_dtypes_do_not_share_memory() -> None:
    with reusing():
        single = scratch("a", (4,), torch.zeros(1))
        double = scratch("a", (4,), torch.zeros(1, dtype=torch.float64))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert single.data_ptr() != double.data_ptr()


def test_outside_everybody_gets_memory_of_their_own() -> None:
    like = torch.zeros(1)
    first, second = scratch("a", (4,), like), scratch("a", (4,), like)
    assert first.data_ptr() != second.data_ptr()


def test_threads_do_not_share_memory() -> None:
    like = torch.zeros(1)
    found: list[int] = []

    def elsewhere() -> None:
        with reusing():
            found.append(scratch("a", (4,), like).data_ptr())

    with reusing():
        here = scratch("a", (4,), like)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert found != [here.data_ptr()]


@settings(deadline=None, max_examples=60)
@given(st.lists(patch_rows(), min_size=2, max_size=4))
def test_grams_are_exact_one_after_the_other(several: list[PatchRows]) -> None:
    with reusing():
        made = [(rows, path, rows.gram_by(path)) for rows in several for path in paths(rows)]
        sums = [(rows, rows.total()) for rows in several]
    for rows, path, gram in made:
        error = (gram - brute_force(rows)).abs().max().item() / energy(rows)
        assert error < 1e-13, f"{path}: {error}"
    for rows, total in sums:
        torch.testing.assert_close(total, rows.dense().sum(dim=1))
