"""A-GEM against the projection of one long vector, written out in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from proxreplay import Batch, Learner, er, finetune
from proxreplay.errors import InputError, RefreshError
from proxreplay.models import GrowingHead, mlp
from proxreplay.proximal import AGEM
from tests.reference import flat_gradient, random


def network(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(3 * 4 * 4, 4),
    ).double()


def examples(n, seed, classes=4):
    rng = torch.Generator().manual_seed(seed)
    return Batch(random(n, 1, 6, 6, seed=seed), torch.randint(0, classes, (n,), generator=rng))


def gradient_of(model, batch):
    """The flat gradient of the cross-entropy, on a copy of the model."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    F.cross_entropy(twin(batch.inputs), batch.labels).backward()
    return flat_gradient(twin)


def step_gradient_(model, batch):
    model.zero_grad()
    F.cross_entropy(model(batch.inputs), batch.labels).backward()
    return flat_gradient(model)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), flip=st.booleans())
def test_projects_only_what_goes_against_the_reference(seed, flip):
    model = network(seed).train()
    g = step_gradient_(model, examples(5, seed))
    reference = examples(8, seed + 1)
    if flip:  # the very opposite of the reference gradient in part of the cases
        r = gradient_of(model, reference)
        for p, piece in zip(
            model.parameters(), (-r + g).split([p.numel() for p in model.parameters()]), strict=True
        ):
            p.grad = piece.view_as(p).clone()
        g = flat_gradient(model)
    r = gradient_of(model, reference)

    agem = AGEM(model)
    agem.observe(None, reference)
    torch.testing.assert_close(flat_gradient(model), g, rtol=0, atol=0)  # observing changes nothing
    agem.precondition_()

    expected = g - (g @ r) / (r @ r) * r if g @ r < 0 else g
    after = flat_gradient(model)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)
    assert after @ r >= -1e-12 * g.norm() * r.norm()
    assert after.norm() <= g.norm() * (1 + 1e-12)


def test_a_gradient_that_agrees_is_left_bit_for_bit():
    model = network().train()
    batch = examples(6, 3)
    g = step_gradient_(model, batch)
    agem = AGEM(model)
    agem.observe(batch, batch)
    agem.precondition_()
    assert torch.equal(flat_gradient(model), g)


@pytest.mark.parametrize("batchnorm", ["batch", "update", "running"])
def test_how_batchnorm_treats_the_reference(batchnorm):
    model = network().train()
    step_gradient_(model, examples(6, 1))
    before = copy.deepcopy(model.state_dict())
    reference = examples(9, 2)
    twin = copy.deepcopy(model)
    if batchnorm == "running":
        twin[1].eval()
    r = gradient_of(twin, reference)

    agem = AGEM(model, batchnorm=batchnorm)
    agem.observe(None, reference)
    kept = torch.cat(
        [agem.state_dict()["reference"][n].flatten() for n, _ in twin.named_parameters()]
    )
    torch.testing.assert_close(kept, r, rtol=0, atol=1e-12)
    changed = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    polluted = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert changed == (polluted if batchnorm == "update" else [])
    assert all(module.training for module in model.modules())


