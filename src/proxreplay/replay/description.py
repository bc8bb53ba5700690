"""Code on paper: which loss, transform or memory a saved learner had, and how to get it back."""

import dataclasses
from typing import Any

from torch import Tensor, nn

from proxreplay.data import transforms
from proxreplay.errors import InputError
from proxreplay.proximal.rules.lpr import LPR
from proxreplay.proximal.shrinkage.strength import Strength
from proxreplay.replay import losses
from proxreplay.replay.memory import (
    ClassBalancedMemory,
    Memory,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
)

MEMORIES = (ClassBalancedMemory, ReservoirMemory, RingMemory, UnlimitedMemory)


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
        fields = {f.name: describe(getattr(part, f.name)) for f in dataclasses.fields(part)}
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


def rebuild(argument: str, description: Any, given: Any) -> Any:
    """What was described; taken as ``given`` where it was handed in.

    Only proxreplay's own losses and transforms are built from a description: names in a file never
    decide which code is imported.
    """
    if given is not None or description is None:
        return given
    known = {
        _name(cls): cls
        for module in (losses, transforms)
        for cls in vars(module).values()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls)
    }
    if not _buildable(description, known):
        raise InputError(
            f"Learner.load: the learner was saved with {argument} '{description['name']}'; hand it "
            f"in as {argument}=..."
        )
    return _build(description, known)


def rebuild_memory(state: dict[str, Any]) -> Memory:
    """An empty memory of the kind and capacity of a saved one."""
    for cls in MEMORIES:
        if cls.__name__ == state["kind"]:
            return cls() if cls is UnlimitedMemory else _with_capacity(cls, state)
    raise InputError(
        f"Learner.load: the learner was saved with memory '{state['kind']}'; hand it in as "
        "memory=..."
    )


def rebuild_rule(description: Any, model: nn.Module, given: Any) -> Any:
    """LPR as it was, for a model; taken as ``given`` where a rule was handed in."""
    if given is not None or description is None:
        return given
    known: dict[str, type] = {_name(Strength): Strength}
    options = dict(description["options"])
    if description["name"] != _name(LPR) or not _buildable(tuple(options.values()), known):
        raise InputError(
            f"Learner.load: the learner was saved with rule '{description['name']}'; make it for "
            "the model as before and hand it in as rule=..."
        )
    built = {name: _build(value, known) for name, value in options.items()}
    strength, overrides = built.pop("strength"), dict(built.pop("overrides"))
    return LPR(model, strength.omega_0, strength.beta, overrides=overrides, **built)


def check_same(saved: dict[str, Any], present: dict[str, Any]) -> None:
    """See that a learner is composed as the saved one was."""
    for name in saved.keys() | present.keys():
        if saved.get(name) != present.get(name):
            raise InputError(
                f"Learner: saved with {name}={saved.get(name)!r}, but this one has "
                f"{name}={present.get(name)!r}; make it as it was."
            )


def _with_capacity(cls: type[Memory], state: dict[str, Any]) -> Memory:
    if state["capacity_bytes"] is not None:
        return cls(capacity_bytes=state["capacity_bytes"])
    return cls(state["capacity"])


def _buildable(description: Any, known: dict[str, type]) -> bool:
    if isinstance(description, tuple):
        return all(_buildable(item, known) for item in description)
    if not isinstance(description, dict):
        return True
    return description["name"] in known and all(
        _buildable(value, known) for value in description["fields"].values()
    )


def _build(description: Any, known: dict[str, type]) -> Any:
    if isinstance(description, tuple):
        return tuple(_build(item, known) for item in description)
    if not isinstance(description, dict):
        return description
    fields = {name: _build(value, known) for name, value in description["fields"].items()}
    return known[description["name"]](**fields)


def _name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"
