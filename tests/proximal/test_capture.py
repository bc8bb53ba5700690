"""A refresh leaves no trace, whatever happens, and sees every call."""

import copy

import pytest
import torch
from torch import nn

from proxreplay import LPR
from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal.layers.batches import as_batches
from tests.reference import assert_same_state, random, shake_


class Interrupted(nn.Module):
    """Raises in the middle of the network, on the second batch."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.calls = 0
        self.armed = False

    def forward(self, x):
        self.calls += 1
        if self.armed and self.calls % 2 == 0:
            raise self.error
        return x


class Noisy(nn.Module):
    """Draws random numbers and counts calls in a buffer, also in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        self.replaced = torch.full((2,), 9.0)
        return x + torch.rand_like(x)


def make_model(error=None):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        Noisy(),
        nn.Flatten(),
        Interrupted(error),
        nn.Dropout(0.5),
        nn.Linear(16, 3),
    )
    model(torch.randn(5, 1, 4, 4)).sum().backward()
    model[1].eval()  # mixed modes, as with frozen BatchNorm
    model[0].weight.requires_grad_(False)
    return model


def trace(model):
    """Everything that a refresh might change."""
    return {
        "modes": [m.training for m in model.modules()],
        "parameters": [p.detach().clone() for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": {name: (id(b), b.clone()) for name, b in model.named_buffers()},
        "rng": torch.get_rng_state(),
        "hooks": [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same_trace(before, after):
    for key in before:
        assert_same_state(after[key], before[key], at=key)


@pytest.mark.parametrize(
    "error", [None, ValueError("half way"), KeyboardInterrupt()], ids=["fine", "raises", "ctrl-c"]
)
def test_refresh_leaves_no_trace(error):
    model = make_model(error)
    lpr = LPR(model, batch_size=4)
    lpr.refresh(torch.randn(8, 1, 4, 4))
    factors = lpr.state_dict()
    before = trace(model)
    if error is None:
        lpr.refresh(torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1)))
    else:
        model[4].armed = True
        with pytest.raises(type(error)):
            lpr.refresh(torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1)))
        assert_same_state(lpr.state_dict(), factors)
    assert_same_trace(before, trace(model))


def test_a_refresh_between_forward_and_backward_does_not_disturb_the_backward():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(6, 3)
    twin = copy.deepcopy(model)
    loss = model(x).square().sum()
    LPR(model).refresh(x)
    loss.backward()
    twin(x).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_inputs_name_layer_and_batch_and_the_old_preconditioner_stays(value):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    lpr = LPR(model, batch_size=2)
    lpr.refresh(torch.randn(6, 2))
    before = lpr.state_dict()
    x = torch.randn(6, 2)
    x[3, 1] = value
    with pytest.raises(RefreshError, match=r"Linear '0' in batch 1"):
        lpr.refresh(x)
    assert_same_state(lpr.state_dict(), before)


def test_half_precision_activations_do_not_overflow_the_statistic():
    model = nn.Linear(2, 1).half()
    lpr = LPR(model)
    lpr.refresh(torch.full((4, 2), 500.0, dtype=torch.float16))  # 500^2 is not a float16
    assert lpr.shrinkage("").dtype == torch.float32


def test_autocast_around_refresh_does_not_round_the_statistic():
    model = nn.Linear(5, 1)
    x = torch.randn(20, 5)
    plain, cast = LPR(model), LPR(model)
    plain.refresh(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.refresh(x)
    assert_same_state(plain.state_dict(), cast.state_dict())


class Repeated(nn.Module):
    """Uses one layer three times in a forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


def test_calls_of_one_module_accumulate():
    model = shake_(Repeated())
    x = random(5, 3)
    lpr = LPR(model, omega_0=2.0, beta=1.5)
    lpr.refresh(x)
    first = torch.tanh(model.layer(x))
    second = torch.tanh(model.layer(first))
    Z = torch.nn.functional.pad(torch.cat([x, first, second]).detach(), (0, 1), value=1.0)
    omega = 2.0 / (5 * 3**1.5)
    expected = torch.linalg.inv(torch.eye(4, dtype=Z.dtype) + omega * Z.T @ Z)
    torch.testing.assert_close(lpr.shrinkage("layer").Lambda[0], expected)
    assert lpr.layers["layer"].positions == 3


class Dicts(nn.Module):
    """Takes keyword arguments and returns a dict, as language models do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7)

    def forward(self, tokens, scale=None, flag=False):
        hidden = self.embed(input=tokens)
        return {"logits": self.out(hidden if scale is None else hidden * scale)}


