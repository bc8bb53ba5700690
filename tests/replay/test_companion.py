"""The companion against scikit-learn, brute force and its own definition."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

from proxreplay import CompanionOptions, Learner, UnlimitedMemory
from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.experiments.configure import configure, refuse_without_effect
from proxreplay.experiments.run import run
from proxreplay.models import mlp
from proxreplay.replay.class_statistics import SharedCovariance
from proxreplay.replay.companion import ENOUGH, STRENGTHS, Companion
from proxreplay.serving.published import Published
from tests.reference import assert_same_state

FEATURES = 6


def examples(
    n: int, classes: int = 3, seed: int = 0, apart: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters around centres that are the same for all seeds."""
    centres = torch.randn(classes, FEATURES, generator=torch.Generator().manual_seed(7)) * apart
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return centres[y] + torch.randn(n, FEATURES, generator=rng), y


def grown(batches: int, *, classes: int = 3, size: int = 10, **options) -> Companion:
    companion = Companion(CompanionOptions(**options))
    x, y = examples(batches * size, classes)
    for inputs, labels in zip(x.split(size), y.split(size), strict=True):
        companion.observe_(inputs, labels)
    return companion


def learner(companion: CompanionOptions | None = None, seed: int = 0, **options) -> Learner:
    torch.manual_seed(seed)
    parts = {"memory": UnlimitedMemory(), "steps_per_batch": 1, "lr": 0.05, **options}
    companion = CompanionOptions() if companion is None else companion
    model = parts.pop("model", None) or mlp(FEATURES, hidden=(8,))
    return Learner(model, companion=companion, **parts)


def taught(batches: int = 12, **options) -> Learner:
    made = learner(**options)
    x, y = examples(10 * batches)
    return made.learn_stream(x, y)


def test_right_after_an_inverse_it_is_the_lda_of_scikit_learn() -> None:
    companion = Companion(CompanionOptions(shrinkage=0.2))
    x, y = examples(120)
    companion.observe_(x.double(), y)
    z = companion.features(x.double()).numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2, priors=np.full(3, 1 / 3)).fit(
        z, y.numpy()
    )
    new, _ = examples(50, seed=1)
    expected = theirs.predict_log_proba(companion.features(new.double()).numpy())
    # the inverse is kept in single precision
    np.testing.assert_allclose(companion.logits(new.double(), 3).numpy(), expected, atol=2e-3)


def test_between_inverses_means_are_new_and_the_covariance_is_that_of_then() -> None:
    companion, x, y = Companion(CompanionOptions()), *examples(203)
    x = x.double()
    companion.observe_(x[:200], y[:200])
    of_then = companion.statistic.covariance()
    companion.observe_(x[200:], y[200:])
    assert len(companion.statistic.counts) == 3
    z, new = companion.features(x), companion.features(examples(40, seed=1)[0].double())
    means = torch.stack([z[y == label].mean(dim=0) for label in range(3)])
    P = torch.linalg.inv(of_then)
    scores = new @ P @ means.T - ((means @ P) * means).sum(dim=1) / 2
    found = companion.logits(examples(40, seed=1)[0].double(), 3)
    torch.testing.assert_close(found, scores.log_softmax(dim=1), atol=2e-3, rtol=0)
    stale = torch.stack([z[:200][y[:200] == label].mean(dim=0) for label in range(3)])
    old = new @ P @ stale.T - ((stale @ P) * stale).sum(dim=1) / 2
    assert float((found - old.log_softmax(dim=1)).abs().max()) > 0.01


