import numpy as np
import pytest
import torch

from proxreplay.data import IID
from proxreplay.errors import InputError
from proxreplay.experiments.custom import custom, fitting_transform
from proxreplay.replay import Learner
from tests.data.data_samples import jpeg, write_files


def folder(tmp_path, prefixes, size=(32, 32), per_class=15):
    files = {f"{p}/{i}.jpg": jpeg(size, seed=i) for p in prefixes for i in range(per_class)}
    return write_files(tmp_path / "mine", files)


def learn_a_little(benchmark):
    data = benchmark.load()
    stream = benchmark.stream(data, seed=0)
    learner = Learner(benchmark.network(), transform=benchmark.transform, steps_per_batch=1)
    for _, batch in zip(range(2), stream, strict=False):
        learner.learn(batch.inputs, batch.labels)
    return learner.predict(stream.tasks[0].test.inputs)


@pytest.mark.parametrize("size", [(32, 32), (8, 8)], ids=["resnet", "cnn"])
def test_a_folder_of_images_with_tasks_learns_without_code(tmp_path, size):
    benchmark = custom(folder(tmp_path, "abcd", size), tasks=2)
    assert len(benchmark.stream(benchmark.load(), seed=0).tasks) == 2
    assert len(learn_a_little(benchmark)) == 6


def test_a_folder_with_domains_needs_no_tasks(tmp_path):
    benchmark = custom(folder(tmp_path, ["old/a", "old/b", "new/a", "new/b"], (8, 8)))
    stream = benchmark.stream(benchmark.load(), seed=0)
    assert [task.name for task in stream.tasks] == ["new", "old"]


def test_arrays_of_numbers_get_an_mlp(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(5, 3, (60, 7)).astype(np.float32), np.arange(60) % 4
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y)
    benchmark = custom(tmp_path / "mine.npz", tasks=2)
    assert benchmark.network(4)(torch.zeros(2, 7)).shape == (2, 4)
    assert len(learn_a_little(benchmark)) > 0


def test_without_tasks_and_domains_it_says_what_to_give(tmp_path):
    with pytest.raises(InputError, match="--tasks"):
        custom(folder(tmp_path, "ab", (8, 8)))


def test_another_scenario_and_network_can_be_named(tmp_path):
    benchmark = custom(
        folder(tmp_path, "ab", (8, 8)), scenario=IID(), network="proxreplay.models:small_cnn"
    )
    assert len(benchmark.stream(benchmark.load(), seed=0).tasks) == 1
    assert benchmark.network(2)[0].in_channels == 3


def test_the_transform_normalises_what_it_was_fitted_to():
    inputs = torch.randint(0, 200, (300, 3, 8, 8), dtype=torch.uint8)
    view = fitting_transform(inputs, augment=False)(inputs)
    torch.testing.assert_close(view.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(view.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)


def test_constant_inputs_do_not_divide_by_zero():
    inputs = torch.full((5, 3, 4, 4), 7, dtype=torch.uint8)
    assert torch.isfinite(fitting_transform(inputs, augment=True)(inputs)).all()
