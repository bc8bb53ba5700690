"""Where a run happened: versions, commit and hardware, for the record."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch


def describe_environment(data_checksum: str) -> dict[str, Any]:
    """Versions, git commit, hardware and the checksum of the data."""
    from proxreplay import __version__

    return {
        "proxreplay": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "git_commit": git_commit(),
        "data_checksum": data_checksum,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git_commit() -> str | None:
    """The commit of the source tree proxreplay runs from; None if that is not a git checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
