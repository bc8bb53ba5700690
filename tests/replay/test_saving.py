"""A saved learner goes on exactly, in a new process; what does not fit is refused by name."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxreplay import (
    LPR,
    Batch,
    ClassBalancedMemory,
    Learner,
    Lode,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
    er,
)
from proxreplay.errors import CheckpointError, InputError
from proxreplay.models import mlp, slim_resnet18, small_cnn
from proxreplay.proximal import OWM, Strength
from proxreplay.replay.memory import Memory
from proxreplay.serialization import save_state
from tests.reference import assert_same_state
from tests.replay import saved_learners
from tests.replay.saved_learners import BEFORE, KINDS, go_on, learn, make, momentum, network


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a new process says after loading every kind of learner, beside what went on here."""
    folder = tmp_path_factory.mktemp("learners")
    here = {}
    for kind in KINDS:
        learner = make(kind)
        learn(learner, 0, BEFORE)
        learner.save(folder / kind)
        here[kind] = go_on(learner)
    script = Path(saved_learners.__file__)
    output = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    there = json.loads(output.stdout)
    return {kind: {"here": here[kind], "there": there[kind]} for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_exactly_in_a_new_process(kind: str, resumed: dict[str, Any]) -> None:
    here, there = resumed[kind]["here"], resumed[kind]["there"]
    assert there["before"] == here["before"]
    assert there["losses"] == here["losses"]
    assert there["after"] == here["after"]
    assert here["after"] != here["before"]


def test_saving_disturbs_nothing(tmp_path: Path) -> None:
    plain, saved = make("derpp+lpr+ema"), make("derpp+lpr+ema")
    for i in range(4):
        assert learn(plain, i, 1) == learn(saved, i, 1)
        saved.save(tmp_path / "learner")


def test_a_learner_that_has_learned_nothing_goes_round(tmp_path: Path) -> None:
    make("derpp_snapshot+lpr+ema").save(tmp_path / "fresh")
    expected = learn(make("derpp_snapshot+lpr+ema"), 0, 3)
    model = network()
    rule = LPR(model, omega_0=4.0)
    fresh = Learner.load(tmp_path / "fresh", model, rule=rule, optimizer=momentum)
    assert learn(fresh, 0, 3) == expected


def test_names_of_labels_are_kept(tmp_path: Path) -> None:
    learner = Learner(mlp(3), loss=Lode(rho=0.05))
    x = torch.randn(4, 3)
    learner.learn(x, ["b", "a", "b", "c"])
    learner.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner", mlp(3))
    assert again.labels == ["b", "a", "c"]
    assert again.predict(x).tolist() == learner.predict(x).tolist()
    assert again.loss == Lode(rho=0.05)


@pytest.mark.parametrize(
    "make_memory",
    [
        lambda: ClassBalancedMemory(7),
        lambda: ReservoirMemory(7),
        lambda: RingMemory(capacity_bytes=300),
        UnlimitedMemory,
    ],
    ids=["class-balanced", "reservoir", "ring in bytes", "unlimited"],
)
def test_every_memory_is_rebuilt(make_memory: Callable[[], Memory], tmp_path: Path) -> None:
    learner = Learner(mlp(3), make_memory())
    for _ in range(3):
        learner.learn(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))
    learner.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner", mlp(3))
    assert type(again.memory) is type(learner.memory)
    x = torch.randn(4, 3)
    assert learner.learn(x, [0, 1, 3, 3]) == again.learn(x, [0, 1, 3, 3])
    assert torch.equal(learner.memory.inputs(), again.memory.inputs())


# What does not fit --------------------------------------------------------------------------------


def own_loss(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
    return er(model, incoming, replay)


def own_transform(inputs: Tensor, generator: torch.Generator | None) -> Tensor:
    return inputs * 2


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


class OwnMemory(UnlimitedMemory):
    """A memory of the user's."""


@pytest.fixture
def saved_own(tmp_path: Path) -> Path:
    model = mlp(3)
    learner = Learner(
        model, OwnMemory(), OWM(model), loss=own_loss, transform=own_transform, optimizer=adam
    )
    learner.learn(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))
    learner.save(tmp_path / "own")
    return tmp_path / "own"


