"""The output layer where a label is: losses and gradients are those of whole logits, on every kind of model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.losses import LossContext, ReferenceLogProbs, answer_nll, answers, get_loss, logits_of, token_nll
from rosu_llm.losses.depth import Depth
from rosu_llm.losses.language import POSITIONS, Positions, answer_positions, answer_values
from rosu_llm.training.regroup import regroup
from tests.losses import naive
from tests.models import CleanLM, samples, tiny_llama

#: Ragged, with one row that answers nothing.
BATCH = [*samples(5, seed=4), naive.unanswered([4, 5, 6])]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}


def family(name: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **settings})
    return transformers.AutoModelForCausalLM.from_config(config)


def gemma(**settings: Any) -> Any:
    return family("Gemma2", head_dim=4, sliding_window=8, query_pre_attn_scalar=4, **settings)


def gpt2() -> Any:
    return family("GPT2", n_embd=16, n_layer=2, n_head=2, n_positions=64)


def with_bias() -> Any:
    return family("Phi", tie_word_embeddings=False, partial_rotary_factor=0.5, num_key_value_heads=4)


def adapted(*modules: str, tied: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=list(modules), init_lora_weights=False, lora_dropout=0.3)
    return get_peft_model(family("Llama", tie_word_embeddings=tied), config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(family, "Llama", tie_word_embeddings=False),
    "llama tied": partial(family, "Llama", tie_word_embeddings=True),
    "mistral": partial(family, "Mistral"),
    "qwen": partial(family, "Qwen2", tie_word_embeddings=True),
    "gemma": gemma,
    "gemma without soft-capping": partial(gemma, final_logit_softcapping=None),
    "cohere, scaled logits": partial(family, "Cohere", logit_scale=0.25),
    "gpt2": gpt2,
    "phi, a bias": with_bias,
    "adapter": partial(adapted, "q_proj"),
    "adapter on the head": partial(adapted, "q_proj", "lm_head"),
}
WAYS = {"gemma": "positions", "cohere, scaled logits": "positions"}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven positions at once, so that every batch has several chunks and a short one at the end."""
    for sizes in (answers.CHUNK, answers.CHUNK_WITH_GRADIENT):
        monkeypatch.setitem(sizes, "cpu", 7 * 64)


def padded(side: str) -> dict[str, Tensor]:
    batch = naive.padded(BATCH, 16)
    if side == "right":
        return batch
    moved = {key: value.clone() for key, value in batch.items()}
    for i, sample in enumerate(BATCH):
        for key, value in batch.items():
            moved[key][i] = value[i].roll(16 - len(sample["input_ids"]))
    return moved


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    size = max(float(g.abs().max()) for g in wanted)
    assert size > 0.0
    assert max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)) < tolerance * size


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_whole_logits(name: str, side: str) -> None:
    """Twice, and equal to the bit: before the first call the model is tried, which must leave no trace."""
    model, batch, found = MODELS[name]().train(), padded(side), []
    torch.manual_seed(1)  # dropout of the adapter
    plain = token_nll(logits_of(model, batch), batch["labels"])
    wanted = gradients(model, plain.square().sum())  # no constant slopes
    for _ in range(2):
        torch.manual_seed(1)
        got = answer_nll(model, batch)
        found.append(gradients(model, got.square().sum()))
        if name != "adapter on the head":  # its dropout draws for whole logits there, for few here
            assert torch.allclose(got, plain, atol=1e-5)
            assert_close(found[-1], wanted)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert answers._WAYS[answers.unwrapped(model)] == WAYS.get(name, "reduced")
    with torch.no_grad():
        assert torch.allclose(
            answer_nll(model.eval(), batch), token_nll(logits_of(model, batch), batch["labels"]), atol=1e-5
        )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "adapter on the head"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_feed_forward_blocks_see_the_tokens_that_count(name: str, checkpointing: bool) -> None:
    """The last one answers alone, the others no padding; whole ones where backward runs the layers again."""
    model = MODELS[name]().train()
    inner = answers.unwrapped(model)
    if checkpointing:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inner.enable_input_require_grads()  # adapters behind frozen layers
    batch = padded("right")
    located = regroup({"retain": [batch]}, 0)["retain"][0]
    torch.manual_seed(1)
    plain = token_nll(logits_of(model, batch), batch["labels"])
    wanted = gradients(model, plain.square().sum())
    answer_nll(model, located)  # tries the model

    seen: list[int] = []
    blocks = [layer.mlp for layer in (inner.transformer.h if name == "gpt2" else inner.model.layers)]
    for block in blocks:  # on something inside: a hook on the block itself would want all of it
        next(block.children()).register_forward_hook(lambda m, given, made: seen.append(given[0][..., 0].numel()))
    torch.manual_seed(1)
    got = answer_nll(model, located)
    count = (
        [batch["input_ids"].numel()] * 2
        if checkpointing or name == "gpt2"  # which drops out inside
        else [int(batch["attention_mask"].sum()), len(located[POSITIONS].rows)]
    )
    assert seen == count
    assert torch.allclose(got, plain, atol=1e-5)
    assert_close(gradients(model, got.square().sum()), wanted)


