"""A diagnosis changes nothing, holds little, follows the settings, and says what it cannot use."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from rosu_llm import measure_coupling
from rosu_llm.analysis.coupling.full_batch import growing_sizes
from rosu_llm.analysis.coupling.pairs import CouplingPlan, PairWindows
from rosu_llm.analysis.coupling.parts import ModelParts, part_of
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.errors import ConfigError, DataError, NonFiniteError
from rosu_llm.losses import COUNT, token_nll
from rosu_llm.representation.config import RepresentationArguments
from rosu_llm.training.config import MethodArguments
from rosu_llm.training.references import References
from tests.models import CleanLM, flat, samples, tiny_llama

SMALL: dict[str, Any] = {
    "pairs": 2,
    "forget_batch_size": 3,
    "retain_batch_size": 4,
    "rhos": (0.1, 0.4),
    "points": 0,
    "progress": False,
}


def measure(model: nn.Module, forget: Any = None, retain: Any = None, **options: Any) -> Any:
    forget = samples(8, seed=1) if forget is None else forget
    retain = samples(9, seed=2) if retain is None else retain
    return measure_coupling(model, forget, retain, **{**SMALL, **options})


def adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_changed(lora: bool, fails: bool) -> None:
    """Weights bit for bit, .grad (the very tensors), modes of all modules, random state; also after an error."""
    model = tiny_llama(dropout=0.5)
    model = adapter(model) if lora else model
    model.train()
    model.get_input_embeddings().eval()
    for p in list(model.parameters())[::2]:
        p.grad = torch.randn_like(p) if p.requires_grad else None
    grads = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    trainable = [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()
    if fails:
        with pytest.raises(NonFiniteError, match="No pair"):
            measure(model, rhos=(0.1, 1e30))
    else:
        measure(model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for p, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is grad
        assert value is None or torch.equal(p.grad, value)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert torch.equal(torch.get_rng_state(), random)


class Gambling(CleanLM):
    """Takes a random number in every forward, whatever the mode."""

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        result = super().forward(input_ids, **rest)
        result.logits = result.logits * (1.0 + 0.1 * torch.rand(1, dtype=torch.float64))
        return result


def test_random_numbers_are_the_same_in_all_passes_and_given_back() -> None:
    model = Gambling().double()
    random = torch.get_rng_state()
    found = measure(model, rhos=(1e-4,))
    assert torch.equal(torch.get_rng_state(), random)
    for record in found.records:  # with other numbers in each pass, changes would not be first order
        assert record.standard is not None
        assert record.standard.forget[0] == pytest.approx(1e-4 * record.standard.forget_slope, rel=1e-2)


def test_dropout_is_off_and_the_run_repeats() -> None:
    with_dropout, without = tiny_llama(dropout=0.5).train(), tiny_llama().eval()
    first, second = measure(with_dropout), measure(without)
    assert [r.cosine for r in first.records] == [r.cosine for r in second.records]


def test_checkpointed_layers_go_on_dropping_activations() -> None:
    model = tiny_llama()
    expected = measure(model).records[0].cosine
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.eval()
    calls = []
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            inner = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = lambda *a, inner=inner, **k: (calls.append(1), inner(*a, **k))[1]
    assert measure(model).records[0].cosine == pytest.approx(expected, rel=1e-4)
    assert calls


def test_no_more_than_two_copies_are_held() -> None:
    """One captured gradient and the backup of the weights; the retain gradient stays in .grad."""
    model = tiny_llama()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert measure(model).setup["held_bytes"] == 2 * whole


def test_gradients_are_those_of_the_losses_on_the_drawn_samples() -> None:
    """Against autograd on the batch as a whole, in float64, with tied weights counted once."""
    model = CleanLM(tied=True).double()
    found = measure(model, micro_batch_size=2)
    forget, retain = samples(8, seed=1), samples(9, seed=2)

    def gradient(data: Any, part: str) -> torch.Tensor:
        plan = CouplingPlan(pairs=2, forget_batch_size=3, retain_batch_size=4)
        windows = PairWindows(
            model, {"forget": forget, "retain": retain}, {}, plan, ForgetRetainCollator(), lambda b: b
        )
        batch = ForgetRetainCollator()([data[i] for i in windows.draw(part, 1)])
        loss = token_nll(model(**batch).logits, batch["labels"]).sum() / COUNT["token"](batch)
        return flat(torch.autograd.grad(loss, list(model.parameters())))

    f, r = gradient(forget, "forget"), gradient(retain, "retain")
    record = found.records[0]
    assert record.cosine == pytest.approx(float(f @ r / (f.norm() * r.norm())), rel=1e-9)
    assert record.forget_norm == pytest.approx(float(f.norm()), rel=1e-9)
    assert record.retain_square == pytest.approx(float(r @ r), rel=1e-9)
    assert found.setup["parameters"] == sum(p.numel() for p in model.parameters())


def test_the_full_batch_is_autograd_over_all_samples_and_the_advice_is_about_it() -> None:
    model, forget, retain = CleanLM().double(), samples(8, seed=1), samples(9, seed=2)
    found = measure(model, forget, retain, full_batch=True, micro_batch_size=2)

    def gradient(data: Any) -> torch.Tensor:
        batch = ForgetRetainCollator()(data)
        loss = token_nll(model(**batch).logits, batch["labels"]).sum() / COUNT["token"](batch)
        return flat(torch.autograd.grad(loss, list(model.parameters())))

    f, r = gradient(forget), gradient(retain)
    whole = found.document["full_batch"]
    cosine = float(f @ r / (f.norm() * r.norm()))
    assert whole["coupling"]["cosine"]["mean"] == pytest.approx(cosine, rel=1e-9)
    assert whole["coupling"]["retain_norm"]["mean"] == pytest.approx(float(r.norm()), rel=1e-9)
    assert f"cos θ = {cosine:.2f} over all samples" in found.advice
    # The curve: batches of 3 and 4, then of all 8 and 9 (which is the limit and not measured again).
    (point,) = whole["curve"]
    assert (point["forget_batch_size"], point["retain_batch_size"], point["pairs"]) == (3, 4, 2)
    plan = CouplingPlan(pairs=2, forget_batch_size=3, retain_batch_size=4)
    windows = PairWindows(model, {"forget": forget, "retain": retain}, {}, plan, list, list)
    parts = {"forget": forget, "retain": retain}
    drawn = [[gradient([parts[p][i] for i in windows.draw(p, pair)]) for p in parts] for pair in (1, 2)]
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in drawn]
    aligned = [float(b @ r / (b.norm() * r.norm())) for _, b in drawn]
    assert point["cosine"]["mean"] == pytest.approx(sum(cosines) / 2, rel=1e-9)
    assert point["retain_alignment"]["mean"] == pytest.approx(sum(aligned) / 2, rel=1e-9)
    assert measure(model, forget, retain).document["full_batch"] is None


@pytest.mark.parametrize(
    ("batch", "whole", "sizes"),
    [
        ((8, 8), (400, 3600), [(8, 8), (32, 32), (128, 128), (400, 512), (400, 2048)]),
        ((8, 8), (8, 9), [(8, 8)]),
        ((8, 8), (8, 8), []),
        ((3, 6), (20, 20), [(3, 6), (12, 20)]),
    ],
)
def test_batches_grow_up_to_the_whole_sets(batch: Any, whole: Any, sizes: Any) -> None:
    assert growing_sizes(batch, whole) == sizes


def test_the_full_batch_is_streamed() -> None:
    """No more than one micro-batch is alive at a time while the whole sets are read."""
    model, alive, most = CleanLM().double(), weakref.WeakSet(), 0

    class Batch(dict[str, Any]):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def collate(items: Any) -> Any:
        nonlocal most
        batch = Batch(ForgetRetainCollator()(items))
        alive.add(batch)
        most = max(most, len(alive))
        return batch

    plan = CouplingPlan(forget_batch_size=2, retain_batch_size=2)
    parts = {"forget": samples(9, seed=1), "retain": samples(9, seed=2)}
    references = References(MethodArguments(), model, "local")
    losses = {part: references.window_loss(part, lambda values: values) for part in parts}
    windows = PairWindows(model, parts, losses, plan, collate, lambda batch: batch)
    for closure in windows.whole("retain"):
        closure().backward()
    assert most == 1


def test_processes_share_a_batch_between_them() -> None:
    data = {"forget": [{"input_ids": [i]} for i in range(9)], "retain": [{"input_ids": [i]} for i in range(9)]}
    plan = CouplingPlan(pairs=1, forget_batch_size=5, retain_batch_size=7, micro_batch_size=2)
    for part, sizes in (("forget", [[2, 1], [2]]), ("retain", [[2, 2], [2, 1]])):
        ranks = [PairWindows(nn.Module(), data, {}, plan, list, list, rank=i, world=2) for i in range(2)]
        shares = [windows.batches(part, 1) for windows in ranks]
        assert [[len(batch) for batch in share] for share in shares] == sizes
        taken = [sample["input_ids"][0] for share in shares for batch in share for sample in batch]
        assert sorted(taken) == sorted(ranks[0].draw(part, 1))
    with pytest.raises(ConfigError, match="leaves some of the 6 processes without a sample"):
        PairWindows(nn.Module(), data, {}, plan, list, list, rank=0, world=6)


@pytest.mark.parametrize("forget_loss", ["npo", "simnpo"])
def test_other_losses_are_followed(forget_loss: str) -> None:
    """At the initial weights NPO's gradient is exactly that of −(log p): half of (2/β)·β per sequence."""
    model = CleanLM().double()
    found = measure(model, method_args=MethodArguments(forget_loss=forget_loss))
    plain = measure(model)
    assert found.records[0].retain_norm == plain.records[0].retain_norm
    assert found.records[0].forget_norm != plain.records[0].forget_norm
    if forget_loss == "npo":
        assert found.records[0].forget_loss == pytest.approx(-2.0 / 0.1 * 0.6931471805599453, rel=1e-6)


