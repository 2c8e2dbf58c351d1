"""FF and IU against dense transcriptions, MIA-Eff against scikit-learn itself, models against known sizes."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.vision.batches import normalised
from rosu_llm.vision.metrics import accuracy, delta_accuracy, mia_efficacy, predictions, true_class
from rosu_llm.vision.models import build_model, load_model, save_model
from rosu_llm.vision.one_step.fisher import fisher_forgetting
from rosu_llm.vision.one_step.influence import influence_unlearning
from tests.models import flat
from tests.vision.small import CLASSES, MEAN, STD, SmallCNN, images


def gradient(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(pixels).logits, labels)
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def test_fisher_forgetting_is_noise_by_the_inverse_fisher_with_a_loud_head() -> None:
    model = SmallCNN().double().eval()
    before = copy.deepcopy(model)
    pixels = normalised(images(12).pixels, MEAN, STD).double()
    fisher_forgetting(model, pixels, strength=1e-4, seed=3)

    drawn = torch.multinomial(
        before(pixels).logits.softmax(-1).detach(), 1, generator=torch.Generator().manual_seed(3)
    )[:, 0]
    fisher = sum(gradient(before, pixels[i : i + 1], drawn[i : i + 1]) ** 2 for i in range(12)) / 12
    variance = 1e-4 * torch.minimum(1.0 / (fisher + 1e-8), torch.tensor(1e3))
    head = torch.cat(
        [torch.full((p.numel(),), 10.0 if n.startswith("head") else 1.0) for n, p in model.named_parameters()]
    )
    noise = torch.randn(len(variance), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = flat(before.parameters()) + (variance * head).sqrt() * noise
    assert torch.allclose(flat(model.parameters()), expected, rtol=1e-9, atol=1e-12)
    assert bool((variance == 0.1).any())  # some weights matter so little that the ceiling holds


def test_influence_unlearning_is_the_recursion_over_single_gradients() -> None:
    model = SmallCNN().double().eval()
    before = copy.deepcopy(model)
    data = images(30)
    pixels, labels = normalised(data.pixels, MEAN, STD).double(), data.labels
    batches = lambda rows: [(pixels[r], labels[r]) for r in rows.split(7)]
    forget, retain = torch.arange(9), torch.arange(9, 30)
    curvature = (pixels[9:20], labels[9:20])
    influence_unlearning(model, batches(forget), batches(retain), curvature, share=0.3, strength=5.0)

    v = 0.3 * (gradient(before, pixels[:9], labels[:9]) - gradient(before, pixels[9:], labels[9:]))
    rows = [gradient(before, pixels[i : i + 1], labels[i : i + 1]) for i in range(9, 20)]
    k, o, count = v.clone(), rows[0].clone(), 11
    for g in rows[1:]:
        shrunk = float(o @ g) / (count + float(o @ g))
        k = k - float(k @ g) / (count + float(o @ g)) * o
        o = (1.0 - shrunk) * o
    expected = flat(before.parameters()) + 5.0 * k
    assert torch.allclose(flat(model.parameters()), expected, rtol=1e-9, atol=1e-12)
    # to first order it raises what it forgets against what it keeps
    change = flat(model.parameters()) - flat(before.parameters())
    assert float(change @ v) > 0.0


def test_mia_efficacy_is_what_scikit_learn_says() -> None:
    from sklearn.svm import SVC

    draw = np.random.default_rng(0)
    members, others, forgotten = draw.beta(9, 1, 300), draw.beta(3, 2, 90), draw.beta(5, 2, 50)
    order = np.random.default_rng(7)
    chosen = members[np.sort(order.permutation(300)[:90])]
    x = np.concatenate([chosen, others]).reshape(-1, 1)
    y = np.array([1] * 90 + [0] * 90)
    called = SVC(C=3, gamma="auto", kernel="rbf").fit(x, y).predict(forgotten.reshape(-1, 1))
    assert mia_efficacy(members, others, forgotten, seed=7) == pytest.approx(100.0 * (called == 0).mean())
    assert 0.0 < mia_efficacy(members, others, forgotten, seed=7) < 100.0
    assert mia_efficacy(np.full(20, 0.99), np.full(20, 0.2), np.full(5, 0.2)) == 100.0


def test_accuracies_are_counted_in_evaluation_mode() -> None:
    model, data = SmallCNN().train(), images(20)
    found = predictions(model, data, MEAN, STD, batch_size=6)
    twin = copy.deepcopy(model).eval()
    logits = twin(normalised(data.pixels, MEAN, STD)).logits
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, data.labels, strict=True))
    assert accuracy(found, data.labels) == pytest.approx(100.0 * right / 20)
    own = [float(row.softmax(-1)[label]) for row, label in zip(logits, data.labels, strict=True)]
    assert true_class(found, data.labels) == pytest.approx(own, rel=1e-5)
    assert model.training
    gold, mine = {"RA": 99.0, "FA": 95.0, "TA": 94.0}, {"RA": 98.0, "FA": 97.0, "TA": 93.5}
    assert delta_accuracy(mine, gold) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("name", "width", "parameters"),
    # the known sizes of the CIFAR forms; a quarter of the width by the same count
    [("resnet18", 64, 11_173_962), ("vgg16_bn", 64, 14_728_266), ("resnet18", 16, 701_466)],
)
def test_models_have_their_known_size(name: str, width: int, parameters: int) -> None:
    model = build_model(name, classes=10, width=width, seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_models_are_seeded_saved_and_read(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    model = build_model("vgg16_bn", classes=CLASSES, width=2, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(
        flat(model.parameters()), flat(build_model("vgg16_bn", classes=CLASSES, width=2, seed=1).parameters())
    )
    x = torch.randn(2, 3, 64, 64)
    assert model(pixel_values=x).logits.shape == (2, CLASSES)
    save_model(model, tmp_path, {"width": 2})
    again = load_model(tmp_path, build_model("vgg16_bn", classes=CLASSES, width=2, seed=9))
    assert torch.equal(model.eval()(x).logits, again.eval()(x).logits)
    with pytest.raises(DataError, match="does not hold this model's weights"):
        load_model(tmp_path, build_model("vgg16_bn", classes=CLASSES, width=4, seed=0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "resnet50"}, "Unknown model 'resnet50'"),
        ({"name": "resnet18", "width": 0}, "width=0"),
        ({"name": "vgg16_bn", "side": 16}, "halves its input five times"),
        ({"name": "nowhere:x"}, "Unknown model"),
    ],
)
def test_models_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_model(**{"classes": 3, "width": 4, "seed": 0, **options})  # type: ignore[arg-type]
