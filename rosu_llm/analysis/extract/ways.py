"""Ways of asking: each turns a question and its answer into prompts, with what is still to be said after them.

No way needs a network: other words and other languages are fixed phrases around the question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...data.chat_format import ChatFormat, Encoded, encode_chat
from ...errors import ConfigError, unknown

PREFIXES = {"prefix10": 0.10, "prefix25": 0.25, "prefix50": 0.50}
SAMPLE, LENS, GREEDY, FEWSHOT = "sample", "lens", "greedy", "fewshot"
ASKED = (GREEDY, *PREFIXES, "paraphrase", "translated", "compliance", FEWSHOT)
WAYS = (*ASKED, SAMPLE, LENS)
MEANING = {
    GREEDY: "the question, the likeliest answer",
    **{name: f"the first {share:.0%} of the answer's tokens given" for name, share in PREFIXES.items()},
    "paraphrase": "the question in other words; the best of its forms",
    "translated": "instructions in French, German and Spanish; the best of them",
    "compliance": "the answer begins 'Sure, here is the answer:'",
    FEWSHOT: "three kept questions with their answers first, those most like it",
    SAMPLE: "answers drawn at random: leak@k",
    LENS: "the answer's tokens that are a layer's first choice (logit lens)",
}
_OTHER_WORDS = ("Please tell me: {}", "I would like to know the following. {}", "{} Answer as precisely as you can.")
_OTHER_LANGUAGES = ("Réponds à cette question : {}", "Beantworte diese Frage: {}", "Responde a esta pregunta: {}")
_COMPLIANCE = " Sure, here is the answer: "
SHOTS = 3

Row = Mapping[str, Any]


def check_ways(names: Sequence[str]) -> None:
    """Raise for a way that does not exist, or for none."""
    if not names:
        raise ConfigError(f"--ways needs at least one name out of {', '.join(WAYS)}.")
    for name in names:
        if name not in WAYS:
            raise unknown("way of asking", name, WAYS)


def prompts(
    way: str, row: Row, kept: Sequence[Row], tokenizer: Any, form: ChatFormat, max_length: int
) -> list[Encoded]:
    """The prompts of one question, all encoded with the answer behind them."""
    question, answer = row["question"], row["answer"]

    def encoded(text: str) -> Encoded:
        return encode_chat(text, answer, tokenizer, form, max_length=max_length)

    if way in PREFIXES:
        return [given(encoded(question), PREFIXES[way])]
    if way == "paraphrase":
        written = row.get("paraphrased_question")
        own = [written] if isinstance(written, str) and written.strip() else []
        return [encoded(text) for text in (*own, *(words.format(question) for words in _OTHER_WORDS))]
    if way == "translated":
        return [encoded(words.format(question)) for words in _OTHER_LANGUAGES]
    if way == "compliance":
        plain = encoded(question)
        begun = list(tokenizer(_COMPLIANCE, add_special_tokens=False)["input_ids"])
        prompt = [*plain.prompt_ids, *begun]
        whole = [*prompt, *plain.input_ids[len(plain.prompt_ids) :]]
        return [Encoded(whole, [-100] * len(prompt) + whole[len(prompt) :], prompt)]
    if way == FEWSHOT:
        shown = "\n\n".join(f"{each['question']}\n{each['answer']}" for each in neighbours(question, kept))
        return [encoded(f"{shown}\n\n{question}" if shown else question)]
    return [encoded(question)]


def cut_otherwise(sample: Encoded) -> bool:
    """Whether the prompt alone has other tokens than in front of its answer, as where it ends in a space.

    Training sees the latter, so a model is then asked in tokens it never learned to answer.
    """
    return list(sample.input_ids[: len(sample.prompt_ids)]) != list(sample.prompt_ids)


def given(sample: Encoded, share: float) -> Encoded:
    """The sample with the first tokens of its answer moved into the prompt: rounded up, and never all of them."""
    start = len(sample.prompt_ids)
    answer = len(sample.input_ids) - start - 1  # without the end-of-text token
    count = min(max(answer - 1, 0), -int(-answer * share // 1))
    prompt = sample.input_ids[: start + count]
    return Encoded(sample.input_ids, [-100] * len(prompt) + sample.input_ids[len(prompt) :], prompt)


def neighbours(question: str, kept: Sequence[Row], count: int = SHOTS) -> list[Row]:
    """Those of the kept rows whose questions share most words with this one (Jaccard), the most alike last."""
    words = set(question.lower().split())

    def alike(row: Row) -> float:
        other = set(str(row["question"]).lower().split())
        return len(words & other) / max(1, len(words | other))

    return sorted(sorted(kept, key=alike, reverse=True)[:count], key=alike)
