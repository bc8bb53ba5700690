"""The slow dense truth that fast code is tested against; float64, no unfolding, no structure.

Everything here goes from the definition: Jacobians by ``torch.func.jacrev``, inverses by
``torch.linalg.solve``. Nothing is imported from the package.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The values of the trained parameters, in the order of `flat_gradient`."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def jacobian(
    function: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor]
) -> Tensor:
    """``J: [outputs, parameters]`` of a function of named tensors."""
    J = jacrev(function)(dict(parameters))
    return torch.cat([J[name].reshape(-1, value.numel()) for name, value in parameters.items()], 1)


def module_jacobian(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """``J: [outputs, parameters]`` of a module's output in its trained parameters, as it stands."""
    return jacobian(lambda p: functional_call(module, dict(p), args, kwargs), trained(module))


def proximal_gradient(g: Tensor, J: Tensor, omega: float) -> Tensor:
    """``g (I + omega J'J)^-1`` for a flat gradient ``g``."""
    P = torch.eye(len(g), dtype=g.dtype) + omega * J.T @ J
    return torch.linalg.solve(P, g)


def dense_shrinkage(Z: Tensor, omega: float) -> Tensor:
    """``(I + omega Z'Z)^-1`` for rows ``Z: [rows, d]``."""
    return torch.linalg.inv(torch.eye(Z.shape[1], dtype=Z.dtype) + omega * Z.T @ Z)


def flat_gradient(module: nn.Module) -> Tensor:
    """All gradients of trained parameters in one vector; every one must be there."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])


def fill_gradients_(module: nn.Module, seed: int = 0) -> Tensor:
    """Give every trained parameter a random gradient; returns them as one vector."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            parameter.grad = noise.to(parameter)
    return flat_gradient(module)


def shake_(module: nn.Module, seed: int = 0) -> nn.Module:
    """Float64, random parameters and random plausible buffers, evaluation mode."""
    rng = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            parameter.copy_(noise)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                noise = torch.rand(buffer.shape, generator=rng, dtype=torch.float64)
                buffer.copy_(0.5 + noise)
    return module


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def stacked_jacobian(module: nn.Module, batches: Iterable[tuple[Any, ...]]) -> Tensor:
    """Jacobians of all batches, one below the other: ``J'J`` is then the sum."""
    return torch.cat([module_jacobian(module, *batch) for batch in batches])


def assert_same_state(a: Any, b: Any, rtol: float = 0, atol: float = 0, at: str = "state") -> None:
    """Nested dicts and lists of tensors, numbers and strings; bit by bit unless told otherwise."""
    assert type(a) is type(b), f"{at}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        same = {"rtol": rtol, "atol": atol, "equal_nan": True}
        torch.testing.assert_close(a, b, **same, msg=lambda m: f"{at}: {m}")
    elif isinstance(a, dict):
        assert list(a) == list(b), at
        for key in a:
            assert_same_state(a[key], b[key], rtol, atol, f"{at}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_same_state(*pair, rtol, atol, f"{at}[{i}]")
    elif isinstance(a, float):
        same = a == b or math.isclose(a, b, rel_tol=rtol, abs_tol=atol)
        assert same, f"{at}: {a} and {b}"
    else:
        assert a == b, at