def test_predictions_are_the_product_of_both() -> None:
    one = taught(companion=CompanionOptions(weight=0.7))
    x, _ = examples(30, seed=5)
    a = one.companion.strength
    assert a > 0
    networks = one.predict_proba(x, predictor="blend").double()
    own = one.predict_proba(x, predictor="companion").double()
    product = networks * own ** (0.7 * a)
    expected = product / product.sum(dim=1, keepdim=True)
    torch.testing.assert_close(one.predict_proba(x).double(), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(one.predict_proba(x, predictor="joint"), one.predict_proba(x))


def test_each_predictor_alone_is_what_all_together_are() -> None:
    one = taught()
    x, _ = examples(30, seed=5)
    names = ["joint", "blend", "online", "average", "both", "companion"]
    for name, logits in one.logits_of_each(x, names).items():
        assert torch.equal(logits, one.logits(x, predictor=name)), name


def test_it_is_judged_by_examples_before_it_has_seen_them() -> None:
    companion, losses = Companion(CompanionOptions()), []
    x, y = examples(300, apart=0.7)
    for inputs, labels in zip(x.split(10), y.split(10), strict=True):
        counts = companion.statistic.counts
        if len(counts) == 3 and bool((counts[labels] >= ENOUGH).all()):
            logits = companion.logits(inputs, 3).double()
            each = [
                nn.functional.cross_entropy(a * logits, labels, reduction="none") for a in STRENGTHS
            ]
            losses.append((torch.stack(each) / math.log(3)).clamp_max(3.0).mean(dim=1))
        companion.observe_(inputs, labels)
    average = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    for t, new in enumerate(losses[-companion.judged :], 1):
        average += max(0.01, 1 / t) * (new - average)
    assert 20 < companion.judged < 30
    torch.testing.assert_close(companion.losses, average, atol=1e-4, rtol=1e-4)
    assert companion.strength == STRENGTHS[int(average.argmin())]
    assert float(companion.losses[0]) == pytest.approx(1.0)  # strength 0 is guessing


def test_labels_that_mean_nothing_give_it_no_say() -> None:
    companion, rng = Companion(CompanionOptions()), torch.Generator().manual_seed(3)
    x, _ = examples(600)
    y = torch.randint(0, 3, (600,), generator=rng)
    for inputs, labels in zip(x.split(10), y.split(10), strict=True):
        companion.observe_(inputs, labels)
    assert companion.strength <= 0.1


def test_it_loses_its_say_when_labels_change_their_meaning() -> None:
    companion, (x, y) = grown(60), examples(600, seed=2)
    before = companion.strength
    for inputs, labels in zip(x.split(10), y.split(10), strict=True):
        companion.observe_(inputs, (labels + 1) % 3)
    assert before >= 0.25
    assert companion.strength < before / 2


def test_it_says_nothing_before_it_was_judged() -> None:
    one = learner()
    x, y = examples(20)
    one.learn(x, y)
    assert one.companion.strength == 0
    torch.testing.assert_close(one.predict_proba(x), one.predict_proba(x, predictor="blend"))


def test_classes_it_has_not_met_are_left_to_the_networks() -> None:
    companion = grown(12)
    logits = companion.logits(examples(5)[0], 5)
    torch.testing.assert_close(logits[:, 3:], torch.full((5, 2), -math.log(3)))
    torch.testing.assert_close(logits[:, :3].exp().sum(dim=1), torch.ones(5))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), times=st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_an_example_that_counts_twice_is_two_examples(seed: int, times: list[int]) -> None:
    x, y = examples(12, seed=seed)
    weighted, repeated = SharedCovariance(), SharedCovariance()
    for rows in (slice(0, 7), slice(7, 12)):
        n = torch.tensor(times[rows])
        weighted.observe_(x[rows], y[rows], n.float())
        repeated.observe_(x[rows].repeat_interleave(n, 0), y[rows].repeat_interleave(n))
    torch.testing.assert_close(weighted.means, repeated.means)
    torch.testing.assert_close(weighted.counts, repeated.counts)
    torch.testing.assert_close(weighted.scatter, repeated.scatter)


@pytest.mark.parametrize("weight", [1e-30, 1e-3, 4e3], ids=["tiny", "small", "large"])
def test_the_unit_of_weights_does_not_matter(weight: float) -> None:
    plain, scaled, (x, y) = *(Companion(CompanionOptions()) for _ in range(2)), examples(300)
    for inputs, labels in zip(x.split(10), y.split(10), strict=True):
        plain.observe_(inputs, labels)
        scaled.observe_(inputs, labels, torch.full((10,), weight))
    assert scaled.judged == plain.judged > 20
    torch.testing.assert_close(scaled.losses, plain.losses, atol=1e-4, rtol=1e-4)


def test_it_is_judged_once_means_are_as_certain_as_those_of_10_equal_examples() -> None:
    companion, (x, y) = Companion(CompanionOptions()), examples(120, classes=2)
    weights = torch.ones(120)
    weights[:2] = 20.0  # the first of each class counts as much as 20 further ones
    first = None
    for i in range(0, 120, 2):
        companion.observe_(x[i : i + 2], y[i : i + 2], weights[i : i + 2])
        if companion.judged and first is None:
            first = i // 2  # examples of each class that came before
    # (20 + n)^2 / (400 + n) is at least 10 from n = 47 on, with the heavy one 48
    assert first == 48


