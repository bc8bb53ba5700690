"""A learner of several processes against one process that is given the same joint batches."""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from proxreplay import LPR, ClassBalancedMemory, Learner, er
from proxreplay.distributed import ALONE, Processes, compare
from proxreplay.models.heads import GrowingHead
from proxreplay.options import CompanionOptions, StepOptions
from proxreplay.proximal import AGEM, OWM, KroneckerLPR
from proxreplay.replay import Derpp, Distilled, derpp_snapshot, er_ace, finetune, lode
from proxreplay.replay.together import held
from proxreplay.serialization import load_state
from tests.distributed.pool import Pool, problem_of

SLOW = os.environ.get("PROXREPLAY_SLOW") == "1"  # all methods, with all batches
BATCHES, N = 100, 9
LOOK = StepOptions(every=3, rebuild=3, incoming=1.0, balance=True)
METHODS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "er": lambda model: {"loss": er},
    "lpr-er": lambda model: {"loss": er, "rule": LPR(model, 1.0)},
    "lpr-der": lambda model: {"loss": derpp_snapshot, "rule": LPR(model, 1.0, rolling=0.5)},
    "lpr-itself": lambda model: {"loss": er, "rule": LPR(model)},
    "lpr-steps": lambda model: {"rule": LPR(model, statistics=StepOptions(2, 3, 0.9, 0.5))},
    "klpr-er": lambda model: {"rule": KroneckerLPR(model, max_dim=40, steps=LOOK)},
    "klpr-sampled": lambda model: {
        "rule": KroneckerLPR(model, fisher="sampled", scope="model", steps=LOOK)
    },
    "agem": lambda model: {"loss": finetune, "rule": AGEM(model, samples=11)},
    "owm": lambda model: {"loss": er, "rule": OWM(model)},
    "er-ace": lambda model: {"loss": er_ace, "rule": AGEM.joint(model)},
    "derpp": lambda model: {"loss": Derpp()},
    "companion": lambda model: {"companion": CompanionOptions(filters=4)},
    "taught": lambda model: {"loss": Distilled(lode, on="all"), "rule": LPR(model, 1.0)},
}
# with PROXREPLAY_SLOW=1: 100 batches, and four processes too
REQUIRED = ("er", "lpr-er", "lpr-der", "lpr-itself", "lpr-steps", "klpr-er", "agem")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64, 12), nn.Tanh(), GrowingHead(12)),
    ).double()


