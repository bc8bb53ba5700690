import pytest
import torch
from torch import nn

from proxreplay.errors import InputError
from proxreplay.models import GrowingHead, resnet18, slim_resnet18


def count(module, without=""):
    return sum(
        p.numel() for n, p in module.named_parameters() if not without or not n.startswith(without)
    )


def test_slim_resnet18_is_that_of_the_paper():
    model = slim_resnet18(num_classes=100)
    assert count(model) == 1_109_240
    kinds = [type(m) for m in model.modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.BatchNorm2d), kinds.count(nn.Linear)) == (
        20,
        20,
        1,
    )
    assert nn.MaxPool2d not in kinds


@pytest.mark.parametrize(
    ("image_size", "features"), [(32, 160), (64, 640), (28, 160), (25, 160), (96, 1440)]
)
def test_slim_features_follow_the_image_size(image_size, features):
    model = slim_resnet18(num_classes=7, image_size=image_size).eval()
    assert model.head.in_features == features
    assert model(torch.zeros(2, 3, image_size, image_size)).shape == (2, 7)


def test_slim_pooling_is_by_4x4_windows_and_not_global():
    model = slim_resnet18(num_classes=5, image_size=64).eval()
    seen = {}
    model.layer4.register_forward_hook(lambda m, i, out: seen.update(map=out))
    model.head.register_forward_pre_hook(lambda m, i: seen.update(features=i[0]))
    model(torch.randn(2, 3, 64, 64))
    windows = seen["map"].view(2, 160, 2, 4, 2, 4).mean(dim=(3, 5))
    torch.testing.assert_close(seen["features"], windows.flatten(1))


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_block_is_what_its_formula_says(stage):
    block = getattr(slim_resnet18(num_classes=2), f"layer{stage}")[0].eval()
    x = torch.randn(2, block.conv1.in_channels, 8, 8)
    inner = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
    shortcut = x if stage == 1 else block.downsample[1](block.downsample[0](x))
    torch.testing.assert_close(block(x), (inner + shortcut).relu())
    assert (block.downsample is None) == (stage == 1)
    assert block.conv1.stride == ((1, 1) if stage == 1 else (2, 2))


def test_too_small_images_are_refused():
    with pytest.raises(InputError, match="image_size=24"):
        slim_resnet18(image_size=24)


def test_other_channels_and_widths():
    model = slim_resnet18(num_classes=3, in_channels=1, width=4).eval()
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 3)


def test_resnet18_has_torchvision_s_parameters():
    model = resnet18(num_classes=1000)
    assert count(model, without="fc.") == 11_176_512
    assert count(model) == 11_689_512
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert len(shapes) == 122
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.1.bn2.running_mean"] == (64,)
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert shapes["layer4.1.conv2.weight"] == (512, 512, 3, 3)
    assert shapes["fc.weight"] == (1000, 512)
    assert "layer1.0.downsample.0.weight" not in shapes


def test_resnet18_maps_224_pixels_to_7x7_before_the_average():
    model = resnet18(num_classes=4).eval()
    seen = {}
    model.layer4.register_forward_hook(lambda m, i, out: seen.update(shape=out.shape))
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 4)
    assert seen["shape"] == (1, 512, 7, 7)


def test_resnet18_is_initialised_as_torchvision_does():
    torch.manual_seed(0)
    weight = resnet18(num_classes=2).layer4[0].conv1.weight  # 256 to 512 channels
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("build", [slim_resnet18, resnet18])
def test_without_classes_the_head_grows(build):
    assert any(isinstance(m, GrowingHead) for m in build().modules())
