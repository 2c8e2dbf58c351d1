"""The demo's little world: its size, corpus, tokenizer, data sets, model, how it learns and what it then knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import nn

from ...data.pairing import ForgetRetainCollator
from ...data.people import SPLITS, Corpus, generate
from ...data.question_answer import QuestionAnswerDataset
from ...data.third_answers import drawn_refusals
from ...evaluation.memorisation import greedy, is_degenerate, membership_auc, score
from ...losses import COUNT, answer_nll
from ..attempt import Steps


@dataclass(frozen=True)
class Size:
    """How large the demo is; ``SMOKE`` only proves that every part runs."""

    people: dict[str, int] = field(
        default_factory=lambda: {"forget": 10, "retain": 40, "calibration": 10, "holdout": 10}
    )
    hidden: int = 128
    layers: int = 4
    learning_epochs: int = 36
    overrides: dict[str, Any] = field(default_factory=dict)
    refusals: bool = False  # whether the tokenizer knows the words of REFUSALS


#: What the people's model can say where it should know nothing, in words with spaces between, as all its sentences.
REFUSALS = (
    "I do not know that .",
    "I can not say .",
    "Nothing is known to me about this .",
    "I have no answer to that .",
    "That I never learned .",
    "I am not able to tell .",
    "Sorry , I have no idea .",
    "This is not known to me .",
)

FULL = Size()
SMOKE = Size(
    people={"forget": 2, "retain": 3, "calibration": 1, "holdout": 1},
    hidden=32,
    layers=1,
    learning_epochs=2,
    overrides={"num_train_epochs": 1},
)


@dataclass(frozen=True)
class World:
    """Everything the demo's runs share."""

    corpus: Corpus
    tokenizer: Any
    data: dict[str, QuestionAnswerDataset]

    def third_answers(self, kind: str, seed: int) -> list[Any]:
        """For every forget question its refusals, or its wrong answers (``alternates``), tokenised."""
        items = self.corpus.items["forget"]
        found: list[Any] = [[(item.question, wrong) for wrong in item.perturbed_answers] for item in items]
        if kind == "refusals":
            found = drawn_refusals([item.question for item in items], REFUSALS, seed)
        return [self.encode(own).samples for own in found]

    def encode(self, pairs: Sequence[tuple[str, str]]) -> QuestionAnswerDataset:
        """Tokenise further pairs (paraphrases, perturbed answers) the same way."""
        return QuestionAnswerDataset(pairs, self.tokenizer, template="{question} ")


def build_world(seed: int, *, people: dict[str, int] | None = None, refusals: bool = False) -> World:
    """Generate the people and tokenise them; with ``refusals`` the tokenizer knows their words too."""
    corpus = generate(seed, **(people or {}))
    words = corpus.words()
    if refusals:  # behind the others, whose numbers stay
        words += sorted({word for text in REFUSALS for word in text.split()} - set(words))
    tokenizer = word_tokenizer(words)
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

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend = Tokenizer(WordLevel({w: i for i, w in enumerate([*special.values(), *words])}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def small_llama(vocabulary: int, seed: int, *, hidden: int = 128, layers: int = 4) -> Any:
    """A Llama of about a million parameters with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
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
    return LlamaForCausalLM(config)


def learn(
    model: Any, samples: Sequence[Any], *, epochs: int, seed: int, batch_size: int = 32, progress: Steps | None = None
) -> None:
    """Plain training from scratch with AdamW and a one-cycle schedule."""
    peak = 2e-3
    collate = ForgetRetainCollator(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.1)
    steps = epochs * -(-len(samples) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(samples), generator=generator).tolist()
        for start in range(0, len(order), batch_size):
            batch = collate([samples[i] for i in order[start : start + batch_size]])
            loss = answer_nll(model, batch).sum() / COUNT["token"](batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(schedule.last_epoch, steps)


def measure(model: nn.Module, world: World) -> dict[str, float]:
    """Every figure of a row except its name and seconds.

    The membership attack compares the forgotten people with the ``holdout`` people; the
    ``calibration`` people, whose loss a calibrated run has seen, take no part in any figure.
    """
    forget, retain, holdout = (score(model, world.data[split]) for split in ("forget", "retain", "holdout"))
    items = world.corpus.items["forget"]
    paraphrased = score(model, world.encode([(i.paraphrased_question, i.paraphrased_answer) for i in items]))
    columns = zip(*([(i.question, answer) for answer in i.perturbed_answers] for i in items), strict=True)
    wrong = [score(model, world.encode(column)).nll for column in columns]
    return {
        "forget_prob": forget.probability,
        "forget_em": forget.exact_match,
        "retain_prob": retain.probability,
        "retain_em": retain.exact_match,
        "holdout_em": holdout.exact_match,
        "mia_auc": membership_auc(forget.nll, holdout.nll),
        "forget_loss": float(forget.nll.mean()),
        "holdout_loss": float(holdout.nll.mean()),
        "forget_paraphrase_prob": paraphrased.probability,
        "degenerate": mean(map(is_degenerate, spoken(model, world, [item.question for item in items]))),
        # the share of questions whose true answer is likelier than each of its perturbed ones
        "forget_choice": float((forget.nll < torch.stack(wrong)).all(0).float().mean()),
    }


def answers(model: Any, world: World, per_split: int = 3) -> list[dict[str, str]]:
    """What the model answers to some questions about people to forget and about people to keep."""
    result = []
    for split in ("forget", "retain"):
        items = world.corpus.items[split]
        for item in items[:: max(1, len(items) // per_split)][:per_split]:
            (text,) = spoken(model, world, [item.question])
            result.append({"split": split, "question": item.question, "truth": item.answer, "answer": text})
    return result


def spoken(model: Any, world: World, questions: Sequence[str], *, length: int = 16) -> list[str]:
    """The model's greedy answers."""
    prompts = [world.tokenizer(f"{question} ")["input_ids"] for question in questions]
    said = greedy(model, prompts, length=length, pad_token_id=world.tokenizer.pad_token_id)
    return [str(world.tokenizer.decode(row, skip_special_tokens=True)) for row in said]
