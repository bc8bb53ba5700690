"""Rules of several processes against the same rule of one process with all examples."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from proxreplay import LPR, Learner
from proxreplay.batch import Batch
from proxreplay.distributed import ALONE, Processes, compare
from proxreplay.proximal import AGEM, AOP, GPM, OWM, LayerwiseRule
from proxreplay.proximal.rules.sharing import owners
from proxreplay.proximal.statistics.statistic import Statistic
from proxreplay.proximal.statistics.summing import pack, summed, unpack
from tests.distributed.pool import Pool, problem_of

RULES: dict[str, Callable[[nn.Module], LayerwiseRule]] = {
    "exact": lambda model: LPR(model, tolerance=0),
    "rolling": lambda model: LPR(model, rolling=0.5, tolerance=0),
    "sketched": lambda model: LPR(model, max_dim=50, tolerance=0.4),
    "gpm": lambda model: GPM(model),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.Flatten()),
        *(nn.Linear(64, 6), tied, nn.Tanh(), tied, nn.Linear(6, 4)),
    ).double()


def examples(n: int = 9) -> torch.Tensor:
    return torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()


def dense(rule: LayerwiseRule, name: str) -> torch.Tensor:
    factor = rule.shrinkage(name)
    unit = torch.eye(factor.width, dtype=torch.float64).expand(factor.groups, -1, -1)
    return factor.apply(unit)


def refresh_together(kind: str, n: int) -> dict[str, float]:
    """The largest error of every factor, with replicated examples and with shares."""
    processes, model = Processes.up(replicated=True), network()
    whole = RULES[kind](model).among(ALONE)
    shared = RULES[kind](model).among(processes)
    own = RULES[kind](model)  # finds the group by itself
    for step in range(2):
        x = examples(n) + step
        whole.refresh(x, of=4 * n)
        shared.refresh(x, of=4 * n)
        own.refresh(x[processes.share(n)], of=4 * n)
    compare(processes, kind, {"shared": shared.state_dict(), "own": own.state_dict()})
    assert whole.untreated == shared.untreated == own.untreated
    assert set(whole.layers) == set(shared.layers) == set(own.layers)
    errors = {}
    for name, layer in whole.layers.items():
        for rule in (shared, own):
            assert rule.layers[name].positions == layer.positions
            omega = rule.layers[name].omega  # a relative strength is rounded
            assert (omega or 0.0) == pytest.approx(layer.omega or 0.0, rel=1e-12)
            error = float((dense(rule, name) - dense(whole, name)).abs().max())
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


@pytest.mark.parametrize("kind", RULES)
def test_factors_are_those_of_all_examples(two: Pool, kind: str) -> None:
    for errors in two.run(refresh_together, kind, 9):
        assert errors
        assert max(errors.values()) < 1e-12, errors


def one_example() -> float:
    processes, model = Processes.up(replicated=True), network()
    whole, shared = LPR(model).among(ALONE), LPR(model).among(processes)
    whole.refresh(examples(1))
    shared.refresh(examples(1))
    batches = [(one,) for one in examples(5).split(2)]
    in_batches = LPR(model).among(processes)
    whole_batches = LPR(model).among(ALONE)
    in_batches.refresh(batches)
    whole_batches.refresh(batches)
    return max(
        float((dense(one, name) - dense(other, name)).abs().max())
        for one, other in ((whole, shared), (in_batches, whole_batches))
        for name in one.layers
    )


def test_fewer_examples_than_processes_and_lists_of_batches(two: Pool) -> None:
    assert max(two.run(one_example)) < 1e-13


def empty_shares() -> tuple[float, str, str, bool]:
    """Process 1 has no example at first; then nobody has one."""
    processes, model = Processes.up(), network()
    whole, own = LPR(model).among(ALONE), LPR(model)
    whole.refresh(examples(3))
    own.refresh(examples(3)[:: processes.rank + 1][: 3 - 3 * processes.rank])
    error = max(float((dense(own, n) - dense(whole, n)).abs().max()) for n in whole.layers)
    own.refresh([examples(3)][processes.rank :])  # batches, none for process 1
    before = dense(own, "0")
    shared = problem_of(lambda: own.refresh(examples(0)))
    replicated = problem_of(lambda: own.among(processes.holding(replicated=True)).refresh([]))
    return error, shared, replicated, torch.equal(before, dense(own, "0"))


def test_an_empty_share_counts_as_nothing_and_no_examples_at_all_are_refused(two: Pool) -> None:
    for error, shared, replicated, kept in two.run(empty_shares):
        assert error < 1e-13
        assert shared == replicated
        assert shared.startswith("InputError: refresh: no examples; give at least one")
        assert kept


def shard_parameters() -> list[str]:
    """One rule is made before the parameters are shared out, the others after."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    before = LPR(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    makers = [lambda: before.refresh(examples()), lambda: LPR(model), lambda: AGEM(model)]
    return [problem_of(make) for make in (*makers, lambda: Learner(model))]


def test_parameters_in_pieces_are_refused_by_name(two: Pool) -> None:
    for lpr, new, agem, learner in two.run(shard_parameters):
        for text, who in ((lpr, "LPR"), (new, "LPR"), (agem, "AGEM"), (learner, "Learner")):
            assert f"{who}: '0.weight' is a DTensor, of which this process holds a piece" in text


