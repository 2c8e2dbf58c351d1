"""Representation-level steps are Algorithm 3 (and RMU, and UAM), on the fast and on the plain path."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rosu_llm.errors import ConfigError
from rosu_llm.representation.losses import bootstrap_noise, control_vectors
from tests.models import VOCABULARY, tiny_decoder
from tests.representation.naive import Naive, Shift, Step
from tests.representation.running import (
    Pairs,
    Recorder,
    build,
    configuration,
    documents,
    parameter_names,
    relative,
    train,
)

STEPS, ETA, RHO, NOISE = 5, 0.5, 0.3, 0.3
LAYER_NAME = "model.layers.2"

#: Large enough that activations move by more than float32 rounding, which r, a difference of activations, magnifies.
LARGE: dict[str, Any] = {"max_steps": STEPS, "learning_rate": ETA, "rho": RHO, "noise_std": NOISE}


def noise_of(trainer: Recorder, step: int) -> Shift:
    """σ of a step as the trainer's seed gives it."""
    settings = trainer.method_args
    draw = bootstrap_noise(trainer.args.seed, step, settings.noise_std, settings.noise_shape)
    return lambda _, hidden: draw(hidden.float())


def parts(trainer: Recorder, step: int) -> tuple[Any, Any]:
    data: Any = trainer.train_dataset
    chosen = slice(step * data.window, (step + 1) * data.window)
    return data.forget[chosen], data.retain[chosen]


def agree(trainer: Recorder, step: int, truth: Step, tolerance: float = 1e-5) -> None:
    """Losses, f, r and s of a step."""
    for name, value in truth.losses.items():
        assert trainer.outcomes[step].losses[name] == pytest.approx(value, rel=tolerance, abs=0.0), (step, name)
    for name, gradient in truth.gradients.items():
        if float(gradient.norm()) == 0.0:
            assert torch.equal(trainer.gradients[step][name], gradient)
        else:
            assert relative(trainer.gradients[step][name], gradient) < tolerance, (step, name)


# -- the two paths, and the paper -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "accumulation", "side"),
    [("llama", 1, "left"), ("llama", 2, "right"), ("mistral", 1, "right"), ("mistral", 2, "left")],
)
def test_five_steps_are_algorithm_3_on_both_paths(tmp_path: Path, family: str, accumulation: int, side: str) -> None:
    """Ragged batches; the naive side sees one document at a time, so that padding and windows must not matter."""
    model = tiny_decoder(family)
    shape = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4 // accumulation}
    settings = {**LARGE, **shape, "side": side}
    fast = train(copy.deepcopy(model), tmp_path / "fast", **settings)
    plain = train(copy.deepcopy(model), tmp_path / "plain", path="plain", **settings)
    naive = Naive(model, LAYER_NAME, parameter_names(family))
    start = naive.vector()
    for step in range(STEPS):
        truth = naive.algorithm_3(*parts(fast, step), noise_of(fast, step), eta=ETA, rho=RHO, beta=ETA / RHO)
        inner = fast.outcomes[step].inner
        assert inner is not None and inner.alpha == pytest.approx(truth.alpha, rel=1e-5)
        agree(fast, step, truth)
        agree(plain, step, truth)
        for name in ("f", "r", "s"):
            assert torch.equal(fast.gradients[step][name], plain.gradients[step][name])
    assert torch.equal(fast.theta(), plain.theta())
    # 1e-5 of the distance gone, not merely of the weights: those moved by a fifth of their norm
    assert relative(fast.theta() - start, naive.vector() - start) < 1e-5
    assert relative(naive.vector(), start) > 0.1


class Layer(nn.Module):
    """A tanh layer that looks back: float64 throughout, unlike HF's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        past = (hidden * weights).cumsum(1) / weights.cumsum(1).clamp(min=1.0)
        return hidden + self.out(torch.tanh(self.mix(torch.cat([hidden, past], -1))))


class Decoder(nn.Module):
    """Four such layers under a name of their own."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return SimpleNamespace(logits=hidden @ self.embed.weight.T)


