"""Saving a learner: its state by parts, and how the code it was made of is found again.

Code is not saved, only described: a name, and the fields of dataclasses. What is proxreplay's own
is built again from its description; names in a file never decide which code is imported.
"""

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from proxreplay.data import transforms
from proxreplay.errors import InputError
from proxreplay.models.heads import replace_in_optimizer_
from proxreplay.models.recipes import build_again, recipe_of
from proxreplay.options import CompanionOptions, LPROptions, StepOptions
from proxreplay.proximal.layers.calling import Caller
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.proximal.rules.lpr import LPR
from proxreplay.proximal.shrinkage.strength import RelativeStrength, Strength
from proxreplay.replay import distillation, losses
from proxreplay.replay.averaging import options_of
from proxreplay.replay.losses import Loss
from proxreplay.replay.memory import (
    ClassBalancedMemory,
    Memory,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
)
from proxreplay.replay.parts import OptimizerFactory
from proxreplay.replay.predicting import Transform, changing, locked
from proxreplay.serialization import load_state, save_state

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner

_OWN = "proxreplay."
MEMORIES: dict[str, type[Memory]] = {
    cls.__name__: cls for cls in (ClassBalancedMemory, ReservoirMemory, RingMemory, UnlimitedMemory)
}
OPTIONS = (
    *("lr", "steps_per_batch", "replay_batch", "refresh_every", "refresh_samples"),
    *("refresh_augment", "channels_last", "seed"),
)

_WAYS_OUT = {
    "companion": "make it as it was, or let Learner.load do so. To go on without one, load it with "
    "it: predictor='online' predicts without it. To have one from now on, a learner made with "
    "Learner(old.model, old.memory, companion=...) shows it what is remembered."
}


class Saving:
    """The methods by which a `Learner` is saved and loaded."""

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next, a part each; code is only described."""
        return state_of(cast("Learner", self))

    @changing
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where a learner composed of the same parts was saved.

        If anything does not fit, this learner stays as it was.
        """
        learner, own = cast("Learner", self), state["learner"]
        check_same(
            {**own["options"], **named_now(own["parts"])}, {**_options(learner), **_parts(learner)}
        )
        # without the memory, which may be large, takes all or nothing, and comes last
        mine = copy.deepcopy(state_of(learner, memory=False))
        try:
            _load_all_but_memory_(learner, state)
            learner.memory.load_state_dict(state["memory"])
        except BaseException:
            _load_all_but_memory_(learner, mine)
            raise

    def save(self, path: Path | str) -> None:
        """Write the learner to a ``.safetensors`` file, or to ``state.safetensors`` in a folder.

        Of several processes that learn together all have to call it; the first one writes.
        """
        processes, state = cast("Learner", self).together.processes, self.state_dict()
        processes.together(
            "saving", lambda: save_state(Path(path), state) if processes.writes else None
        )

    @classmethod
    def load(
        cls,
        path: Path | str,
        model: nn.Module | None = None,
        memory: Memory | None = None,
        rule: GradientRule | None = None,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerFactory | None = None,
        transform: Transform | None = None,
        call: Caller | None = None,
        device: torch.device | str | None = None,
        compile: bool = False,
    ) -> Self:
        """Read a learner that goes on exactly where it was saved.

        Code is not saved. What is proxreplay's own is built again: its networks, memories, losses
        and transforms, and LPR with layers chosen by name. What is yours has to be handed in as it
        was made before, and is checked against what was saved. ``device`` and ``compile`` are not
        saved either.
        """
        state = load_state(Path(path))
        own = state["learner"]
        parts, options = named_now(own["parts"]), dict(own["options"])
        if model is None:
            if own["recipe"] is None:
                raise InputError(
                    "Learner.load: this learner was saved with a network of your own; build it "
                    "again and hand it in as model=..."
                )
            model = build_again(own["recipe"])
        if optimizer is not None:
            del options["lr"]
        average, companion = state.get("averaging"), state.get("companion")
        learner: Self = cast(Any, cls)(
            model,
            _memory(state["memory"]) if memory is None else memory,
            _rule(parts["rule"], model, rule),
            loss=_part("loss", parts["loss"], loss),
            averaging=None if average is None else options_of(average),
            companion=None if companion is None else CompanionOptions(**companion["options"]),
            optimizer=optimizer,
            transform=_part("transform", parts["transform"], transform),
            call=_part("call", parts.get("call"), call),
            device=device,
            compile=compile,
            **options,
        )
        learner.load_state_dict(state)
        return learner


