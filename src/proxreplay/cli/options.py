"""Options that several commands share, and from the words of a command line to values."""

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxreplay.cli import late
from proxreplay.cli.text import plain
from proxreplay.errors import InputError
from proxreplay.options import CHECKPOINT_EVERY

if TYPE_CHECKING:
    from proxreplay.experiments.config import RunConfig
    from proxreplay.experiments.engines import Engine
    from proxreplay.experiments.run import RunOptions

MAX_RUNS = 10_000
MAX_JOBS = 1024
ENGINES = ("local", "ray")
DEFAULT_METHOD = "lpr-er"


def benchmark_names() -> list[str]:
    """For completion."""
    return [*late.benchmarks.BENCHMARKS, late.benchmarks.CUSTOM]


def method_names() -> list[str]:
    """For completion."""
    return [*late.recipes.METHODS]


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """An option that takes a value."""
    return typer.Option(*names, metavar=metavar, help=help, **more)


def number(help: str, **more: Any) -> Any:
    """An option that takes a whole number, of at least 1 unless another ``min`` is given."""
    return option("N", help, **{"min": 1, **more})


def flag(name: str, help: str) -> Any:
    """An option that is given or not."""
    return typer.Option(name, help=help)


Benchmark = Annotated[
    str, typer.Argument(help="See: proxreplay benchmarks", autocompletion=benchmark_names)
]
_METHODS = f"See: proxreplay methods. Default: {DEFAULT_METHOD}"
MethodName = Annotated[str | None, option("NAME", _METHODS, autocompletion=method_names)]
_DATA_ROOT = option("DIR", "Where the data sets are.", envvar="PROXREPLAY_DATA")
DataRoot = Annotated[Path | None, _DATA_ROOT]
Trust = Annotated[bool, flag("--trust", "Execute a network's code that a file names.")]
Out = Annotated[Path | None, option("DIR", "Where everything is written.")]


@dataclass(frozen=True)
class Settings:
    """Options that decide what runs compute."""

    memory: Annotated[int | None, number("Examples remembered.")] = None
    eval_every: Annotated[int | None, number("Batches between evaluations.")] = None
    threads: Annotated[int | None, number("CPU threads per run.")] = None
    data: Annotated[str | None, option("PATH", "custom: a folder, zip or .npz of your own.")] = None
    tasks: Annotated[int | None, number("Tasks to split it into.")] = None
    prequential: Annotated[
        bool, flag("--prequential", "Also predict every batch before it is learned.")
    ] = False
    sets: Annotated[
        list[str] | None,
        option("KEY=VALUE", "Any setting; repeatable. See: proxreplay settings", "--set"),
    ] = None
    config: Annotated[
        Path | None, option("FILE", "Settings, such as another run's config.yaml.")
    ] = None
    trust: Trust = False

    def layers(self, **further: Any) -> tuple[dict[str, Any], ...]:
        """Values by key, the later ones stronger: the file, options, ``--set``."""
        given = {
            "capacity": self.memory,
            "eval_every": self.eval_every,
            "threads": self.threads,
            "stream.data": self.data,
            "stream.tasks": self.tasks,
            "diagnostics.prequential": self.prequential or None,
            **further,
        }
        options = {key: value for key, value in given.items() if value is not None}
        return self.from_file, options, parse_sets(self.sets)

    @functools.cached_property
    def from_file(self) -> dict[str, Any]:
        """The settings in ``--config``."""
        return {} if self.config is None else _told(*late.configure.read_layer(self.config))

    def resolve(self, benchmark: str | None, method: str | None, **further: Any) -> "RunConfig":
        """The configuration of one run; benchmark and method may come from the file."""
        benchmark = benchmark or self.from_file.get("benchmark")
        if benchmark is None:
            raise InputError("which benchmark? Name one (see: proxreplay benchmarks) or --config.")
        method = method or self.from_file.get("method", DEFAULT_METHOD)
        config = late.configure.configure(benchmark, method, *self.layers(**further))
        self.check([config])
        return config

    def check(self, configs: "Sequence[RunConfig]") -> None:
        """Refuse settings without effect, and code that only a file names."""
        sets = parse_sets(self.sets)
        late.configure.refuse_without_effect(sets, configs)
        if "network" not in sets:
            refuse_foreign_code(configs, f"--config {self.config}", trust=self.trust)


@dataclass(frozen=True)
class How:
    """Options that decide how runs are made; none of them changes what runs compute."""

    data_root: DataRoot = None
    checkpoint_every: Annotated[int, number("Batches between checkpoints.")] = CHECKPOINT_EVERY
    track: Annotated[
        list[str] | None, option("NAME", "tensorboard, wandb, mlflow; repeatable.")
    ] = None

    def options(self) -> "RunOptions":
        """The same for `run`."""
        return late.run.RunOptions(self.data_root, self.checkpoint_every, tuple(self.track or ()))


