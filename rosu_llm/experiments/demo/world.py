"""The demo's little world: corpus, tokenizer, data sets, model and how it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...data.pairing import ForgetRetainCollator
from ...data.people import SPLITS, Corpus, Item, generate
from ...data.question_answer import QuestionAnswerDataset
from ...losses import COUNT, logits_of, token_nll


@dataclass(frozen=True)
class World:
    """Everything the demo's runs share."""

    corpus: Corpus
    tokenizer: Any
    data: dict[str, QuestionAnswerDataset]

    def encode(self, pairs: Sequence[tuple[str, str]]) -> QuestionAnswerDataset:
        """Tokenise further pairs (paraphrases, perturbed answers) the same way."""
        return QuestionAnswerDataset(pairs, self.tokenizer, template="{question} ")


def build_world(seed: int, *, people: dict[str, int] | None = None) -> World:
    """Generate the people and tokenise them."""
    corpus = generate(seed, **(people or {}))
    tokenizer = word_tokenizer(corpus.words())
    world = World(corpus, tokenizer, {})
    for split in SPLITS:
        world.data[split] = world.encode([(item.question, item.answer) for item in corpus.items[split]])
    return world


def word_tokenizer(words: Sequence[str]) -> Any:
    """One token per word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    backend = Tokenizer(WordLevel({w: i for i, w in enumerate([*special, *words])}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def small_llama(vocabulary: int, seed: int, *, hidden: int = 128, layers: int = 4) -> Any:
    """A Llama of about a million parameters with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def learn(
    model: nn.Module,
    samples: Sequence[Any],
    *,
    epochs: int,
    seed: int,
    learning_rate: float = 2e-3,
    batch_size: int = 32,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Plain training from scratch with AdamW and a one-cycle schedule."""
    collate = ForgetRetainCollator(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    steps = epochs * -(-len(samples) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    done = 0
    for _ in range(epochs):
        order = torch.randperm(len(samples), generator=generator).tolist()
        for start in range(0, len(order), batch_size):
            batch = collate([samples[i] for i in order[start : start + batch_size]])
            loss = token_nll(logits_of(model, batch), batch["labels"]).sum() / COUNT["token"](batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            if progress is not None:
                progress(done, steps, float(loss.detach()))


def pairs_of(items: Sequence[Item], *, paraphrased: bool = False) -> list[tuple[str, str]]:
    """Question/answer pairs of items, plain or paraphrased."""
    if paraphrased:
        return [(i.paraphrased_question, i.paraphrased_answer) for i in items]
    return [(i.question, i.answer) for i in items]
