from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool, pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    """Two processes that know each other."""
    with pool(2) as started:
        yield started


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four processes that know each other."""
    with pool(4) as started:
        yield started
