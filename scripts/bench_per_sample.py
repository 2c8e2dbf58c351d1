"""Per-sample retain gradients: k stored gradients of batch-1 passes, or none stored and k Jacobian-vector products?

    python scripts/bench_per_sample.py [--samples 8] [--smoke]

A rank-k step needs the k×k Gram matrix of the per-sample gradients rᵢ and the projections of two vectors (f and s).

stored   k batch-1 passes, k copies; Gram and projections are inner products and sums of the copies.
jvp      one gradient at a time: for each j, rⱼ by a batch-1 pass and ⟨rᵢ, rⱼ⟩ for all i by one forward-mode derivative
         of the k losses along rⱼ; then per projected vector x another for ⟨rᵢ, x⟩ and a weighted pass for Σ cᵢ rᵢ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, jvp
from transformers import LlamaConfig, LlamaForCausalLM

from rosu_llm.losses import token_nll

PROJECTED = 2


def per_sample_losses(model: LlamaForCausalLM, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Mean next-token loss of each row."""
    logits = functional_call(model, weights, (), {"input_ids": ids, "use_cache": False}).logits
    return torch.stack([token_nll(one[None], row[None]).mean() for one, row in zip(logits, ids, strict=True)])


def gradient(model: LlamaForCausalLM, weights: dict[str, Tensor], ids: Tensor, coefficients: Tensor) -> list[Tensor]:
    """Σ cᵢ rᵢ by one pass."""
    loss = (per_sample_losses(model, weights, ids) * coefficients).sum()
    return list(torch.autograd.grad(loss, list(weights.values())))


def dot(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return torch.stack([torch.dot(a.view(-1), b.view(-1)) for a, b in zip(x, y, strict=True)]).sum()


def stored(model: LlamaForCausalLM, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The Gram matrix, after everything a step does with it."""
    one = torch.ones(1)
    rows = [gradient(model, weights, row[None], one) for row in ids]
    gram = torch.stack([torch.stack([dot(x, y) for x in rows]) for y in rows])
    for _ in range(PROJECTED):
        coefficients = [float(dot(row, [w.detach() for w in weights.values()])) for row in rows]
        for parts in zip(*rows, strict=True):
            total = torch.zeros_like(parts[0])
            for c, part in zip(coefficients, parts, strict=True):
                total.add_(part, alpha=c)
    return gram


def derivatives(model: LlamaForCausalLM, weights: dict[str, Tensor], ids: Tensor, x: list[Tensor]) -> Tensor:
    """⟨rᵢ, x⟩ for all i."""
    primal = {name: w.detach() for name, w in weights.items()}
    along = dict(zip(weights, x, strict=True))
    return jvp(lambda w: per_sample_losses(model, w, ids), (primal,), (along,))[1]


def by_jvp(model: LlamaForCausalLM, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The same, one gradient at a time."""
    one = torch.ones(1)
    gram = torch.stack([derivatives(model, weights, ids, gradient(model, weights, r[None], one)) for r in ids])
    for _ in range(PROJECTED):
        x = [w.detach() for w in weights.values()]
        gradient(model, weights, ids, derivatives(model, weights, ids, x))
    return gram.detach()


def seconds(call: Callable[[], Tensor], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    options = parser.parse_args()
    hidden, layers = (32, 1) if options.smoke else (256, 6)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = dict(model.named_parameters())
    size = sum(w.numel() for w in weights.values())
    ids = torch.randint(0, 4096, (options.samples, options.length))
    repeats = 1 if options.smoke else options.repeats
    truth = stored(model, weights, ids)
    error = float((truth - by_jvp(model, weights, ids)).abs().max() / truth.max())
    times = {name: seconds(lambda f=f: f(model, weights, ids), repeats) for name, f in METHODS.items()}
    one = seconds(lambda: gradient(model, weights, ids, torch.full((len(ids),), 1 / len(ids)))[0], repeats)
    print(f"{size / 1e6:.1f} M parameters, k = {options.samples}, {options.length} tokens; Gram differs by {error:.1e}")
    print(f"one pass over the {options.samples} samples: {one:.3f} s")
    for name, value in times.items():
        copies = options.samples if name == "stored" else 1
        print(f"{name:8s} {value:.3f} s = {value / one:.2f} passes, {copies} gradient copies")


METHODS = {"stored": stored, "jvp": by_jvp}

if __name__ == "__main__":
    main()
