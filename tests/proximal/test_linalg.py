"""Both forms of a shrinkage against dense matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.proximal.shrinkage.forms import (
    DenseShrinkage,
    SpectralShrinkage,
    shrinkage_from_state,
)
from proxreplay.proximal.shrinkage.inverse import dense_inverse_, invert_, spectral_inverse
from proxreplay.proximal.statistics.sketch import Sketch
from tests.reference import random

I6 = torch.eye(6, dtype=torch.float64)


def metric(Z, omega):
    return I6 + omega * Z.mT @ Z


def both_forms(Z, omega):
    G = Z.mT @ Z
    s, U = torch.linalg.eigh(G)
    spectral, error = spectral_inverse(s, U, omega, torch.zeros(len(Z)), 0.0)
    assert error <= 1e-12
    return [DenseShrinkage(dense_inverse_(G, omega)), spectral]


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 9), omega=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_both_forms_multiply_with_the_inverse_of_the_metric(rows, omega, seed):
    Z, M = random(2, rows, 6, seed=seed), random(2, 3, 6, seed=seed + 1)
    expected = torch.linalg.solve(metric(Z, omega), M, left=False)
    for form in both_forms(Z, omega):
        torch.testing.assert_close(form.apply(M), expected, rtol=0, atol=1e-9)
        in_place = M.clone()
        form.apply_(in_place)
        torch.testing.assert_close(in_place, expected, rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    kept=st.sets(st.integers(0, 5), min_size=1, max_size=5),
    rows=st.integers(1, 9),
    omega=st.floats(0.01, 100),
)
def test_restriction_inverts_the_metric_of_the_columns_that_move(kept, rows, omega):
    Z = random(2, rows, 6)
    index = torch.tensor(sorted(kept))
    M = random(2, 3, len(index), seed=1)
    P = metric(Z, omega)[:, index][:, :, index]
    expected = torch.linalg.solve(P, M, left=False)
    for form in both_forms(Z, omega):
        torch.testing.assert_close(form.restricted(index).apply(M), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["dense", "spectral"])
def test_restriction_of_a_projector_is_the_limit(kind):
    """What a rule with infinite strength does when one column cannot move."""
    Z = random(1, 2, 6)
    U = torch.linalg.qr(Z.mT).Q
    form = {
        "dense": DenseShrinkage(I6 - U @ U.mT),
        "spectral": SpectralShrinkage(U, torch.ones(1, 2, dtype=torch.float64)),
    }[kind]
    index = torch.arange(5)
    short = Z[:, :, :5]
    expected = torch.eye(5, dtype=torch.float64) - torch.linalg.pinv(short) @ short
    made = form.restricted(index).apply(torch.eye(5, dtype=torch.float64)[None])
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-9)


def test_forms_come_back_from_their_state():
    M = random(1, 3, 6)
    for form in both_forms(random(1, 4, 6), 2.0):
        again = shrinkage_from_state(form.state())
        assert type(again) is type(form)
        assert torch.equal(again.apply(M), form.apply(M))
        assert (again.groups, again.width, again.bytes) == (form.groups, form.width, form.bytes)


def test_float32_cholesky_survives_a_badly_conditioned_gram():
    """Condition 1e6: the error of Lambda stays small where gradients live."""
    scales = torch.logspace(0, -3, 50)
    Z = torch.randn(400, 50, generator=torch.Generator().manual_seed(0)) * scales * 50
    G = (Z.T @ Z)[None]
    exact = dense_inverse_((Z.double().T @ Z.double())[None], 1.0)[0]
    assert torch.linalg.cond(torch.linalg.inv(exact)) > 1e5
    assert torch.linalg.matrix_norm(dense_inverse_(G, 1.0)[0].double() - exact, 2) < 1e-3


@settings(deadline=None, max_examples=25)
@given(rank=st.integers(1, 8), rows=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_sketch_knows_how_much_it_dropped(rank, rows, seed):
    """``B'B <= Z'Z <= B'B + dropped I``."""
    Z = random(2, rows, 6, seed=seed)
    sketch = Sketch(Z.new_zeros(2, 0, 6), rank, Z.new_zeros(2), 6)
    for piece in Z.split(5, dim=1):
        sketch.add_(piece)
    assert sketch.B.shape[1] <= 2 * rank
    lost = torch.linalg.eigvalsh(Z.mT @ Z - sketch.B.mT @ sketch.B)
    assert (lost >= -1e-9).all()
    assert (lost[:, -1] <= sketch.dropped + 1e-9).all()
    s, U = sketch.spectrum()
    torch.testing.assert_close((U * s[:, None]) @ U.mT, sketch.B.mT @ sketch.B, rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=20)
@given(kept=st.sets(st.integers(0, 5), min_size=1, max_size=5))
def test_a_scaled_spectral_shrinkage_is_restricted_like_the_dense_one(kept):
    U = torch.linalg.qr(random(1, 6, 3)).Q
    few = SpectralShrinkage(U, torch.tensor([[0.3, 0.7, 0.95]], dtype=U.dtype), 0.9)
    dense = DenseShrinkage(few.apply(I6[None]))
    index = torch.tensor(sorted(kept))
    M = random(1, 3, len(index), seed=1)
    torch.testing.assert_close(
        few.restricted(index).apply(M), dense.restricted(index).apply(M), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 7, 45])
@pytest.mark.parametrize("by_halves", [360, 5], ids=["by Cholesky", "by halves"])
def test_a_dense_factor_is_made_in_the_memory_of_the_gram(groups, width, by_halves, monkeypatch):
    monkeypatch.setattr("proxreplay.proximal.shrinkage.inverse.BY_HALVES", by_halves)
    Z = random(groups, 9, width)
    G = Z.mT @ Z
    expected = torch.linalg.inv(torch.eye(width, dtype=torch.float64) + 0.3 * G)
    made = dense_inverse_(G, 0.3)
    assert made.data_ptr() == G.data_ptr()
    torch.testing.assert_close(made, expected)


def test_inverting_by_halves_is_as_precise_as_by_cholesky():
    """Float32, condition 1e6, 900 columns: two levels of halves."""
    d = 900
    scales = torch.logspace(0, -3, d) * 30
    Z = torch.randn(d + 200, d, generator=torch.Generator().manual_seed(0)) * scales
    P = Z.T @ Z + torch.eye(d)
    exact = torch.linalg.inv(P.double())
    cholesky = torch.cholesky_inverse(torch.linalg.cholesky(P))
    invert_(P)
    error, usual = (float(torch.linalg.matrix_norm(M.double() - exact, 2)) for M in (P, cholesky))
    assert error < 3 * usual < 1e-5
    assert float((P - P.T).abs().max()) < 1e-6
