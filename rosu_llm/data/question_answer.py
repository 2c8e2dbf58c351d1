"""Questions and answers as token sequences whose labels cover the answer only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset

from ..errors import DataError, one_line
from .chat_format import IGNORE, ChatFormat, check_length, encode_chat, token_ids

Tokens = dict[str, list[int]]
_ELSE = "pass --chat-format Llama-2-7b-hf (Question: … Answer: …) or another; in Python, chat=False and a template."


class QuestionAnswerDataset(Dataset[Tokens]):
    """Tokenised ``(question, answer)`` pairs.

    With a chat template the question is the user's turn and the answer the assistant's; otherwise the
    text is ``template`` filled in. Labels are the answer's tokens and the end-of-sequence token.

    Args:
        pairs: the questions and answers; without a question (None) the answer is learned as plain text.
        tokenizer: a transformers tokenizer.
        template: text before the answer when there is no chat template.
        max_length: longer samples are cut on the right.
        chat: use the tokenizer's chat template; None means "if it has one".
        chat_format: encode questions in this format instead, as OpenUnlearning does; a sample longer than
            ``max_length`` is then an error.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[str | None, str]],
        tokenizer: Any,
        *,
        template: str = "Question: {question}\nAnswer: ",
        max_length: int = 512,
        chat: bool | None = None,
        chat_format: ChatFormat | None = None,
    ) -> None:
        if chat is None:
            chat = bool(getattr(tokenizer, "chat_template", None))
        self.samples = [
            _encode(question, answer, tokenizer, template, max_length, chat)
            if question is None or chat_format is None
            else _encode_formatted(question, answer, tokenizer, chat_format, max_length)
            for question, answer in pairs
        ]
        if not self.samples:
            raise DataError("No question/answer pair was given: the data set would be empty.")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tokens:
        return self.samples[index]


def _encode(question: str | None, answer: str, tokenizer: Any, template: str, max_length: int, chat: bool) -> Tokens:
    """Token ids and labels of one pair."""
    if question is None:
        question, template, chat = "", "", False
    if chat:
        prompt, whole = _render(question, answer, tokenizer)
    else:
        prompt = tokenizer(template.format(question=question), add_special_tokens=True)["input_ids"]
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        if prompt and end and prompt[-1] == end[0]:
            prompt = prompt[:-1]
        whole = prompt + tokenizer(answer, add_special_tokens=False)["input_ids"] + end
    labels = [IGNORE] * len(prompt) + list(whole[len(prompt) :])
    if len(prompt) >= max_length:
        raise DataError(
            f"The question alone has {len(prompt)} tokens and max_length is {max_length}: no answer token would be "
            f"left. Raise max_length. The question begins {question[:60]!r}."
        )
    return {"input_ids": list(whole)[:max_length], "labels": labels[:max_length]}


def _render(question: str, answer: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The question's turn, and the whole chat that begins with it, through the tokenizer's chat template."""
    from jinja2 import TemplateError

    user = [{"role": "user", "content": question}]
    chat = [*user, {"role": "assistant", "content": answer}]
    try:
        prompt = token_ids(tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=True))
        whole = token_ids(tokenizer.apply_chat_template(chat, tokenize=True))
    except TemplateError as error:
        raise DataError(
            f"The tokenizer's chat template refuses a question and its answer ({one_line(error)}): {_ELSE}"
        ) from error
    if whole[: len(prompt)] != prompt:
        raise DataError(
            "The chat template renders the question differently once an answer follows, so the answer's tokens cannot "
            f"be told apart: {_ELSE}"
        )
    return prompt, whole


def _encode_formatted(question: str, answer: str, tokenizer: Any, form: ChatFormat, max_length: int) -> Tokens:
    """Token ids, labels and attention mask of one pair, as OpenUnlearning's data set and collator give them."""
    encoded = encode_chat(question, answer, tokenizer, form, max_length=max_length)
    check_length(encoded, max_length, question)
    # Its collator attends to what is not the pad token. Where that is the end-of-turn token too (Llama-3, whose
    # tokenizer has no other), the model is trained and scored without seeing the ends of turns.
    mask = [int(token != tokenizer.pad_token_id) for token in encoded.input_ids]
    return {"input_ids": encoded.input_ids, "labels": encoded.labels, "attention_mask": mask}
