"""Every layer against the dense Jacobian: the preconditioned gradient is ``g (I + w J'J)^-1``."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR, register_layer
from proxreplay.proximal import LinearMap, Part
from tests.reference import (
    fill_gradients_,
    flat_gradient,
    jacobian,
    module_jacobian,
    proximal_gradient,
    random,
    shake_,
    stacked_jacobian,
    trained,
)

OMEGA_0, BETA = 1.7, 1.3
few = settings(deadline=None, max_examples=25)


def check_against_jacobian(layer, *args, positions, kwargs=None):
    """Refresh on one batch, precondition random gradients, compare with the oracle."""
    kwargs = kwargs or {}
    shake_(layer)
    lpr = LPR(layer, OMEGA_0, BETA)
    lpr.refresh([kwargs or args])
    n = len((*args, *kwargs.values())[0])
    (treated,) = lpr.layers.values()
    assert treated.positions == pytest.approx(positions)
    omega = OMEGA_0 / (n * positions**BETA)
    assert treated.omega == pytest.approx(omega)
    assert not lpr.untreated

    g = fill_gradients_(layer)
    expected = proximal_gradient(g, module_jacobian(layer, *args, **kwargs), omega)
    lpr.precondition_()
    torch.testing.assert_close(flat_gradient(layer), expected, rtol=0, atol=1e-10)


def freeze_some_(layer, frozen):
    """Freeze the weight or the bias, where the layer has both."""
    names = dict(layer.named_parameters())
    if frozen and len(names) == 2:
        names[frozen].requires_grad_(False)


freezing = st.sampled_from([None, None, "weight", "bias"])


@few
@given(
    leading=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    n=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    bias=st.booleans(),
    frozen=freezing,
)
def test_linear_on_any_leading_shape(leading, n, sizes, bias, frozen):
    layer = nn.Linear(*sizes, bias=bias)
    freeze_some_(layer, frozen)
    check_against_jacobian(layer, random(n, *leading, sizes[0]), positions=math.prod(leading))


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    kernel, dilation = each(1, 3), each(1, 2)
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = (1,) * dims if padding == "same" else each(1, 3)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=each(0, 2) if padding == "numbers" else padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    freeze_some_(layer, draw(freezing))
    size = tuple(draw(st.integers(4, 6 if dims < 3 else 5)) for _ in range(dims))
    return layer, random(draw(st.integers(1, 3)), layer.in_channels, *size)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_convolution_in_any_dimension(case):
    layer, x = case
    try:
        out = layer(x.float())
    except RuntimeError:  # torch itself refuses the kernel or the padding for this size
        assume(False)
    check_against_jacobian(layer, x, positions=out[0, 0].numel())


@st.composite
def transposed_convolutions(draw):
    dims = draw(st.integers(1, 3))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 2))
    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(draw(st.integers(0, r + 1)) for r in reach)
    extra = tuple(draw(st.integers(0, s - 1)) for s in map(max, stride, dilation))
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        output_padding=extra,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    freeze_some_(layer, draw(freezing))
    size = tuple(draw(st.integers(2, 4 if dims < 3 else 3)) for _ in range(dims))
    return layer, random(draw(st.integers(1, 2)), layer.in_channels, *size)


@settings(deadline=None, max_examples=40)
@given(transposed_convolutions())
def test_transposed_convolution_in_any_dimension(case):
    layer, x = case
    try:
        out = layer(x.float())
    except RuntimeError:  # the padding crops more than there is
        assume(False)
    assume(out.numel() > 0)
    check_against_jacobian(layer, x, positions=out[0, 0].numel())


def test_transposed_convolution_with_a_wanted_output_size():
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    kwargs = {"input": random(2, 2, 3, 4), "output_size": [8, 10]}
    check_against_jacobian(layer, positions=80, kwargs=kwargs)


@few
@given(
    dims=st.integers(0, 3),
    channels=st.integers(1, 3),
    n=st.integers(2, 4),
    track=st.booleans(),
    frozen=freezing,
)
def test_batchnorm_uses_running_statistics_or_those_of_the_batch(dims, channels, n, track, frozen):
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    layer = kind(channels, eps=0.1, track_running_stats=track)
    freeze_some_(layer, frozen)
    size = [2, 3, 2][:dims]
    check_against_jacobian(layer, random(n, channels, *size), positions=math.prod(size))


@few
@given(dims=st.integers(1, 3), channels=st.integers(1, 3), track=st.booleans(), frozen=freezing)
def test_instancenorm(dims, channels, track, frozen):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    layer = kind(channels, eps=0.1, affine=True, track_running_stats=track)
    freeze_some_(layer, frozen)
    size = [4, 3, 2][:dims]
    check_against_jacobian(layer, random(3, channels, *size), positions=math.prod(size))


@few
@given(groups=st.integers(1, 3), per=st.integers(1, 3), dims=st.integers(0, 2), frozen=freezing)
def test_groupnorm(groups, per, dims, frozen):
    assume(per > 1 or dims > 0)
    layer = nn.GroupNorm(groups, groups * per, eps=0.1)
    freeze_some_(layer, frozen)
    size = [2, 3][:dims]
    check_against_jacobian(layer, random(3, groups * per, *size), positions=math.prod(size))


@few
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    leading=st.lists(st.integers(1, 3), max_size=2),
    kind=st.sampled_from(["layer", "layer without bias", "rms"]),
    frozen=freezing,
)
def test_layernorm_and_rmsnorm(shape, leading, kind, frozen):
    layer = {
        "layer": lambda: nn.LayerNorm(shape, eps=0.1),
        "layer without bias": lambda: nn.LayerNorm(shape, eps=0.1, bias=False),
        "rms": lambda: nn.RMSNorm(shape, eps=0.1),
    }[kind]()
    freeze_some_(layer, frozen)
    name = "x" if kind == "rms" else "input"
    x = random(3, *leading, *shape)
    check_against_jacobian(layer, positions=math.prod(leading), kwargs={name: x})


@few
@given(
    vocabulary=st.integers(2, 6),
    tokens=st.integers(1, 5),
    padding=st.booleans(),
    n=st.integers(1, 4),
)
def test_embedding_keeps_a_vector_not_a_matrix(vocabulary, tokens, padding, n):
    layer = nn.Embedding(vocabulary, 3, padding_idx=1 if padding else None)
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(vocabulary, (n, tokens), generator=rng)
    check_against_jacobian(layer, x, positions=tokens)
    lpr = LPR(layer)
    lpr.refresh(x)
    assert lpr.layers[""].bytes == vocabulary * 8


def test_sparse_gradient_of_an_embedding_equals_the_dense_one():
    x = torch.tensor([[0, 2, 2], [4, 2, 0]])
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(0)
        layer = nn.Embedding(5, 2, sparse=sparse)
        lpr = LPR(layer, omega_0=3.0)
        lpr.refresh(x)
        layer(x).square().sum().backward()
        lpr.precondition_()
        assert layer.weight.grad.is_sparse == sparse
        gradients.append(layer.weight.grad.to_dense())
    torch.testing.assert_close(*gradients)


def test_embedding_with_max_norm_is_treated_and_left_without_a_trace():
    layer = nn.Embedding(4, 2, max_norm=0.1)
    before = layer.weight.detach().clone()
    lpr = LPR(layer)
    lpr.refresh(torch.tensor([[0, 1], [1, 3]]))
    assert torch.equal(layer.weight, before)
    assert "" in lpr.layers


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the oracle
@few
@given(
    mode=st.sampled_from(["sum", "mean", "weighted"]),
    vocabulary=st.integers(2, 5),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    padding=st.booleans(),
    last=st.booleans(),
)
def test_embedding_bag_is_a_linear_over_counts(mode, vocabulary, lengths, padding, last):
    assume(sum(lengths) > 0)
    layer = nn.EmbeddingBag(
        vocabulary,
        3,
        mode="sum" if mode == "weighted" else mode,
        padding_idx=1 if padding else None,
        include_last_offset=last,
    )
    rng = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    kwargs = {
        "offsets": offsets if last else offsets[:-1],  # first: one for every bag
        "input": torch.randint(vocabulary, (sum(lengths),), generator=rng),
    }
    if mode == "weighted":
        kwargs["per_sample_weights"] = random(sum(lengths))
    bags = len(lengths) / (len(lengths) + last)  # examples are counted by the first tensor
    check_against_jacobian(layer, positions=bags, kwargs=kwargs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the oracle
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_with_bags_of_one_size(mode):
    x = torch.tensor([[0, 2, 2], [4, 2, 0]])
    check_against_jacobian(nn.EmbeddingBag(5, 2, mode=mode), x, positions=1)


def test_the_maximum_of_an_embedding_bag_is_left_alone_and_named():
    lpr = LPR(nn.Sequential(nn.EmbeddingBag(5, 2, mode="max")))
    reason = "the maximum of an EmbeddingBag is not linear in its weight."
    assert lpr.untreated == {"0.weight": reason}
    lpr.refresh(torch.tensor([[0, 2, 2]]))
    assert not lpr.layers


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "sequence-first"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 3, "vdim": 5},
        {"kdim": 3, "vdim": 5, "bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
    ],
    ids=["packed", "packed-no-bias", "separate", "separate-no-bias", "extra-kv", "zero-attention"],
)
def test_attention_is_four_linear_maps_and_two_learned_tokens(options, batch_first):
    layer = shake_(nn.MultiheadAttention(4, 2, batch_first=batch_first, **options))
    n, target, source = 3, 2, 5
    query = random(n, target, 4)
    key = random(n, source, options.get("kdim", 4), seed=1)
    value = random(n, source, options.get("vdim", 4), seed=2)
    args = [x if batch_first else x.transpose(0, 1) for x in (query, key, value)]
    mask = torch.zeros(n, source, dtype=torch.bool)
    mask[0, 3:] = True
    lpr = LPR(layer, OMEGA_0, BETA)
    call = dict(zip(("query", "key", "value"), args, strict=True)) | {"key_padding_mask": mask}
    lpr.refresh([call], batch_dim=0 if batch_first else 1)

    g = fill_gradients_(layer)
    expected = attention_oracle(layer, g, query, key, value, args, mask)
    lpr.precondition_()
    torch.testing.assert_close(flat_gradient(layer), expected, rtol=0, atol=1e-10)
    assert not lpr.untreated


def attention_oracle(layer, g, query, key, value, args, mask):
    """Every linear map for itself, by Jacobians of its own output in all parameters."""
    E = layer.embed_dim
    p = trained(layer)

    def projected(i, name, x):
        def output(q):
            packed = q.get("in_proj_weight")
            weight = q[f"{name}_proj_weight"] if packed is None else packed[i * E : (i + 1) * E]
            bias = q["in_proj_bias"][i * E : (i + 1) * E] if "in_proj_bias" in q else None
            return F.linear(x, weight, bias)

        return output

    heads = {}
    original = F.linear

    def spy(x, weight, bias=None):
        if weight is layer.out_proj.weight:
            heads["x"] = x.detach()
        return original(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", spy)
        layer(*args, key_padding_mask=mask)
    maps = [
        (projected(0, "q", query), query),
        (projected(1, "k", key), key),
        (projected(2, "v", value), value),
        (lambda q: F.linear(heads["x"], q["out_proj.weight"], q.get("out_proj.bias")), query),
    ]
    n = len(query)
    total = torch.eye(len(g), dtype=g.dtype)
    for output, x in maps:
        J = jacobian(output, p)
        total += OMEGA_0 / (n * x.shape[1] ** BETA) * J.T @ J
    for name in ("bias_k", "bias_v"):
        if name in p:
            J = jacobian(lambda q, name=name: q[name].expand(n, 1, E), p)
            total += OMEGA_0 / n * J.T @ J
    return torch.linalg.solve(total, g)


def test_self_attention_shares_one_gram_between_its_projections():
    layer = shake_(nn.MultiheadAttention(4, 2, batch_first=True))
    x = random(3, 5, 4)
    lpr = LPR(layer)
    lpr.refresh([(x, x, x)])
    q, k, v = (lpr.shrinkage(f"{name}_proj").Lambda for name in "qkv")
    assert torch.equal(q, k)
    assert torch.equal(k, v)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (3,)),
        (nn.Conv1d(2, 3, 2), (2, 5)),
        (nn.Conv2d(2, 3, 2, padding=1, padding_mode="circular"), (2, 4, 3)),
        (nn.ConvTranspose1d(2, 3, 2, stride=2), (2, 4)),
        (nn.InstanceNorm1d(2, affine=True), (2, 5)),
        (nn.LayerNorm(3), (3,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_input_without_a_dimension_for_examples_counts_as_one_example(layer, shape):
    class OneByOne(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return torch.stack([self.layer(one) for one in x])

    model = shake_(OneByOne())
    x = random(3, *shape)
    lpr = LPR(model, OMEGA_0, BETA)
    lpr.refresh(x)
    g = fill_gradients_(model)
    omega = lpr.layers["layer"].omega
    lpr.precondition_()
    expected = proximal_gradient(g, module_jacobian(model, x), omega)
    torch.testing.assert_close(flat_gradient(model), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("missing", ["weight", "bias"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(3, 2), (4, 3)), (lambda: nn.Conv2d(2, 4, 2, groups=2), (4, 2, 3, 3))],
    ids=["linear", "grouped-convolution"],
)
def test_a_parameter_without_gradient_stays_and_the_others_are_treated_as_if_it_were_frozen(
    make, shape, missing
):
    layer = shake_(make())
    x = random(*shape)
    lpr = LPR(layer, OMEGA_0, BETA)
    lpr.refresh(x)
    omega = lpr.layers[""].omega
    fill_gradients_(layer)
    getattr(layer, missing).grad = None
    getattr(layer, missing).requires_grad_(False)
    expected = proximal_gradient(flat_gradient(layer), module_jacobian(layer, x), omega)
    lpr.precondition_()
    assert getattr(layer, missing).grad is None
    torch.testing.assert_close(flat_gradient(layer), expected, rtol=0, atol=1e-10)


def test_layers_without_any_gradient_are_skipped():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    lpr = LPR(model)
    lpr.refresh(torch.randn(5, 2))
    model[1].weight.grad = torch.ones(1, 2)
    lpr.precondition_()
    assert model[0].weight.grad is None
    assert not torch.equal(model[1].weight.grad, torch.ones(1, 2))


def test_batches_of_different_sizes_add_up():
    layer = shake_(nn.Conv2d(2, 3, 3, padding=1))
    batches = [(random(n, 2, 4, 4, seed=n),) for n in (1, 3, 2)]
    lpr = LPR(layer, OMEGA_0, BETA)
    lpr.refresh(batches)
    g = fill_gradients_(layer)
    lpr.precondition_()
    omega = OMEGA_0 / (6 * 16**BETA)
    expected = proximal_gradient(g, stacked_jacobian(layer, batches), omega)
    torch.testing.assert_close(flat_gradient(layer), expected, rtol=0, atol=1e-10)


class LayerScale(nn.Module):
    """A number per channel, as vision transformers use."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x * self.gamma


class InOutLinear(nn.Module):
    """A linear layer that stores its weight as ``[in, out]``, as GPT-2's does."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.fixture
def taught(monkeypatch):
    """Two layers of one's own, forgotten afterwards."""
    from proxreplay.proximal.layers import registry

    monkeypatch.setattr(registry, "_LAYERS", dict(registry._LAYERS))

    @register_layer(LayerScale, maps=LinearMap(weight=Part("gamma"), bias=None))
    def scale_rows(layer, x):
        return x.reshape(-1, len(layer.gamma)).T[:, :, None]

    @register_layer(InOutLinear, maps=LinearMap(weight=Part("weight", swap=True)))
    def in_out_rows(layer, x):
        return x.reshape(1, -1, x.shape[-1])


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize(
    "layer", [LayerScale(3), InOutLinear(3, 4)], ids=["layer-scale", "in-out-linear"]
)
def test_a_layer_of_ones_own_takes_one_function(layer):
    check_against_jacobian(layer, random(4, 5, 3), positions=5)
