import os

import pytest
import torch

from proxreplay.data import Dataset, Examples
from proxreplay.errors import DataError, InputError
from proxreplay.experiments.benchmarks import BENCHMARKS, find_benchmark
from proxreplay.experiments.configure import configure
from tests.data.data_samples import clear_files, jpeg, tiny_files, write_files, zipped

REAL = os.environ.get("PROXREPLAY_DATA")
SLOW = os.environ.get("PROXREPLAY_SLOW")
SHAPES = {  # channels, size, classes, domains, training images
    "split-digits": (1, 8, 10, (), 1071),
    "split-mnist": (1, 28, 10, (), 60_000),
    "split-fashion": (1, 28, 10, (), 60_000),
    "split-cifar10": (3, 32, 10, (), 50_000),
    "split-cifar100": (3, 32, 100, (), 50_000),
    "split-tinyimagenet": (3, 64, 200, (), 100_000),
    "online-clear": (3, 224, 11, tuple("0123456789"), 33_000),
    "domain-pacs": (3, 64, 7, ("photo", "art_painting", "cartoon", "sketch"), 8000),
}
COUNTS = {  # tasks, stream batches per task, trained ones, SGD steps in all
    "split-cifar100": (20, 238, 237, 14_220),
    "split-tinyimagenet": (20, 475, 475, 85_500),
    "online-clear": (10, 314, 313, 31_300),
}
EVERY = pytest.mark.parametrize("name", list(BENCHMARKS))


def of_shape(name: str) -> Dataset:
    """A data set of the right shape that takes no memory: one black image, many times."""
    channels, size, classes, domains, count = SHAPES[name]

    def part(n):
        image = torch.zeros(1, channels, size, size, dtype=torch.uint8)
        labels = torch.arange(n) % classes
        where = torch.arange(n) // classes % len(domains) if domains else None
        return Examples(image.expand(n, -1, -1, -1), labels, where)

    names = tuple(str(i) for i in range(classes))
    return Dataset(name, part(count), part(count // 5), names, domains=domains)


def counts(benchmark, data):
    stream = benchmark.scenario.stream(data, seed=0)
    batches = torch.bincount(torch.tensor([stream.task_at(p) for p in range(len(stream))]))
    tasks = len(stream.tasks)
    assert batches.unique().numel() == 1
    trained, rest = divmod(stream.trained_batches, tasks)
    assert rest == 0
    steps = stream.trained_batches * benchmark.steps_per_batch
    return (tasks, int(batches[0]), trained, steps)


def test_all_benchmarks_of_the_issue_are_declared():
    assert list(BENCHMARKS) == list(SHAPES)
    assert [n for n, b in BENCHMARKS.items() if b.from_paper] == list(COUNTS)


@EVERY
def test_data_stream_transform_and_network_fit_together(name):
    benchmark, data = find_benchmark(name), of_shape(name)
    batch = next(benchmark.scenario.stream(data, seed=0, batch_size=4))
    view = benchmark.transform(batch.inputs, torch.Generator().manual_seed(0))
    assert view.shape == batch.inputs.shape
    classes = len(data.classes)
    assert benchmark.network(classes).eval()(view).shape == (4, classes)
    assert benchmark.network()(view).shape == (4, 1)


def test_the_paper_s_settings():
    er, der, ema = ([configure(n, f"lpr-{m}") for n in COUNTS] for m in ("er", "der", "ema"))
    lr = [[config.lr for config in configs] for configs in (er, der, ema)]
    assert lr == [[0.1, 0.01, 0.01], [0.05, 0.01, 0.1], [0.05, 0.01, 0.05]]
    assert [(c.lpr.omega_0, c.lpr.beta) for c in er] == [(4, 2), (0.25, 2), (1, 1)]
    weights = [(c.loss.replay_weight, c.loss.logit_weight) for c in der]
    assert weights == [(1, 1), (1, 0.5), (0.5, 1)]
    assert [find_benchmark(n).steps_per_batch for n in COUNTS] == [3, 9, 10]
    assert [find_benchmark(n).capacity for n in COUNTS] == [2000, 4000, 2000]


@pytest.mark.parametrize("name", list(COUNTS))
def test_counts_of_the_protocol(name):
    assert counts(find_benchmark(name), of_shape(name)) == COUNTS[name]


def test_pacs_domains_come_from_photographs_to_sketches():
    stream = find_benchmark("domain-pacs").scenario.stream(of_shape("domain-pacs"), seed=3)
    assert [t.name for t in stream.tasks] == ["photo", "art_painting", "cartoon", "sketch"]


def test_missing_data_is_told_by_status_and_by_load(tmp_path):
    benchmark = find_benchmark("split-mnist")
    assert not benchmark.status(tmp_path).found
    with pytest.raises(DataError, match="proxreplay data fetch mnist"):
        benchmark.load(tmp_path)
    assert find_benchmark("split-digits").status(tmp_path).found


def test_an_unknown_benchmark_names_the_known_ones():
    with pytest.raises(InputError, match="split-digits, split-mnist"):
        find_benchmark("split-imagenet")


@pytest.mark.skipif(not REAL, reason="PROXREPLAY_DATA is not set: no real CIFAR-100")
def test_counts_from_the_real_cifar100():
    benchmark = find_benchmark("split-cifar100")
    assert counts(benchmark, benchmark.load(REAL)) == COUNTS["split-cifar100"]


@pytest.mark.skipif(not SLOW, reason="PROXREPLAY_SLOW is not set: decodes 150,000 images")
@pytest.mark.parametrize("name", ["split-tinyimagenet", "online-clear"])
def test_counts_from_generated_archives_of_the_right_shape(tmp_path, name, monkeypatch):
    monkeypatch.delenv("PROXREPLAY_CACHE", raising=False)
    if name == "split-tinyimagenet":
        files = tiny_files(200, 500, 10_000, image=jpeg((8, 8)))
        zipped(tmp_path / "tiny-imagenet-200.zip", files)
    else:
        classes = tuple(f"class{i}" for i in range(11))
        write_files(tmp_path / "clear10", clear_files(10, classes, 300, jpeg((4, 5))))
    benchmark = find_benchmark(name)
    data = benchmark.load(tmp_path)
    assert len(data.train) == SHAPES[name][4]
    assert counts(benchmark, data) == COUNTS[name]
