"""Statistics that come from the training steps themselves."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from proxreplay import LPR, Batch, KroneckerLPR, Learner
from proxreplay.errors import InputError
from proxreplay.models import mlp, small_cnn
from proxreplay.options import StepOptions
from proxreplay.proximal import register_layer
from proxreplay.proximal.layers import registry
from proxreplay.proximal.layers.torch_layers import instancenorm_rows
from proxreplay.serialization import load_state, save_state
from tests.reference import assert_same_state, dense_shrinkage, flat_gradient

NEWEST = StepOptions(every=1, rebuild=1, decay=0.0)


def plain_cnn():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3, stride=2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)).double().train()


def batch(n=6, seed=0, shape=(2, 6, 6)):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=rng)


def attached(model, steps=NEWEST, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return LPR(model, 4.0, tolerance=0, statistics=steps, **options).attach(optimizer), optimizer


def step_(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def factors(rule):
    identity = torch.eye(1, dtype=torch.float64)
    found = {}
    for name, layer in rule.layers.items():
        eye = torch.eye(layer.d, dtype=torch.float64).expand(layer.groups, -1, -1)
        found[name] = rule.shrinkage(name).apply(eye.contiguous() * identity)
    return found


def refreshed(model, x):
    rule = LPR(model, 4.0, tolerance=0)
    rule.refresh(x)
    return rule


def assert_factors_equal(one, other, atol=1e-12):
    a, b = factors(one), factors(other)
    assert a.keys() == b.keys()
    assert a
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=name)


def test_two_lines_hold_what_a_refresh_on_the_same_examples_holds():
    model = plain_cnn()
    x, y = batch()
    expected = refreshed(model, x)
    rule, optimizer = attached(model)
    step_(model, optimizer, x, y)
    assert_factors_equal(rule, expected)


def test_batchnorm_rows_are_those_of_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(3))
    x, y = batch()
    model.double()(x)
    rule, optimizer = attached(model.train())
    h = model[0](x).detach()
    step_(model, optimizer, x, y)
    for c in range(3):
        z = h[:, c].flatten()
        z = (z - z.mean()) / (z.var(correction=0) + model[1].eps).sqrt()
        Z = torch.stack([z, torch.ones_like(z)], dim=1)
        omega = 4.0 / len(Z)
        torch.testing.assert_close(factors(rule)["1"][c], dense_shrinkage(Z, omega))


class Doubled(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


def doubled_rows(layer, input):
    kept = (None, None) if layer.training else (layer.running_mean, layer.running_var)
    x_hat = F.batch_norm(input, *kept, training=layer.training, momentum=0, eps=layer.eps)
    return 2 * x_hat.T[:, :, None]


def test_rows_registered_for_a_derived_batchnorm_are_used_in_steps_too(monkeypatch):
    monkeypatch.setattr(registry, "_LAYERS", dict(registry._LAYERS))
    register_layer(Doubled)(doubled_rows)
    model = nn.Sequential(Doubled(3), nn.Linear(3, 3)).double().train()
    model[0].bias.requires_grad_(False)
    x, y = batch(6, 0, (3,))
    rule, optimizer = attached(model)
    step_(model, optimizer, x, y)
    z = 2 * F.batch_norm(x, None, None, training=True)
    expected = 1 / (1 + 4.0 / 6 * z.square().sum(0))
    torch.testing.assert_close(factors(rule)["0"].flatten(), expected)


def test_instancenorm_rows_of_one_example_without_a_batch_are_those_of_training():
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=True).double().train()
    x = torch.randn(3, 5, dtype=torch.float64) + 7
    Z = instancenorm_rows(layer, x).dense()[:, :, 0]
    expected = F.instance_norm(x[None], eps=layer.eps)[0]
    torch.testing.assert_close(Z, expected)
    assert layer.running_mean.count_nonzero() == 0  # left as they were


def test_the_average_over_steps_is_debiased_and_equals_its_naive_twin():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double().train()
    r = 0.8
    rule, optimizer = attached(model, StepOptions(every=2, rebuild=3, decay=r))
    mean, weight, window, looked = 0.0, 0.0, [], 0
    for i in range(17):
        x, y = batch(6, i, (5,))
        step_(model, optimizer, x, y)
        if i % 2 == 0:
            Z = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], dim=1)
            window.append(Z.T @ Z / 6)
            before = looked
            looked += 1
            if len(window) >= min(3, max(1, looked - len(window))) or before == 0:
                stays = r ** len(window)
                mean = stays * mean + (1 - stays) * sum(window) / len(window)
                weight = stays * weight + 1 - stays
                window = []
    Lambda = torch.linalg.inv(torch.eye(6, dtype=torch.float64) + 4.0 * mean / weight)
    torch.testing.assert_close(factors(rule)["0"][0], Lambda)


@pytest.mark.parametrize("again", [None, True, False], ids=["plain", "reentrant", "checkpoint"])
def test_parts_of_a_model_that_are_called_alone_count_accumulated_batches(again):
    """As a LightningModule does it, whose own forward nobody calls."""
    model = nn.ModuleDict({"net": plain_cnn()})
    net = model["net"]
    if again is not None:
        net = lambda x: checkpoint(model["net"], x, use_reentrant=again)  # noqa: E731
    rule, optimizer = attached(model)
    x, y = batch()
    x.requires_grad_()  # reentrant checkpoints need it
    for part in (slice(0, 3), slice(3, 6)):
        (F.cross_entropy(net(x[part]), y[part]) / 2).backward()
    optimizer.step()
    expected = refreshed(model["net"], x.detach())
    assert {name: one.positions for name, one in rule.layers.items()} == {
        f"net.{name}": one.positions for name, one in expected.layers.items()
    }


class Reader(nn.Module):
    """Reads sequences and looks at all outputs of an LSTM, or at its last states alone."""

    def __init__(self, packed, last):
        super().__init__()
        self.packed, self.last = packed, last
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if self.packed:
            lengths = torch.tensor([5, 3, 4, 5, 1, 2])
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        outputs, (h, _) = self.lstm(x)
        if self.last:
            return self.head(h[-1])
        if self.packed:
            outputs = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)[0]
        return self.head(outputs.sum(1))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("last", [False, True], ids=["outputs", "last-state"])
def test_recurrent_layers_are_seen_whatever_is_used_of_them(packed, last):
    torch.manual_seed(0)
    model = Reader(packed, last).double().train()
    x, y = batch(shape=(5, 3))
    expected = refreshed(model, x)
    rule, optimizer = attached(model)
    step_(model, optimizer, x, y)
    assert_factors_equal(rule, expected)
    assert not rule.untreated


def evaluate_(model, x, y):
    model.eval()
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    model.train()


def without_gradient_(model, x, y):
    with torch.no_grad():
        model(x)


def not_gone_back_through_(model, x, y):
    F.cross_entropy(model(x), y)


def copied_(model, x, y):
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(x), y).backward()


@pytest.mark.parametrize(
    "meanwhile", [evaluate_, without_gradient_, not_gone_back_through_, copied_]
)
def test_what_is_not_a_training_step_does_not_count(meanwhile):
    model = plain_cnn()
    x, y = batch()
    expected = refreshed(model, x)
    rule, optimizer = attached(model)
    other = batch(5, 9)
    meanwhile(model, *other)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    meanwhile(model, *other)
    optimizer.step()
    assert_factors_equal(rule, expected)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointed_activations_count_once(reentrant):
    model = plain_cnn()
    x, y = batch()
    expected = refreshed(model, x)
    rule, optimizer = attached(model)
    inner, whole = nn.Sequential(*list(model)[:4]), model.forward
    model.forward = lambda x: model[4](checkpoint(inner, x, use_reentrant=reentrant))
    step_(model, optimizer, x.requires_grad_(), y)
    model.forward = whole
    assert_factors_equal(rule, expected)


def test_accumulated_batches_are_one_step():
    model = plain_cnn()
    x, y = batch(8)
    expected = refreshed(model, x)
    rule, optimizer = attached(model)
    for part in (slice(0, 3), slice(3, 8)):
        (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
    optimizer.step()
    assert_factors_equal(rule, expected)


def test_a_second_backward_through_the_same_graph_counts_rows_once():
    model = plain_cnn()
    x, y = batch()
    expected = refreshed(model, x)
    rule, optimizer = attached(model)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    optimizer.step()
    assert_factors_equal(rule, expected)


def test_replayed_examples_only_are_held_in_place():
    model = plain_cnn()
    (new, y_new), (old, y_old) = batch(4, 1), batch(7, 2)
    expected = refreshed(model, old)
    rule = LPR(model, 4.0, tolerance=0, statistics=NEWEST)
    with rule.watched(Batch(new, y_new), Batch(old, y_old)):
        F.cross_entropy(model(torch.cat([new, old])), torch.cat([y_new, y_old])).backward()
    rule.step_()
    assert_factors_equal(rule, expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_parts_are_weighed_apart_also_in_passes_of_their_own():
    model = plain_cnn()
    (new, y_new), (old, y_old) = batch(4, 1), batch(8, 2)
    rule = LPR(model, 4.0, tolerance=0, statistics=StepOptions(1, 1, 0.0, incoming=0.5))
    with rule.watched(Batch(new, y_new), Batch(old, y_old)):
        (F.cross_entropy(model(new), y_new) + F.cross_entropy(model(old), y_old)).backward()
    rule.step_()
    z = torch.cat([model[:4](old), model[:4](new) * 0.5**0.5]).detach()
    Z = torch.cat([z, torch.cat([torch.ones(8), torch.full((4,), 0.5**0.5)])[:, None]], dim=1)
    torch.testing.assert_close(factors(rule)["4"][0], dense_shrinkage(Z, 4.0 / 10))


def test_few_rows_wait_for_one_product(monkeypatch):
    """Wide layers: rows of several steps are multiplied at once, with the same result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)).double().train()
    rule, optimizer = attached(model, StepOptions(every=1, rebuild=5, decay=0.5))
    waited = []
    for i in range(12):
        step_(model, optimizer, *batch(6, i, (40,)))
        state = rule.state_dict()["step"]["sums"]["collectors"]
        waited += [len(w) for c in state.values() for s in c["sums"].values()
                   for w in s["waiting"].values()]  # fmt: skip
    assert max(waited) > 1
    Z = torch.cat([torch.cat([batch(6, i, (40,))[0] for i in range(9, 12)])])
    assert Z.shape == (18, 40)
    assert rule.state_dict()["step"]["sums"]["in_window"] in range(5)