@pytest.mark.parametrize(
    ("jacobian", "reduction", "path"),
    [
        ("relaxed", "token_mean", "plain"),
        ("relaxed", "token_mean", "fast"),
        ("relaxed", "paper", "fast"),
        ("relaxed", "rmu", "fast"),
        ("none", "paper", "fast"),
    ],
)
def test_a_float32_model_follows_the_float64_algorithm(
    tmp_path: Path, jacobian: str, reduction: str, path: str
) -> None:
    """Not an HF model at all: only its list of layers is named. The truth is float64 to the last operation."""
    model = Decoder()
    names = ["blocks.1.out.weight", "blocks.2.out.weight"]
    rate, radius = {"token_mean": (0.5, 0.3), "paper": (0.05, 0.3), "rmu": (2.0, 0.3)}[reduction]
    settings = {**LARGE, "learning_rate": rate, "rho": radius, "reduction": reduction, "jacobian": jacobian}
    trainer = train(
        copy.deepcopy(model),
        tmp_path,
        **settings,
        layer_stack="blocks",
        trainable_parameters=r"blocks\.(1|2)\.out",
        path=path,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    naive = Naive(copy.deepcopy(model).double(), "blocks.2", names, reduction)
    start = naive.vector()
    for step in range(STEPS):
        truth = naive.algorithm_3(
            *parts(trainer, step), noise_of(trainer, step), eta=rate, rho=radius, beta=rate / radius, jacobian=jacobian
        )
        agree(trainer, step, truth)
    assert relative(trainer.theta() - start, naive.vector() - start) < 1e-5


@pytest.mark.parametrize("components", ["delta_only", "v_only"])
def test_components_are_the_terms_of_the_update(tmp_path: Path, components: str) -> None:
    model = tiny_decoder()
    trainer = train(copy.deepcopy(model), tmp_path, components=components, **LARGE)
    naive = Naive(model, LAYER_NAME, parameter_names())
    start = naive.vector()
    for step in range(STEPS):
        noise = noise_of(trainer, step)
        truth = naive.algorithm_3(*parts(trainer, step), noise, eta=ETA, rho=RHO, beta=ETA / RHO, components=components)
        agree(trainer, step, truth)
    assert relative(trainer.theta() - start, naive.vector() - start) < 1e-5


def test_delta_alone_cannot_be_matched_to_a_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="amplify='optimizer'"):
        configuration(tmp_path, components="delta_only", amplify="matched")


# -- baselines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_rmu_is_its_published_objective(tmp_path: Path, path: str) -> None:
    """mean (h − c·u)² over the forget batch + α · mean (h − h₀)² over the retain batch, two corpora in turn."""
    model = tiny_decoder()
    corpora = [step % 2 for step in range(STEPS) for _ in range(4)]
    forget, retain = documents(4 * STEPS, 5), documents(4 * STEPS, 6)
    rows = [{"input_ids": ids, "corpus": corpus} for ids, corpus in zip(forget, corpora, strict=True)]

    class Labelled(Pairs):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"forget": rows[i], "retain": {"input_ids": retain[i]}}

    settings = {"method": "graddiff", "forget_loss": "rmu", "reduction": "rmu", "retain_weight": 3.0, "steering": 6.5}
    trainer = train(
        copy.deepcopy(model),
        tmp_path,
        options={"train_dataset": Labelled(forget, retain, 4)},
        max_steps=STEPS,
        learning_rate=0.05,
        path=path,
        **settings,
    )
    control = control_vectors(trainer.args.seed, 6.5)
    naive = Naive(model, LAYER_NAME, parameter_names(), "rmu")
    start = naive.vector()
    for step in range(STEPS):
        vector = control({"corpus": torch.tensor([step % 2])}, torch.zeros(1, 1, 32))[0, 0]
        window = slice(4 * step, 4 * step + 4)
        truth = naive.rmu(forget[window], retain[window], lambda _, h, v=vector: v.expand_as(h), alpha=3.0, eta=0.05)
        # the package raises a forget loss, so RMU's enters as its negative
        truth.losses["forget"] *= -1.0
        agree(trainer, step, truth)
    assert relative(trainer.theta() - start, naive.vector() - start) < 1e-5