def state_of(learner: "Learner", *, memory: bool = True) -> dict[str, Any]:
    """Everything that decides what happens next, a part each; code is only described."""
    own = {
        "options": _options(learner),
        "parts": _parts(learner),
        "recipe": recipe_of(learner.model),
        "batches_seen": learner.batches_seen,
        "batches_learned": learner.batches_learned,
        **learner.intake.state_dict(),
        "generators": {name: rng.get_state() for name, rng in learner.views.generators.items()},
    }
    parts: dict[str, Any] = {
        "model": learner.model,
        "optimizer": learner.optimizer,
        "memory": learner.memory if memory else None,
        "rule": learner.rule,
        "averaging": learner.averaging,
        "companion": learner.companion,
        "teacher": learner.provider.teacher,
    }
    present = {name: part.state_dict() for name, part in parts.items() if part is not None}
    return {"learner": own, **present}


def _load_all_but_memory_(learner: "Learner", state: dict[str, Any]) -> None:
    before = [list(head.parameters()) for head in learner.heads]
    try:
        learner.model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise InputError(
            f"Learner: the saved weights do not fit the model; build it as it was. {error}"
        ) from error
    finally:  # a head has changed its size even if something else did not fit
        for old, head in zip(before, learner.heads, strict=True):
            replace_in_optimizer_(learner.optimizer, old, list(head.parameters()))
    # a copy: the optimizer would go on with the very tensors it is given
    learner.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    for name in ("rule", "averaging", "companion"):
        part = getattr(learner, name)
        if part is not None:
            part.load_state_dict(state[name])
    if learner.provider.teacher is not None:
        learner.provider.take_snapshot().load_state_dict(state["teacher"])
    own = state["learner"]
    learner.batches_seen = own["batches_seen"]
    learner.batches_learned = own["batches_learned"]
    learner.intake.load_state_dict(own)
    for name, rng in own["generators"].items():
        learner.views.generators[name].set_state(rng)


def _options(learner: "Learner") -> dict[str, Any]:
    return {name: getattr(learner, name) for name in OPTIONS}


def _parts(learner: "Learner") -> dict[str, Any]:
    return {
        "loss": describe(learner.loss),
        "transform": describe(learner.transform),
        "optimizer": type(learner.optimizer).__name__,
        "rule": describe_rule(learner.rule),
        "averaging": learner.averaging is not None,
        "companion": None if learner.companion is None else describe(learner.companion.options),
        "call": describe(learner.call),
    }


def describe(part: Any) -> Any:
    """A name for code, with its fields for dataclasses; plain values as they are.

    >>> describe(losses.Lode(rho=0.05))["fields"]
    {'rho': 0.05, 'classes_per_task': None}
    """
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, list | tuple):
        return tuple(describe(item) for item in part)
    if isinstance(part, set | frozenset):
        return tuple(sorted((describe(item) for item in part), key=repr))
    if isinstance(part, dict):
        return tuple((describe(key), describe(value)) for key, value in part.items())
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {
            f.name: describe(getattr(part, f.name))
            for f in dataclasses.fields(part)
            if not f.metadata.get("added") or getattr(part, f.name) != f.default
        }  # without what older versions did not have, unless it was used
        return {"name": _name(type(part)), "fields": fields}
    return {"name": _name(part if hasattr(part, "__qualname__") else type(part))}