@pytest.mark.parametrize("stop", [1, 4, 6, 7], ids=lambda n: f"after {n} steps")
def test_resumes_bit_by_bit_in_the_middle_of_a_window(stop, tmp_path):
    def make():
        torch.manual_seed(0)
        model = small_cnn(1, 3, widths=(4, 5)).train()
        rule = LPR(model, 4.0, statistics=StepOptions(every=2, rebuild=3, decay=0.9))
        return model, rule

    def run(model, rule, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule.attach(optimizer)
        for i in steps:
            x, y = batch(6, i, (1, 6, 6))
            step_(model, optimizer, x.float(), y)
        rule.detach()

    model, rule = make()
    run(model, rule, range(stop))
    save_state(tmp_path, {"rule": rule.state_dict(), "model": model.state_dict()})
    run(model, rule, range(stop, 12))
    other, other_rule = make()
    saved = load_state(tmp_path)
    other.load_state_dict(saved["model"])
    other_rule.load_state_dict(saved["rule"])
    run(other, other_rule, range(stop, 12))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert_same_state(rule.state_dict(), other_rule.state_dict())


def test_copies_of_rule_and_model_are_free_of_hooks():
    model = plain_cnn()
    rule, optimizer = attached(model)
    step_(model, optimizer, *batch())
    twin = pickle.loads(pickle.dumps(model))
    x, y = batch()
    F.cross_entropy(twin(x), y).backward()
    assert not rule._watch.examples
    again = copy.deepcopy(rule)
    assert again._optimizer is None
    rule.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(not p._backward_hooks for p in model.parameters())


def test_what_is_not_finite_is_let_go_with_a_warning():
    model = plain_cnn()
    rule, optimizer = attached(model)
    x, y = batch()
    step_(model, optimizer, x, y)
    before = factors(rule)
    broken = x.clone()
    broken[0, 0, 0, 0] = float("nan")
    F.cross_entropy(model(broken), y).backward()
    with pytest.warns(UserWarning, match="not finite"):
        rule.step_()
    after = factors(rule)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_layers_that_a_step_does_not_use_keep_what_they_know():
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, which="a"):
            return getattr(self, which)(x)

    model = Two().double().train()
    rule, optimizer = attached(model)
    x, y = batch(6, 0, (4,))
    step_(model, optimizer, x, y)
    assert rule.untreated == {"b": "not called in any training step that was looked at."}
    before = factors(rule)["a"]
    optimizer.zero_grad()
    F.cross_entropy(model(x * 2, which="b"), y).backward()
    optimizer.step()
    assert torch.equal(factors(rule)["a"], before)
    assert set(rule.layers) == {"a", "b"}