def test_states_from_before_squares_were_kept_are_of_equal_weights() -> None:
    companion = grown(12)
    state = companion.state_dict()
    del state["statistic.squares"]
    again = Companion(CompanionOptions())
    again.load_state_dict(state)
    x, y = examples(10, seed=5)
    for one in (companion, again):
        one.observe_(x, y)
    assert again.judged == companion.judged
    assert torch.equal(again.losses, companion.losses)


def test_sample_weights_of_the_learner_reach_it() -> None:
    one, (x, y) = learner(), examples(10)
    one.learn(x, y, sample_weight=torch.arange(10.0))
    assert one.companion.statistic.counts.tolist() == [0 + 3 + 6 + 9, 1 + 4 + 7, 2 + 5 + 8]


def test_every_example_counts_once_whether_learned_or_remembered() -> None:
    one, (x, y) = learner(), examples(40)
    one.learn(x[:10], y[:10])
    one.remember(x[10:20], y[10:20])
    one.learn(Batch(x[20:25], y[20:25], train=False))
    assert float(one.companion.statistic.counts.sum()) == 25


def test_it_meets_what_a_memory_holds_already() -> None:
    earlier = taught()
    later = learner(memory=earlier.memory)
    assert later.companion.statistic.counts.tolist() == [40, 40, 40]


def test_a_forgotten_class_is_gone_and_the_covariance_stays() -> None:
    one = taught()
    before = one.companion.statistic.covariance()
    one.forget(label=1)
    torch.testing.assert_close(one.companion.statistic.covariance(), before)
    x, y = examples(60, seed=4)
    own = one.logits(x, predictor="companion")
    torch.testing.assert_close(own[:, 1], torch.full((60,), -math.log(2)))
    assert 1 not in one.predict(x).tolist()
    kept = y != 1
    assert (one.predict(x)[kept] == y[kept].numpy()).mean() > 0.9
    one.learn_stream(*examples(60, seed=6))
    assert (one.predict(x) == y.numpy()).mean() > 0.9


def test_forgotten_examples_leave_no_rows_of_their_own() -> None:
    one = learner()
    x, y = examples(20)
    learned = one.learn(x, y)
    before = one.companion.statistic.scatter
    assert len(one.companion.state_dict()["statistic.recent"]) > 0
    one.forget(ids=learned.ids[:3])
    left = one.companion.state_dict()["statistic.recent"]
    assert len(left) == left.untyped_storage().nbytes() == 0
    assert torch.equal(one.companion.statistic.scatter, before)


def test_forgetting_all_classes_leaves_nothing() -> None:
    companion = grown(5, classes=1)
    companion.forget_(0)
    assert not companion.logits(examples(3)[0], 2).any()
    companion.forget_(5)  # never came
    x, y = examples(30)
    companion.observe_(x, y)
    assert companion.statistic.counts.tolist() == [10, 10, 10]


def test_a_saved_learner_goes_on_bit_by_bit(tmp_path: Path) -> None:
    x, y = examples(700)
    whole, half = learner(), learner()
    whole.learn_stream(x, y)
    half.learn_stream(x[:330], y[:330])
    half.save(tmp_path / "half.safetensors")
    again = Learner.load(tmp_path / "half.safetensors")
    again.predict(x[:7])  # looking at it on the way changes nothing
    again.learn_stream(x[330:], y[330:])
    assert torch.equal(again.logits(x), whole.logits(x))
    mine, theirs = again.companion.state_dict(), whole.companion.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        assert same, name


@pytest.mark.parametrize(
    ("saved", "present", "way_out"),
    [
        (1.0, 0.0, "predictor='online' predicts without it"),
        (0.0, 1.0, "Learner(old.model, old.memory, companion=...) shows it what is remembered"),
        (1.0, 0.5, "make it as it was, or let Learner.load do so"),
    ],
    ids=["dropped", "added", "another weight"],
)
def test_one_is_neither_added_nor_dropped_in_silence(
    saved: float, present: float, way_out: str
) -> None:
    state = taught(companion=CompanionOptions(weight=saved)).state_dict()
    one = taught(4, companion=CompanionOptions(weight=present), seed=1)
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(InputError, match="Learner: saved with companion=") as said:
        one.load_state_dict(state)
    assert way_out in str(said.value)
    assert_same_state(one.state_dict(), before)


