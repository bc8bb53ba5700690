"""Any optimizer, any loop: `attach` does what calling `precondition_` by hand does."""

import copy
import warnings

import pytest
import torch
from torch import nn

from proxreplay import LPR, Learner
from proxreplay.errors import InputError, RefreshError
from tests.reference import assert_same_state, fill_gradients_, flat_gradient


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def batches(count):
    rng = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.randn(6, 1, 4, 4, generator=rng),
            torch.randint(3, (6,), generator=rng),
        )


def train(make_optimizer, *, attached, steps, refresh_every=10, autocast=False):
    """A plain loop; the only difference is who calls `precondition_`."""
    model = make_model()
    optimizer = make_optimizer(model)
    lpr = LPR(model, omega_0=4.0, beta=1.0)
    if attached:
        lpr.attach(optimizer)
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if not attached:
            lpr.precondition_()
        optimizer.step()
        if step % refresh_every == 0:
            lpr.refresh(x)
    return model


pytestmark = pytest.mark.filterwarnings("ignore:LPR. every gradient stays as it is")


def groups(model):
    return [
        {"params": model[0].parameters(), "lr": 0.05},
        {"params": [*model[1].parameters(), *model[4].parameters()]},
    ]


OPTIMIZERS = {
    "sgd-momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adam-foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "groups": lambda m: torch.optim.SGD(groups(m), lr=0.1, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_attached_equal_fifty_by_hand_bit_by_bit(name):
    ours, theirs = (train(OPTIMIZERS[name], attached=a, steps=50) for a in (True, False))
    assert_same_state(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_a_thousand_steps_with_adam_and_autocast_do_not_drift():
    ours, theirs = (
        train(OPTIMIZERS["adam"], attached=a, steps=1000, refresh_every=100, autocast=True)
        for a in (True, False)
    )
    assert_same_state(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert all(torch.isfinite(p).all() for p in ours.parameters())


def test_it_does_change_the_training():
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    ours = train(OPTIMIZERS["sgd-momentum"], attached=True, steps=3)
    assert not torch.equal(plain[4].weight, ours[4].weight)


@pytest.mark.parametrize("as_keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_gradients_made_inside_a_closure_are_preconditioned(kind, as_keyword):
    ours, theirs = make_model(), make_model()
    x, y = next(batches(1))
    for model, attached in ((ours, True), (theirs, False)):
        if kind == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        lpr = LPR(model, omega_0=4.0)
        lpr.refresh(x)
        if attached:
            lpr.attach(optimizer)

        def closure(model=model, optimizer=optimizer, lpr=lpr, attached=attached):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if not attached:
                lpr.precondition_()
            return loss

        returned = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
        assert returned.item() > 0
    assert_same_state(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_accumulated_gradients_are_preconditioned_once():
    model = make_model()
    x, y = next(batches(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    lpr = LPR(model, omega_0=4.0).attach(optimizer)
    lpr.refresh(x)
    for part in (slice(0, 3), slice(3, 6)):
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
    raw = torch.cat([model[4].weight.grad, model[4].bias.grad[:, None]], dim=1)
    before = torch.cat([model[4].weight, model[4].bias[:, None]], dim=1).detach()
    optimizer.step()
    after = torch.cat([model[4].weight, model[4].bias[:, None]], dim=1).detach()
    expected = before - raw @ lpr.shrinkage("4").Lambda[0]
    torch.testing.assert_close(after, expected)


def test_clipping_before_the_step_happens_before_preconditioning():
    model = make_model()
    x, y = next(batches(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    lpr = LPR(model, omega_0=4.0).attach(optimizer)
    lpr.refresh(x)
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert torch.stack([g.norm() for g in clipped]).norm() == pytest.approx(0.1, rel=1e-3)
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() < 0.1


@pytest.mark.parametrize("scale", [1024.0, float("inf")], ids=["fine", "overflow-skips-the-step"])
def test_grad_scaler_unscales_before(scale):
    ours, theirs = make_model(), make_model()
    x, y = next(batches(1))
    for model, attached in ((ours, True), (theirs, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lpr = LPR(model, omega_0=4.0)
        lpr.refresh(x)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if attached:
            lpr.attach(optimizer)
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (scale / 1024.0)).backward()
        if not attached:
            scaler.unscale_(optimizer)
            lpr.precondition_()
        scaler.step(optimizer)
        scaler.update()
    assert_same_state(dict(ours.state_dict()), dict(theirs.state_dict()))
    if scale == float("inf"):
        assert torch.equal(ours[0].weight, make_model()[0].weight)


def test_set_to_none_and_parameters_without_gradient():
    model = make_model()
    x, _ = next(batches(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LPR(model).attach(optimizer).refresh(x)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    model[4].bias.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(model[4].bias.grad, torch.zeros(3))


def test_parameters_of_other_optimizers_are_not_touched():
    model = make_model()
    x, _ = next(batches(1))
    optimizer = torch.optim.SGD([*model[4].parameters(), model[0].weight], lr=0.1)
    lpr = LPR(model, omega_0=4.0).attach(optimizer)
    lpr.refresh(x)
    fill_gradients_(model)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p.grad, before[n])}
    assert changed == {"0.weight", "4.weight", "4.bias"}


def test_detach_undoes_attach():
    model = make_model()
    x, _ = next(batches(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lpr = LPR(model, omega_0=4.0)
    assert lpr.attach(optimizer) is lpr
    lpr.refresh(x)
    lpr.detach()
    lpr.detach()
    fill_gradients_(model)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert_same_state([p.grad for p in model.parameters()], before)
    lpr.attach(optimizer)
    optimizer.step()
    assert not torch.equal(model[4].weight.grad, before[-2])


def test_an_autocast_region_around_the_step_does_not_round_the_product():
    ours, theirs = make_model(), make_model()
    x, _ = next(batches(1))
    for model, enabled in ((ours, True), (theirs, False)):
        lpr = LPR(model, omega_0=4.0)
        lpr.refresh(x)
        fill_gradients_(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            lpr.precondition_()
    assert torch.equal(ours[4].weight.grad, theirs[4].weight.grad)


def test_channels_last_makes_no_difference():
    model = make_model().to(memory_format=torch.channels_last)
    twin = make_model()
    x, y = next(batches(1))
    for one in (model, twin):
        lpr = LPR(one, omega_0=4.0)
        lpr.refresh(x)
        nn.functional.cross_entropy(one(x), y).backward()
        lpr.precondition_()
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)


def test_a_second_refresh_takes_effect():
    model = make_model()
    lpr = LPR(model, omega_0=4.0)
    results = []
    for x, _ in batches(2):
        lpr.refresh(x)
        fill_gradients_(model)
        lpr.precondition_()
        results.append(model[4].weight.grad.clone())
        fresh = LPR(model, omega_0=4.0)
        fresh.refresh(x)
        fill_gradients_(model)
        fresh.precondition_()
        assert torch.equal(results[-1], model[4].weight.grad)
    assert not torch.equal(*results)


def test_a_layer_that_changed_its_shape_says_so():
    model = nn.Sequential(nn.Linear(3, 2))
    lpr = LPR(model)
    lpr.refresh(torch.randn(4, 3))
    model[0] = nn.Linear(5, 1)
    fill_gradients_(model)
    with pytest.raises(RefreshError, match=r"Linear '0'.*refresh again"):
        lpr.precondition_()


def test_nothing_is_changed_if_one_layer_does_not_fit():
    model = make_model()
    lpr = LPR(model)
    lpr.refresh(next(batches(1))[0])
    model[4] = nn.Linear(32, 3)
    fill_gradients_(model)
    before = flat_gradient(model)
    with pytest.raises(RefreshError, match="refresh again"):
        lpr.precondition_()
    assert torch.equal(flat_gradient(model), before)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_was_planned_for_one_step_is_not_used_for_others(layout):
    """Gradients come and go; every step is as that of a new rule."""
    model = make_model().double().to(memory_format=layout)
    lpr = LPR(model, omega_0=4.0)
    x = next(batches(1))[0].double()
    lpr.refresh(x)
    absent = [(), ("0.weight",), ("1.bias", "4.bias"), (), ("1.weight", "4.weight"), ()]
    for seed, names in enumerate(absent):
        gradients = []
        for rule in (lpr, None):
            fill_gradients_(model, seed=seed)
            for name in names:
                model.get_parameter(name).grad = None
            if rule is None:
                rule = LPR(model, omega_0=4.0)
                rule.refresh(x)
            rule.precondition_()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert len(gradients[0]) == 6 - len(names)
        assert all(torch.equal(*two) for two in zip(*gradients, strict=True))


def test_a_model_may_be_copied_with_its_rule():
    model = make_model()
    x, _ = next(batches(1))
    lpr = LPR(model)
    lpr.refresh(x)
    twin = copy.deepcopy(lpr)
    assert twin.model is not model
    assert_same_state(twin.state_dict(), lpr.state_dict())


def test_a_rule_that_was_never_refreshed_says_so_once():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lpr = LPR(model).attach(optimizer)
    assert set(lpr.untreated.values()) == {"not refreshed yet."}
    assert "not refreshed yet" in repr(lpr)
    with pytest.warns(UserWarning, match=r"LPR: every gradient stays as it is; call refresh"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("step", ["step_", "precondition_"])
@pytest.mark.parametrize("options", [{}, {"omega_0": 1.0, "beta": 1.0}])
def test_a_rule_stepped_by_hand_says_so_too(step, options):
    model = make_model()
    lpr = LPR(model, **options)
    with pytest.warns(UserWarning, match=r"LPR: every gradient stays as it is; call refresh"):
        getattr(lpr, step)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(lpr, step)()
        fresh = LPR(model, **options)
        fresh.refresh(next(batches(1))[0])
        getattr(fresh, step)()
        learner = Learner(model, rule=LPR(model, **options), refresh_every=2)
        learner.learn(*next(batches(1)))  # it will refresh by itself


def test_a_wrapped_optimizer_is_unwrapped():
    class Wrapper(torch.optim.Optimizer):  # as Accelerate has it: nothing of its own is set up
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

        def step(self, closure=None):
            return self.optimizer.step(closure)

    model = make_model()
    x, _ = next(batches(1))
    wrapped = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    lpr = LPR(model, omega_0=4.0).attach(wrapped)
    lpr.refresh(x)
    fill_gradients_(model)
    before = model[4].weight.grad.clone()
    wrapped.step()
    assert not torch.equal(model[4].weight.grad, before)


def test_a_rule_and_its_layers_print_as_a_table():
    model = make_model()
    lpr = LPR(model, omega_0=4.0)
    lpr.refresh(next(batches(1))[0])
    lines = repr(lpr.layers).splitlines()
    assert lines[0].split() == ["layer", "type", "d", "groups", "positions", "omega", "MB"]
    assert [line.split()[0] for line in lines[1:]] == list(lpr.layers)
    assert "omega_0=4.0" in repr(lpr)
    assert "not attached" in repr(lpr)
    assert repr(lpr.layers) in repr(lpr)


@pytest.mark.parametrize("wrong", [None, torch.optim.SGD], ids=["none", "class"])
def test_what_is_no_model_or_no_optimizer_is_refused(wrong):
    with pytest.raises(InputError, match="is no optimizer; give one of torch's"):
        LPR(nn.Linear(3, 2)).attach(wrong)
    with pytest.raises(InputError, match=r"give a torch\.nn\.Module"):
        LPR(wrong)
