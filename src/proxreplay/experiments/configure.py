"""From names and overrides to the configuration of a run, and to the benchmark it asks for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxreplay.data.scenarios import IID, Blurry, ClassIncremental, DomainIncremental, Scenario
from proxreplay.errors import InputError
from proxreplay.experiments.benchmarks import CUSTOM, Benchmark, Defaults, Settings, find_benchmark
from proxreplay.experiments.config import RunConfig, of_a_run, read_settings, renamed
from proxreplay.experiments.recipes import (
    AVERAGED_SUFFIX,
    KLPR_PREFIX,
    LPR_PREFIX,
    METHODS,
    Method,
    find_method,
)
from proxreplay.options import LearnerOptions, LPROptions


def configure(benchmark_name: str, method_name: str, *layers: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run: defaults < benchmark < method < each further layer.

    A layer is values by dotted key; the later ones are stronger (a file, then ``--set``).
    """
    method = find_method(method_name)
    defaults = Defaults() if benchmark_name == CUSTOM else find_benchmark(benchmark_name)
    config = RunConfig(benchmark_name, method.name).with_values(
        {"capacity": defaults.capacity, "steps_per_batch": defaults.steps_per_batch}
    )
    config = config.with_values(_tuned(defaults.settings, method))
    config = config.with_values({"lr": config.lr * method.longer, **method.values})
    if method.name.startswith(LPR_PREFIX):
        config = config.with_values(
            {"refresh.samples": LearnerOptions.refresh_samples, "lpr.per": LPROptions.per}
        )
    for values in layers:
        config = config.with_values(values)
    config = config.with_values({"lpr.per": config.lpr.acts_per})
    if (config.benchmark, config.method) != (benchmark_name, method.name):
        raise InputError(
            f"the configuration is of {config.method} on {config.benchmark}, but {method.name} on "
            f"{benchmark_name} was asked for."
        )
    return config


def read_layer(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The values in a file of settings by dotted key, and remarks about them.

    What a run has written is complete: settings that it does not name came later, so they are as
    without them, not as today's recipe has them. That is remarked on where it matters.
    """
    own = read_settings(path)
    values, remarks = renamed(own)
    if of_a_run(path, own):
        values, _ = renamed(averaging_named(own))
        earlier = RunConfig("", "").with_values(values).flat()
        missing = {k: v for k, v in earlier.items() if "." in k and k not in values}
        now = configure(str(values.get("benchmark", CUSTOM)), str(values["method"]), values).flat()
        remarks += [
            f"{path} says nothing of {key}: {value} is taken, as in runs from before there was "
            f"such a setting; today's {values['method']} has --set {key}={now[key]}"
            for key, value in missing.items()
            if value != now[key]
        ]
        values |= missing
    return values, remarks


def averaging_named(values: dict[str, Any]) -> dict[str, Any]:
    """A file with a section ``ema`` is from before averages could start other than as a copy."""
    earlier = values.get("ema")
    if not isinstance(earlier, dict):
        return values
    method = METHODS.get(str(values.get("method")))
    averaged = method is not None and method.averaged
    section = {**earlier, "start": "copy", "predict": "average"} if averaged else {}
    return {k: v for k, v in values.items() if k != "ema"} | {"averaging": section}


def _tuned(settings: Settings, method: Method) -> Mapping[str, Any]:
    """A benchmark's settings for a method."""
    replay = method.name.removeprefix(LPR_PREFIX).removeprefix(KLPR_PREFIX)
    names = (replay.removesuffix(AVERAGED_SUFFIX), *method.tuned_like, "er")
    return next(settings[name] for name in names if name in settings)


_OF_METHODS = (
    *("loss.", "averaging.", "distillation.", "lpr.", "klpr.", "refresh.", "step."),
    *("projection.", "floor."),
)
_OF_TRAINING = ("lr", "replay_batch", "steps_per_batch", "compile", "network", "sharded")
_OF_RULES = ("diagnostics.gradients_every", "diagnostics.spectrum")
_OF_BLURRY = ("stream.disjoint", "stream.blur")


def has_effect(key: str, config: RunConfig) -> bool:
    """Whether a setting changes anything about a run."""
    method = find_method(config.method)
    if key.startswith(_OF_METHODS):
        return key in method.uses
    if method.floor is not None and (key in _OF_TRAINING or key.startswith("companion.")):
        return False
    if key in ("companion.filters", "companion.shrinkage"):
        return config.companion.weight > 0
    if key in _OF_RULES:
        return method.rule is not None
    return key not in _OF_BLURRY or config.stream.scenario == "blurry"


def refuse_without_effect(keys: Iterable[str], configs: Sequence[RunConfig]) -> None:
    """Refuse settings that change nothing about any of the runs."""
    for key in keys:
        if not any(has_effect(key, config) for config in configs):
            names = ", ".join(dict.fromkeys(config.method for config in configs))
            raise InputError(
                f"{key} has no effect on {names}; leave it out. Those that have an effect: "
                f"proxreplay settings {configs[0].method}"
            )


def foreign_code(config: RunConfig) -> str | None:
    """What of other people's code a run would execute; None if it would execute none."""
    network = config.network
    own = network is None or ":" not in network or network.startswith("proxreplay.models:")
    return None if own else network


def declared(config: RunConfig) -> Benchmark:
    """The benchmark of a configuration, with what the configuration changes about it."""
    chosen = config.stream
    if config.benchmark != CUSTOM:
        if chosen.data is not None:
            raise InputError(
                f"stream.data={chosen.data} goes with the benchmark '{CUSTOM}', not with "
                f"'{config.benchmark}'."
            )
        if chosen.image_size is not None or chosen.augment is not None:
            raise InputError(
                f"stream.image_size and stream.augment go with the benchmark '{CUSTOM}'; "
                f"'{config.benchmark}' fixes both."
            )
        benchmark = find_benchmark(config.benchmark)
    elif chosen.data is None:
        raise InputError("custom: which data? Give --data with a folder, a zip or an .npz file.")
    else:
        from proxreplay.experiments.custom import custom

        benchmark = custom(
            chosen.data,
            tasks=chosen.tasks,
            scenario=_scenario(config, None),
            image_size=chosen.image_size,
            augment=chosen.augment,
        )
    return replace(benchmark, scenario=_scenario(config, benchmark.scenario) or benchmark.scenario)


def _scenario(config: RunConfig, own: Scenario | None) -> Scenario | None:
    """The scenario that the configuration asks for; the benchmark's own if it asks for none."""
    chosen = config.stream
    tasks = chosen.tasks or getattr(own, "tasks", None)
    name = chosen.scenario
    if name == "iid":
        return IID(tasks or 1)
    if name in ("class", "blurry"):
        if tasks is None:
            raise InputError(f"stream.scenario={name}: say how many tasks with stream.tasks.")
        if name == "class":
            return ClassIncremental(tasks)
        return Blurry(tasks, chosen.disjoint, chosen.blur)
    if name == "domain":
        return own if isinstance(own, DomainIncremental) else DomainIncremental()
    if chosen.tasks is not None and isinstance(own, ClassIncremental):
        return ClassIncremental(chosen.tasks)
    if chosen.tasks is not None and own is not None:
        raise InputError(
            f"stream.tasks={chosen.tasks}: the tasks of {config.benchmark} are its domains; leave "
            "it out, or choose stream.scenario=class."
        )
    return own
