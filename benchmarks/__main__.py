"""All benchmarks in one run: ``python -m benchmarks [--json FILE]``."""

import json
from pathlib import Path

import torch

from benchmarks import (
    averaging,
    gram_error,
    gram_paths,
    growth,
    learner,
    memory_use,
    precondition,
    refresh,
    step_statistics,
    stream,
)
from benchmarks.timing import SETTINGS, parse, show

SCRIPTS = {
    "Exactness": gram_error.run,
    "Refresh": refresh.run,
    "Preconditioning": precondition.run,
    "Learner": learner.run,
    "Averaging": averaging.run,
    "Statistics from steps": step_statistics.run,
    "Stream": stream.run,
    "Memory use": memory_use.run,
    "Paths": gram_paths.run,
    "Growth": growth.run,
}


def main() -> None:
    options = parse(("--json", "write all numbers to this file"))
    record: dict[str, object] = {"torch": torch.__version__, "threads": SETTINGS.threads}
    for title, run in SCRIPTS.items():
        claims = run()
        show(title, claims)
        record[title] = [claim.as_dict() for claim in claims]
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
