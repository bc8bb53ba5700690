"""Inputs that are a dict or tuple of tensors are learned as one tensor is.

The truth is a twin that sees both tensors as one: everything has to be equal to the last bit.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from proxreplay import (
    LPR,
    Batch,
    ClassBalancedMemory,
    Distilled,
    Learner,
    RingMemory,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)
from proxreplay.batch import Inputs, each, merged, named, part, unnamed
from proxreplay.errors import InputError
from proxreplay.evaluation.diagnostics import GradientRatios, RepresentationDrift
from proxreplay.models import mlp
from proxreplay.proximal import AGEM, GPM, OWM
from proxreplay.proximal.layers.calling import Called
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay.losses import Loss
from proxreplay.seeding import seeded

Form = Callable[[Tensor], Any]


@dataclass
class Output:
    """As the models of transformers give it."""

    logits: Tensor
    hidden: Tensor | None = None


class TwoInputs(nn.Module):
    """A network that takes its five features as an image and a table."""

    def __init__(self, net: nn.Module, *, wrap: bool = False) -> None:
        super().__init__()
        self.net = net
        self.wrap = wrap

    def forward(self, image: Tensor, table: Tensor) -> Tensor | Output:
        logits = self.net(torch.cat([image, table], dim=1))
        return Output(logits) if self.wrap else logits


class OneInput(nn.Module):
    """The same for one tensor, with an output like that of transformers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Output:
        return Output(self.net(x))


def as_dict(x: Tensor) -> dict[str, Tensor]:
    return {"image": x[:, :3], "table": x[:, 3:]}


def as_tuple(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3], x[:, 3:]


