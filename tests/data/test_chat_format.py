"""Chat formats: token for token what OpenUnlearning's pre-processing gave, and one clear error where nothing fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rosu_llm import QuestionAnswerDataset
from rosu_llm.data.chat_format import (
    FORMAT_FILE,
    FORMATS,
    ChatFormat,
    check_length,
    encode_chat,
    find_format,
    format_json,
    read_format,
    token_ids,
)
from rosu_llm.errors import ConfigError, DataError
from tests.data.chat_cases import FIXTURE, MAX_LENGTH, PAIRS, TOKENIZERS, build_tokenizer, digest, tofu_pairs

THEIRS: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))


def theirs(name: str) -> dict[str, Any]:
    entry = THEIRS[name]
    return entry if isinstance(entry, dict) else theirs(entry)


def test_every_model_configuration_is_there() -> None:
    assert set(FORMATS) == set(THEIRS) == set(TOKENIZERS)
    assert len(FORMATS) == 13


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_says_what_openunlearnings_file_says(name: str) -> None:
    """Every value that its pre-processing reads: with a chat template the tags are not among them."""
    values, form = theirs(name)["template_args"], FORMATS[name]
    read = ["apply_chat_template", "system_prompt", "date_string"]
    if not values["apply_chat_template"]:
        read += [
            "system_prompt_with_special_tokens",
            "user_start_tag",
            "user_end_tag",
            "asst_start_tag",
            "asst_end_tag",
        ]
    assert {key: getattr(form, key) for key in read} == {key: values.get(key) for key in read}


@pytest.mark.parametrize("name", FORMATS)
def test_ids_and_labels_are_openunlearnings(name: str) -> None:
    tokenizer, expected = build_tokenizer(TOKENIZERS[name]), theirs(name)
    encoded = [encode_chat(q, a, tokenizer, FORMATS[name], max_length=MAX_LENGTH) for q, a in PAIRS]
    for ours, case in zip(encoded, expected["cases"], strict=True):
        assert ours.input_ids == case["input_ids"]
        assert ours.labels == [-100] * case["masked"] + case["input_ids"][case["masked"] :]
        assert len(ours.prompt_ids) == case["masked"]
    assert digest((e.input_ids, e.labels) for e in encoded) == expected["cases_digest"]


@pytest.mark.parametrize("name", ["Llama-2-7b-chat-hf", "Llama-3.2-1B-Instruct", "Qwen2.5-3B-Instruct", "phi-1_5"])
def test_real_rows_are_encoded_as_openunlearning_encodes_them(name: str, shared_data: Path) -> None:
    tokenizer = build_tokenizer(TOKENIZERS[name])
    encoded = [encode_chat(q, a, tokenizer, FORMATS[name]) for q, a in tofu_pairs(shared_data / "tofu")]
    assert len(encoded) == 80
    assert digest((e.input_ids, e.labels) for e in encoded) == theirs(name)["tofu_digest"]


def test_the_cases_hold_what_makes_formats_differ() -> None:
    """Else equality would prove little: cut text, an end token added, one not added, a merge across the border."""
    cut = theirs("phi-1_5")["cases"][3]["input_ids"]
    assert len(cut) == MAX_LENGTH + 1
    assert len(theirs("Llama-3.2-1B-Instruct")["cases"][3]["input_ids"]) > MAX_LENGTH + 1
    llama, chatml = build_tokenizer("llama3"), build_tokenizer("chatml")
    ends = llama.eos_token_id, chatml.eos_token_id
    assert [theirs("Llama-3.2-1B-Instruct")["cases"][0]["input_ids"].count(ends[0])] == [3]
    assert [theirs("Qwen2.5-3B-Instruct")["cases"][0]["input_ids"].count(ends[1])] == [4]
    merged = encode_chat(*PAIRS[2], build_tokenizer("bytes"), FORMATS["phi-1_5"])
    assert merged.input_ids[: len(merged.prompt_ids)] != merged.prompt_ids


def test_the_prompt_alone_is_what_a_model_is_asked() -> None:
    tokenizer = build_tokenizer("llama2")
    encoded = encode_chat("Who?", "Ada.", tokenizer, FORMATS["Llama-2-7b-chat-hf"])
    assert tokenizer.decode(encoded.prompt_ids, skip_special_tokens=True).strip() == "[INST] Who? [/INST]"
    answer = [label for label in encoded.labels if label != -100]
    assert tokenizer.decode(answer[:-1]) == "Ada."
    assert answer[-1] == tokenizer.eos_token_id


def test_either_answer_of_apply_chat_template_is_understood() -> None:
    assert list(token_ids([1, 2])) == list(token_ids({"input_ids": [1, 2]})) == [1, 2]


# -- which format -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("open-unlearning/tofu_Llama-3.2-1B-Instruct_full", "Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b-chat-hf"),
        ("/models/PHI-1_5", "phi-1_5"),
        ("google/gemma-7b-it", "gemma-7b-it"),
    ],
)
def test_a_models_name_tells_its_format(model: str, name: str) -> None:
    assert find_format(None, build_tokenizer("llama3"), model) == FORMATS[name]


def test_else_the_chat_template_without_a_system_prompt() -> None:
    form = find_format(None, build_tokenizer("chatml"), "owner/other")
    assert form == find_format("tokenizer", build_tokenizer("chatml")) == ChatFormat(True)


@pytest.mark.parametrize("name", [None, "tokenizer", "Qwen2.5-3B-Instruct"])
def test_a_missing_chat_template_is_an_error_that_says_what_to_pass(name: str | None) -> None:
    with pytest.raises(ConfigError, match=r"no(ne\.| chat template).*--chat-format NAME.*Llama-2-7b-hf") as caught:
        find_format(name, build_tokenizer("bytes"), "owner/other")
    assert "\n" not in str(caught.value)


def test_a_wrong_name_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Llama-3\.2-1B-Instruct'"):
        find_format("Llama-3.2-1B", build_tokenizer("llama3"))


def test_a_file_with_template_args_is_a_format(tmp_path: Path) -> None:
    """OpenUnlearning's own model file, the keys alone, or what a run has written."""
    values = {"apply_chat_template": False, "user_start_tag": "U: ", "user_end_tag": "\n", "asst_start_tag": "A: "}
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump({"model_args": {"a": 1}, "template_args": values}))
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "own.json").write_text(format_json(ChatFormat(**values)))
    for name in ("whole.yaml", "keys.yaml", "own.json"):
        assert find_format(str(tmp_path / name), build_tokenizer("bytes")) == ChatFormat(**values)