def own_parts(model: nn.Module) -> dict[str, Any]:
    return {
        "memory": OwnMemory(),
        "rule": OWM(model),
        "loss": own_loss,
        "transform": own_transform,
        "optimizer": adam,
    }


def test_parts_of_ones_own_are_handed_in(saved_own: Path) -> None:
    model = mlp(3)
    assert Learner.load(saved_own, model, **own_parts(model)).batches_learned == 1


MISSING = {
    "memory": "memory 'OwnMemory'; hand it in as memory=",
    "loss": "own_loss'; hand it in as loss=",
    "transform": "own_transform'; hand it in as transform=",
    "rule": "OWM'; make it for the model as before and hand it in as rule=",
    "optimizer": "saved with optimizer='Adam'",
}


@pytest.mark.parametrize("part", MISSING)
def test_a_part_that_is_missing_is_asked_for(part: str, saved_own: Path) -> None:
    model = mlp(3)
    parts = own_parts(model)
    del parts[part]
    with pytest.raises(InputError, match=MISSING[part]):
        Learner.load(saved_own, model, **parts)


WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "loss": (lambda model: er, "saved with loss="),
    "transform": (lambda model: lambda x, g: x, "saved with transform="),
    "rule": (lambda model: LPR(model, omega_0=2.0), "saved with rule="),
    "optimizer": (lambda model: torch.optim.RMSprop, "saved with optimizer="),
    "memory": (lambda model: RingMemory(3), "RingMemory"),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_part_that_is_another_is_refused(part: str, saved_own: Path) -> None:
    model = mlp(3)
    replacement, message = WRONG[part]
    with pytest.raises(InputError, match=message):
        Learner.load(saved_own, model, **own_parts(model) | {part: replacement(model)})


def test_another_network_is_refused(saved_own: Path) -> None:
    model = mlp(3, hidden=(7,))
    with pytest.raises(InputError, match="do not fit the model"):
        Learner.load(saved_own, model, **own_parts(model))


def test_state_of_a_learner_with_other_options_is_refused() -> None:
    state = Learner(mlp(3), steps_per_batch=2).state_dict()
    with pytest.raises(InputError, match=r"saved with steps_per_batch=2.*has steps_per_batch=3"):
        Learner(mlp(3), steps_per_batch=3).load_state_dict(state)
    with pytest.raises(InputError, match="averaging"):
        Learner(mlp(3), averaging=None, steps_per_batch=2).load_state_dict(state)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    learner = Learner(mlp(3))
    learner.learn(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))
    learner.save(tmp_path / "learner")
    (file,) = (tmp_path / "learner").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=file.name):
        Learner.load(tmp_path / "learner", mlp(3))


def test_what_was_saved_is_not_shared_with_the_learner() -> None:
    """State handed over in memory stays as it was while the learner goes on."""
    learner = make("derpp_snapshot+lpr+ema")
    learn(learner, 0, 4)
    copy_of_state = make("derpp_snapshot+lpr+ema")
    copy_of_state.load_state_dict(learner.state_dict())
    assert learn(copy_of_state, 4, 6) == learn(learner, 4, 6)


def _without_a_row(state: dict[str, Any]) -> None:
    name = next(name for name, tensor in state["model"].items() if tensor.ndim == 2)
    state["model"][name] = state["model"][name][:, 1:]


def _drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        *way, last = path
        for key in way:
            state = state[key]
        del state[last]

    return change


