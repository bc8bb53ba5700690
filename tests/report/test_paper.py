"""The paper's numbers: found where the paper has them, and only there."""

import pytest

from proxreplay.evaluation import Estimate
from proxreplay.report.paper import paper, paper_row


@pytest.mark.parametrize(
    ("benchmark", "method", "memory", "acc", "wc_acc", "seeds"),
    [
        ("split-cifar100", "er", 2000, (0.2937, 0.0054), (0.1264, 0.0030), 10),
        ("split-cifar100", "lpr-lode", 1000, (0.2740, 0.0051), (0.1753, 0.0054), 10),
        ("split-tinyimagenet", "lpr-der", 4000, (0.2408, 0.0032), (0.1751, 0.0013), 10),
        ("online-clear", "lpr-ema", 2000, (0.7558, 0.0013), (0.6764, 0.0038), 5),
        ("split-cifar100", "lpr-er", None, (0.4244, 0.0051), (0.2260, 0.0057), 5),
        ("split-tinyimagenet", "agem", 4000, (0.0295, 0.0020), (0.0250, 0.0012), 5),
    ],
    ids=lambda v: str(v),
)
def test_rows_are_those_of_the_paper(
    benchmark: str,
    method: str,
    memory: int | None,
    acc: tuple[float, float],
    wc_acc: tuple[float, float],
    seeds: int,
) -> None:
    row = paper_row(benchmark, method, memory)
    assert row is not None
    assert row.measures["acc"] == Estimate(*acc, seeds)
    assert row.measures["wc_acc"] == Estimate(*wc_acc, seeds)


@pytest.mark.parametrize(
    ("benchmark", "method", "memory"),
    [
        ("split-digits", "er", 2000),
        ("split-cifar100", "er", 1234),
        ("split-cifar100", "derpp", 2000),
        ("online-clear", "lode", 2000),
        ("split-cifar100", "agem", 1000),
    ],
    ids=["benchmark", "memory", "method", "not on this benchmark", "memory of a baseline"],
)
def test_what_the_paper_did_not_run_is_not_there(benchmark: str, method: str, memory: int) -> None:
    assert paper_row(benchmark, method, memory) is None


def test_averages_come_with_a_note() -> None:
    averaged = paper_row("split-cifar100", "lpr-ema", 2000)
    plain = paper_row("split-cifar100", "lpr-er", 2000)
    assert averaged is not None
    assert averaged.note is not None
    assert "online network" in averaged.note
    assert plain is not None
    assert plain.note is None


def test_every_number_is_a_fraction_with_a_small_standard_error() -> None:
    for table in paper()["memory_constrained"].values():
        for memory, rows in table.items():
            if memory == "seeds":
                continue
            for numbers in rows.values():
                assert len(numbers) == 6
                assert all(0 < mean < 1 for mean in numbers[::2])
                assert all(0 < error < 0.02 for error in numbers[1::2])