def fail_to_refresh() -> tuple[str, bool, str]:
    processes, model = Processes.up(), network()
    rule = LPR(model)
    rule.refresh(examples()[processes.share(9)])
    before = dense(rule, "0")
    bad = examples()
    bad[-1] = float("nan")
    text = problem_of(lambda: rule.refresh(bad[processes.share(9)]))
    return text, torch.equal(before, dense(rule, "0")), repr(rule)


def test_a_failure_in_one_process_leaves_all_as_they_were(two: Pool) -> None:
    (first, *kept), (second, *also_kept) = two.run(fail_to_refresh)
    assert first.startswith("RefreshError")
    assert second.startswith("ProcessError: refresh failed in process 0 of 2: RefreshError")
    assert kept[0]
    assert also_kept[0]
    assert "2 processes, this is number 0; each is given its own share" in kept[1]


def reference_together(samples: int) -> float:
    processes, model = Processes.up(replicated=True), network().eval()
    labels = torch.randint(4, (samples,), generator=torch.Generator().manual_seed(2))
    x, own = examples(samples), processes.share(samples)
    found = []
    for rule, rows in (
        (AGEM(model).among(ALONE), slice(None)),
        (AGEM(model).among(processes), slice(None)),
        (AGEM(model), own),
    ):
        rule.observe(None, Batch(x[rows], labels[rows]))
        found.append(rule.state_dict()["reference"])
    compare(processes, "agem", {"shared": found[1], "own": found[2]})
    whole, *others = found
    return max(float((whole[n] - one[n]).abs().max()) for one in others for n in whole)


def test_the_reference_gradient_is_that_of_all_examples(two: Pool) -> None:
    assert max(two.run(reference_together, 9)) < 1e-14


def reference_of_some() -> tuple[str, bool]:
    """Only process 0 has examples to compare with; then nobody has."""
    processes, model = Processes.up(), network().eval()
    rule = AGEM(model)
    labels = torch.zeros(9, dtype=torch.int64)
    rule.observe(None, Batch(examples(), labels))
    some = Batch(examples(), labels) if processes.writes else None
    text = problem_of(lambda: rule.observe(None, some))
    rule.observe(None, None)
    return text, bool(rule.state_dict()["reference"])


def test_a_reference_that_some_processes_lack_is_refused_in_all(two: Pool) -> None:
    for text, referred in two.run(reference_of_some):
        assert "AGEM: process 1 of 2 has no reference examples, but others have" in text
        assert not referred


def observe_together(n: int) -> float:
    """The largest difference to one process with all examples, over three batches."""
    processes, worst = Processes.up(replicated=True), 0.0
    for kind in (OWM, AOP):
        model = network()
        whole = kind(model, norms="treat").among(ALONE)
        shared, own = kind(model, norms="treat").among(processes), kind(model, norms="treat")
        for step in range(3):
            x, labels = examples(n) + step, torch.zeros(n, dtype=torch.int64)
            mine = processes.share(n)
            for rule, rows in ((whole, slice(None)), (shared, slice(None)), (own, mine)):
                rule.observe(Batch(x[rows], labels[rows]))
        compare(processes, kind.__name__, {"shared": shared.state_dict(), "own": own.state_dict()})
        assert set(whole.layers) == set(shared.layers) == set(own.layers)
        assert {"0", "4"} <= set(whole.layers)
        for name in whole.layers:
            for rule in (shared, own):
                worst = max(worst, float((dense(rule, name) - dense(whole, name)).abs().max()))
    return worst


@pytest.mark.parametrize("n", [9, 1])
def test_mean_inputs_are_those_of_all_examples(two: Pool, n: int) -> None:
    assert max(two.run(observe_together, n)) < 1e-10


@given(st.lists(st.floats(0.1, 1e6), max_size=30), st.integers(1, 8))
def test_owners_are_never_far_from_fair(costs: list[float], size: int) -> None:
    named = {str(i): cost for i, cost in enumerate(costs)}
    found = owners(named, size)
    assert found.keys() == named.keys()
    loads = [sum(named[n] for n, owner in found.items() if owner == r) for r in range(size)]
    fair = sum(costs) / size  # a greedy choice exceeds it by less than the largest part
    assert max(loads) <= fair + max(costs, default=0.0) + 1e-6


@given(st.integers(1, 3), st.integers(1, 6))
def test_packed_triangles_come_back(groups: int, width: int) -> None:
    Z = torch.randn(groups, 4, width)
    G = Z.mT @ Z
    G = (G + G.mT) / 2
    assert torch.equal(unpack(pack(G), width), G.double())
    assert pack(G).numel() == groups * width * (width + 1) // 2


def test_gram_matrices_are_not_kept_beside_their_triangles() -> None:
    """Both are as large as the factors, and there is one for every layer."""
    grams: list[Any] = []
    there: list[Any] = []

    class Two(Processes):
        def tell(self, value: Any, at: str = "") -> list[Any]:
            return [value, value]

        def sum_(self, tensors: Any) -> None:
            there.extend(gram() for gram in grams)

    def collect() -> tuple[dict[str, Any], dict[str, str]]:
        found = {name: Statistic(torch.eye(3)[None], 3, 5, 5, torch.float32) for name in "ab"}
        grams.extend(weakref.ref(one.G) for one in found.values())
        return found, {}

    total, _ = summed(Two(0, 2), collect, torch.device("cpu"))
    assert there == [None, None]
    assert all(torch.equal(one.G, torch.eye(3).double()[None]) for one in total.values())