@dataclass(frozen=True)
class Where:
    """Options that decide who makes several runs, and how many at a time."""

    jobs: Annotated[
        int | None, number("Runs at a time. Default: 1; with ray, as many as fit.", max=MAX_JOBS)
    ] = None
    engine: Annotated[str, option("NAME", "local (processes here), or ray.")] = "local"
    address: Annotated[
        str | None, option("ADDRESS", "Of a Ray cluster to join, or auto. Default: a local Ray.")
    ] = None

    def make_engine(self) -> "Engine":
        """The engine that is asked for; refuses what does not go together."""
        if self.engine not in ENGINES:
            raise InputError(f"--engine {self.engine}: give one of {', '.join(ENGINES)}.")
        if self.engine == "ray":
            return late.ray_engine.RayEngine(self.address, self.jobs)
        if self.address is not None:
            raise InputError(f"--address {self.address}: goes with --engine ray; leave it out.")
        if self.jobs in (None, 1):
            return late.engines.InlineEngine()
        return late.engines.ProcessEngine(self.jobs)


def refuse_foreign_code(configs: "Sequence[RunConfig]", where: str, *, trust: bool) -> None:
    """Refuse to execute code that nobody has named on this command line."""
    for config in configs:
        code = late.configure.foreign_code(config)
        if code is not None and not trust:
            raise InputError(
                f"{where} names code that would be executed: network={code}. Look at it; then "
                "give --trust, or name it yourself with --set network=... where there is --set."
            )


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses: their fields become options of its own."""
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {n: t for n, t in hints.items() if dataclasses.is_dataclass(t)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=keyword, annotation=hints[name]))
            continue
        inner = typing.get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(f.name, keyword, default=f.default, annotation=inner[f.name])
            for f in dataclasses.fields(groups[name])
        ]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            given[name] = group(**{field: given.pop(field) for field in fields})
        function(**given)

    del command.__wrapped__
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def current(values: dict[str, Any]) -> dict[str, Any]:
    """Values under today's names; a word about each earlier name."""
    return _told(*late.config.renamed(values))


def _told(values: dict[str, Any], remarks: list[str]) -> dict[str, Any]:
    """The values, after a word about each remark."""
    for remark in remarks:
        typer.secho(plain(f"proxreplay: {remark}"), fg="yellow", err=True)
    return values


def parse_sets(sets: list[str] | None) -> dict[str, Any]:
    """``["lpr.omega_0=4"]`` as ``{"lpr.omega_0": 4}``."""
    values: dict[str, Any] = {}
    for text in sets or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: give KEY=VALUE, such as --set lpr.omega_0=4.")
        if key.strip() in values:
            raise InputError(f"--set {text}: {key.strip()} is given twice.")
        values[key.strip()] = late.config.parse_value(value)
    return current(values)


def parse_grid(texts: list[str]) -> dict[str, list[Any]] | None:
    """``["lr=0.01,0.1"]`` as ``{"lr": [0.01, 0.1]}``; ``["paper"]`` as None."""
    if texts == ["paper"]:
        return None
    if math.prod(text.count(",") + 1 for text in texts) > MAX_RUNS:
        raise InputError(f"--grid: more than {MAX_RUNS:,} combinations; give fewer.")
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise InputError(f"--grid {text}: give KEY=V1,V2 or, alone, --grid paper.")
        found = [late.config.parse_value(value) for value in values.split(",")]
        if key.strip() in grid or any(found.count(value) > 1 for value in found):
            raise InputError(f"--grid {text}: give each key and each of its values once.")
        grid[key.strip()] = found
    return current(grid)


def parse_methods(text: str) -> list[str]:
    """Methods such as ``er,lpr-er``."""
    names = [late.recipes.find_method(name.strip()).name for name in text.split(",")]
    if len(set(names)) != len(names):
        raise InputError(f"--methods {text}: give each method once.")
    return names


def parse_seeds(text: str) -> list[int]:
    """Seeds such as ``0-4`` or ``0,2,5-7``.

    >>> parse_seeds("0,2,5-7")
    [0, 2, 5, 6, 7]
    """
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 40:
            raise InputError(f"--seeds {text[:60]}: give numbers and ranges, such as 0-4 or 0,2,5.")
        ranges.append(range(int(first), int(last or first) + 1))
    if sum(found.stop - found.start for found in ranges) > MAX_RUNS:
        raise InputError(f"--seeds {text[:60]}: more than {MAX_RUNS:,} seeds; give fewer.")
    seeds = [seed for found in ranges for seed in found]
    if len(set(seeds)) != len(seeds) or not seeds:
        raise InputError(f"--seeds {text[:60]}: give each seed once, at least one.")
    return seeds
