"""Freed memory that stays with the process."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory"
)

PAGES = """
import resource
import torch
from proxreplay.allocator import keep_freed_memory

told = keep_freed_memory()

def step():
    blocks = [torch.zeros(3_000_000) for _ in range(8)]  # 96 MB, more than glibc keeps by itself

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(**settings: str) -> tuple[str, int]:
    """What the function returned, and how many pages five steps then took from the system."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("GLIBC_")}
    made = subprocess.run(
        [sys.executable, "-c", PAGES],
        env=plain | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    told, count = made.stdout.split()
    return told, int(count)


def test_later_steps_take_hardly_a_page_from_the_system() -> None:
    told, count = pages()
    assert told == "True"
    assert count < 10_000  # of 117,000


def test_a_setting_of_the_user_is_respected() -> None:
    told, count = pages(MALLOC_TRIM_THRESHOLD_="131072")
    assert told == "False"
    assert count > 50_000
