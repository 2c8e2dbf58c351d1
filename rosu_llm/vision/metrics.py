"""RA, FA, TA, ΔAcc and MIA-Eff: what the paper's vision tables show (appendix, "Evaluation metrics"), in per cent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import ConfigError
from ..losses.reference import evaluating
from .batches import normalised
from .images import Images

ACCURACIES = ("RA", "FA", "TA")


@torch.no_grad()
def predictions(
    model: nn.Module, images: Images, mean: tuple[float, ...], std: tuple[float, ...], *, batch_size: int = 512
) -> Tensor:
    """Class probabilities of every image, in float32 on the CPU."""
    device = next(model.parameters()).device
    found = []
    with evaluating(model):
        for pixels in images.pixels.split(batch_size):
            logits = model(pixel_values=normalised(pixels, mean, std).to(device)).logits
            found.append(logits.float().softmax(-1).cpu())
    return torch.cat(found)


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Share of images whose most probable class is their own."""
    return 100.0 * float((probabilities.argmax(-1) == labels).double().mean())


def true_class(probabilities: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """p(label) of every image."""
    return probabilities.gather(1, labels[:, None])[:, 0].double().numpy()


def check_attack() -> None:
    """Raise where MIA-Eff cannot be measured: asked before anything is trained."""
    try:
        import sklearn.svm  # noqa: F401
    except ImportError as error:
        raise ConfigError("MIA-Eff needs scikit-learn: pip install rosu-llm[vision].") from error


def mia_efficacy(
    members: NDArray[np.float64], non_members: NDArray[np.float64], forgotten: NDArray[np.float64], *, seed: int = 0
) -> float:
    """Share of forgotten images that an attack calls non-members.

    The attack is a support vector machine (rbf, C = 3, γ = 1/#features) on p(label), trained on as many members (retain
    images) as non-members (test images), drawn by ``seed``.
    """
    check_attack()
    from sklearn.svm import SVC

    count = min(len(members), len(non_members))
    draw = np.random.default_rng(seed)
    chosen = [own[np.sort(draw.permutation(len(own))[:count])] for own in (members, non_members)]
    attack = SVC(C=3, gamma="auto", kernel="rbf")
    attack.fit(np.concatenate(chosen)[:, None], np.repeat([1, 0], count))
    return 100.0 * float(np.mean(attack.predict(forgotten[:, None]) == 0))


def delta_accuracy(found: Mapping[str, float], retrained: Mapping[str, float]) -> float:
    """Σ |difference to the retrained model| over RA, FA and TA."""
    return sum(abs(found[name] - retrained[name]) for name in ACCURACIES)