def test_dropout_of_the_reference_leaves_the_generator_as_it_was():
    model = network(dropout=0.5).train()
    step_gradient_(model, examples(6, 1))
    state = torch.get_rng_state()
    AGEM(model).observe(None, examples(6, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_only_parameters_that_move_take_part():
    model = network().train()
    reference = examples(8, 5)
    step_gradient_(model, examples(5, 4))
    r = gradient_of(model, reference)
    head = list(model[5].parameters())
    size = sum(p.numel() for p in head)
    for p, piece in zip(head, (-r[-size:]).split([p.numel() for p in head]), strict=True):
        p.grad = piece.view_as(p).clone()
    g = flat_gradient(model)
    agem = AGEM(model).attach(torch.optim.SGD(head, lr=0.1))
    agem.observe(None, reference)
    agem._before_step(torch.optim.SGD(head, lr=0.1), (None,), {})
    after = flat_gradient(model)
    assert torch.equal(after[:-size], g[:-size])
    torch.testing.assert_close(after[-size:], torch.zeros(size).double(), rtol=0, atol=1e-12)


def test_without_a_reference_the_step_is_free():
    model = network().train()
    agem = AGEM(model)
    g = step_gradient_(model, examples(5, 4))
    agem.observe(None, examples(5, 5))
    agem.observe(examples(5, 4), None)
    agem.precondition_()
    assert torch.equal(flat_gradient(model), g)


def test_joint_variant_takes_its_reference_from_what_was_replayed():
    seen = []

    class Watched(AGEM):
        def observe(self, incoming=None, reference=None):
            seen.append((incoming, reference))
            super().observe(incoming, reference)

    def loss(model, incoming, replay):
        replayed.append(replay)
        return er(model, incoming, replay)

    replayed = []
    model = mlp(2, hidden=(5,))
    learner = Learner(model, rule=Watched.joint(model), loss=loss, steps_per_batch=2)
    for i in range(3):
        learner.learn(random(4, 2, seed=i).float(), torch.tensor([0, 1, 2, 3]))
    assert [reference for _, reference in seen] == replayed
    assert replayed[0] is None
    assert replayed[-1] is not None


def test_joint_variant_refuses_a_loss_that_replays_nothing():
    model = mlp(2)
    with pytest.raises(InputError, match="AGEM looks at the replayed examples"):
        Learner(model, rule=AGEM.joint(model), loss=finetune)


def test_joint_variant_adds_eps_to_the_square():
    model = nn.Linear(1, 2, bias=False).double()
    agem = AGEM.joint(model)
    assert (agem.reference_samples, agem.batchnorm, agem.eps) == (None, "running", 1e-7)
    agem.load_state_dict(
        {"rule": "AGEM", "reference": {"weight": torch.full((2, 1), 1e-4).double()}}
    )
    model.weight.grad = torch.full((2, 1), -1.0).double()
    agem.precondition_()
    expected = -1 + 2e-4 / (2e-8 + 1e-7) * 1e-4
    torch.testing.assert_close(model.weight.grad, torch.full((2, 1), expected).double())


def test_asks_the_learner_for_so_many_examples():
    class Watched(AGEM):
        def observe(self, incoming=None, reference=None):
            sizes.append(0 if reference is None else len(reference))

    sizes = []
    model = mlp(2)
    learner = Learner(model, rule=Watched(model, samples=7), loss=finetune, steps_per_batch=1)
    for i in range(3):
        learner.learn(random(4, 2, seed=i).float(), torch.tensor([0, 1, 2, 3]))
    assert sizes == [0, 4, 7]


def test_a_head_that_has_grown_since_asks_for_another_look():
    model = nn.Sequential(nn.Linear(2, 3), GrowingHead(3))
    agem = AGEM(model)
    batch = Batch(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))
    agem.observe(None, batch)
    model[1].grow(3)
    model(batch.inputs).sum().backward()
    with pytest.raises(
        RefreshError, match=r"'1.weight' is \[1, 3\], but the parameter is \[3, 3\]"
    ):
        agem.precondition_()


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    agem = AGEM(model)
    with pytest.raises(InputError, match=r"'0.weight' has a sparse gradient"):
        agem.observe(None, Batch(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4).long()))
    assert agem.state_dict()["reference"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"batchnorm": "train"}, "batchnorm=train"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": float("nan")}, "eps=nan"),
    ],
    ids=lambda value: str(value),
)
def test_options_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        AGEM(nn.Linear(1, 1), **options)


def test_mixed_precision_scaling_does_not_matter():
    """The projection is homogeneous in g, so scaled gradients stay scaled."""
    model = network().train()
    reference = examples(8, 7)
    agem = AGEM(model)
    agem.observe(None, reference)
    g = -gradient_of(model, reference) + step_gradient_(model, examples(3, 8))
    results = []
    for scale in (1.0, 1024.0):
        pieces = (g * scale).split([p.numel() for p in model.parameters()])
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p).clone()
        agem.precondition_()
        results.append(flat_gradient(model) / scale)
    torch.testing.assert_close(*results)