def test_the_way_out_of_having_none_works(tmp_path: Path) -> None:
    taught(companion=CompanionOptions(weight=0)).save(tmp_path / "old")
    old = Learner.load(tmp_path / "old")
    one = Learner(old.model, old.memory, companion=CompanionOptions())
    assert one.companion is not None
    assert one.companion.statistic.counts.sum() == len(old.memory) > 0
    x, y = examples(90, seed=9)
    assert (one.predict(x, predictor="companion") == y.numpy()).mean() > 0.9


def test_copies_are_apart() -> None:
    one = taught()
    x, _ = examples(50, seed=8)
    two, published = copy.deepcopy(one), Published.of(one, 0, 0)
    before = one.logits(x)
    probabilities = torch.tensor(published.predict(x).probabilities)
    one.learn_stream(*examples(200, seed=9))
    assert not torch.equal(one.logits(x), before)
    assert torch.equal(two.logits(x), before)
    assert torch.equal(torch.tensor(published.predict(x).probabilities), probabilities)
    assert published.predict(x).labels == probabilities.argmax(dim=1).tolist()


def test_the_network_learns_as_if_it_were_not_there() -> None:
    torch.manual_seed(0)
    plain = Learner(mlp(FEATURES, hidden=(8,)), UnlimitedMemory(), lr=0.05, steps_per_batch=1)
    plain.learn_stream(*examples(120))
    state = torch.get_rng_state()
    one = taught()
    torch.manual_seed(0)
    assert torch.equal(
        one.logits(examples(9)[0], online=True), plain.logits(examples(9)[0], online=True)
    )
    torch.set_rng_state(state)
    Companion(CompanionOptions()).observe_(*examples(10))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "inputs",
    [{"x": torch.randn(10, FEATURES)}, torch.randint(0, 5, (10, FEATURES))],
    ids=["a dict", "integers"],
)
def test_what_has_no_random_features_is_refused_before_anything_changes(inputs) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.float())

    one = Learner(Net(), UnlimitedMemory(), companion=CompanionOptions())
    before = {k: v.clone() for k, v in one.model.state_dict().items()}
    with pytest.raises(InputError, match=r"companion looks at images or vectors.*companion=None"):
        one.learn(inputs, torch.arange(10) % 3)
    assert (one.batches_seen, len(one.memory)) == (0, 0)
    assert all(torch.equal(v, before[k]) for k, v in one.model.state_dict().items())


def test_few_inputs_have_few_features() -> None:
    companion = Companion(CompanionOptions(filters=64))
    companion.observe_(torch.randn(4, 10), torch.tensor([0, 1, 0, 1]))
    assert companion.weight.shape == (2, 48)  # 4 * 10, in whole filters of 16
    images = Companion(CompanionOptions(filters=8))
    images.observe_(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1]))
    assert images.weight.shape == (2, 128)


@pytest.mark.parametrize("name", ["joint", "companion"])
def test_without_one_its_predictors_are_refused(name: str) -> None:
    plain = Learner(mlp(FEATURES), UnlimitedMemory())
    plain.learn(*examples(10))
    with pytest.raises(InputError, match=r"no companion.*CompanionOptions"):
        plain.predict(examples(3)[0], predictor=name)


def test_it_needs_no_average() -> None:
    one = taught(averaging=None)
    x, y = examples(60, seed=4)
    assert (one.predict(x) == y.numpy()).mean() > 0.9
    assert torch.equal(one.logits(x, online=True), one.logits(x, predictor="online"))


def test_wrong_options_are_named() -> None:
    with pytest.raises(InputError, match=r"companion\.weight=-1"):
        CompanionOptions(weight=-1)
    with pytest.raises(InputError, match=r"companion\.weight=1e\+39; give at most"):
        CompanionOptions(weight=1e39)  # times a logarithm it is infinite
    with pytest.raises(InputError, match=r"companion\.shrinkage=1e-15; give .* at least 1e-09"):
        CompanionOptions(shrinkage=1e-15)  # the covariance of few examples has no inverse then
    with pytest.raises(InputError, match="companion is True"):
        Learner(mlp(FEATURES), companion=True)


def test_settings_without_effect_are_refused() -> None:
    plain, floor = configure("split-digits", "er"), configure("split-digits", "slda")
    refuse_without_effect(["companion.weight"], [plain])
    with pytest.raises(InputError, match=r"companion\.filters has no effect on er"):
        refuse_without_effect(["companion.filters"], [plain])
    with pytest.raises(InputError, match=r"companion\.weight has no effect on slda"):
        refuse_without_effect(["companion.weight"], [floor])


