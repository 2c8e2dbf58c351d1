"""How a question and its answer become tokens: OpenUnlearning's chat formats, token for token.

A benchmark's numbers depend on every token around the answer: system prompt, date, tags, end-of-text. The formats
here are the ``template_args`` of OpenUnlearning's model configurations, and :func:`encode_chat` gives the same ids and
labels as its pre-processing:

* with the tokenizer's chat template the text is never cut; with tags it is cut to ``max_length`` tokens;
* one end-of-text token is added unless the last token is one;
* as many tokens are masked as the prompt has, even if the tokenizer merges its last letters with the answer's first.

If no token of the answer would be left to learn or to score, it raises an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, DataError, one_line, unknown
from ..files import parse_yaml

IGNORE = -100
#: Written beside a trained model, so that it is evaluated in the format it was trained in.
FORMAT_FILE = "chat_format.json"


@dataclass(frozen=True)
class ChatFormat:
    """OpenUnlearning's ``template_args``: the tokenizer's chat template, or tags around question and answer."""

    apply_chat_template: bool
    system_prompt: str | None = None
    date_string: str | None = None
    system_prompt_with_special_tokens: str | None = None
    user_start_tag: str | None = None
    user_end_tag: str | None = None
    asst_start_tag: str | None = None
    asst_end_tag: str | None = None


@dataclass(frozen=True)
class Encoded:
    """One question and answer: all ids, labels that are -100 outside the answer, and the ids of the prompt alone."""

    input_ids: list[int]
    labels: list[int]
    prompt_ids: list[int]


_SYSTEM = "You are a helpful assistant."
_DATED = ChatFormat(True, system_prompt=_SYSTEM, date_string="10 Apr 2025")
_UNDATED = ChatFormat(True, system_prompt=_SYSTEM)
_BARE = ChatFormat(True)
_QUESTION_ANSWER = ChatFormat(
    False, user_start_tag="Question: ", user_end_tag="\n", asst_start_tag="Answer: ", asst_end_tag="\n\n"
)
_INST = ChatFormat(False, user_start_tag="[INST] ", user_end_tag=" [/INST]", asst_start_tag="", asst_end_tag=" ")

#: By the names of OpenUnlearning's model configurations. Tags that a chat template makes unused are left out.
FORMATS: Mapping[str, ChatFormat] = {
    "Llama-2-7b-hf": _QUESTION_ANSWER,
    "Llama-2-13b-hf": _QUESTION_ANSWER,
    "Llama-2-7b-chat-hf": _INST,
    "Llama-3.1-8B-Instruct": _DATED,
    "Llama-3.2-1B-Instruct": _DATED,
    "Llama-3.2-3B-Instruct": _DATED,
    "Phi-3.5-mini-instruct": _UNDATED,
    "Qwen2.5-1.5B-Instruct": _UNDATED,
    "Qwen2.5-3B-Instruct": _UNDATED,
    "Qwen2.5-7B-Instruct": _UNDATED,
    "gemma-7b-it": _BARE,
    "phi-1_5": _QUESTION_ANSWER,
    "zephyr-7b-beta": _DATED,
}

_CHOICES = (
    "Pass --chat-format NAME: one of OpenUnlearning's model names ("
    + ", ".join(FORMATS)
    + "), 'tokenizer' for the tokenizer's own chat template, or a YAML file with template_args "
    "(Llama-2-7b-hf is 'Question: … Answer: …' and needs no chat template)."
)


def find_format(name: str | None, tokenizer: Any, model_name: str | None = None) -> ChatFormat:
    """The format called ``name``, or the one that fits the model.

    Args:
        name: a key of :data:`FORMATS`, ``tokenizer`` (the chat template without a system prompt), or a YAML file:
            these keys, or one of OpenUnlearning's model files, of which ``template_args`` is taken. None: what the
            model's folder says it was trained with, else by the model's name, else the tokenizer's chat template.
        tokenizer: must have a chat template where the format applies one.
        model_name: hub id or folder of the model.
    """
    if name is None:
        form = _infer(tokenizer, model_name)
    elif name in FORMATS or name == "tokenizer":
        form = FORMATS.get(name, _BARE)
    elif (path := Path(name).expanduser()).is_file():
        form = read_format(path)
    else:
        raise unknown("chat format", name, (*FORMATS, "tokenizer", "a YAML file"))
    if form.apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"Chat format {name or model_name!r} needs a chat template and the tokenizer has none. {_CHOICES}"
        )
    return form


def _infer(tokenizer: Any, model_name: str | None) -> ChatFormat:
    if model_name:
        saved = saved_format(model_name)
        if saved is not None:
            return saved
        for known in FORMATS:
            if known.lower() in model_name.lower():
                return FORMATS[known]
    if getattr(tokenizer, "chat_template", None):
        return _BARE
    raise ConfigError(
        f"The tokenizer of {model_name!r} has no chat template and its name is no known model's. {_CHOICES}"
    )


def saved_format(model_name: str) -> ChatFormat | None:
    """The format that this model was trained with, if its folder records it; for a checkpoint, if the run's does."""
    folder = Path(model_name).expanduser()
    if folder.name.startswith("checkpoint-"):
        folder = folder.parent
    path = folder / FORMAT_FILE
    return read_format(path) if path.is_file() else None