def test_control_vectors_are_fixed_unit_vectors_times_c() -> None:
    control = control_vectors(7, 6.5)
    rows = control({"corpus": torch.tensor([0, 1, 0])}, torch.zeros(3, 5, 32))
    assert rows.shape == (3, 1, 32)
    assert torch.allclose(rows.norm(dim=-1), torch.tensor(6.5))
    assert torch.equal(rows[0], rows[2]) and not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[:1], control({}, torch.zeros(1, 9, 32)))  # without corpora: the first's
    assert not torch.equal(rows[:1], control_vectors(8, 6.5)({}, torch.zeros(1, 5, 32)))
    assert float(rows.min()) >= 0.0  # of uniform numbers in [0, 1), as published


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_uam_descends_at_the_forget_perturbation(tmp_path: Path, path: str) -> None:
    model = tiny_decoder()
    trainer = train(copy.deepcopy(model), tmp_path, method="uam", path=path, **LARGE)
    naive = Naive(model, LAYER_NAME, parameter_names())
    start = naive.vector()
    for step in range(STEPS):
        agree(trainer, step, naive.uam(*parts(trainer, step), noise_of(trainer, step), eta=ETA, rho=RHO))
    assert relative(trainer.theta() - start, naive.vector() - start) < 1e-5


# -- step 0 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("reduction", ["token_mean", "paper", "rmu"])
def test_step_0_is_the_closed_form(tmp_path: Path, reduction: str, path: str) -> None:
    """h = h₀ to the bit: the retain loss is zero, the forget loss a function of σ and the lengths alone."""
    trainer = train(tiny_decoder(), tmp_path, reduction=reduction, path=path, gradient_accumulation_steps=2)
    forget, _ = parts(trainer, 0)
    sigma = bootstrap_noise(trainer.args.seed, 0, 0.01, "hidden")(torch.zeros(1, 32)).double()
    square = float(sigma @ sigma)
    lengths = [len(document) for document in forget]
    assert len(set(lengths)) > 1
    expected = {
        "token_mean": 0.5 * square,
        "paper": 0.5 * square * sum(lengths) / len(lengths),
        "rmu": square / 32,
    }[reduction]
    outcome = trainer.outcomes[0]
    assert outcome.losses["retain"] == 0.0
    assert outcome.losses["forget"] == pytest.approx(expected, rel=1e-6)
    assert float(trainer.gradients[0]["r"].abs().max()) == 0.0
    # r = 0, so q = f: not below ε_q here, hence a perturbation of length ρ
    length = float(trainer.gradients[0]["f"].norm())
    assert length > 1e-6
    (logged,) = [entry for entry in trainer.state.log_history if "step/alpha" in entry]
    assert logged["step/fallback"] == 0.0
    assert logged["step/alpha"] == pytest.approx(0.4 / length, rel=1e-6)
    assert logged["perturb/norm"] == pytest.approx(0.4, rel=1e-5)
    assert logged["loss/retain"] == 0.0


def test_step_0_falls_back_where_the_forget_gradient_is_below_the_threshold(tmp_path: Path) -> None:
    model = tiny_decoder()
    trainer = train(model, tmp_path, noise_std=1e-9)
    assert 0.0 < float(trainer.gradients[0]["f"].norm()) <= 1e-6
    (logged,) = [entry for entry in trainer.state.log_history if "step/alpha" in entry]
    assert logged["step/fallback"] == 1.0 and logged["step/alpha"] == 0.0
    assert torch.equal(trainer.theta(), trainer.path_of_theta[0])  # −ηr with r = 0


# -- σ ----------------------------------------------------------------------------------------------------


