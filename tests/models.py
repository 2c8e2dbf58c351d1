"""Small models and samples for tests.

`CleanLM` computes in float64 throughout (HF's Llama computes norms, rotary embeddings and softmax in
float32 whatever its dtype), so it serves where truth to 1e-9 is wanted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 61


class CleanLM(nn.Module):
    """A two-layer causal model: embedding, causal average, MLP, tied or untied head; dropout optional."""

    def __init__(self, width: int = 12, dropout: float = 0.0, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(2 * width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SimpleNamespace:
        x = self.embed(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = mask.unsqueeze(-1).to(x.dtype)
        past = (x * weights).cumsum(1) / weights.cumsum(1).clamp(min=1.0)
        h = self.drop(torch.tanh(self.mix(torch.cat([x, past], -1))))
        return SimpleNamespace(logits=self.head(self.out(h)))


def tiny_llama(seed: int = 0, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A two-layer HF Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "attention_dropout": dropout,
            "use_cache": False,
            **overrides,
        }
    )
    return LlamaForCausalLM(config).to(dtype)


def samples(
    count: int, seed: int, *, shortest: int = 6, longest: int = 14, prompt: int = 3
) -> list[dict[str, list[int]]]:
    """Ragged random sequences whose first ``prompt`` labels are masked."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        result.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return result


def flat(tensors: Any) -> Tensor:
    """One long float64 vector."""
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


#: Small models of other families: names of the classes, what they need beside the common sizes, and the matrices of
#: layers 1 and 2 that a test trains. Families that the installed transformers does not have yet are skipped.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "mlp.down_proj"),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 8}, "mlp.down_proj"),
    "qwen2": ("Qwen2", {}, "mlp.down_proj"),
    "qwen3": ("Qwen3", {"head_dim": 8}, "mlp.down_proj"),
    "phi": ("Phi", {"num_key_value_heads": 4, "pad_token_id": 0}, "mlp.fc2"),
    "phi3": ("Phi3", {"pad_token_id": 0}, "mlp.down_proj"),
    "gemma": ("Gemma", {"head_dim": 8}, "mlp.down_proj"),
    # with a cache, without which 4.45.1 stumbles over its own warning
    "gemma2": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "use_cache": True},
        "mlp.down_proj",
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
        "mlp.down_proj",
    ),
}


def tiny_decoder(family: str = "llama", seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A four-layer model of one of :data:`FAMILIES`, random weights large enough for activations to differ."""
    import pytest
    import transformers

    name, extra, _ = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"the installed transformers has no {name}")
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "use_cache": False,
    }
    torch.manual_seed(seed)
    config = config_class(**{**common, **extra, **overrides})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
