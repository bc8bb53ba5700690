"""The modules behind the commands, each imported when it is first used: ``--help`` answers at once.

late.jobs.comparison(...)           imports `proxreplay.experiments.jobs`
"""

# mypy: implicit-reexport
# ruff: noqa: F401
# isort: skip_file

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxreplay import demo, reproduce
    from proxreplay.cli import display
    from proxreplay.data import catalog, fetch, scenarios
    from proxreplay.evaluation import measures
    from proxreplay.experiments import benchmarks, config, configure, engines, interrupt, jobs
    from proxreplay.experiments import joint, plan, ray_engine, recipes, results, run, sweep
    from proxreplay.experiments import trackers
    from proxreplay.report import findings, grouping, page, plots, tables, watch

_MODULES = {
    "proxreplay": "demo reproduce",
    "proxreplay.cli": "display",
    "proxreplay.data": "catalog fetch scenarios",
    "proxreplay.evaluation": "measures",
    "proxreplay.experiments": "benchmarks config configure engines interrupt jobs joint plan "
    "ray_engine recipes results run sweep trackers",
    "proxreplay.report": "findings grouping page plots tables watch",
}


def __getattr__(name: str) -> ModuleType:
    for package, modules in _MODULES.items():
        if name in modules.split():
            return import_module(f"{package}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