def test_lora_has_its_own_parts_and_nothing_else() -> None:
    found = measure(adapter(tiny_llama()))
    kinds = {row["kind"] for row in found.document["by_kind"]}
    assert {"q LoRA-A", "q LoRA-B", "down LoRA-A"} <= kinds
    assert all("LoRA" in kind for kind in kinds)
    size = sum(row["parameters"] for row in found.document["by_kind"])
    assert size == found.setup["parameters"] < 10_000


def test_a_part_without_gradient_has_no_cosine() -> None:
    """A fresh adapter's A gets no gradient while B is zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    found = measure(peft.get_peft_model(tiny_llama(), config))
    rows = {row["kind"]: row for row in found.document["by_kind"]}
    assert rows["q LoRA-A"]["cosine"] is None
    assert rows["q LoRA-B"]["cosine"] == pytest.approx(found.document["coupling"]["cosine"]["mean"])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (3, "q")),
        ("module.model.layers.11.mlp.gate_proj.weight", (11, "gate")),
        ("model.layers.0.input_layernorm.weight", (0, "norm")),
        ("model.norm.weight", (None, "norm")),
        ("model.embed_tokens.weight", (None, "embedding")),
        ("lm_head.weight", (None, "lm_head")),
        ("transformer.h.2.attn.c_attn.bias", (2, "qkv")),
        ("transformer.h.2.attn.c_proj.weight", (2, "o")),
        ("transformer.h.2.mlp.c_proj.weight", (2, "down")),
        ("transformer.h.2.ln_1.weight", (2, "norm")),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight", (1, "up LoRA-B")),
        ("base_model.model.model.layers.1.self_attn.v_proj.base_layer.weight", (1, "v")),
        ("something.new.weight", (None, "new")),
        ("scale", (None, "scale")),
    ],
)
def test_names_tell_layer_and_kind(name: str, part: tuple[int | None, str]) -> None:
    assert part_of(name) == part


def test_tied_parameters_are_one_part() -> None:
    layout = ModelParts.of(tiny_llama(tie_word_embeddings=True))
    assert (None, "lm_head") not in layout.parts
    assert (None, "embedding") in layout.parts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forget": []}, "forget set is empty"),
        ({"retain": []}, "retain set is empty"),
        ({"forget": samples(2, seed=1)}, "2 samples, fewer than forget_batch_size=3"),
        ({"retain_batch_size": 10}, "9 samples, fewer than retain_batch_size=10"),
    ],
)
def test_too_few_samples_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        measure(tiny_llama(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rhos": (0.1, 0.0)}, r"rho=0\.0"),
        ({"rhos": (-0.1,)}, r"rho=-0\.1"),
        ({"rhos": (float("nan"),)}, "rho=nan"),
        ({"rho": float("inf")}, "rho=inf"),
        ({"rhos": ()}, "rhos is empty"),
        ({"pairs": 0}, "pairs=0"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"points": -1}, "points=-1"),
        ({"method_args": RepresentationArguments()}, "rosu diagnose"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(tiny_llama(), **options)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="No trainable parameter"):
        measure(tiny_llama().requires_grad_(False))


class Fragile(CleanLM):
    """Its loss is NaN for batches in which token 4 is the first one, and its gradient for token 5."""

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        result = super().forward(input_ids, **rest)
        first = input_ids[:, 0]
        if (first == 4).any():
            result.logits = result.logits * float("nan")
        if (first == 5).any():
            result.logits = result.logits + torch.where(result.logits > 1e9, 0.0, (result.logits * 0.0).sqrt())
        return result


@pytest.mark.parametrize(("token", "words"), [(4, "the forget loss is nan"), (5, "the gradient f has NaN")])
def test_a_bad_pair_is_named_and_left_out(token: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"input_ids": [9, *s["input_ids"]], "labels": [-100, *s["labels"]]} for s in samples(8, seed=1)]
    bad = {**good[0], "input_ids": [token, *good[0]["input_ids"][1:]]}
    retain = [{"input_ids": [9, *s["input_ids"]], "labels": [-100, *s["labels"]]} for s in samples(9, seed=2)]
    with caplog.at_level(logging.WARNING):
        found = measure(Fragile().double(), forget=[bad, *good[1:]], retain=retain, pairs=8)
    assert 1 <= len(found.skipped) < 8
    assert len(found.records) == 8 - len(found.skipped)
    assert all(words in entry["reason"] for entry in found.skipped)
    assert f"Pair {found.skipped[0]['pair']} of 8 is left out" in caplog.text
    assert found.document["pairs_used"] == len(found.records)
    clean = measure(Fragile().double(), forget=good, retain=retain, pairs=8)
    kept = {record.pair: record.cosine for record in found.records}
    assert kept == {record.pair: record.cosine for record in clean.records if record.pair in kept}


def test_where_every_pair_is_bad_one_line_says_so() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"No pair could be measured; in pair 1 the forget loss is nan"):
        measure(model)
