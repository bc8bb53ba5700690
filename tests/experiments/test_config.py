import pytest

from proxreplay.errors import InputError
from proxreplay.experiments.config import RunConfig, keys, renamed

BASE = RunConfig("split-digits", "lpr-er")


def test_dotted_and_nested_values_are_the_same() -> None:
    dotted = BASE.with_values({"lpr.omega_0": 4, "lr": 0.05})
    nested = BASE.with_values({"lpr": {"omega_0": 4.0}, "lr": 0.05})
    assert dotted == nested
    assert dotted.lpr.omega_0 == 4.0
    assert dotted.lpr.beta == BASE.lpr.beta


def test_a_configuration_survives_the_round_trip_and_keeps_its_digest() -> None:
    config = BASE.with_values({"refresh.samples": 200, "seed": 3})
    again = RunConfig("x", "y").with_values(config.to_dict())
    assert again == config
    assert again.digest == config.digest != BASE.digest


@pytest.mark.parametrize("key", keys())
def test_every_key_can_be_set_to_what_it_is(key: str) -> None:
    value = BASE
    for part in key.split("."):
        value = getattr(value, part)
    assert BASE.with_values({key: value}) == BASE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lpr.omega": 4.0}, "unknown key 'lpr.omega'; the nearest valid one is 'lpr.omega_0'"),
        ({"lpr": 4.0}, "unknown key 'lpr'"),
        ({"lr.x": 4.0}, "unknown key 'lr.x'"),
        ({"lr": "fast"}, "lr='fast' is a str; give float"),
        ({"capacity": 2.5}, "capacity=2.5 is a float; give int"),
        ({"capacity": 0}, "capacity=0"),
        ({"lpr.omega_0": -1.0}, "lpr.omega_0=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"refresh.every": 0}, "refresh.every=0"),
        ({"refresh.every": "tasks"}, "refresh.every=tasks; give a number of stream batches, or"),
        ({"projection.head": "none"}, "projection.head=none; give one of treat, free"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_bad_values_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        BASE.with_values(values)


def test_yaml_reads_exponents_as_text_and_they_are_still_numbers() -> None:
    assert BASE.with_values({"lr": "1e-3"}).lr == 0.001


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("refresh.samples", "all"),
        ("refresh.samples", "none"),
        ("capacity", "none"),
        ("network", "none"),
    ],
)
def test_what_is_not_set_can_be_said_in_words(key, word):
    values = BASE.with_values({"refresh.samples": 5, "capacity": 7, "network": "a:b"})
    assert values.with_values({key: word}).flat()[key] is None


def test_words_for_nothing_are_no_values_elsewhere():
    with pytest.raises(InputError, match="capacity='all' is a str; give int or none"):
        BASE.with_values({"capacity": "all"})
    with pytest.raises(InputError, match="lr='none'"):
        BASE.with_values({"lr": "none"})


@pytest.mark.parametrize(
    ("key", "value"), [("lpr.rolling", 1.0), ("lpr.rolling", -0.1), ("lpr.tolerance", 0.5)]
)
def test_shares_outside_their_range_are_refused(key, value):
    with pytest.raises(InputError, match=key):
        BASE.with_values({key: value})


def test_earlier_names_are_still_read_and_remarked_on():
    old = {"memory": 7, "ema": {"momentum": 0.5}, "diagnostics.drift": "official"}
    new = {"capacity": 7, "averaging.momentum": 0.5, "diagnostics.drift": "authors"}
    assert BASE.with_values(old) == BASE.with_values(new)
    assert renamed(old)[0] == new
    assert len(renamed(old)[1]) == 3
    assert renamed(new) == (new, [])
    with pytest.raises(InputError, match="given twice"):
        BASE.with_values({"memory": 7, "capacity": 8})


@pytest.mark.parametrize("key", ["lr", "capacity"])
@pytest.mark.parametrize("digits", [300, 5000])
def test_a_whole_number_that_no_float_holds_is_refused_by_name(digits, key):
    value = int("f" * digits, 16)  # YAML reads 0xfff
    with pytest.raises(InputError, match=f"{key} has {4 * digits} bits; give a number"):
        BASE.with_values({key: value})