def by_hand(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model.net(torch.cat([inputs["left"], inputs["right"]], dim=1))
    return logits


def odd_names(x: Tensor) -> dict[str, Tensor]:
    return {"left": x[:, :3], "right": x[:, 3:]}


FORMS: dict[str, tuple[Form, Callable[[nn.Module], nn.Module], Any]] = {
    "dict": (as_dict, TwoInputs, None),
    "tuple": (as_tuple, TwoInputs, None),
    "dict, output with logits": (as_dict, lambda net: TwoInputs(net, wrap=True), None),
    "one tensor, output with logits": (lambda x: x, OneInput, None),
    "call": (odd_names, TwoInputs, by_hand),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

LOSSES: dict[str, Loss] = {
    "finetune": finetune,
    "er": er,
    "er_ace": er_ace,
    "lode": lode,
    "derpp": derpp,
    "derpp_snapshot": derpp_snapshot,
    "distilled": Distilled(er, on="all"),
}
RULES: dict[str, Callable[[nn.Module], GradientRule | None]] = {
    "no rule": lambda model: None,
    "lpr": lambda model: LPR(model, omega_0=4.0),
    "agem": lambda model: AGEM(model, samples=8),
    "agem joint": AGEM.joint,
    "owm": lambda model: OWM(model, alpha=0.1),
    "gpm": lambda model: GPM(model),
}


def network() -> nn.Module:
    with seeded(0, "model"):
        return mlp(5, hidden=(6,)).double()


def noise(inputs: Inputs, rng: torch.Generator | None) -> Inputs:
    """Augmentation that moves all features of an example by the same random number."""
    if rng is None:
        return inputs
    first = next(iter(named(inputs).values()))
    moved = torch.rand(len(first), 1, generator=rng, dtype=first.dtype)
    return each(inputs, lambda tensor: tensor + moved)


def learner_of(wrap: Callable[[nn.Module], nn.Module], rule: Any, **options: Any) -> Learner:
    model = wrap(network())
    return Learner(
        model,
        ClassBalancedMemory(12),
        rule(model),
        steps_per_batch=2,
        replay_batch=4,
        refresh_every=2,
        refresh_samples=8,
        transform=noise,
        **options,
    )


def stream(batches: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    for i in range(batches):
        x = torch.randn(6, 5, generator=rng, dtype=torch.float64)
        yield x, torch.randint(0, 2, (6,), generator=rng) + i // 2


def twins(form: Any, rule: Any, **options: Any) -> tuple[Learner, Learner, Form]:
    shape, wrap, call = form
    plain = learner_of(lambda net: net, rule, **options)
    return plain, learner_of(wrap, rule, call=call, **options), shape


def weights_of(learner: Learner) -> list[Tensor]:
    return [parameter.detach() for parameter in learner.model.parameters()]


def assert_same(plain: Learner, structured: Learner) -> None:
    for one, other in zip(weights_of(plain), weights_of(structured), strict=True):
        assert torch.equal(one, other)


def every_combination() -> list[Any]:
    """All losses with LPR, all rules with er, in every form."""
    pairs = [(loss, "lpr") for loss in LOSSES] + [("er", rule) for rule in RULES if rule != "lpr"]
    return [
        pytest.param(form, loss, rule, id=f"{form}: {loss} and {rule}")
        for form, (loss, rule) in itertools.product(FORMS, pairs)
    ]


@pytest.mark.parametrize(("form", "loss", "rule"), every_combination())
def test_equals_the_twin_with_one_tensor(form: str, loss: str, rule: str) -> None:
    plain, structured, shape = twins(FORMS[form], RULES[rule], loss=LOSSES[loss])
    for x, y in stream():
        assert plain.learn(x, y).loss == structured.learn(shape(x), y).loss
    assert_same(plain, structured)
    x, y = next(stream())
    assert torch.equal(plain.predict_proba(x), structured.predict_proba(shape(x)))
    for predictor in ("online", "average", "both"):
        expected = plain.logits(x, predictor=predictor, batch_size=4)
        assert torch.equal(structured.logits(shape(x), predictor=predictor, batch_size=4), expected)
    assert plain.evaluate(x, y) == structured.evaluate(shape(x), y)
    assert (plain.predict(x[0]) == structured.predict(part(shape(x), slice(0, 1)))).all()


@every_form
def test_goes_on_exactly_when_loaded(form: Any, tmp_path: Path) -> None:
    _, learner, shape = twins(form, RULES["lpr"])
    batches = list(stream(8))
    for x, y in batches[:5]:
        learner.learn(shape(x), y)
    learner.save(tmp_path)
    model = form[1](network())
    hand_in = {"rule": LPR(model, omega_0=4.0), "transform": noise, "call": form[2]}
    again = Learner.load(tmp_path, model, **hand_in)
    for x, y in batches[5:]:
        assert again.learn(shape(x), y).loss == learner.learn(shape(x), y).loss
    assert_same(learner, again)
    assert torch.equal(again.logits(shape(batches[0][0])), learner.logits(shape(batches[0][0])))


def test_a_call_of_your_own_has_to_be_handed_in_again(tmp_path: Path) -> None:
    _, learner, shape = twins(FORMS["call"], RULES["no rule"])
    learner.learn(shape(torch.randn(4, 5)), [0, 1, 0, 1])
    learner.save(tmp_path)
    with pytest.raises(InputError, match=r"saved with call '.*by_hand'; hand it in as call=..."):
        Learner.load(tmp_path, TwoInputs(network()), transform=noise)
    with pytest.raises(InputError, match="saved with call="):
        Learner.load(tmp_path, TwoInputs(network()), transform=noise, call=lambda m, x: x)


@every_form
def test_what_is_forgotten_is_gone(form: Any) -> None:
    plain, structured, shape = twins(form, RULES["lpr"])
    ids = []
    for x, y in stream():
        plain.learn(x, y)
        ids += structured.learn(shape(x), y).ids
    assert plain.forget(ids=ids[:20]) == structured.forget(ids=ids[:20])
    assert plain.forget(label=2) == structured.forget(label=2)
    x, y = next(stream())
    plain.learn(x, y)
    structured.learn(shape(x), y)
    assert_same(plain, structured)


def test_bytes_of_every_tensor_are_overwritten() -> None:
    memory = RingMemory(4)
    rng = torch.Generator()
    ids = memory.add(
        Batch(as_dict(torch.full((4, 5), 7.0)), torch.zeros(4, dtype=torch.int64)), rng
    )
    assert memory.remove(ids[:3]) == 3
    for name in ("inputs.image", "inputs.table"):
        tensor = memory._storage.tensors[name]
        assert tensor[:1].eq(7).all()
        assert tensor[1:].eq(0).all()


@every_form
def test_every_source_of_batches_is_one_stream(form: Any) -> None:
    shape = form[0]
    x = torch.cat([x for x, _ in stream()])
    y = torch.cat([y for _, y in stream()])
    singles = [(part(shape(x), slice(i, i + 1)), int(y[i])) for i in range(len(x))]
    singles = [(each(one, lambda tensor: tensor[0]), label) for one, label in singles]
    sources: list[tuple[Any, Any]] = [
        (shape(x), y),
        (shape(x), y.tolist()),
        ([(part(shape(x), slice(i, i + 6)), y[i : i + 6]) for i in range(0, 30, 6)], None),
        ([Batch(part(shape(x), slice(i, i + 6)), y[i : i + 6]) for i in range(0, 30, 6)], None),
        (singles, None),
        (DataLoader(singles, batch_size=6), None),
    ]
    if isinstance(shape(x), dict):
        arrays = {name: tensor.numpy() for name, tensor in shape(x).items()}
        sources += [
            (arrays, y.numpy()),
            ([{**one, "labels": label} for one, label in singles], None),
            (DataLoader([{**one, "labels": label} for one, label in singles], batch_size=6), None),
        ]
    first = None
    for source, labels in sources:
        _, learner, _ = twins(form, RULES["no rule"])
        learner.learn_stream(source, labels, batch_size=6)
        first = first or learner
        assert learner.batches_learned == 5
        assert_same(first, learner)


def test_a_dataset_of_pairs_of_tensors_is_not_mistaken() -> None:
    learner = Learner(network(), averaging=None)
    x, y = next(stream())
    learner.learn_stream(TensorDataset(x, y), batch_size=3)
    assert learner.batches_learned == 2


@every_form
def test_one_example_at_a_time(form: Any) -> None:
    plain, structured, shape = twins(form, RULES["no rule"])
    x, y = next(stream())
    for i in range(len(x)):
        one = each(part(shape(x), slice(i, i + 1)), lambda tensor: tensor[0])
        assert plain.learn(x[i], int(y[i])).loss == structured.learn(one, int(y[i])).loss
    assert structured.predict(one).shape == (1,)


@every_form
def test_a_filled_memory_is_taken_over(form: Any) -> None:
    shape, wrap, call = form
    memory = ClassBalancedMemory(12)
    x, y = next(stream())
    memory.add(Batch(shape(x), y), torch.Generator())
    learner = Learner(wrap(network()), memory, call=call)
    assert len(learner.learn(shape(x), y).ids) == 6
    with pytest.raises(InputError, match="keep to one shape and dtype"):
        learner.learn(each(shape(x), lambda tensor: tensor[:, :1]), y)


@every_form
def test_a_refresh_of_your_own_choice(form: Any) -> None:
    plain, structured, shape = twins(form, RULES["lpr"])
    x, y = next(stream())
    plain.learn(x, y)
    structured.learn(shape(x), y)
    assert plain.refresh(x[:3]) == structured.refresh(shape(x[:3])) == 3
    plain.learn(x, y)
    structured.learn(shape(x), y)
    assert_same(plain, structured)


def test_diagnostics_see_structured_steps() -> None:
    found: list[Any] = []
    for shape, wrap in ((lambda x: x, lambda net: net), (as_dict, TwoInputs)):
        model = wrap(network())
        rule = LPR(model, omega_0=4.0)
        ratios: list[Any] = []
        probe = GradientRatios(model, rule, ratios.append)
        learner = Learner(model, rule=rule, refresh_every=1, observers=[probe])
        for x, y in stream(3):
            learner.learn(shape(x), y)
        found.append([one.overall for one in ratios])
        drift = RepresentationDrift(model, learner.view(shape(x))).attach(learner.optimizer)
        learner.learn(shape(x), y)
        assert drift.total() > 0
    assert repr(found[0]) == repr(found[1])  # NaN is not equal to itself
    assert len(found[0]) >= 3


def test_numpy_arrays_and_lists_in_a_dict() -> None:
    x, y = next(stream())
    one, other = (twins(FORMS["dict"], RULES["no rule"])[1] for _ in range(2))
    one.learn(as_dict(x), y)
    other.learn({"image": x[:, :3].tolist(), "table": x[:, 3:].numpy()}, y.numpy())
    assert_same(one, other)


def test_a_tuple_of_numbers_is_still_one_tensor() -> None:
    learner = Learner(mlp(2))
    learner.learn(((0.0, 1.0), (1.0, 0.0)), (0, 1))
    assert learner.intake.kind is not None
    assert learner.intake.kind.plain


class NeedsBoth(TwoInputs):
    """Nothing is optional."""


GOOD = as_dict(torch.randn(4, 5, dtype=torch.float64))
BAD: dict[str, tuple[Any, str]] = {
    "lengths differ": (
        {"image": torch.zeros(4, 3), "table": torch.zeros(3, 2)},
        r"inputs of different length: 4 rows in inputs.image, 3 rows in inputs.table",
    ),
    "nan in one": (
        {**GOOD, "table": torch.full((4, 2), np.nan)},
        r"inputs.table hold NaN, infinity",
    ),
    "an empty dict": ({}, "an empty dict as inputs"),
    "a key that is no string": ({0: torch.zeros(4, 3)}, "with the key 0; give strings"),
    "an argument is missing": (
        {"image": torch.zeros(4, 3)},
        r"cannot take inputs of \(inputs.image \[3\] float64\) each .*missing 1 required "
        r"positional argument: 'table'.*call=",
    ),
    "an argument too many": ({**GOOD, "other": torch.zeros(4, 1)}, "unexpected keyword argument"),
    "no rows": ({"image": torch.zeros(0, 3), "table": torch.zeros(0, 2)}, "inputs.image of shape"),
    "text": ({**GOOD, "table": ["a", "b", "c", "d"]}, "inputs.table of dtype"),
}


@pytest.mark.parametrize(("x", "message"), BAD.values(), ids=BAD)
def test_bad_inputs_are_named_and_change_nothing(x: Any, message: str) -> None:
    learner = Learner(NeedsBoth(network()))
    with pytest.raises(InputError, match=message):
        learner.learn(x, [0, 1, 0, 1])
    assert learner.intake.kind is None
    assert len(learner.memory) == learner.batches_seen == 0
    learner.learn(GOOD, [0, 1, 0, 1])
    before = [parameter.clone() for parameter in weights_of(learner)]
    with pytest.raises(InputError):
        learner.learn(x, [0, 1, 0, 1])
    assert all(map(torch.equal, before, weights_of(learner)))
    assert learner.batches_seen == 1
    assert np.isfinite(learner.learn(GOOD, [0, 1, 0, 1]).loss)


def test_inputs_of_another_form_than_before() -> None:
    learner = Learner(TwoInputs(network()))
    learner.learn(GOOD, [0, 1, 0, 1])
    with pytest.raises(InputError, match=r"inputs of \[5\] float64 each, but earlier ones were \("):
        learner.learn(torch.zeros(4, 5), [0, 1, 0, 1])
    with pytest.raises(InputError, match=r"inputs\[0\]"):
        learner.predict((torch.zeros(4, 3), torch.zeros(4, 2)))


def test_an_output_without_logits() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super().forward(x), x

    with pytest.raises(InputError, match="Pair gives a tuple without logits; say how to get them"):
        Learner(Pair(2, 2)).learn(torch.zeros(2, 2), [0, 1])
    learner = Learner(Pair(2, 2), call=lambda model, x: model(x)[0])
    assert np.isfinite(learner.learn(torch.zeros(2, 2), [0, 1]).loss)


def test_call_must_be_a_function() -> None:
    with pytest.raises(InputError, match=r"call is 3; give a function of \(model, inputs\)"):
        Learner(network(), call=3)  # type: ignore[arg-type]


def test_a_loss_in_a_loop_of_your_own() -> None:
    model = Called(TwoInputs(network(), wrap=True))
    x, y = next(stream())
    for module in model.modules():
        if hasattr(module, "grow"):
            module.grow(3, torch.Generator())
            module.activate(y)
    assert er(model, Batch(as_dict(x), y), None) == er(model.model.net, Batch(x, y), None)


def test_names_of_tensors_go_round() -> None:
    for inputs in (torch.zeros(2), {"a": torch.zeros(2), "[0]": torch.ones(2)}, (torch.zeros(2),)):
        again = unnamed(named(inputs))
        assert type(again) is type(inputs)
        assert named(again).keys() == named(inputs).keys()
    with pytest.raises(InputError, match="give all batches the same"):
        merged([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
