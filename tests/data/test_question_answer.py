"""Labels are the answer's tokens and the end token: exactly those."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rosu_llm import QuestionAnswerDataset
from rosu_llm.errors import DataError
from rosu_llm.experiments.demo.world import word_tokenizer

PAIRS = [("Where was Ada born ?", "Ada was born in Riga ."), ("Who ?", "Nobody"), ("Why is that so ?", "")]
WORDS = sorted({word for pair in PAIRS for text in pair for word in text.split()})
MARKS = ["Question:", "Answer:", "[user]", "[assistant]", "[end]"]
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    """One token per word, so that every id can be spelled out."""
    return word_tokenizer([*MARKS, *WORDS])


def ids(tokenizer: Any, text: str) -> list[int]:
    """Ids word by word, straight from the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[word] for word in text.split()]


def test_without_chat_template_the_prompt_is_masked_and_the_answer_ends(tokenizer: Any) -> None:
    dataset = QuestionAnswerDataset(PAIRS, tokenizer)
    assert len(dataset) == 3
    for sample, (question, answer) in zip(dataset, PAIRS, strict=True):
        prompt = ids(tokenizer, f"Question: {question} Answer:")
        target = [*ids(tokenizer, answer), 2]
        assert sample == {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}


def test_another_template(tokenizer: Any) -> None:
    sample = QuestionAnswerDataset(PAIRS[:1], tokenizer, template="{question} ")[0]
    prompt, target = ids(tokenizer, PAIRS[0][0]), [*ids(tokenizer, PAIRS[0][1]), 2]
    assert sample == {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}


def test_braces_in_a_question_are_just_text(tokenizer: Any) -> None:
    sample = QuestionAnswerDataset([("{x} {question}", "Nobody")], tokenizer)[0]
    unknown = tokenizer.unk_token_id
    assert sample["input_ids"] == [*ids(tokenizer, "Question:"), unknown, unknown, *ids(tokenizer, "Answer: Nobody"), 2]


def test_with_chat_template_the_users_turn_is_masked(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    for sample, (question, answer) in zip(QuestionAnswerDataset(PAIRS, tokenizer), PAIRS, strict=True):
        prompt = ids(tokenizer, f"[user] {question} [end] [assistant]")
        target = ids(tokenizer, f"{answer} [end]")
        assert sample == {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}


def test_the_chat_template_can_be_left_aside(tokenizer: Any) -> None:
    plain = QuestionAnswerDataset(PAIRS, tokenizer).samples
    tokenizer.chat_template = CHAT
    assert QuestionAnswerDataset(PAIRS, tokenizer, chat=False).samples == plain
    assert QuestionAnswerDataset(PAIRS, tokenizer).samples != plain


def test_a_chat_template_that_rewrites_the_question_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}[end] {% endif %}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    with pytest.raises(DataError, match="chat=False"):
        QuestionAnswerDataset(PAIRS, tokenizer)


def special(tokenizer: Any, single: str) -> Any:
    """Let the tokenizer add special tokens of its own."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def test_a_start_token_is_added_once_and_masked(tokenizer: Any) -> None:
    sample = QuestionAnswerDataset(PAIRS[:1], special(tokenizer, "<s> $A"))[0]
    prompt = [1, *ids(tokenizer, f"Question: {PAIRS[0][0]} Answer:")]
    target = [*ids(tokenizer, PAIRS[0][1]), 2]
    assert sample == {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}


def test_an_end_token_that_the_tokenizer_adds_does_not_part_question_and_answer(tokenizer: Any) -> None:
    sample = QuestionAnswerDataset(PAIRS[:1], special(tokenizer, "<s> $A </s>"))[0]
    assert sample["input_ids"].count(2) == 1
    assert sample["input_ids"][-1] == sample["labels"][-1] == 2
    assert sample["input_ids"].count(1) == 1


def test_without_an_end_token_the_answer_just_stops(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    sample = QuestionAnswerDataset(PAIRS[:1], tokenizer)[0]
    assert sample["input_ids"][-1] == sample["labels"][-1] == ids(tokenizer, ".")[0]


def test_samples_are_cut_on_the_right_and_keep_at_least_one_answer_token(tokenizer: Any) -> None:
    whole = QuestionAnswerDataset(PAIRS[:1], tokenizer)[0]
    prompt = whole["labels"].count(-100)
    for length in range(prompt + 1, len(whole["labels"]) + 3):
        sample = QuestionAnswerDataset(PAIRS[:1], tokenizer, max_length=length)[0]
        assert sample == {k: v[:length] for k, v in whole.items()}
        assert sample["labels"][-1] != -100


@pytest.mark.parametrize("chat", [False, True])
def test_a_question_that_fills_the_sample_is_refused_with_its_length(tokenizer: Any, chat: bool) -> None:
    tokenizer.chat_template = CHAT
    count = 8 if chat else 7  # five words and [user] … [end] [assistant], or Question: … Answer:
    with pytest.raises(DataError, match=rf"has {count} tokens and max_length is {count}.*'Where was Ada born \?'"):
        QuestionAnswerDataset(PAIRS, tokenizer, max_length=count, chat=chat)


def test_no_pair_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="No question/answer pair"):
        QuestionAnswerDataset(iter([]), tokenizer)