def describe_rule(rule: Any) -> Any:
    """The type of a rule and its options, which are its public attributes."""
    if rule is None:
        return None
    options = {
        name: describe(value)
        for name, value in sorted(vars(rule).items())
        if not name.startswith("_") and not isinstance(value, nn.Module | Tensor)
    }
    return {"name": _name(type(rule)), "options": options}


def _part(argument: str, description: Any, given: Any) -> Any:
    """A loss or transform that was described; taken as ``given`` where it was handed in."""
    if given is not None or description is None:
        return given
    known = {
        _name(cls): cls
        for module in (losses, distillation, transforms)
        for cls in vars(module).values()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls)
    }
    try:
        return _build(description, known)
    except LookupError as error:
        raise InputError(
            f"Learner.load: the learner was saved with {argument} '{description['name']}'; hand it "
            f"in as {argument}=..."
        ) from error


def _memory(state: dict[str, Any]) -> Memory:
    """An empty memory of the kind and capacity of a saved one."""
    if state["kind"] not in MEMORIES:
        raise InputError(
            f"Learner.load: the learner was saved with memory '{state['kind']}'; hand it in as "
            "memory=..."
        )
    # a capacity in bytes decides that in examples
    limits = [name for name in ("capacity_bytes", "capacity") if state[name] is not None]
    return MEMORIES[state["kind"]](**{name: state[name] for name in limits[:1]})


def _rule(description: Any, model: nn.Module, given: Any) -> Any:
    """LPR as it was, for a model; taken as ``given`` where a rule was handed in."""
    if given is not None or description is None:
        return given
    kinds = (Strength, RelativeStrength, StepOptions)
    known: dict[str, type] = {_name(one): one for one in kinds}
    ours = {_name(LPR): description["options"]}
    try:
        built = {n: _build(value, known) for n, value in ours[description["name"]].items()}
    except LookupError as error:
        raise InputError(
            f"Learner.load: the learner was saved with rule '{description['name']}'; make it for "
            "the model as before and hand it in as rule=..."
        ) from error
    strength, overrides = built.pop("strength"), dict(built.pop("overrides"))
    built = {"gradient": LPR.gradient, "per": LPR.per} | built
    if isinstance(strength, RelativeStrength):
        return LPR(model, level=strength.level, overrides=overrides, **built)
    return LPR(model, strength.omega_0, strength.beta, overrides=overrides, **built)


def check_same(saved: dict[str, Any], present: dict[str, Any]) -> None:
    """See that a learner is composed as the saved one was."""
    for name in {**saved, **present}:
        if name == "lr" and None in (saved[name], present[name]):
            continue  # an optimizer was handed in, and its state has the learning rate
        if saved.get(name) != present.get(name):
            raise InputError(
                f"Learner: saved with {name}={saved.get(name)!r}, but this one has "
                f"{name}={present.get(name)!r}; {_WAYS_OUT.get(name, 'make it as it was.')}"
            )


def _build(description: Any, known: dict[str, type]) -> Any:
    """What `describe` was given; a LookupError for code that is not known."""
    if isinstance(description, tuple):
        return tuple(_build(item, known) for item in description)
    if not isinstance(description, dict):
        return description
    kind = known[description["name"]]
    return kind(**{name: _build(value, known) for name, value in description["fields"].items()})


def _name(code: Any) -> str:
    """Where code is found; what is proxreplay's own has one name, in whichever module it is."""
    if code.__module__.startswith(_OWN):
        return f"{_OWN}{code.__qualname__}"
    return f"{code.__module__}.{code.__qualname__}"


def named_now(description: Any) -> Any:
    """A description with the names that `describe` gives today; older ones had the module too."""
    if isinstance(description, tuple | list):
        return tuple(named_now(item) for item in description)
    if not isinstance(description, dict):
        return description
    values = {key: named_now(value) for key, value in description.items()}
    name = values.get("name")
    if isinstance(name, str) and name.startswith(_OWN):
        values["name"] = _OWN + name.rpartition(".")[2]
    if values.get("name") == _name(LPR):  # before there was a choice
        values["options"] = {"statistics": LPROptions.statistics, **values["options"]}
    return values
