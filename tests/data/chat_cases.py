"""Tokenizers, questions and answers for comparing chat formats with OpenUnlearning's own pre-processing.

The tokenizers are written out here, not trained, so that every version of the libraries builds the same ones: bytes
with a few merges, and a chat template in the manner of each model family. ``openunlearning_chat.json`` beside this file
holds what OpenUnlearning makes of the cases; to write it again, in an environment with its pins::

    PYTHONPATH=/path/to/open-unlearning/src python tests/data/chat_cases.py /path/to/open-unlearning [TOFU folder]
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).with_name("openunlearning_chat.json")
MAX_LENGTH = 44

#: Question and answer: plain, non-ASCII, an answer whose first letter merges with the last of "Answer: ", and one so
#: long that a format with tags cuts it at MAX_LENGTH.
PAIRS = [
    ("Who is Ada?", "Ada is a poet."),
    ("Wo wohnt Jürgen?", "In Köln."),
    ("Is it?", "a yes"),
    ("Which was first?", "The first one, then the next one, and so on."),
]

_MERGES = [("t", "h"), ("th", "e"), ("i", "s"), ("Ġ", "a"), ("Ċ", "Ċ"), ("e", "r"), (":", "Ġ"), ("Ġ", "Ċ"), ("o", "n")]

LLAMA3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ date_string | default('26 Jul 2024') }}\n\n{{ system }}"
    "<|eot_id|>{% for turn in turns %}<|start_header_id|>{{ turn['role'] }}<|end_header_id|>\n\n"
    "{{ turn['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nDefault.<|im_end|>\n{% endif %}"
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZEPHYR = (
    "{% for turn in messages %}<|{{ turn['role'] }}|>\n{{ turn['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI = (
    "{% for turn in messages %}<|{{ turn['role'] }}|>\n{{ turn['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for turn in messages %}{% if turn['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>"
    "{{ 'model' if turn['role'] == 'assistant' else turn['role'] }}\n{{ turn['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

#: Family → special tokens (beginning, end, others) and chat template.
_FAMILIES: dict[str, tuple[str | None, str, tuple[str, ...], str | None]] = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), LLAMA3),
    "chatml": (None, "<|im_end|>", ("<|im_start|>",), CHATML),
    "zephyr": ("<s>", "</s>", (), ZEPHYR),
    "phi3": (None, "<|endoftext|>", ("<|user|>", "<|end|>", "<|assistant|>", "<|system|>"), PHI),
    "gemma": ("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), GEMMA),
    "llama2": ("<s>", "</s>", (), None),
    "bytes": (None, "<|endoftext|>", (), None),
}

#: OpenUnlearning's model configurations → the family of the tokenizer.
TOKENIZERS = {
    "Llama-2-7b-hf": "llama2",
    "Llama-2-13b-hf": "llama2",
    "Llama-2-7b-chat-hf": "llama2",
    "Llama-3.1-8B-Instruct": "llama3",
    "Llama-3.2-1B-Instruct": "llama3",
    "Llama-3.2-3B-Instruct": "llama3",
    "Phi-3.5-mini-instruct": "phi3",
    "Qwen2.5-1.5B-Instruct": "chatml",
    "Qwen2.5-3B-Instruct": "chatml",
    "Qwen2.5-7B-Instruct": "chatml",
    "gemma-7b-it": "gemma",
    "phi-1_5": "bytes",
    "zephyr-7b-beta": "zephyr",
}


def build_tokenizer(family: str) -> Any:
    """Bytes with a few merges, the family's special tokens, and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    begin, end, others, template = _FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in _MERGES)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in (begin, end, *others) if token])
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=end)
    tokenizer.chat_template = template
    return tokenizer


def digest(encoded: Iterable[tuple[list[int], list[int]]]) -> str:
    """One number for many pairs of ids and labels."""
    return hashlib.sha256(json.dumps([list(pair) for pair in encoded]).encode()).hexdigest()[:32]


def tofu_pairs(folder: Path) -> list[tuple[str, str]]:
    """Real questions with one right and one wrong answer each."""
    lines = (folder / "forget01_perturbed.json").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    return [(row["question"], answer) for row in rows for answer in (row["answer"], row["perturbed_answer"][0])]


def main(checkout: Path, tofu: Path) -> None:
    """Run OpenUnlearning's pre-processing over all cases and write the fixture; a name stands for an equal entry."""
    import yaml
    from data.utils import preprocess_chat_instance  # OpenUnlearning's

    result: dict[str, Any] = {}
    for name, family in TOKENIZERS.items():
        tokenizer = build_tokenizer(family)
        form = yaml.safe_load((checkout / "configs" / "model" / f"{name}.yaml").read_text())["template_args"]

        def theirs(question: str, answer: str, length: int) -> tuple[list[int], list[int]]:
            item = preprocess_chat_instance(tokenizer, form, [question], [answer], length)
            return item["input_ids"].tolist(), item["labels"].tolist()

        cases = [theirs(question, answer, MAX_LENGTH) for question, answer in PAIRS]
        entry = {
            "template_args": form,
            "cases": [{"input_ids": ids, "masked": labels.count(-100)} for ids, labels in cases],
            "cases_digest": digest(cases),
            "tofu_digest": digest([theirs(question, answer, 512) for question, answer in tofu_pairs(tofu)]),
        }
        result[name] = next((other for other, known in result.items() if known == entry), entry)
    FIXTURE.write_text(json.dumps(result, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "../shared/data/tofu"))