def stream(batches: int = BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Classes that come one after the other; a batch need not divide by the processes."""
    rng = torch.Generator().manual_seed(3)
    centres = torch.randn(5, 1, 4, 4, generator=rng).double()
    found = []
    for i in range(batches):
        labels = torch.randint(0, 2 + min(3, i // 4), (N,), generator=rng)
        noise = torch.randn(N, 1, 4, 4, generator=rng).double()
        found.append((centres[labels] + 0.5 * noise, labels))
    return found


def make(
    method: str, processes: Processes, shared: Processes | None = None, **options: Any
) -> Learner:
    model = network()
    given = {
        "lr": 0.05,
        "steps_per_batch": 2 if SLOW or method == "lpr-itself" else 1,
        "replay_batch": 7,
        "refresh_every": 10,
        "refresh_samples": 30,
    }
    parts = METHODS[method](model)
    memory = ClassBalancedMemory(40, shared_by=shared)
    return Learner(model, memory, processes=processes, **parts | given | options)


def weights(learner: Learner) -> torch.Tensor:
    parts = [p.detach().reshape(-1) for p in learner.model.parameters()]
    assert learner.averaging is not None
    if learner.companion is not None:
        parts += [learner.companion.weight.double().reshape(-1), learner.companion.losses]
    return torch.cat([*parts, *(p.reshape(-1) for p in learner.averaging.model.parameters())])


def learn_together(method: str, batches: int) -> torch.Tensor:
    """The weights after the stream, once all processes have proved to hold the same bytes."""
    processes = Processes.up(replicated=True, check_every=10)
    learner = make(method, processes)
    for x, y in stream(batches):
        assert math.isfinite(learner.learn(x, y).loss)
    compare(processes, method, held(learner))
    return weights(learner)


def learn_alone(method: str, batches: int = BATCHES) -> torch.Tensor:
    torch.set_num_threads(1)
    learner = make(method, ALONE)
    for x, y in stream(batches):
        learner.learn(x, y)
    return weights(learner)


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_learn_what_one_learns(two: Pool, method: str) -> None:
    batches = BATCHES if method == "lpr-der" or SLOW else 20
    one = learn_alone(method, batches)
    for found in two.run(learn_together, method, batches):
        assert float((found - one).abs().max()) < 1e-10


def learn_from_one_example(processes: Processes) -> torch.Tensor:
    learner = make("lpr-itself", processes)
    for i, (x, y) in enumerate(stream(20)):
        n = 1 if i % 7 == 6 else N
        learner.learn(x[:n], y[:n])
    return weights(learner)


def from_one_example_together() -> torch.Tensor:
    return learn_from_one_example(Processes.up(replicated=True, check_every=10))


def test_a_process_without_incoming_rows_does_as_the_others(two: Pool) -> None:
    """It waited for nobody, and the others for it."""
    one = learn_from_one_example(ALONE)
    for found in two.run(from_one_example_together):
        assert float((found - one).abs().max()) < 1e-10


@pytest.mark.parametrize("method", REQUIRED if SLOW else ["lpr-er"])
def test_four_processes_learn_what_one_learns(four: Pool, method: str) -> None:
    batches = BATCHES if SLOW else 12
    one = learn_alone(method, batches)
    for found in four.run(learn_together, method, batches):
        assert float((found - one).abs().max()) < 1e-10


def learn_in_a_group(batches: int) -> torch.Tensor:
    """Two learners at a time, each of two processes that have a group of their own."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    own = dist.get_rank() % 2
    processes = Processes.up(groups[own], replicated=True)
    assert "not in the group" in problem_of(lambda: Processes.up(groups[1 - own]))
    learner = make("lpr-er", processes, shared=processes)
    for x, y in stream(batches + own)[own:]:  # not the same in both groups
        learner.learn(x, y)
    compare(processes, "group", held(learner))
    return weights(learner)


def test_a_group_of_ones_own_learns_what_one_process_learns(four: Pool) -> None:
    one = learn_alone("lpr-er", 12)
    first, other, second, another = four.run(learn_in_a_group, 12)
    assert float((first - one).abs().max()) < 1e-10
    assert torch.equal(first, second)
    assert torch.equal(other, another)
    assert not torch.equal(first, other)


def learn_shares(names: bool) -> tuple[torch.Tensor, list[Any], tuple[int, ...]]:
    processes = Processes.up()
    learner = make("lpr-er", None)  # finds the group by itself
    own = processes.share(N)
    for x, y in stream(30):
        labels = np.array([f"class {int(label)}" for label in y]) if names else y
        learned = learner.learn(x[own].numpy() if names else x[own], labels[own])
    compare(processes, "shares", held(learner))
    assert "2 processes" in repr(learner)
    return weights(learner), learner.labels, learned.ids


@pytest.mark.parametrize("names", [False, True], ids=["integers", "names"])
def test_shares_of_the_stream_are_joined(two: Pool, names: bool) -> None:
    one = make("lpr-er", ALONE)
    order = [i for rank in range(2) for i in range(N)[rank::2]]  # one share after the other
    for x, y in stream(30):
        x, y = x[order], y[order]
        one.learn(x, [f"class {int(label)}" for label in y] if names else y)
    (first, labels, ids), (second, _, more) = two.run(learn_shares, names)
    assert labels == one.labels
    assert float((first - weights(one)).abs().max()) < 1e-10
    assert torch.equal(first, second)
    assert ids + more == tuple(range(29 * N, 30 * N))


def save_and_load(method: str, folder: str) -> tuple[torch.Tensor, int]:
    """Saved in the middle, of a window too; what is loaded goes on with the same bytes."""
    processes = Processes.up(replicated=True)
    learner = make(method, processes)
    for x, y in stream(15):
        learner.learn(x, y)
    learner.save(f"{folder}/middle.safetensors")
    again = make(method, processes)
    again.load_state_dict(load_state(Path(folder) / "middle.safetensors"))
    for one in (learner, again):
        for x, y in stream(30)[15:]:
            one.learn(x, y)
    assert torch.equal(weights(learner), weights(again))
    return weights(learner), len(learner.memory)


@pytest.mark.parametrize("method", ["lpr-der", "klpr-er"])
def test_what_two_processes_save_goes_on_with_two_or_one(
    two: Pool, method: str, tmp_path: Path
) -> None:
    (there, size), _ = two.run(save_and_load, method, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["middle.safetensors"]
    state = load_state(tmp_path / "middle.safetensors")
    assert method != "klpr-er" or len(state["rule"]["step"]["others"]) == 1  # one each
    alone = make(method, ALONE)
    alone.load_state_dict(state)
    alone.load_state_dict(alone.state_dict())
    for x, y in stream(30)[15:]:
        alone.learn(x, y)
    assert len(alone.memory) == size
    assert float((weights(alone) - there).abs().max()) < 1e-10


def learn_with_parts(folder: str) -> tuple[str, list[int], torch.Tensor]:
    """A memory in parts beside a whole one: the same draws, deletions and bytes."""
    processes = Processes.up(replicated=True, check_every=5)
    whole, parts = make("lpr-der", processes), make("lpr-der", processes, shared=processes)
    for i, (x, y) in enumerate(stream(24)):
        one, other = whole.learn(x, y), parts.learn(x, y)
        assert one.ids == other.ids
        assert one.loss == other.loss
        if i == 12:
            some = whole.memory.ids[::3]
            assert parts.forget(ids=some) == whole.forget(ids=some) == len(some)
            assert parts.forget(label=1) == whole.forget(label=1) > 0
            assert not set(some.tolist()) & set(parts.memory._storage.part.ids)
    compare(processes, "parts", held(parts))
    assert torch.equal(weights(whole), weights(parts))
    assert torch.equal(whole.memory.ids, parts.memory.ids)
    for mine, theirs in zip(whole.memory, parts.memory, strict=True):
        assert mine.extras.keys() == theirs.extras.keys()
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.labels, theirs.labels)
    parts.save(f"{folder}/parts.safetensors")
    return repr(parts.memory), parts.memory._storage.part.ids, weights(parts)


def test_a_memory_in_parts_is_drawn_from_as_one(two: Pool, tmp_path: Path) -> None:
    (said, first, there), (_, second, _) = two.run(learn_with_parts, str(tmp_path))
    assert "in each of 2 processes" in said
    assert {i % 2 for i in first} == {0}
    assert {i % 2 for i in second} == {1}
    alone = make("lpr-der", ALONE)
    alone.load_state_dict(load_state(tmp_path / "parts.safetensors"))
    assert sorted(alone.memory.ids.tolist()) == sorted([*first, *second])
    assert torch.equal(weights(alone), there)
    for found in two.run(go_on_in_parts, str(tmp_path)):
        assert found == sorted(alone.memory.ids.tolist())


def go_on_in_parts(folder: str) -> list[int]:
    """What one process has saved, in parts of two; and a state without rows is refused."""
    processes = Processes.up(replicated=True)
    learner = make("lpr-der", processes, shared=processes)
    learner.load_state_dict(load_state(Path(folder) / "parts.safetensors"))
    state = learner.memory.state_dict()
    if not processes.writes:
        assert "only process 0 has the whole" in problem_of(
            lambda: learner.memory.load_state_dict(state)
        )
    assert "give both the same processes" in problem_of(lambda: make("er", ALONE, shared=processes))
    return sorted(learner.memory.ids.tolist())


def batchnorm() -> tuple[list[str], torch.Tensor, str]:
    processes = Processes.up(replicated=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    learner = Learner(model, ClassBalancedMemory(40), processes=processes, loss=er, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in stream(20):
            learner.learn(x.float(), y)
    compare(processes, "BatchNorm", held(learner))
    x, y = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])
    learner.loss = finetune  # which runs the incoming batch alone: one example for each process
    alone = problem_of(lambda: learner.learn(x, y))
    return [str(one.message) for one in caught], model[2].running_var, alone


def test_batchnorm_is_named_once_and_stays_the_same_in_all(two: Pool) -> None:
    (said, first, few), (silent, second, also_few) = two.run(batchnorm)
    assert len(said) == 1
    assert "1 BatchNorm layers ('2', ...)" in said[0]
    assert "SyncBatchNorm" in said[0]
    assert silent == []
    assert torch.equal(first, second)
    assert "one example alone" in few
    assert "one example alone" in also_few


def evaluated_batchnorm() -> torch.Tensor:
    processes = Processes.up(replicated=True)
    return norm_in_evaluation(processes)


def norm_in_evaluation(processes: Processes) -> torch.Tensor:
    class Fixed(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> "Fixed":
            return super().train(False)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), Fixed(6), nn.Linear(6, 5)).double()
    learner = Learner(model, ClassBalancedMemory(40), processes=processes, loss=er, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in stream(20):
            learner.learn(x, y)
    return weights(learner)


def test_batchnorm_in_evaluation_mode_is_that_of_one_process(two: Pool) -> None:
    one = norm_in_evaluation(ALONE)
    for found in two.run(evaluated_batchnorm):
        assert float((found - one).abs().max()) < 1e-10


def save_in_one(folder: str) -> tuple[str, str]:
    """The usual slip: process 0 saves or refreshes while the others learn on."""
    x, y = stream(1)[0]
    found = []
    for act in (lambda one: one.save(f"{folder}/one.safetensors"), lambda one: one.refresh()):
        learner = make("lpr-er", Processes.up())
        learner.learn(x, y)
        mine = act if dist.get_rank() == 0 else lambda one: one.learn(x, y)
        found.append(problem_of(lambda mine=mine, learner=learner: mine(learner)))
    return found[0], found[1]


def test_calls_that_only_some_processes_make_are_named(two: Pool, tmp_path: Path) -> None:
    for saved, refreshed in two.run(save_in_one, str(tmp_path)):
        assert "process 0 is at 'saving' and process 1 at 'learn'" in saved
        assert "process 0 is at 'refresh' and process 1 at 'learn'" in refreshed


def bad_cases() -> dict[str, str]:
    processes = Processes.up(replicated=True, check_every=1)
    rank = processes.rank
    x, y = stream(1)[0]
    found = {}
    found["options"] = problem_of(lambda: make("er", processes, lr=0.1 + rank).learn(x, y))
    other = make("er", processes)
    with torch.no_grad():
        other.model[4].bias += rank
    found["weights"] = problem_of(lambda: other.learn(x, y))
    found["stream"] = problem_of(lambda: make("er", processes).learn(x + rank, y))
    drifting = make("er", processes)
    drifting.learn(x, y)
    with torch.no_grad():
        drifting.averaging.model[4].bias += rank * 1e-9
    found["drift"] = problem_of(lambda: drifting.learn(x, y))
    drawn = make("er", processes)
    drawn.learn(x, y)
    if rank:
        drawn.views.generators["replay"].manual_seed(1)
    found["generators"] = problem_of(lambda: drawn.learn(x, y))
    lengths = make("er", Processes.up())
    found["lengths"] = problem_of(lambda: lengths.learn_stream(stream(3 + rank)))
    found["after"] = str(lengths.batches_learned)
    wrapped = nn.parallel.DistributedDataParallel(network())
    found["wrapped"] = problem_of(lambda: Learner(wrapped))
    shapes = make("er", Processes.up())
    found["shapes"] = problem_of(lambda: shapes.learn(x[..., : 4 - rank], y))
    return found


def test_bad_cases_are_named_in_all_processes(two: Pool) -> None:
    for found in two.run(bad_cases):
        assert (
            "process 1 of 2 holds something else than process 0 in learner/options/lr"
            in (found["options"])
        )
        assert "in model/4.bias" in found["weights"]
        assert "process 1 of 2 was handed other examples than process 0" in found["stream"]
        assert "after 2 stream batches: process 1 of 2" in found["drift"]
        assert "averaging/model/4.bias" in found["drift"]
        assert "learner/generators/replay" in found["generators"]
        assert "the stream of process 0 of 2 is over while others go on" in found["lengths"]
        assert found["after"] == "3"
        assert (
            "Learner: the model is a DistributedDataParallel; give model.module" in found["wrapped"]
        )
        assert "examples of another kind" in found["shapes"]
