"""The leading directions and the weighed mean of the rest, against eigenvectors in float64."""

import pytest
import torch
from torch import Tensor

from proxreplay.proximal.shrinkage.spectral import leading


def gram(d: int, power: float) -> Tensor:
    """Symmetric, with eigenvalues ``1 / i^power``."""
    rng = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=rng)).Q
    s = torch.arange(1, d + 1, dtype=torch.float64) ** -power
    return (Q * s) @ Q.mT


def slow(G: Tensor, omega: float, rank: int) -> Tensor:
    """The same metric from all eigenvectors."""
    s, U = torch.linalg.eigh(G)
    s = s.clone()
    s[:-rank] = s[:-rank].square().sum() / s[:-rank].sum()
    return torch.linalg.inv(torch.eye(len(G), dtype=G.dtype) + omega * (U * s) @ U.mT)


@pytest.mark.parametrize("power", [2.0, 3.0], ids=["slow decay", "fast decay"])
def test_followed_it_becomes_that_of_the_eigenvectors(power: float) -> None:
    G, eye = gram(80, power), torch.eye(80, dtype=torch.float64)[None]
    made = leading(G, 50.0, 10)
    for _ in range(6):
        made = leading(G, 50.0, 10, made.followed[0])
    torch.testing.assert_close(made.apply(eye)[0], slow(G, 50.0, 10), rtol=0, atol=2e-3)
    assert made.rank == 10


def test_gradients_of_like_rows_are_off_by_less_than_with_the_plain_mean_of_the_rest() -> None:
    G, rank = gram(200, 1.0), 12
    M = torch.randn(30, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) @ G
    exact = torch.linalg.inv(torch.eye(200, dtype=torch.float64) + 400.0 * G)
    made = leading(G, 400.0, rank)
    for _ in range(6):
        made = leading(G, 400.0, rank, made.followed[0])
    s = torch.linalg.eigvalsh(G)
    plain = (torch.linalg.eigh(G).eigenvectors[:, :-rank], 1 / (1 + 400.0 * s[:-rank].mean()))
    by_mean = M @ exact
    by_mean = by_mean + (plain[1] * M - by_mean) @ plain[0] @ plain[0].mT
    error = (made.apply(M[None])[0] - M @ exact).norm()
    assert error < 0.75 * (by_mean - M @ exact).norm()
    assert torch.linalg.eigvalsh(made.apply(torch.eye(200).double()[None])[0]).max() <= 1 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_direction_of_nearly_all_the_energy_leaves_the_rest_between_its_bounds(dtype) -> None:
    G = gram(300, 1.0).to(dtype)
    G += 1e3 * torch.ones(300, 300, dtype=dtype) / 300
    made = leading(G, 1.0, 10)
    for _ in range(4):
        made = leading(G, 1.0, 10, made.followed[0])
    rest = 1 / made.scale - 1
    e = torch.linalg.eigvalsh(G.double())[:-10]
    assert 0.5 * float(e.mean()) < rest < 2 * float(e.max())


def test_a_matrix_of_zeros_changes_nothing() -> None:
    M = torch.randn(1, 3, 40)
    made = leading(torch.zeros(40, 40), 3.0, 5)
    torch.testing.assert_close(made.apply(M), M)


def test_of_few_directions_all_are_found() -> None:
    Z = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(50, dtype=torch.float64)
    made = leading(Z.mT @ Z, 2.0, 6)
    torch.testing.assert_close(made.apply(eye[None])[0], torch.linalg.inv(eye + 2.0 * Z.mT @ Z))
