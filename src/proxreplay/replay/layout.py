"""When to keep images in NHWC order (channels_last): it is faster, and once not safe."""

import logging

import torch
from torch import nn

log = logging.getLogger(__name__)

# Below this many input channels the backward pass of a strided 1x1 convolution in channels_last
# order writes past its buffers on the CPU (seen with torch 2.13: 2 to 7 channels).
_SAFE_CHANNELS = 8


def channels_last_is_safe(model: nn.Module, device: torch.device) -> bool:
    """Whether torch's kernels can be trusted with channels_last for this model and device.

    >>> risky = nn.Conv2d(4, 8, kernel_size=1, stride=2)
    >>> channels_last_is_safe(risky, torch.device("cpu"))
    False
    """
    if device.type != "cpu":
        return True
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and _overruns(module):
            log.info(
                "channels_last is left off: %s is a strided 1x1 convolution with fewer than %d "
                "input channels, which torch's CPU kernel does not handle in that order",
                name or type(module).__name__,
                _SAFE_CHANNELS,
            )
            return False
    return True


def _overruns(layer: nn.Conv2d) -> bool:
    strided = max(layer.stride) > 1 and max(layer.kernel_size) == 1
    return strided and layer.in_channels // layer.groups < _SAFE_CHANNELS
