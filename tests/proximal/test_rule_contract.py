"""What every gradient rule promises, run over every rule."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR, Batch, KroneckerLPR
from proxreplay.errors import InputError
from proxreplay.models import GrowingHead, mlp, small_cnn
from proxreplay.proximal import (
    AGEM,
    AOP,
    GPM,
    OWM,
    SGP,
    AdaptiveAlpha,
    GradientRule,
    StreamProgress,
)
from proxreplay.serialization import load_state, save_state
from tests.reference import assert_same_state, flat_gradient

RULES = {
    "LPR": lambda model: LPR(model, omega_0=4.0),
    "LPR by itself": LPR,
    "AGEM": lambda model: AGEM(model, samples=8),
    "AGEM.joint": lambda model: AGEM.joint(model),
    "OWM": lambda model: OWM(model, alpha=1e-2),
    "AOP": lambda model: AOP(model, AdaptiveAlpha(StreamProgress(10)), norms="treat"),
    "GPM": lambda model: GPM(model, 0.9),
    "GPM.accumulate": lambda model: GPM(model, 0.8, accumulate=True, energy_growth=0.01),
    "SGP": lambda model: SGP(model, 0.9, norms="freeze"),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())


def conv_net():
    torch.manual_seed(0)
    return small_cnn(1, 3, widths=(4, 5)).train()


def examples(n, seed):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 1, 6, 6, generator=rng)
    return Batch(inputs, torch.randint(0, 3, (n,), generator=rng))


def backward_(model, batch):
    model.zero_grad()
    F.cross_entropy(model(batch.inputs), batch.labels).backward()


def inform(rule, seed=0):
    """Whatever a rule learns from, once: a refresh, an observation, or both."""
    rule.refresh(examples(12, seed).inputs)
    if hasattr(rule, "observe"):
        rule.observe(examples(10, seed + 1), opposed(examples(8, seed + 2)))


def opposed(batch):
    """The same inputs with other labels, so that A-GEM has something to object to."""
    return Batch(batch.inputs, (batch.labels + 1) % 3)


def prepared(make, seed=0):
    """A model with gradients that the rule will change, and the rule."""
    model = conv_net()
    rule = make(model)
    batch = examples(8, seed + 2)
    backward_(model, batch)
    inform(rule, seed)
    return model, rule


@every_rule
def test_is_a_gradient_rule_and_changes_the_gradient(make):
    model, rule = prepared(make)
    assert isinstance(rule, GradientRule)
    before = flat_gradient(model)
    rule.precondition_()
    after = flat_gradient(model)
    assert after.isfinite().all()
    assert not torch.equal(before, after)


@every_rule
def test_never_makes_a_gradient_longer(make):
    """A contraction, not a strict one: directions that nobody uses are free."""
    for seed in range(3):
        model, rule = prepared(make, seed)
        for step in range(3):
            backward_(model, examples(8, 100 + step))
            before = flat_gradient(model).norm()
            rule.precondition_()
            assert flat_gradient(model).norm() <= before * (1 + 1e-6)
            inform(rule, seed + step)


@every_rule
def test_learning_leaves_no_trace_on_the_model(make):
    model = conv_net()
    model[1].eval()  # a mode of its own
    rule = make(model)
    backward_(model, examples(8, 1))
    modes = [module.training for module in model.modules()]
    state, gradient = copy.deepcopy(model.state_dict()), flat_gradient(model)
    generator = torch.get_rng_state()
    inform(rule)
    rule.state_dict()
    assert [module.training for module in model.modules()] == modes
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert torch.equal(flat_gradient(model), gradient)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.requires_grad and not p._backward_hooks for p in model.parameters())


@every_rule
def test_before_it_knows_anything_gradients_stay(make):
    model = conv_net()
    rule = make(model)
    backward_(model, examples(8, 1))
    before = flat_gradient(model)
    first = "observe" if isinstance(rule, OWM) else "refresh"
    said = pytest.warns(UserWarning, match=f"every gradient stays as it is; call {first}")
    with nullcontext() if isinstance(rule, AGEM) else said:
        rule.precondition_()
    assert torch.equal(flat_gradient(model), before)


@every_rule
def test_attached_it_does_the_same_inside_the_optimizer_until_detached(make):
    model, rule = prepared(make)
    twin, twin_rule = prepared(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert rule.attach(optimizer) is rule
    rule.attach(optimizer)  # again changes nothing
    with pytest.raises(InputError, match="attached already"):
        rule.attach(torch.optim.SGD(list(model.parameters())[:1], lr=0.1))
    optimizer.step()
    twin_rule.step_()
    twin_optimizer.step()
    assert torch.equal(flat_gradient(model), flat_gradient(twin))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))

    rule.detach()
    backward_(model, examples(8, 9))
    before = flat_gradient(model)
    optimizer.step()
    assert torch.equal(flat_gradient(model), before)


@every_rule
def test_attached_it_leaves_parameters_of_other_optimizers_alone(make):
    model, rule = prepared(make)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    rule.attach(optimizer)
    optimizer.step()
    for name, parameter in model.named_parameters():
        if not name.startswith("head."):
            assert torch.equal(parameter.grad, before[name]), name


@every_rule
def test_state_round_trip_is_exact_now_and_later(make, tmp_path):
    model, rule = prepared(make)
    inform(rule, 20)
    save_state(tmp_path, {"rule": rule.state_dict()})
    other_model = copy.deepcopy(model)
    other = make(other_model)
    other.load_state_dict(load_state(tmp_path)["rule"])
    for seed in (30, 40):
        for one, its_model in ((rule, model), (other, other_model)):
            backward_(its_model, examples(8, seed))
            one.precondition_()
            inform(one, seed)
        assert torch.equal(flat_gradient(model), flat_gradient(other_model))
    assert getattr(rule, "untreated", None) == getattr(other, "untreated", None)


@every_rule
def test_state_of_another_rule_is_refused(make):
    rule = make(conv_net())
    with pytest.raises(InputError, match="this is the state of Something"):
        rule.load_state_dict({**rule.state_dict(), "rule": "Something"})


@every_rule
def test_state_with_columns_in_another_order_is_refused(make):
    rule = make(conv_net())
    state = rule.state_dict()
    if isinstance(rule, AGEM):  # which has no columns
        assert "columns" not in state
        return
    del state["columns"]
    with pytest.raises(InputError, match="an earlier version"):
        rule.load_state_dict(state)


@every_rule
def test_every_trained_parameter_is_treated_or_named(make):
    model, rule = prepared(make)
    if isinstance(rule, AGEM):
        assert set(rule.state_dict()["reference"]) == {name for name, _ in model.named_parameters()}
        return
    treated = {p for one in rule.state_dict()["layers"].values() for p in one["parameters"]}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        assert (name in treated) != (module in rule.untreated), name


@every_rule
def test_a_growing_head_grows_on(make):
    torch.manual_seed(0)
    model = mlp(4, hidden=(6,))
    assert isinstance(model.head, GrowingHead)
    rule = make(model)
    for size in (2, 5):
        model.head.grow(size)
        model.head.activate(torch.arange(size))
        x, y = torch.randn(8, 4), torch.arange(8) % size
        model.zero_grad()
        (-F.cross_entropy(model(x), y)).backward()  # against what is remembered
        before = flat_gradient(model)
        rule.refresh(x)
        if hasattr(rule, "observe"):
            rule.observe(Batch(x, y), Batch(x, y))
        rule.precondition_()
        assert flat_gradient(model).isfinite().all()
        assert not torch.equal(flat_gradient(model), before)


@every_rule
@pytest.mark.filterwarnings("ignore:(OWM|AOP). every gradient stays as it is")
def test_a_model_without_anything_to_train_is_no_error(make):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    rule = make(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    rule.refresh(torch.randn(5, 4))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from when it was trained
    rule.precondition_()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert not getattr(rule, "layers", {})


@every_rule
def test_an_optimizer_of_another_model_is_refused(make):
    rule = make(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    with pytest.raises(InputError, match="holds no parameter of the rule's model"):
        rule.attach(torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1))


@every_rule
def test_an_attached_rule_is_copied_and_pickled_without_its_optimizer(make):
    model, rule = prepared(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule.attach(optimizer)
    rule.precondition_()
    for twin in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert_same_state(twin.state_dict(), rule.state_dict())
        twin.attach(torch.optim.SGD(twin.model.parameters(), lr=0.1))
        assert twin.model is not model
    rule.attach(torch.optim.SGD(model.parameters(), lr=0.2))  # takes over, as in a second fit
    optimizer.zero_grad()
    backward_(model, examples(8, 1))
    before = flat_gradient(model)
    optimizer.step()
    assert torch.equal(flat_gradient(model), before)


@every_rule
def test_models_that_do_not_exist_yet_are_refused(make):
    with pytest.raises(InputError, match="not initialised yet"):
        make(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize(
    ("rule", "option"),
    [
        (LPR, {"omgea": 1.0}),
        (LPR, {"fisher": "exact"}),
        (LPR, {"seed": 3}),
        (GPM, {"decay": 0.5}),
        (GPM, {"sketch": True}),
        (KroneckerLPR, {"decay": 0.5}),
        (KroneckerLPR, {"batch_size": 3}),
        (OWM, {"batch_size": 3}),
    ],
)
def test_options_that_only_a_base_class_knows_are_refused(rule, option):
    """They would change a rule in silence, or the error would name a class that nobody called."""
    said = rf"{rule.__name__}\(\) got an unexpected keyword argument '{next(iter(option))}'"
    with pytest.raises(TypeError, match=said):
        rule(nn.Linear(3, 2), **option)
    rule(nn.Linear(3, 2), include=[nn.Linear], exclude=[], max_dim=100)