def test_a_block_that_mixes_tokens_or_is_watched_stays_whole() -> None:
    batch = padded("right")
    mixing, watched = MODELS["llama"](), MODELS["llama"]()
    one = mixing.model.layers[0].mlp
    one.forward = lambda x, forward=one.forward: forward(x.roll(1, 1))  # each token sees the one before it
    seen: list[int] = []
    watched.model.layers[1].mlp.register_forward_hook(lambda m, given, made: seen.append(made[..., 0].numel()))
    for model in (mixing, watched):
        wanted = gradients(model, token_nll(logits_of(model, batch), batch["labels"]).square().sum())
        assert_close(gradients(model, answer_nll(model, batch).square().sum()), wanted)
    assert set(seen[2:]) == {16, batch["input_ids"].numel()}  # one row when it is tried, then all


def test_an_adapter_on_the_head_is_exact_without_dropout() -> None:
    model, batch = MODELS["adapter on the head"]().eval(), padded("right")
    wanted = gradients(model, token_nll(logits_of(model, batch), batch["labels"]).square().sum())
    for _ in range(2):
        assert_close(gradients(model, answer_nll(model, batch).square().sum()), wanted)


class Headed(CleanLM):
    """The float64-clean module with an output layer that can be found."""

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("name", ["nll", "npo", "simnpo", "kl"])
def test_every_loss_in_float64(name: str) -> None:
    """Against the same module whose output layer nobody finds; 1e-10 leaves room for sums in another order."""
    batch, hidden, found = padded("right"), CleanLM(seed=3).double(), Headed(seed=3).double()
    references = ReferenceLogProbs()
    references.compute(CleanLM(seed=9).double(), [batch])
    other = CleanLM(seed=9).double()
    context = LossContext(
        {"npo_beta": 0.3, "simnpo_beta": 2.0, "simnpo_delta": 0.1}, references, partial(logits_of, other)
    )
    loss = get_loss(name, "retain" if name == "kl" else "forget").function
    wanted = loss(hidden, batch, context)
    for _ in range(2):
        got = loss(found, batch, context)
        assert got.item() == pytest.approx(wanted.item(), rel=1e-10)
        assert_close(gradients(found, got), gradients(hidden, loss(hidden, batch, context)), 1e-10)
    assert (answers._WAYS[hidden], answers._WAYS[found]) == ("whole", "reduced")


@pytest.mark.parametrize("shape", ["sample", "token"])
def test_bounded_samples_weigh_the_same(shape: str) -> None:
    batch, hidden, found = padded("right"), CleanLM(seed=3).double(), Headed(seed=3).double()
    size = (6,) if shape == "sample" else (6, 15)
    targets = 6.0 * torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for model in (hidden, found, found):
        gate = Depth(lambda _: targets, 2.0).gate(batch)
        with gate.on(model):
            results.append(
                gradients(
                    model,
                    get_loss("simnpo", "forget").function(
                        model, batch, LossContext({"simnpo_beta": 2.0, "simnpo_delta": 0.1}, gate=gate)
                    ),
                )
            )
    assert_close(results[1], results[0], 1e-10)
    assert_close(results[2], results[0], 1e-10)


def test_a_loss_of_distributions_is_bounded_too() -> None:
    """The weights come from log p of the answer, whatever the loss reads of the logits."""
    batch, model = padded("right"), Headed(seed=3).double()
    targets = torch.tensor([9.0, 4.4, 4.3, 4.2, 0.0, 0.0], dtype=torch.float64)

    def entropy(logits: Tensor, tokens: Tensor, at: slice) -> Tensor:
        logs = logits.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    results = []
    for _ in range(2):
        gate = Depth(lambda _: targets, 1.0).gate(batch)
        with gate.on(model):
            value = answer_values(model, batch, entropy, LossContext(gate=gate))[0].sum()
            results.append(gradients(model, value))
    levels = token_nll(logits_of(model, batch), batch["labels"])
    weights = (targets - levels.sum(-1) / (levels > 0).sum(-1).clamp(min=1)).clamp(0.0, 1.0)
    logs = logits_of(model, batch)[:, :-1].log_softmax(-1)
    each = -(logs.exp() * logs).sum(-1) * (batch["labels"][:, 1:] != -100)
    wanted = gradients(model, (weights.detach()[:, None] * each).sum())
    for got in results:
        assert_close(got, wanted, 1e-10)


