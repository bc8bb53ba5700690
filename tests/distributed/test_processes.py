"""What processes say to each other, against the same sums and copies made by one."""

import copy
import os
import pickle

import pytest
import torch
from torch import nn

from proxreplay import er, er_ace, lode
from proxreplay.batch import Batch
from proxreplay.distributed import ALONE, Processes, compare, current, mean_, shared_calls
from proxreplay.errors import InputError
from proxreplay.replay import Derpp, Distilled, derpp_snapshot
from tests.distributed.pool import Pool, problem_of

LOSSES = {
    **{"er": er, "er-ace": er_ace, "lode": lode, "derpp": Derpp(), "der": derpp_snapshot},
    "distilled": Distilled(er, on="all"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def batch(n: int) -> Batch:
    def logits() -> torch.Tensor:
        return torch.randn(n, 4, dtype=torch.float64)

    extras = {"teacher": logits(), "logits": logits(), "average": logits()}
    inputs = torch.randn(n, 5, dtype=torch.float64)
    return Batch(inputs, torch.randint(4, (n,)), extras)


def penalised(model: nn.Module, incoming: Batch, replay: Batch | None) -> torch.Tensor:
    """A loss of somebody's own that uses the network in other ways than by a call."""
    features = model[0](incoming.inputs).square().mean()
    return er(model, incoming, replay) + features + 0.1 * model[2].weight.square().sum()


def gradients_together(n: int, replayed: int) -> dict[str, float]:
    """The largest error of the mean gradient of each loss."""
    processes, model = Processes.up(replicated=True), network()
    incoming, replay = batch(n), batch(replayed)
    parameters = dict(model.named_parameters())
    errors = {}
    for name, loss in {**LOSSES, "penalised": penalised}.items():
        value = loss(model, incoming, replay)
        whole = torch.autograd.grad(value, list(parameters.values()))
        with shared_calls([model], processes):
            shared = loss(model, incoming, replay)
            own = torch.autograd.grad(shared, list(parameters.values()))
        found = mean_(dict(zip(parameters, own, strict=True)), parameters, processes)
        assert torch.allclose(value, shared, rtol=0, atol=1e-13)
        errors[name] = max(
            float((found[name] - g).abs().max()) for name, g in zip(parameters, whole, strict=True)
        )
    return errors


@pytest.mark.parametrize(("n", "replayed"), [(7, 6), (8, 8), (1, 2)], ids=["odd", "even", "few"])
def test_the_mean_gradient_is_that_of_the_joint_batch(two: Pool, n: int, replayed: int) -> None:
    for errors in two.run(gradients_together, n, replayed):
        assert max(errors.values()) < 1e-14, errors


def talk() -> list[object]:
    processes = Processes.up()
    rank = processes.rank
    rows = torch.arange(3 * (rank + 1), dtype=torch.int16).view(-1, 3) + 10 * rank
    names = torch.tensor([rank == 0] * (rank + 1))
    joined, flags = processes.gather([rows, names])
    empty = processes.gather([torch.zeros(rank, 2)])[0]
    sums = [torch.full((2,), 1.0 + rank), torch.tensor([rank]), torch.ones(3) / (1 + rank)]
    processes.sum_(sums)
    sent = [torch.full((2, 2), float(rank)), torch.tensor([rank == 1])]
    processes.broadcast_(sent, 1)
    return [joined.tolist(), flags.tolist(), list(empty.shape), sums, sent]


def test_sums_rows_and_copies(two: Pool) -> None:
    for joined, flags, empty, sums, sent in two.run(talk):
        assert joined == [[0, 1, 2], [10, 11, 12], [13, 14, 15]]
        assert flags == [True, False, False]
        assert empty == [1, 2]
        assert [one.tolist() for one in sums] == [[3.0, 3.0], [1], [1.5, 1.5, 1.5]]
        assert [one.tolist() for one in sent] == [[[1.0, 1.0], [1.0, 1.0]], [True]]


def disagree() -> tuple[str, str]:
    processes = Processes.up()
    same = {"model": {"a": torch.ones(2), "b": torch.zeros(2)}, "rule": None}
    compare(processes, "the run", same)
    other = copy.deepcopy(same)
    other["model"]["b"] += processes.rank * 1e-30
    generators = {"replay": torch.Generator().manual_seed(processes.rank)}
    return (
        problem_of(lambda: compare(processes, "the run", other)),
        problem_of(lambda: compare(processes, "the run", {**same, "generators": generators})),
    )


def test_a_disagreement_names_the_part(two: Pool) -> None:
    for weights, generators in two.run(disagree):
        assert "process 1 of 2 holds something else than process 0 in model/b." in weights
        assert "in generators/replay." in generators


def missing_gradients() -> tuple[bool, float]:
    processes = Processes.up()
    like = {"a": torch.zeros(2), "b": torch.zeros(3)}
    own = {"a": None, "b": torch.ones(3) if processes.rank else None}
    found = mean_(own, like, processes)
    return found["a"] is None, float(found["b"].sum())


def test_a_gradient_that_only_one_process_has_counts(two: Pool) -> None:
    assert two.run(missing_gradients) == [(True, 1.5)] * 2


def sparse() -> str:
    gradient = {"table": torch.eye(2).to_sparse()}
    return problem_of(lambda: mean_(gradient, {"table": torch.eye(2)}, Processes.up()))


def test_sparse_gradients_are_refused_by_name(two: Pool) -> None:
    assert all("'table' has a sparse gradient" in text for text in two.run(sparse))


def fail_in_one() -> str:
    processes = Processes.up()

    def act() -> None:
        if processes.rank == 1:
            raise InputError("no data here")

    return problem_of(lambda: processes.together("loading", act))


def test_a_failure_in_one_process_is_one_in_all(two: Pool) -> None:
    first, second = two.run(fail_in_one)
    assert first == "ProcessError: loading failed in process 1 of 2: InputError: no data here"
    assert second == "InputError: no data here"


def leave(end: bool) -> None:
    """One process fails while the other waits for it."""
    if Processes.up().rank == 1:
        os._exit(3) if end else 1 / 0
    Processes.up().tell(None)


@pytest.mark.parametrize(
    ("end", "said"),
    [(False, "process 1: .*ZeroDivisionError"), (True, "process 1 .* code 3")],
    ids=["error", "exit"],
)
def test_a_failing_case_is_named_and_does_not_disturb_the_next(
    two: Pool, end: bool, said: str
) -> None:
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        two.run(leave, end)
    assert two.run(missing_gradients) == [(True, 1.5)] * 2


def test_without_a_group() -> None:
    assert current() is ALONE
    with pytest.raises(InputError, match="no process group is up"):
        Processes.up()
    with pytest.raises(InputError, match="check_every=0"):
        Processes(check_every=0)
    assert pickle.loads(pickle.dumps(Processes(1, 2))).alone


@pytest.mark.parametrize("n", range(9))
def test_shares_are_all_there_is_and_as_equal_as_can_be(n: int) -> None:
    shares = [Processes(rank, 4).share(n) for rank in range(4)]
    assert sorted(i for share in shares for i in range(n)[share]) == list(range(n))
    sizes = [len(range(n)[share]) for share in shares]
    rows = torch.tensor([i for share in shares for i in range(n)[share]])
    assert Processes(0, 4).in_order(rows).tolist() == list(range(n))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == Processes(0, 4).shares(n)