def test_noise_is_drawn_once_per_step_from_the_seed() -> None:
    like = torch.zeros(3, 7, 64)
    one = bootstrap_noise(0, 4, 0.01, "hidden")
    assert one(like).shape == (64,)
    assert torch.equal(one(like), one(torch.zeros(1, 2, 64)))  # any micro-batch
    assert torch.equal(one(like), bootstrap_noise(0, 4, 0.01, "hidden")(like))  # any rank
    others = [bootstrap_noise(0, 5, 0.01, "hidden"), bootstrap_noise(1, 4, 0.01, "hidden")]
    assert all(not torch.equal(one(like), other(like)) for other in others)
    many = torch.cat([bootstrap_noise(0, step, 0.01, "hidden")(like) for step in range(200)]).double()
    # 12 800 draws: mean within 4 standard errors of 0, deviation within 4 of 0.01
    assert abs(float(many.mean())) < 4 * 0.01 / 12800**0.5
    assert float(many.std()) == pytest.approx(0.01, rel=4 / (2 * 12800) ** 0.5)
    state = torch.get_rng_state()
    one(like)
    assert torch.equal(state, torch.get_rng_state())


def test_token_noise_differs_between_positions_and_is_shared_by_sequences(tmp_path: Path) -> None:
    draw = bootstrap_noise(3, 0, 0.01, "token")
    sigma = draw(torch.zeros(3, 7, 32))
    assert sigma.shape == (7, 32)
    assert not torch.equal(sigma[0], sigma[1])
    assert torch.equal(sigma[:5], draw(torch.zeros(1, 5, 32)))  # a shorter batch sees the beginning
    trainer = train(tiny_decoder(), tmp_path, noise_shape="token", gradient_accumulation_steps=2, seed=3)
    forget, _ = parts(trainer, 0)
    sigma = draw(torch.zeros(1, 16, 32)).double()
    squares = [float(sigma[t] @ sigma[t]) for document in forget for t in range(len(document))]
    assert trainer.outcomes[0].losses["forget"] == pytest.approx(0.5 * sum(squares) / len(squares), rel=1e-6)


def test_every_step_has_its_own_noise_and_other_seeds_other_noise(tmp_path: Path) -> None:
    """At a learning rate of almost nothing h stays h₀, and the forget loss of a step is ½‖σ‖² of its σ."""
    for seed in (0, 1):
        trainer = train(tiny_decoder(), tmp_path / str(seed), max_steps=3, learning_rate=1e-30, seed=seed)
        losses = [outcome.losses["forget"] for outcome in trainer.outcomes]
        sigmas = [bootstrap_noise(seed, step, 0.01, "hidden")(torch.zeros(1, 32)).double() for step in range(3)]
        assert losses == pytest.approx([0.5 * float(s @ s) for s in sigmas], rel=1e-6)
        assert len(set(losses)) == 3


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
def test_bf16_does_not_swallow_the_noise(tmp_path: Path, autocast: bool, path: str) -> None:
    """Activations of size 1 have bf16 steps of 0.008: σ = 0.01 must be added to their float32 difference."""
    model = tiny_decoder(dtype=torch.float32 if autocast else torch.bfloat16)
    trainer = train(model, tmp_path, bf16=autocast, path=path, max_steps=3)
    assert {p.dtype for p in trainer._theta.values()} == {torch.float32}
    sigma = bootstrap_noise(trainer.args.seed, 0, 0.01, "hidden")(torch.zeros(1, 32)).double()
    assert trainer.outcomes[0].losses["retain"] == 0.0
    assert trainer.outcomes[0].losses["forget"] == pytest.approx(0.5 * float(sigma @ sigma), rel=1e-6)
    moved = (trainer.theta() - trainer.path_of_theta[0]).norm()
    assert float(moved) > 0.0
    assert trainer.outcomes[2].losses["retain"] > 0.0