def test_batches_may_be_tensors_tuples_or_dicts_and_give_the_same():
    model = Dicts()
    tokens = torch.randint(7, (6, 3))
    scale = torch.ones(6, 1, 1)
    batches = {
        "tensor": tokens,
        "tensors": [(tokens[:2],), (tokens[2:],)],
        "tuples": [(tokens[:4], scale[:4]), (tokens[4:], scale[4:])],
        "dicts": [{"tokens": tokens, "scale": scale, "flag": True}],
        "one dict": {"tokens": tokens, "flag": True},
        "generator": (part for part in tokens.split(1)),
    }
    states = {}
    for kind, inputs in batches.items():
        lpr = LPR(model, 1.0)
        lpr.refresh(inputs)
        states[kind] = lpr.state_dict()
    for kind, state in states.items():
        assert_same_state(state, states["tensor"], rtol=1e-5, atol=1e-6, at=kind)


@pytest.mark.parametrize(
    "inputs", [[], torch.zeros(0, 2), [()], ["text"]], ids=["none", "empty", "tuple", "text"]
)
def test_nothing_to_learn_from_is_refused(inputs):
    lpr = LPR(nn.Linear(2, 1))
    with pytest.raises(InputError, match="refresh"):
        lpr.refresh(inputs)


class Expert(nn.Module):
    """Sends only some rows, or none, to its second layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 1)
        self.never = nn.Linear(2, 1)

    def forward(self, x):
        return self.second(self.first(x)[x[:, 0] > 0])


def test_layers_that_get_no_rows_are_named_not_skipped_in_silence():
    lpr = LPR(Expert())
    lpr.refresh([-torch.ones(3, 2), torch.ones(1, 2)])
    assert lpr.layers["second"].positions == 1 / 4
    assert lpr.untreated == {"never": "not called in the forward pass of the last refresh."}
    lpr.refresh(-torch.ones(3, 2))
    assert lpr.layers.keys() == {"first"}
    assert lpr.untreated.keys() == {"second", "never"}


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "padding-mask"])
def test_transformer_encoder_is_seen_in_spite_of_its_fused_path(masked):
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(block, 2)
    x = torch.randn(3, 5, 8)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    lpr = LPR(model)
    lpr.refresh([{"src": x, "src_key_padding_mask": mask} if masked else x])
    per_block = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"}
    per_block |= {"linear1", "linear2", "norm1", "norm2"}
    assert lpr.layers.keys() == {f"layers.{i}.{name}" for i in (0, 1) for name in per_block}
    assert not lpr.untreated
    assert torch.backends.mha.get_fastpath_enabled()


def compile_as_refresh_calls(model, x):
    """Have compiled code ready that knows of no hooks and fits what a refresh does."""
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def partly_compiled(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(model, backend="aot_eager"),
        compiled_in_place,
    ],
    ids=["eager", "aot-eager", "in-place"],
)
def test_compiled_models_give_the_same_preconditioner_and_gradients(wrap):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(6, 3)
    results = []
    for one in (plain, model):
        compile_as_refresh_calls(one, x)
        one(x).square().sum().backward()
        lpr = LPR(one, omega_0=3.0)
        lpr.refresh(x)
        lpr.precondition_()
        results.append((lpr.state_dict(), [p.grad for p in one.parameters()]))
    assert_same_state(*results, rtol=1e-6, atol=1e-7)


def test_a_compiled_part_of_a_model_is_seen():
    model = partly_compiled(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.randn(6, 3)
    compile_as_refresh_calls(model, x)
    lpr = LPR(model)
    lpr.refresh(x)
    assert [layer.d for layer in lpr.layers.values()] == [4, 5]


@pytest.fixture
def process_group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_data_parallel_models_have_plain_names_and_the_same_gradients():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    x = torch.randn(6, 3)
    gradients = []
    for one in (plain, model):
        lpr = LPR(one, omega_0=3.0)
        lpr.refresh(x)
        one(x).square().sum().backward()
        lpr.precondition_()
        assert lpr.layers.keys() == {"0", "2"}
        gradients.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("shape", "batches"),
    [
        ((500, 3, 32, 32), [200, 200, 100]),
        ((50, 3, 224, 224), [20, 20, 10]),
        ((100, 3, 64, 64), [85, 15]),
        ((300, 4), [200, 100]),
        ((0, 4), []),
    ],
    ids=["cifar", "photos", "between", "features", "nothing"],
)
def test_large_inputs_are_taken_fewer_at_a_time(shape: tuple[int, ...], batches: list[int]) -> None:
    inputs = torch.empty(shape, device="meta")
    assert [len(batch) for batch in as_batches(inputs, nn.ReLU(), None, 0)] == batches
    some = as_batches(inputs[:9], nn.ReLU(), 4, 0)
    assert [len(b) for b in some] == ([4, 4, 1] if shape[0] else [])