DAMAGE: dict[str, Callable[[dict[str, Any]], None]] = {
    "weights of another shape": _without_a_row,
    "no optimizer": _drop("optimizer", "param_groups"),
    "no factors": _drop("rule", "layers"),
    "no average": _drop("averaging", "model"),
    "no teacher": _drop("teacher"),
    "no counts": _drop("learner", "batches_seen"),
    "no memory": _drop("memory", "fields"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_state_that_does_not_fit_changes_nothing(damage: str) -> None:
    """Batches 4 to 8 bring classes that the other learner does not know."""
    kind = "derpp_snapshot+lpr+ema"
    here, twin, ahead = make(kind), make(kind), make(kind)
    for learner in (here, twin):
        learn(learner, 0, 4)
    learn(ahead, 0, 8)
    state = copy.deepcopy(ahead.state_dict())
    DAMAGE[damage](state)
    with pytest.raises((InputError, KeyError)):
        here.load_state_dict(state)
    assert_same_state(here.state_dict(), twin.state_dict())
    assert learn(here, 4, 8) == learn(twin, 4, 8)


def go_on_briefly(learner: Learner, shape: tuple[int, ...]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(5)
    for _ in range(3):
        learner.learn(torch.randn(4, *shape, generator=rng), torch.tensor([0, 1, 2, 3]))
    return learner.model.state_dict()


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (lambda: mlp(6, hidden=(8,)), (6,)),
        (lambda: small_cnn(2, 5, widths=(4, 8)), (2, 8, 8)),
        (lambda: slim_resnet18(width=2), (3, 32, 32)),
    ],
    ids=["mlp", "small_cnn", "slim_resnet18"],
)
def test_what_is_our_own_is_loaded_by_the_path_alone(
    network: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = network()
    last = [name for name, _ in model.named_modules()][-1]
    rule = LPR(model, 2.0, overrides={last: Strength(0.5)})
    learner = Learner(model, RingMemory(6), rule, loss=Lode(0.2), refresh_every=2, lr=0.05)
    go_on_briefly(learner, shape)
    learner.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved")
    here, there = go_on_briefly(learner, shape), go_on_briefly(again, shape)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_network_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    learner = Learner(nn.Sequential(nn.Linear(3, 4)))
    learner.learn(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))
    learner.save(tmp_path / "saved")
    with pytest.raises(InputError, match="a network of your own; build it again and hand it in"):
        Learner.load(tmp_path / "saved")


OLD_NAMES = {
    "proxreplay.LPR": "proxreplay.proximal.lpr.LPR",
    "proxreplay.Strength": "proxreplay.proximal.strength.Strength",
    "proxreplay.Lode": "proxreplay.replay.losses.Lode",
}


def as_before(value: Any) -> Any:
    """Descriptions as the version before rooms and `Labels.met` wrote them: with modules."""
    if isinstance(value, dict):
        values = {key: as_before(item) for key, item in value.items() if key != "met"}
        return values | ({"name": OLD_NAMES[values["name"]]} if "name" in values else {})
    return tuple(map(as_before, value)) if isinstance(value, tuple) else value


def test_a_learner_of_the_version_before_goes_on(tmp_path: Path) -> None:
    model = mlp(6, hidden=(8,))
    overrides = {"linear1": Strength(0.5)}
    learner = Learner(model, RingMemory(6), LPR(model, 2.0, overrides=overrides), loss=Lode(0.2))
    names = ["a", "b", "c", "a"]
    learner.learn(torch.randn(4, 6), names)
    state = learner.state_dict()
    own = state["learner"]
    old = own | {"parts": as_before(own["parts"]), "labels": as_before(own["labels"])}
    assert old["parts"] != own["parts"]
    save_state(tmp_path / "old", state | {"learner": old})
    again = Learner.load(tmp_path / "old")
    x = torch.randn(4, 6)
    assert again.learn(x, names) == learner.learn(x, names)
    assert again.forget(label="b") == learner.forget(label="b") > 0


def test_a_learner_from_before_lpr_could_wait_acts_at_every_step(tmp_path: Path) -> None:
    model = mlp(6, hidden=(8,))
    learner = Learner(model, RingMemory(6), LPR(model))
    assert learner.rule is not None
    assert vars(learner.rule)["per"] == "batch"
    learner.learn(torch.randn(4, 6), [0, 1, 2, 0])
    state = learner.state_dict()
    del state["learner"]["parts"]["rule"]["options"]["per"]
    save_state(tmp_path / "old", state)
    again = Learner.load(tmp_path / "old").rule
    assert isinstance(again, LPR)
    assert (again.per, again.gradient) == ("step", None)


def test_an_optimizer_beside_a_rate_that_it_ignored_goes_on() -> None:
    """The version before kept ``lr`` beside an optimizer of one's own."""
    learner = Learner(mlp(3), optimizer=adam)
    learner.learn(torch.randn(4, 3), [0, 1, 2, 1])
    state = learner.state_dict()
    state["learner"]["options"]["lr"] = 0.3
    again = Learner(mlp(3), optimizer=adam)
    again.load_state_dict(state)
    x = torch.randn(4, 3)
    assert again.learn(x, [0, 1, 2, 1]) == learner.learn(x, [0, 1, 2, 1])