def test_a_run_records_every_predictor(tmp_path: Path) -> None:
    values = {"eval_every": 40, "stream.first": 2, "capacity": 50}
    config = configure("split-digits", "anytime", values)
    result = run(config, tmp_path / "run")
    names = {"blend", "average", "both", "companion"}
    assert names <= result.predictors.keys()
    assert result.measures["aaa"] != result.predictors["blend"]["aaa"]


class Sturdy(nn.Module):
    """Learns from numbers of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.clamp(-1, 1))


def test_what_is_served_stays_when_classes_come_and_go() -> None:
    one, (x, _) = taught(), examples(20, seed=8)
    published = Published.of(one, 0, 0)
    before = published.predict(x).probabilities
    one.learn(*examples(20, classes=5))
    assert published.predict(x).probabilities == before
    one.forget(label=1)
    assert published.predict(x).probabilities == before


def test_a_forgotten_class_leaves_no_row_behind() -> None:
    companion = grown(30)
    companion.forget_(1)
    assert not companion.weight[1].any()
    assert not companion.bias[1]
    means = companion.statistic.means[[0, 2]]
    torch.testing.assert_close(companion._centre, means.mean(dim=0))
    companion.forget_(0)
    companion.forget_(2)
    assert not companion.weight.any()
    assert not companion._centre.any()


def test_after_forgetting_the_covariance_is_inverted_again_as_soon_as_there_is_more() -> None:
    companion, x = grown(30), torch.randn(40, FEATURES) * 30
    for label in (0, 1, 2):
        companion.forget_(label)
    companion.observe_(x, torch.arange(40) % 2)
    inverse = torch.linalg.inv(companion.statistic.covariance()).float()
    torch.testing.assert_close(companion._inverse, inverse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1e15, 1e20, 3e38])
def test_numbers_of_any_size_are_learned_and_predicted(size: float) -> None:
    one = learner(model=Sturdy())
    x, y = examples(60)
    one.learn_stream((x * size / 10).clamp(-3e38, 3e38), y)
    alike = torch.ones(60, FEATURES) * y[:, None] / 3 * size  # no covariance at all
    for inputs in (x * size / 100, alike):
        assert bool(one.predict_proba(inputs.clamp(-3e38, 3e38)).isfinite().all())
    other = learner(model=Sturdy())
    other.learn_stream(alike, y)
    networks = other.predict_proba(alike, predictor="blend")
    assert other.companion.strength == 0
    torch.testing.assert_close(other.predict_proba(alike), networks)


def test_numbers_that_only_double_precision_has_are_learned() -> None:
    one = learner(model=Sturdy().double())
    x, y = examples(60)
    one.learn_stream(x.double() * 1e200, y)
    weights = torch.full((60,), 1e300, dtype=torch.float64)
    one.learn_stream(x.double(), y, sample_weight=weights)
    assert bool(one.predict_proba(x.double()).isfinite().all())


def test_half_precision_holds_what_it_is_sure_of() -> None:
    one, y = learner(model=Sturdy().half()), torch.arange(30) % 3
    x = (torch.ones(30, FEATURES) * y[:, None]).half()  # no covariance: it is as sure as can be
    one.learn_stream(x, y)
    assert float(one.logits(x, predictor="companion").min()) < -1e5
    assert bool(one.predict_proba(x).isfinite().all())


def test_single_numbers_are_vectors_of_one() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[:, None])

    x, y = torch.linspace(-1, 1, 30), torch.arange(30) % 3
    one = learner(model=Scalar())
    one.learn_stream(x, y)
    assert one.predict(x, predictor="companion").shape == (30,)


def test_a_fixed_head_tells_how_many_outputs_there_are() -> None:
    earlier, (x, y) = taught(), examples(30, seed=4)
    fresh = learner(model=nn.Linear(FEATURES, 7))
    assert fresh.logits(x, predictor="companion").shape == (30, 7)
    later = learner(model=nn.Linear(FEATURES, 7), memory=earlier.memory)
    assert (later.predict(x, predictor="companion") == y.numpy()).mean() > 0.9


def test_a_memory_of_what_has_no_random_features_is_refused() -> None:
    memory = UnlimitedMemory()
    tokens = Batch(torch.randint(0, 5, (9, FEATURES)), torch.arange(9) % 3)
    memory.add(tokens, torch.Generator())
    with pytest.raises(InputError, match=r"companion looks at images or vectors.*int64"):
        learner(model=mlp(FEATURES), memory=memory)


def test_without_weight_there_is_none() -> None:
    assert learner(companion=CompanionOptions(weight=0)).companion is None