def test_a_date_in_a_file_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("apply_chat_template: true\ndate_string: 2025-04-10\n")
    assert read_format(tmp_path / "a.yaml").date_string == "2025-04-10"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("apply_chat_template: maybe\n", "is no chat format"),
        ("- a\n", "is no chat format"),
        ("a: [1\n", "is not valid YAML"),
        ("apply_chat_template: true\nsystem_promt: x\n", "Did you mean 'system_prompt'"),
        ("apply_chat_template: false\nuser_start_tag: 'Q'\n", "user_end_tag, asst_start_tag must be given"),
    ],
)
def test_a_file_that_is_no_format_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_format(str(tmp_path / "a.yaml"), build_tokenizer("llama3"))


def test_a_trained_models_folder_says_what_it_was_trained_with(tmp_path: Path) -> None:
    """Also to its checkpoints, and before the name is guessed at."""
    (tmp_path / FORMAT_FILE).write_text(format_json(FORMATS["phi-1_5"]))
    for folder in (tmp_path, tmp_path / "checkpoint-8"):
        assert find_format(None, build_tokenizer("llama3"), str(folder)) == FORMATS["phi-1_5"]
    assert find_format(None, build_tokenizer("llama3"), str(tmp_path / "other")) == ChatFormat(True)


# -- what does not fit --------------------------------------------------------------------------------------


def test_a_question_that_fills_the_length_is_refused() -> None:
    tokenizer, form = build_tokenizer("bytes"), FORMATS["phi-1_5"]
    length = len(encode_chat(*PAIRS[0], tokenizer, form).prompt_ids)
    assert encode_chat(*PAIRS[0], tokenizer, form, max_length=length + 1).labels.count(-100) == length
    with pytest.raises(DataError, match=rf"fills max_length={length} tokens.*--max-length"):
        encode_chat(*PAIRS[0], tokenizer, form, max_length=length)


def test_an_answer_without_a_token_of_its_own_is_refused() -> None:
    tokenizer = build_tokenizer("llama3")
    form = ChatFormat(False, user_start_tag="", user_end_tag="", asst_start_tag="")
    with pytest.raises(DataError, match="No token of the answer ''"):
        encode_chat("ends <|eot_id|>", "", tokenizer, form)


def test_a_template_that_refuses_the_system_prompt_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"System role not supported.*--chat-format tokenizer"):
        encode_chat("Who?", "Ada", build_tokenizer("gemma"), FORMATS["Qwen2.5-3B-Instruct"])


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = build_tokenizer("bytes")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        encode_chat("Who?", "Ada", tokenizer, FORMATS["phi-1_5"])


@pytest.mark.parametrize("name", ["phi-1_5", "Llama-3.2-1B-Instruct"])
def test_training_data_are_never_cut(name: str) -> None:
    """With tags OpenUnlearning cuts, with a chat template it ignores the length: both are errors here."""
    tokenizer, form = build_tokenizer(TOKENIZERS[name]), FORMATS[name]
    length = len(encode_chat(*PAIRS[3], tokenizer, form).input_ids)
    assert len(QuestionAnswerDataset([PAIRS[3]], tokenizer, max_length=length, chat_format=form)) == 1
    with pytest.raises(DataError, match=f"more than the {length - 1} tokens of max_length"):
        QuestionAnswerDataset([PAIRS[3]], tokenizer, max_length=length - 1, chat_format=form)
    with pytest.raises(DataError, match="of the model's context"):
        check_length(encode_chat(*PAIRS[3], tokenizer, form), length - 1, "", what="the model's context")


def test_training_attends_to_what_openunlearnings_collator_attends_to() -> None:
    """It masks the pad token wherever it is; Llama-3's is the end of every turn."""
    tokenizer = build_tokenizer("llama3")
    (sample,) = QuestionAnswerDataset([PAIRS[0]], tokenizer, chat_format=FORMATS["Llama-3.2-1B-Instruct"]).samples
    assert sample["attention_mask"] == [int(i != tokenizer.eos_token_id) for i in sample["input_ids"]]
    assert sample["attention_mask"].count(0) == 3
    tokenizer.pad_token = tokenizer.bos_token
    (sample,) = QuestionAnswerDataset([PAIRS[0]], tokenizer, chat_format=FORMATS["Llama-3.2-1B-Instruct"]).samples
    assert sample["attention_mask"] == [0] + [1] * (len(sample["input_ids"]) - 1)


def test_plain_text_needs_no_format() -> None:
    tokenizer = build_tokenizer("llama3")
    plain = QuestionAnswerDataset([(None, "one two")], tokenizer).samples
    assert QuestionAnswerDataset([(None, "one two")], tokenizer, chat_format=FORMATS["phi-1_5"]).samples == plain
