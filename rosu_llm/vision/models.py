"""ResNet-18 and VGG-16 with BatchNorm for small images, in plain torch; others by name from torchvision or timm.

ResNet-18 for 32×32 has a 3×3 stem of stride 1 and no max-pooling (the usual CIFAR form); ``width`` is the number of
channels of its first stage, 64 in the paper. VGG-16 ends in global pooling and one linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from ..errors import ConfigError, DataError, unknown
from ..files import read_json, write_json

MODELS = ("resnet18", "vgg16_bn")
_VGG16 = (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0)
WEIGHTS, DESCRIPTION = "model.safetensors", "vision.json"


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inside + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two residual blocks, of ``width``, 2, 4 and 8 times as many channels."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        plan = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
        self.blocks = nn.Sequential(*(Residual(a * width, b * width, stride) for a, b, stride in plan))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        x = self.blocks(functional.relu(self.stem_bn(self.stem(pixel_values))))
        return ImageClassifierOutput(logits=self.head(x.mean((2, 3))))


class VGG16BN(nn.Module):
    """Thirteen 3×3 convolutions with BatchNorm and five poolings."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inner = 3
        for times in _VGG16:
            if times == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            outer = times * width
            layers += [nn.Conv2d(inner, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU()]
            inner = outer
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inner, classes)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.head(self.blocks(pixel_values).mean((2, 3))))


class OtherClassifier(nn.Module):
    """A model of another library, which takes and returns a plain tensor."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.inside(pixel_values))


def build_model(name: str, *, classes: int, width: int, seed: int, side: int = 32) -> nn.Module:
    """A new model; of ``torchvision:NAME`` and ``timm:NAME``, where installed, ``width`` is their own."""
    if width < 1:
        raise ConfigError(f"width={width} is no number of channels: give 64 for the paper's size, 16 for a CPU.")
    if name == "vgg16_bn" and side < 32:
        raise ConfigError(f"model='vgg16_bn' halves its input five times, and images are {side} wide: use resnet18.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "resnet18":
            return _initialised(ResNet18(classes, width))
        if name == "vgg16_bn":
            return _initialised(VGG16BN(classes, width))
        library, _, other = name.partition(":")
        if library not in ("torchvision", "timm") or not other:
            raise unknown("model", name, (*MODELS, "torchvision:NAME", "timm:NAME"))
        return OtherClassifier(_of_library(library, other, classes))


def _of_library(library: str, name: str, classes: int) -> nn.Module:
    try:
        if library == "timm":
            import timm

            made: nn.Module = timm.create_model(name, num_classes=classes)
        else:
            import torchvision

            made = torchvision.models.get_model(name, num_classes=classes)
    except ImportError as error:
        raise ConfigError(
            f"model='{library}:{name}' needs {library}: pip install {library}, or use {' or '.join(MODELS)}."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"model='{library}:{name}': {library} says {error}") from error
    return made


def _initialised(model: nn.Module) -> nn.Module:
    """He et al.'s initial weights for convolutions."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def head_of(model: nn.Module) -> nn.Linear:
    """The last linear layer."""
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no linear layer that could be its head.")
    return found[-1]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some layer normalises over the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def save_model(model: nn.Module, folder: Path, description: Mapping[str, Any]) -> None:
    """Weights as safetensors, and what they are weights of."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{WEIGHTS}.partial"
    save_file({name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}, partial)
    write_json(folder / DESCRIPTION, dict(description))
    partial.replace(folder / WEIGHTS)


def load_model(folder: Path, model: nn.Module) -> nn.Module:
    """The weights of a folder in a model of the same shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        what = read_json(folder / DESCRIPTION) if (folder / DESCRIPTION).is_file() else "unknown"
        raise DataError(f"{folder} does not hold this model's weights (it holds {what}): {error}") from error
    return model
