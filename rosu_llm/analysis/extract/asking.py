"""Putting prompts to a model: the likeliest continuation, samples, and what each layer would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.batching import plan_batches
from ...data.chat_format import IGNORE, Encoded
from ...errors import ConfigError, NonFiniteError
from ...evaluation.processes import BatchJob, from_first, run_jobs
from ...evaluation.tofu.generation import generate, text_of
from ...evaluation.tofu.token_statistics import BROKEN

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
    """For each prompt so many texts drawn at ``temperature``.

    The noise of a prompt's n-th text depends on (seed, the prompt's place, n) alone: ``batch_size`` says how many are
    drawn at once, not which.
    """
    from transformers import LogitsProcessorList

    pad = _pad(tokenizer)

    def one(at: int) -> list[str]:
        texts: list[str] = []
        ids = torch.tensor([prompts[at].prompt_ids], device=next(model.parameters()).device)
        with torch.inference_mode():
            for start in range(0, samples, batch_size):
                numbers = range(start, min(start + batch_size, samples))
                rows = ids.repeat(len(numbers), 1)
                found = model.generate(
                    rows,
                    attention_mask=torch.ones_like(rows),
                    logits_processor=LogitsProcessorList([_Drawing(temperature, seed, at, numbers, ids.device)]),
                    do_sample=False,
                    num_beams=1,
                    temperature=None,
                    top_k=None,
                    top_p=None,
                    max_new_tokens=new,
                    pad_token_id=pad,
                )
                texts += [text_of(tokenizer, row[ids.shape[1] :]).strip() for row in found.tolist()]
        return texts

    lengths = [len(prompt.prompt_ids) + new for prompt in prompts]
    return ask_all("samples", lengths, lambda batch: [one(at) for at in batch], batch_size=1)


class _Drawing:
    """Makes the likeliest token a sample: argmax(ℓ/T + G) with Gumbel noise G is drawn from softmax(ℓ/T).

    Every row has a generator of its own, which the other rows of a batch do not move.
    """

    def __init__(self, temperature: float, seed: int, at: int, numbers: Sequence[int], device: torch.device) -> None:
        self.temperature = temperature
        states = [np.random.SeedSequence([abs(seed), at, number]).generate_state(1, np.uint64) for number in numbers]
        self.generators = [torch.Generator(device).manual_seed(int(state[0])) for state in states]

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise NonFiniteError(BROKEN)
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        # An exponential number may be rounded to 0, whose Gumbel number is infinite: such a token would always win.
        return scores.float() / self.temperature - noise.clamp_(min=2.0**-24).log_()


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
