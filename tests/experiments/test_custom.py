import numpy as np
import pytest
import torch

from proxreplay.data import IID, Examples
from proxreplay.errors import InputError
from proxreplay.experiments.build import build_network
from proxreplay.experiments.configure import configure
from proxreplay.experiments.custom import custom, fitting_transform
from proxreplay.experiments.run import run
from proxreplay.replay import Learner
from tests.data.data_samples import jpeg, write_files


def examples(shape):
    torch.manual_seed(0)
    return Examples(torch.randint(0, 200, shape, dtype=torch.uint8), torch.zeros(shape[0]).long())


def folder(tmp_path, prefixes, size=(32, 32), per_class=15):
    files = {f"{p}/{i}.jpg": jpeg(size, seed=i) for p in prefixes for i in range(per_class)}
    return write_files(tmp_path / "mine", files)


def learn_a_little(benchmark):
    data = benchmark.load()
    stream = benchmark.scenario.stream(data, seed=0)
    learner = Learner(benchmark.network(), transform=benchmark.transform, steps_per_batch=1)
    for _, batch in zip(range(2), stream, strict=False):
        learner.learn(batch.inputs, batch.labels)
    return learner.predict(stream.tasks[0].test.inputs)


@pytest.mark.parametrize("size", [(32, 32), (8, 8)], ids=["resnet", "cnn"])
def test_a_folder_of_images_with_tasks_learns_without_code(tmp_path, size):
    benchmark = custom(folder(tmp_path, "abcd", size), tasks=2)
    assert len(benchmark.scenario.stream(benchmark.load(), seed=0).tasks) == 2
    assert len(learn_a_little(benchmark)) == 6


def test_a_folder_with_domains_needs_no_tasks(tmp_path):
    benchmark = custom(folder(tmp_path, ["old/a", "old/b", "new/a", "new/b"], (8, 8)))
    stream = benchmark.scenario.stream(benchmark.load(), seed=0)
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
    benchmark = custom(folder(tmp_path, "ab", (8, 8)), scenario=IID())
    assert len(benchmark.scenario.stream(benchmark.load(), seed=0).tasks) == 1
    config = configure("custom", "er", {"network": "proxreplay.models:mlp"})
    assert build_network(config, benchmark, benchmark.load())[1].in_features == 3 * 8 * 8


def test_the_transform_normalises_what_it_was_fitted_to():
    data = examples((300, 3, 8, 8))
    view = fitting_transform(data, augment=False)(data.inputs)
    torch.testing.assert_close(view.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(view.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)


def test_constant_inputs_do_not_divide_by_zero():
    inputs = torch.full((5, 3, 4, 4), 7, dtype=torch.uint8)
    transform = fitting_transform(Examples(inputs, torch.zeros(5).long()), augment=True)
    assert torch.isfinite(transform(inputs)).all()


@pytest.mark.parametrize(
    ("shape", "grey", "augment", "padding", "flip"),
    [
        pytest.param((3, 32, 32), False, None, 4, False, id="colour"),
        pytest.param((3, 32, 32), True, None, 0, False, id="grey-stored-as-colour"),
        pytest.param((1, 28, 28), True, None, 0, False, id="grey"),
        pytest.param((3, 8, 8), False, None, 0, False, id="small"),
        pytest.param((3, 8, 8), False, True, 1, True, id="asked-for"),
        pytest.param((1, 32, 32), True, "crop", 4, False, id="only-crops"),
        pytest.param((3, 32, 32), False, False, 0, False, id="nothing"),
    ],
)
def test_augmentation_is_chosen_by_what_the_data_is(shape, grey, augment, padding, flip):
    data = examples((20, *shape))
    if grey:
        data = Examples(data.inputs[:, :1].expand(-1, shape[0], -1, -1).clone(), data.labels)
    transform = fitting_transform(data, augment)
    assert (transform.crop_padding, transform.flip) == (padding, flip)


def test_what_was_chosen_is_said_with_the_key_that_changes_it(tmp_path, caplog):
    custom(folder(tmp_path, "ab", (8, 8)), tasks=2)
    assert "random augmentation: none" in caplog.text
    assert "stream.augment" in caplog.text


@pytest.mark.parametrize("count", [1, 4])
def test_a_class_with_too_few_images_is_named(tmp_path, count):
    path = folder(tmp_path, "ab", (8, 8))
    write_files(path, {f"rare/{i}.jpg": jpeg((8, 8)) for i in range(count)})
    with pytest.raises(InputError, match=r"class 'rare' has \d .* at least 5 examples"):
        custom(path, tasks=3)


def test_five_images_of_each_class_are_enough(tmp_path):
    path = folder(tmp_path, "abcd", (8, 8), per_class=5)
    out = tmp_path / "run"
    config = configure("custom", "er", {"stream.data": str(path), "stream.tasks": 4})
    assert len(run(config, out).test_accuracy) == 4


def test_the_folder_that_one_is_in_can_be_named_by_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(folder(tmp_path, "ab", (8, 8)))
    assert custom(".", tasks=2).load().name == "mine"
