"""The leading directions and the mean of the rest, against eigenvectors in float64."""

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
    s[:-rank] = s[:-rank].mean()
    return torch.linalg.inv(torch.eye(len(G), dtype=G.dtype) + omega * (U * s) @ U.mT)


@pytest.mark.parametrize("power", [2.0, 3.0], ids=["slow decay", "fast decay"])
def test_followed_it_becomes_that_of_the_eigenvectors(power: float) -> None:
    G, eye = gram(80, power), torch.eye(80, dtype=torch.float64)[None]
    made = leading(G, 50.0, 10)
    for _ in range(6):
        made = leading(G, 50.0, 10, made.followed[0])
    torch.testing.assert_close(made.apply(eye)[0], slow(G, 50.0, 10), rtol=0, atol=2e-3)
    assert made.rank == 10


def test_the_trace_of_the_metric_stays_as_the_strength_is_measured_by_it() -> None:
    G = gram(60, 0.5)
    made = leading(G, 3.0, 7).apply(torch.eye(60, dtype=torch.float64)[None])[0]
    trace = torch.linalg.inv(made).trace()
    torch.testing.assert_close(trace, (torch.eye(60, dtype=torch.float64) + 3.0 * G).trace())
    assert torch.linalg.eigvalsh(made).max() <= 1 + 1e-12


def test_a_matrix_of_zeros_changes_nothing() -> None:
    M = torch.randn(1, 3, 40)
    made = leading(torch.zeros(40, 40), 3.0, 5)
    torch.testing.assert_close(made.apply(M), M)


def test_of_few_directions_all_are_found() -> None:
    Z = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(50, dtype=torch.float64)
    made = leading(Z.mT @ Z, 2.0, 6)
    torch.testing.assert_close(made.apply(eye[None])[0], torch.linalg.inv(eye + 2.0 * Z.mT @ Z))
