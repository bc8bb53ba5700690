import pytest
import torch
from torch import nn

from proxreplay.errors import InputError
from proxreplay.models import GrowingHead, load_network, mlp, small_cnn

SOURCE = """
from torch import nn

def fixed():
    return nn.Linear(3, 4)

def fitted(num_classes, in_channels):
    return nn.Conv2d(in_channels, num_classes or 1, 1)

class Own(nn.Module):
    def __init__(self, image_size):
        super().__init__()
        self.size = image_size

def wrong():
    return "a string"

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(SOURCE)
    return path


def test_mlp_and_small_cnn_give_logits():
    assert mlp(12, 5, hidden=(7,))(torch.zeros(2, 3, 4)).shape == (2, 5)
    assert small_cnn(3, 5).eval()(torch.zeros(2, 3, 9, 9)).shape == (2, 5)
    assert isinstance(mlp(4).head, GrowingHead)


@pytest.mark.parametrize("name", ["fixed", "fitted", "Own"])
def test_a_network_is_given_what_it_has_parameters_for(file, name):
    network = load_network(f"{file}:{name}", 9, in_channels=2, image_size=16)
    facts = {
        "fixed": lambda n: n.out_features == 4,
        "fitted": lambda n: (n.in_channels, n.out_channels) == (2, 9),
        "Own": lambda n: n.size == 16,
    }
    assert isinstance(network, nn.Module)
    assert facts[name](network)


def test_a_network_from_an_installed_package():
    network = load_network("proxreplay.models:slim_resnet18", None, in_channels=1, image_size=64)
    assert network.head.in_features == 640
    assert network.conv1.in_channels == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("justaname", "package.module:name, or", id="no-colon"),
        pytest.param(":name", "package.module:name, or", id="no-module"),
        pytest.param("proxreplay.models:", "package.module:name, or", id="no-name"),
        pytest.param("no.such.module:f", "No module named", id="no-such-module"),
        pytest.param("proxreplay.models:nothing", "has no function or class", id="no-such-name"),
        pytest.param("gone/nets.py:f", "does not exist", id="no-such-file"),
    ],
)
def test_a_bad_path_says_what_is_wrong(spec, message):
    with pytest.raises(InputError, match=message):
        load_network(spec, None, 3, 32)


def test_what_is_no_network_is_refused(file):
    with pytest.raises(InputError, match="returned str"):
        load_network(f"{file}:wrong", None, 3, 32)
    with pytest.raises(InputError, match="has no function or class 'number'"):
        load_network(f"{file}:number", None, 3, 32)


@pytest.mark.parametrize(("sizes", "words"), [(100, r"such as \(100,\)"), ((8, "x"), r"\[1\]='x'")])
def test_sizes_are_one_whole_number_per_layer(sizes, words):
    with pytest.raises(InputError, match=f"hidden.*{words}"):
        mlp(12, hidden=sizes)