def test_bf16_steps_stay_near_the_float32_ones(tmp_path: Path) -> None:
    """The same weights, frozen part rounded: f agrees to bf16's three digits."""
    rounded = tiny_decoder(dtype=torch.bfloat16)
    low = train(copy.deepcopy(rounded), tmp_path / "low", **LARGE)
    high = train(copy.deepcopy(rounded).float(), tmp_path / "high", **LARGE)
    assert relative(low.gradients[0]["f"], high.gradients[0]["f"]) < 0.02
    assert relative(low.theta() - low.path_of_theta[0], high.theta() - high.path_of_theta[0]) < 0.1


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_trained_weight_beside_a_frozen_bias_in_bf16(tmp_path: Path, trained: str, path: str) -> None:
    model = tiny_decoder("phi", dtype=torch.bfloat16)
    where = rf"layers\.(1|2)\.mlp\.fc2\.{trained}$"
    trainer = train(model, tmp_path / "out", trainable_parameters=where, path=path, max_steps=2)
    assert trainer.outcomes[0].losses["retain"] == 0.0
    assert float((trainer.theta() - trainer.path_of_theta[0]).norm()) > 0.0
    trainer.save_model()
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


# -- padding ----------------------------------------------------------------------------------------------


def test_padding_is_masked_out(tmp_path: Path) -> None:
    """Another pad token and another side: nothing changes beyond rounding (rotary positions shift)."""
    runs = [
        train(tiny_decoder(), tmp_path / f"{side}{pad}", side=side, pad=pad, **{**LARGE, "max_steps": 3})
        for side, pad in (("right", 0), ("right", 9), ("left", 0), ("left", 9))
    ]
    for other in runs[1:]:
        assert relative(other.theta() - other.path_of_theta[0], runs[0].theta() - runs[0].path_of_theta[0]) < 1e-5
    assert torch.equal(runs[0].theta(), runs[1].theta())  # a right pad is seen by nobody


def test_padding_counts_where_it_is_not_masked(tmp_path: Path) -> None:
    """As in RMU's code: the mean runs over every place, and pads are places."""
    model = tiny_decoder()
    settings = {**LARGE, "reduction": "rmu", "mask_padding": False, "max_steps": 2}
    one = train(copy.deepcopy(model), tmp_path / "a", pad=0, **settings)
    two = train(copy.deepcopy(model), tmp_path / "b", pad=9, **settings)
    assert relative(one.theta(), two.theta()) > 1e-4
    # by hand: in a batch padded with 9 every sequence is as long as the longest
    batch = two.windows[0][0]["forget"]
    layers: list[Tensor] = []
    for weights in (model, two.model):
        hook = weights.get_submodule(LAYER_NAME).register_forward_hook(
            lambda _, __, out: layers.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            weights(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        hook.remove()
    sigma = bootstrap_noise(two.args.seed, 2, NOISE, "hidden")(layers[0]).double()
    expected = float(((layers[1].double() - layers[0].double() + sigma) ** 2).mean())
    two.state.global_step = 2
    assert float(two.compute_loss(two.model, {"forget": batch})) == pytest.approx(expected, rel=1e-5)


# -- dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_dropout_has_no_effect(tmp_path: Path, path: str) -> None:
    settings = {**LARGE, "max_steps": 2, "path": path}
    dry = train(tiny_decoder(), tmp_path / "dry", **settings)
    wet = train(tiny_decoder(attention_dropout=0.5), tmp_path / "wet", **settings)
    assert wet.outcomes[0].losses["retain"] == 0.0
    assert torch.equal(dry.theta(), wet.theta())


# -- cost -------------------------------------------------------------------------------------------------


def test_the_frozen_layers_run_once_per_batch(tmp_path: Path) -> None:
    """Layer 0 sees each forget and each retain batch once; the trained ones thrice for retain (θ₀, θ, θ+δ)."""
    model = tiny_decoder()
    trainer = build(model, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    calls = dict.fromkeys(range(4), 0)
    for i in calls:
        model.model.layers[i].register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    trainer.train()
    batches = 2
    assert calls == {0: 2 * batches, 1: (2 + 3) * batches, 2: (2 + 3) * batches, 3: 0}
    assert not trainer._prepared