def test_second_derivatives_are_those_of_whole_logits() -> None:
    batch, models = padded("right"), (CleanLM(seed=3).double(), Headed(seed=3).double())
    products = []
    for model in (*models, models[1]):
        parameters = list(model.parameters())
        first = torch.autograd.grad(answer_nll(model, batch).square().sum(), parameters, create_graph=True)
        products.append(torch.autograd.grad(sum((g * g.detach()).sum() for g in first), parameters))
    assert_close(list(products[1]), list(products[0]), 1e-9)
    assert_close(list(products[2]), list(products[0]), 1e-9)


def test_nothing_of_tokens_times_vocabulary_is_kept() -> None:
    """What autograd saves of the output layer: the hidden states and the weight, never logits."""
    model = tiny_llama()
    ids = torch.randint(4, 60, (4, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    answer_nll(model, batch)
    vocabulary, saved = model.config.vocab_size, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        answer_nll(model, batch).sum()
    assert not [shape for shape in saved if shape[-1:] == (vocabulary,) and len(shape) > 1 and shape[0] > 7]


@pytest.mark.parametrize("name", ["llama", "adapter on the head"])
def test_a_batch_without_answers_has_no_gradient_and_joins_in(name: str) -> None:
    """A process that only keeps others company runs the same forward and backward."""
    model, batch = MODELS[name]().eval(), padded("right")
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    answer_nll(model, nothing).sum().backward()  # before the first answer as well
    answer_nll(model, batch)
    assert max(float(g.abs().max()) for g in gradients(model, answer_nll(model, nothing).sum())) == 0.0
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_bf16_autocast_rounds_as_whole_logits_do() -> None:
    model, batch = MODELS["llama"](), padded("right")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            plain = token_nll(logits_of(model, batch), batch["labels"])
            got = answer_nll(model, batch)
        assert torch.allclose(got, plain, atol=1e-6)
        # chunks are rounded one by one: a bf16 has 8 bits
        assert_close(gradients(model, got.sum()), gradients(model, plain.sum()), 2**-7)


class Strange(nn.Module):
    """A model whose output layer is called in a way of its own, as its logits come from ``call``."""

    def __init__(self, call: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self._call = nn.Embedding(64, 8), nn.Linear(8, 64), call

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self._call(self.head, self.embed(input_ids)))


@pytest.mark.parametrize(
    "call",
    [
        lambda head, hidden: hidden @ head.weight.t(),
        lambda head, hidden: head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1),
        lambda head, hidden: head(hidden) + head(2 * hidden),
        lambda head, hidden: head(input=hidden),
    ],
    ids=["never", "flat", "twice", "by name"],
)
def test_a_model_that_cannot_be_followed_computes_all_logits(call: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Strange(call), padded("right")
    wanted = token_nll(logits_of(model, batch), batch["labels"])
    with caplog.at_level("INFO", "rosu_llm"):
        for _ in range(2):
            assert torch.allclose(answer_nll(model, batch), wanted, atol=1e-6)
    assert sum("output layer" in record.message for record in caplog.records) == 1
    assert answers._WAYS[model] == "whole"


def test_the_layer_gets_its_own_forward_back() -> None:
    """Also one that somebody had put in its place, and after an error."""
    model, batch = MODELS["llama"](), padded("right")
    own = partial(type(model.lm_head).forward, model.lm_head)
    model.lm_head.forward = own
    answer_nll(model, batch)
    answer_nll(model, batch)
    assert model.lm_head.forward is own
    with pytest.raises(RuntimeError, match="no"):
        answer_values(model, batch, lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    assert model.lm_head.forward is own
    assert "forward" not in vars(copy.deepcopy(MODELS["llama"]()).lm_head)


def test_a_hook_on_the_layer_sees_logits_and_may_change_them() -> None:
    model, batch = MODELS["llama"](), padded("right")
    answer_nll(model, batch)
    handle = model.lm_head.register_forward_hook(lambda _, __, logits: 2.0 * logits)
    assert torch.allclose(answer_nll(model, batch), token_nll(logits_of(model, batch), batch["labels"]), atol=1e-5)
    handle.remove()
    assert torch.allclose(answer_nll(model, batch), token_nll(logits_of(model, batch), batch["labels"]), atol=1e-5)


def test_known_positions_are_used() -> None:
    model, batch = MODELS["llama"](), padded("right")
    known = {**batch, POSITIONS: Positions(*answer_positions(batch), tokens=30, sequences=5)}
    assert torch.equal(answer_nll(model, known), answer_nll(model, batch))