def read_format(path: Path) -> ChatFormat:
    """A format from a YAML (or JSON) file."""
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {one_line(error)}") from error
    if isinstance(values, dict) and isinstance(values.get("template_args"), dict):
        values = values["template_args"]
    known = [field.name for field in dataclasses.fields(ChatFormat)]
    if not isinstance(values, dict) or not isinstance(values.get("apply_chat_template"), bool):
        raise ConfigError(
            f"{path} is no chat format: it needs 'apply_chat_template: true' or 'false', beside {known[1:]}."
        )
    for key in values:
        if key not in known:
            raise unknown(f"key of a chat format in {path}:", key, known)
    # YAML reads a date as a date.
    texts: dict[str, Any] = {k: v if isinstance(v, (bool, type(None))) else str(v) for k, v in values.items()}
    form = ChatFormat(**texts)
    missing = [tag for tag in ("user_start_tag", "user_end_tag", "asst_start_tag") if getattr(form, tag) is None]
    if missing and not form.apply_chat_template:
        raise ConfigError(
            f"{path}: without a chat template {', '.join(missing)} must be given (empty text is allowed)."
        )
    return form


def format_json(form: ChatFormat) -> str:
    """The text that :func:`read_format` reads."""
    return json.dumps(dataclasses.asdict(form), indent=2, ensure_ascii=False)


def encode_chat(question: str, answer: str, tokenizer: Any, form: ChatFormat, *, max_length: int = 512) -> Encoded:
    """Ids and labels of one question and answer."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("The tokenizer has no end-of-text token: set eos_token in its tokenizer_config.json.")
    if form.apply_chat_template:
        system = [{"role": "system", "content": form.system_prompt}] if form.system_prompt else []
        asked = [*system, {"role": "user", "content": question}]
        prompt = _render(tokenizer, form, asked, add_generation_prompt=True)
        whole = _render(tokenizer, form, [*asked, {"role": "assistant", "content": answer}])
    else:
        head = form.system_prompt_with_special_tokens or ""
        text = f"{head}{form.user_start_tag}{question}{form.user_end_tag}{form.asst_start_tag}"
        cut: dict[str, Any] = {"add_special_tokens": True, "max_length": max_length, "truncation": True}
        prompt = list(tokenizer(text, **cut)["input_ids"])
        whole = list(tokenizer(text + answer, **cut)["input_ids"])
        if len(prompt) >= max_length:
            raise DataError(
                f"The question alone fills max_length={max_length} tokens: no token of the answer is left. Raise "
                f"--max-length. The question begins {question[:60]!r}."
            )
    if not whole or whole[-1] != end:
        whole = [*whole, end]
    if len(prompt) >= len(whole):
        raise DataError(
            f"No token of the answer {answer[:60]!r} is left behind the prompt's {len(prompt)} tokens: it is empty, or "
            "the tokenizer merges it with the prompt. Drop the row, or choose another --chat-format."
        )
    return Encoded(whole, [IGNORE] * len(prompt) + whole[len(prompt) :], prompt)


def check_length(encoded: Encoded, limit: int, question: str, *, what: str = "max_length") -> None:
    """Raise for a sample longer than ``limit``: cut answers would be learned, or scored, as whole ones."""
    if len(encoded.input_ids) > limit:
        raise DataError(
            f"A question with its answer has more than the {limit} tokens of {what}; answers are not cut. Raise it, or "
            f"drop the row. The question begins {question[:60]!r}."
        )


def _render(tokenizer: Any, form: ChatFormat, chat: list[dict[str, str]], **options: Any) -> list[int]:
    from jinja2 import TemplateError

    dated = {"date_string": form.date_string} if form.date_string is not None else {}
    try:
        return token_ids(tokenizer.apply_chat_template(chat, tokenize=True, **options, **dated))
    except TemplateError as error:
        raise ConfigError(
            f"The tokenizer's chat template refuses this chat format ({error}): try --chat-format tokenizer, which has "
            "no system prompt."
        ) from error


def token_ids(rendered: Any) -> list[int]:
    """The ids of ``apply_chat_template``: transformers 5 returns a mapping, earlier versions the list itself."""
    return list(rendered["input_ids"] if hasattr(rendered, "keys") else rendered)
