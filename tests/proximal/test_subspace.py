"""Directions followed from refresh to refresh, against the inverse itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from proxreplay import LPR
from proxreplay.proximal.shrinkage.forms import (
    DenseShrinkage,
    SpectralShrinkage,
    shrinkage_from_state,
)
from proxreplay.proximal.shrinkage.spectral import (
    LOOK_EVERY,
    MANY,
    PROBES,
    Pace,
    _largest_outside,
    _leading,
    follow,
    most_that_pays,
    pays,
)
from tests.reference import dense_shrinkage, fill_gradients_, flat_gradient, random

D = 120


def decaying(seed, decay, top=30.0):
    """A Gram matrix with eigenvalues ``top / rank ** decay`` and random eigenvectors."""
    Q = torch.linalg.qr(random(D, D, seed=seed)).Q
    s = top / torch.arange(1.0, D + 1, dtype=Q.dtype) ** decay
    return (Q * s) @ Q.mT


def drifted(G, seed, drift):
    """The Gram matrix of rows that have changed by ``drift`` of their size."""
    Z = torch.linalg.cholesky(G + 1e-9 * torch.eye(D)).mT
    Z = Z + drift * Z.norm() / D * random(D, D, seed=seed)
    return Z.mT @ Z


def directions(G, tolerance):
    """The eigenvectors of those that lose more than twice the tolerance."""
    s, U = torch.linalg.eigh(G)
    return U[:, s / (1 + s) > 2 * tolerance]


def error(made, G, omega=1.0):
    one = torch.eye(D, dtype=torch.float64)
    off = made.apply(one.to(made.dtype)[None])[0].double() - torch.linalg.inv(one + omega * G)
    return float(torch.linalg.eigvalsh(off).abs().max())


@settings(deadline=None, max_examples=60)
@given(
    decay=st.floats(0.8, 2.5),
    drift=st.floats(0, 0.4),
    tolerance=st.floats(0.02, 0.2),
    seed=st.integers(0, 999),
)
def test_what_is_followed_is_within_the_tolerance(decay, drift, tolerance, seed):
    before = decaying(seed, decay)
    G = drifted(before, seed + 1, drift)
    made = follow(G, 1.0, tolerance, D // 2, directions(before, tolerance))
    assert made is None or error(made, G) <= 1.1 * tolerance  # what is outside is seen from below


@settings(deadline=None, max_examples=60)
@given(decay=st.floats(1.2, 2.5), tolerance=st.floats(0.02, 0.2), seed=st.integers(0, 999))
def test_what_is_found_from_nothing_is_within_the_tolerance(decay, tolerance, seed):
    G = decaying(seed, decay)
    made = follow(G, 1.0, tolerance, D // 2)
    assert made is None or error(made, G) <= 1.1 * tolerance
    if directions(G, tolerance / 2).shape[1] < D // 8:
        assert made is not None


@settings(deadline=None, max_examples=30)
@given(decay=st.floats(0.5, 2.5), k=st.integers(1, 40), seed=st.integers(0, 99))
def test_leading_directions_are_those_of_nystroems_approximation(decay, k, seed):
    G = decaying(seed, decay)
    Q = torch.linalg.qr(random(D, k, seed=seed + 1)).Q
    s, U = _leading(G, Q)
    expected = G @ Q @ torch.linalg.inv(Q.mT @ G @ Q) @ Q.mT @ G
    torch.testing.assert_close((U * s) @ U.mT, expected, rtol=0, atol=1e-8)
    assert torch.equal(s, s.sort().values)


@settings(deadline=None, max_examples=30)
@given(decay=st.floats(0.5, 2.5), rank=st.integers(0, 40), seed=st.integers(0, 99))
def test_what_is_outside_is_seen_from_below_and_nearly_all_of_it(decay, rank, seed):
    G = decaying(seed, decay)
    s, U = torch.linalg.eigh(G)
    start = random(D, PROBES, seed=seed)
    seen = _largest_outside(G, s[D - rank :], U[:, D - rank :], start)
    assert 0.8 * s[D - rank - 1] <= seen <= s[D - rank - 1] * (1 + 1e-9)


def test_rows_without_a_full_rank_are_no_obstacle():
    Z = random(10, D)
    made = follow(Z.mT @ Z, 1.0, 0.05, D // 2, directions(decaying(0, 2.0), 0.05))
    assert made is not None
    assert made.rank <= 10
    assert error(made, Z.mT @ Z) <= 1e-6


def test_what_is_spare_is_saved_and_followed():
    made = follow(decaying(0, 1.5), 1.0, 0.1, D // 2)
    again = shrinkage_from_state(made.state())
    assert torch.equal(again.followed, made.followed)
    assert made.followed.shape[2] > made.rank
    assert made.U.is_contiguous()  # products with a loaded one are the same to the last bit
    assert made.bytes == sum(t.nbytes for t in (made.U, made.f, made.spare))
    M = random(1, 3, D)
    assert torch.equal(again.apply(M), made.apply(M))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("omega", [1.0, 0.25])
def test_a_small_drift_is_followed_with_few_directions(dtype, omega):
    before = decaying(0, 1.5) / omega
    G = drifted(before, 1, 0.05)
    start = directions(before * omega, 0.1)
    made = follow(G.to(dtype), omega, 0.1, D // 2, start.to(dtype))
    assert made is not None
    assert made.dtype == dtype
    assert error(made, G, omega) <= 0.1
    assert made.rank <= 2 * start.shape[1]
    orthonormal = torch.eye(made.rank, dtype=dtype)
    torch.testing.assert_close(made.U[0].mT @ made.U[0], orthonormal, rtol=0, atol=1e-5)


def test_directions_that_are_new_are_found():
    """Those of before are of no use at all."""
    start = directions(decaying(0, 2.0), 0.1)
    G = decaying(5, 2.0)
    made = follow(G, 1.0, 0.1, D // 2, start)
    assert made is not None
    assert error(made, G) <= 0.1


def test_too_many_new_directions_are_admitted():
    start = directions(decaying(0, 2.0), 0.1)[:, -3:]
    assert follow(5 * torch.eye(D, dtype=torch.float64), 1.0, 0.1, D // 2, start) is None


def test_nothing_to_shrink_needs_no_direction():
    G = torch.zeros(D, D, dtype=torch.float64)
    made = follow(G, 1.0, 0.1, D // 2, G[:, :0])
    assert made is not None
    assert made.rank == 0
    assert error(made, G) == 0


@given(d=st.integers(512, 4000), out=st.integers(8, 600), steps=st.integers(0, 10_000))
def test_fewer_directions_pay_sooner(d, out, steps):
    worth = [pays(d, out, rank, steps) for rank in (0, d // 16, d // 8, d // 4, d // 2, d)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0]
    assert not worth[-1]


@given(d=st.integers(512, 4000), out=st.integers(8, 600), steps=st.integers(0, 10_000))
def test_the_most_that_pays_is_the_last_that_does(d, out, steps):
    most = most_that_pays(d, out, steps)
    assert pays(d, out, most, steps)
    assert not pays(d, out, most + 1, steps)


def test_if_nobody_knows_how_many_steps_half_of_the_directions_may_stay():
    assert pays(1440, 160, 700, MANY)
    assert not pays(1440, 160, 725, MANY)
    assert not pays(1440, 160, 700, 30)


def test_the_pace_is_that_of_the_last_stretch_with_steps():
    pace = Pace()
    looks = []
    for steps in (0, 30, 0, 20):
        pace.steps += steps
        looks.append((pace.time_to_look, pace.expected))
        pace.refreshed()
    assert looks == [(True, MANY), (False, 30), (False, 30), (False, 20)]
    assert pace.expected == 20


class TestRefreshes:
    """600 columns; rows whose energy falls, and which change from refresh to refresh."""

    @staticmethod
    def rows(refresh):
        scales = 4 * 0.9 ** torch.arange(60.0, dtype=torch.float64)
        basis = random(60, 599, seed=0) + 0.02 * refresh * random(60, 599, seed=1)
        return (random(240, 60, seed=10 + refresh) * scales) @ basis / 599**0.5

    def refreshed(self, lpr, refresh, steps=30):
        lpr.refresh(self.rows(refresh))
        for _ in range(steps):
            fill_gradients_(lpr.model)
            lpr.precondition_()
        return lpr.shrinkage("")

    @staticmethod
    def counted(monkeypatch):
        """What `follow` was given to start from, call by call."""
        starts = []

        def counting(G, omega, tolerance, most, start=None):
            starts.append(start)
            return follow(G, omega, tolerance, most, start)

        monkeypatch.setattr("proxreplay.proximal.shrinkage.choose.follow", counting)
        return starts

    def test_every_one_is_within_the_tolerance_and_starts_from_the_one_before(self, monkeypatch):
        starts = self.counted(monkeypatch)
        layer = nn.Linear(599, 40).double()
        lpr = LPR(layer, 50.0, tolerance=0.1)
        known = None
        for refresh in range(6):
            factor = self.refreshed(lpr, refresh)
            assert (starts[-1] is None) if known is None else torch.equal(starts[-1], known)
            known = factor.followed[0]
            assert isinstance(factor, SpectralShrinkage)
            Z = torch.nn.functional.pad(self.rows(refresh), (0, 1), value=1.0)
            exact = dense_shrinkage(Z, 50.0 / len(Z))
            made = factor.apply(torch.eye(600, dtype=torch.float64)[None])[0]
            assert 0 < torch.linalg.matrix_norm(made - exact, 2) <= 0.1

    def test_a_resumed_rule_goes_on_alike(self):
        layer = nn.Linear(599, 40).double()
        lpr, again = (LPR(layer, 50.0, tolerance=0.1) for _ in range(2))
        for refresh in range(3):
            self.refreshed(lpr, refresh, steps=7)
        again.load_state_dict(lpr.state_dict())
        gradients = []
        for one in (lpr, again):
            self.refreshed(one, 3, steps=1)
            gradients.append(flat_gradient(layer))
        assert torch.equal(*gradients)
        assert lpr.state_dict()["pace"] == again.state_dict()["pace"]

    def test_where_it_does_not_pay_the_factor_is_exact_and_looked_at_rarely(self, monkeypatch):
        starts = self.counted(monkeypatch)
        looks = []
        layer = nn.Linear(599, 2).double()
        lpr = LPR(layer, 1e4, tolerance=0.02)
        x = random(700, 599)
        for refresh in range(LOOK_EVERY + 2):
            before = len(starts)
            lpr.refresh(x)
            looks += [refresh] * (len(starts) - before)
            assert isinstance(lpr.shrinkage(""), DenseShrinkage)
        assert looks == [0, LOOK_EVERY]
