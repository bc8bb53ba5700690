"""Lets tests say ``from tests.reference import ...`` under plain ``pytest`` as well."""

import os
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory):
    """Decoded data of tests stays out of the user's cache folder."""
    if not os.environ.get("PROXREPLAY_CACHE"):
        os.environ["PROXREPLAY_CACHE"] = str(tmp_path_factory.mktemp("cache"))