def test_attention_with_dropout_draws_no_further_random_numbers():
    def run(watch):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rule = LPR(model, statistics=NEWEST).attach(optimizer) if watch else None
        for i in range(2):
            step_(model, optimizer, *batch(4, i, (3, 8)))
        return rule, torch.rand(3), [p.detach() for p in model.parameters()]

    rule, after, values = run(True)
    _, without, same = run(False)
    assert torch.equal(after, without)
    assert all(map(torch.equal, values, same))
    assert {"0.self_attn.q_proj", "0.self_attn.out_proj", "0.norm1"} <= set(rule.layers)


def test_compiled_models_are_looked_at_too():
    model = plain_cnn()
    x, y = batch()
    expected = refreshed(model, x)
    compiled = torch.compile(model, backend="eager")
    rule = LPR(compiled, 4.0, tolerance=0, statistics=NEWEST)
    compiled(x)  # compiled before anybody watched
    with rule.watched():
        F.cross_entropy(compiled(x), y).backward()
    rule.step_()
    assert_factors_equal(rule, expected)


def test_a_learner_needs_no_refresh_and_resumes(tmp_path):
    def make():
        torch.manual_seed(0)
        model = mlp(4)
        return Learner(model, rule=LPR(model, statistics=StepOptions(2, 3, 0.9)), lr=0.05)

    def data(i):
        rng = torch.Generator().manual_seed(i)
        return torch.randn(10, 4, generator=rng), torch.randint(i // 8, i // 8 + 2, (10,))

    learner = make()
    stream = [data(i) for i in range(16)]
    for i, (x, y) in enumerate(stream):
        if i == 7:
            learner.save(tmp_path)
        assert learner.learn(x, y).refreshed is None
    assert learner.refresh() is None
    assert set(learner.rule.layers) == {"linear1", "linear2", "head"}
    other = Learner.load(tmp_path, mlp(4))
    for x, y in stream[7:]:
        other.learn(x, y)
    assert all(map(torch.equal, learner.model.parameters(), other.model.parameters()))
    assert_same_state(learner.rule.state_dict(), other.rule.state_dict())


def test_before_anything_is_seen_the_first_attached_step_says_so():
    model = plain_cnn()
    rule = LPR(model, statistics="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    rule.attach(optimizer)
    before = flat_gradient(model)
    with pytest.warns(UserWarning, match="no forward pass in training mode was seen"):
        optimizer.step()
    assert torch.equal(flat_gradient(model), before)


def test_bad_options_are_refused():
    with pytest.raises(InputError, match=r"lpr\.statistics=memory"):
        LPR(plain_cnn(), statistics="memory")
    with pytest.raises(InputError, match=r"step\.every=0"):
        StepOptions(every=0)
    with pytest.raises(InputError, match=r"step\.decay=1"):
        StepOptions(decay=1.0)


@pytest.mark.parametrize("make", [KroneckerLPR, lambda m: LPR(m, 1.0, statistics="step")])
def test_a_rule_that_sees_no_step_says_so_once(make):
    model = nn.Sequential(nn.Linear(3, 2))
    rule = make(model)
    model(torch.ones(4, 3)).sum().backward()
    with pytest.warns(UserWarning, match=r"no training step was seen. Use attach\(optimizer\)"):
        rule.step_()
    rule.step_()  # said once; warnings are errors here
    with rule.watched():
        model(torch.ones(4, 3)).sum().backward()
    rule.step_()
