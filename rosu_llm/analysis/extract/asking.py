"""Putting prompts to a model: the likeliest continuation, samples, and what each layer would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batching import plan_batches
from ...data.chat_format import IGNORE, Encoded
from ...errors import ConfigError
from ...evaluation.processes import BatchJob, from_first, run_jobs
from ...evaluation.tofu.generation import generate, text_of

_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm")


def ask_all(
    title: str, lengths: Sequence[int], work: Callable[[Sequence[int]], Sequence[Any]], *, batch_size: int
) -> list[Any]:
    """The results of all prompts, shared among processes; every process gets them."""
    results: list[list[Any]] = []
    batches = plan_batches(lengths, batch_size=batch_size, batch_tokens=8192)
    run_jobs([BatchJob(title, batches, work)], lambda _, values, __: results.append(values))
    return from_first(lambda: results[0])


def greedily(model: Any, tokenizer: Any, prompts: Sequence[Encoded], *, new: int, batch_size: int, title: str) -> Any:
    """For each prompt ``generation`` and ``ground_truth``, what remained to be said."""
    pad = _pad(tokenizer)

    def work(batch: Sequence[int]) -> list[dict[str, str]]:
        return generate(model, tokenizer, [prompts[at] for at in batch], pad, new)

    lengths = [len(prompt.prompt_ids) + new for prompt in prompts]
    return ask_all(title, lengths, work, batch_size=batch_size)


def sampled(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Encoded],
    *,
    new: int,
    batch_size: int,
    samples: int,
    temperature: float,
    seed: int,
) -> list[list[str]]:
    """For each prompt so many texts drawn at ``temperature``; a prompt's depend on (seed, its place) alone."""
    pad = _pad(tokenizer)

    def one(at: int) -> list[str]:
        texts: list[str] = []
        ids = torch.tensor([prompts[at].prompt_ids], device=next(model.parameters()).device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed * 1_000_003 + at)
            while len(texts) < samples:
                count = min(batch_size, samples - len(texts))
                found = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=count,
                    max_new_tokens=new,
                    pad_token_id=pad,
                )
                texts += [text_of(tokenizer, row[ids.shape[1] :]).strip() for row in found.tolist()]
        return texts

    lengths = [len(prompt.prompt_ids) + new for prompt in prompts]
    return ask_all("samples", lengths, lambda batch: [one(at) for at in batch], batch_size=1)


def through_the_lens(model: Any, tokenizer: Any, prompts: Sequence[Encoded]) -> list[list[float]]:
    """For each prompt and layer (the embedding first) the share of answer tokens that are its first choice.

    A layer's choice is that of the model's own output layer applied to its hidden states after the final norm
    (nostalgebraist's logit lens); transformers gives the last hidden states normed already.
    """
    norm, head = final_norm(model), model.get_output_embeddings()

    def one(at: int) -> list[float]:
        sample = prompts[at]
        labels = torch.tensor(sample.labels)[1:]
        where = labels != IGNORE
        where[-1] = where[-1] and int(where.sum()) == 1  # the end of the text is no part of the answer
        ids = torch.tensor([sample.input_ids], device=next(model.parameters()).device)
        with torch.inference_mode():
            states: tuple[Tensor, ...] = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
            shares = []
            for number, state in enumerate(states):
                hidden = state[0, :-1][where.to(state.device)]
                logits = head(hidden if number == len(states) - 1 else norm(hidden))
                right = logits.argmax(-1).cpu() == labels[where]
                shares.append(float(right.float().mean()))
        return shares

    lengths = [len(prompt.input_ids) for prompt in prompts]
    return ask_all("logit lens", lengths, lambda batch: [one(at) for at in batch], batch_size=8)


def final_norm(model: Any) -> nn.Module:
    """The norm before the output layer."""
    inner = model.base_model
    for place in (inner, getattr(inner, "decoder", None)):
        for name in _FINAL_NORMS:
            found = getattr(place, name, None)
            if isinstance(found, nn.Module):
                return found
    raise ConfigError(
        f"The logit lens does not find the final norm of {type(model).__name__}: leave 'lens' out of --ways."
    )


def _pad(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
