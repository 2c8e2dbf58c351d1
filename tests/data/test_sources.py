"""Files of rows: read as they are, and where they are broken the error says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rosu_llm.data.sources import load_samples, local_file, named_rows, read_rows, source_content
from rosu_llm.errors import DataError
from rosu_llm.experiments.demo.world import word_tokenizer

ROWS = [{"question": "Who ?", "answer": "Ada"}, {"question": "Where ?", "answer": "Riga — über"}]


@pytest.fixture
def tokenizer() -> Any:
    return word_tokenizer("Question: Answer: Who Where ? Ada Riga — über one two three".split())


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list(tmp_path: Path, indent: int | None) -> None:
    assert read_rows(write(tmp_path / "a.json", "\n " + json.dumps(ROWS, indent=indent, ensure_ascii=False))) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a"])
@pytest.mark.parametrize("between", ["\n", "\r\n", "\n\n \n\t\n"])
def test_json_lines_with_blank_lines_whatever_the_name(tmp_path: Path, name: str, between: str) -> None:
    text = between.join(json.dumps(row, ensure_ascii=False) for row in ROWS) + between
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(str(tmp_path / name)) == ROWS


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path: Path, character: str) -> None:
    """JSON allows Unicode's other line breaks inside strings, and writers that keep non-ASCII text put them there."""
    row = {"question": f"one{character}two", "answer": "three"}
    assert read_rows(write(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False) + "\n")) == [row]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"question": "Who ?"}\n\n{"question": \n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3, is not JSON"):
        read_rows(path)


def test_a_broken_list_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json begins like a JSON list but does not parse"):
        read_rows(write(tmp_path / "a.json", '[{"question": "Who ?"},'))


@pytest.mark.parametrize("text", ["", " \n\n", "[]"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="holds no row"):
        read_rows(write(tmp_path / "a.json", text))


@pytest.mark.parametrize("text", ['[{"text": "one"}, "two"]', '{"text": "one"}\n3\n'])
def test_rows_without_fields_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"row 2, is a (str|int), not an object"):
        read_rows(write(tmp_path / "a.json", text))


@pytest.mark.parametrize("name", ["missing.json", "missing.jsonl", "./missing", "/nowhere/missing", "~/missing"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="is not a file"):
        read_rows(name)


def test_the_hub_is_asked_for_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        asked.append((*args, kwargs["split"]))
        return iter(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load)
    for source in ("owner/name", "owner/name:forget10", "owner/name:forget10:test", "owner/name::test"):
        assert read_rows(source) == ROWS
    assert asked == [
        ("owner/name", None, "train"),
        ("owner/name", "forget10", "train"),
        ("owner/name", "forget10", "test"),
        ("owner/name", None, "test"),
    ]


def test_what_the_hub_cannot_give_is_an_error_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError, match=r"'owner/name:x' is neither a local file.*no network"):
        read_rows("owner/name:x")


def test_questions_and_answers_under_any_name(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", '{"q": "Who ?", "a": "Ada", "text": "one"}\n')
    sample = load_samples(path, tokenizer, question_key="q", answer_key="a")[0]
    assert tokenizer.convert_ids_to_tokens(sample["input_ids"]) == "Question: Who ? Answer: Ada </s>".split()
    assert [label != -100 for label in sample["labels"]] == [False] * 4 + [True] * 2


def test_numbers_as_answers_are_read_as_text(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(["7", "Answer:", "Question:", "Who"])
    sample = load_samples(write(tmp_path / "a.jsonl", '{"question": "Who", "answer": 7}\n'), tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(sample["input_ids"])[-2:] == ["7", "</s>"]


def test_plain_text_is_learned_whole_even_by_a_chat_model(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path = write(tmp_path / "a.jsonl", '{"text": "one two three"}\n{"text": "two"}\n')
    dataset = load_samples(path, tokenizer)
    for sample, text in zip(dataset, ("one two three", "two"), strict=True):
        assert tokenizer.convert_ids_to_tokens(sample["input_ids"]) == [*text.split(), "</s>"]
        assert sample["labels"] == sample["input_ids"]


def test_text_among_questions_is_still_plain_text(tmp_path: Path, tokenizer: Any) -> None:
    """A row with a text but no question is learned as plain text, whatever the rows beside it are."""
    path = write(tmp_path / "a.jsonl", '{"question": "Who ?", "answer": "Ada"}\n{"text": "one two"}\n')
    sample = load_samples(path, tokenizer)[1]
    assert tokenizer.convert_ids_to_tokens(sample["input_ids"]) == ["one", "two", "</s>"]


@pytest.mark.parametrize("row", ['{"question": "Who ?"}', '{"prompt": "Who ?", "answer": "Ada"}', "{}"])
def test_missing_fields_are_named_with_those_there_are(tmp_path: Path, tokenizer: Any, row: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"question": "Who ?", "answer": "Ada"}\n' + row)
    with pytest.raises(DataError, match=r"Row 2 of .*neither 'question' and 'answer' nor 'text'") as caught:
        load_samples(path, tokenizer)
    assert str(sorted(json.loads(row))) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who ?", "answer": " "}, "Row 2 of .* has an empty answer: nothing would be learned"),
        ({"text": ""}, "Row 2 of .* has an empty text"),
        ({"question": "Who ?", "answer": ["Ada", "Riga"]}, "Row 2 of .* has a list as answer, not text"),
        ({"question": {"en": "Who ?"}, "answer": "Ada"}, "Row 2 of .* has a dict as question"),
        ({"question": "Who ?", "answer": None}, "Row 2 of .* has answer: null"),
    ],
)
def test_fields_that_say_nothing_are_named(tmp_path: Path, tokenizer: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_samples(write(tmp_path / "a.json", json.dumps([ROWS[0], row])), tokenizer)


def test_a_question_may_be_empty_and_other_fields_anything(tmp_path: Path, tokenizer: Any) -> None:
    """A field that is not read is not looked at."""
    row = {"question": "", "answer": "Ada", "text": None}
    assert len(load_samples(write(tmp_path / "a.json", json.dumps([row])), tokenizer)) == 1


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (2, 2), (9, 2), (None, 2)])
def test_limit_takes_the_first_rows(tmp_path: Path, tokenizer: Any, limit: int | None, count: int) -> None:
    path = write(tmp_path / "a.json", json.dumps(ROWS))
    every = load_samples(path, tokenizer).samples
    assert load_samples(path, tokenizer, limit=limit).samples == every[:count]


def test_limit_spares_the_rows_behind_it(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.json", json.dumps([*ROWS, {"other": 1}]))
    assert len(load_samples(path, tokenizer, limit=2)) == 2


def test_max_length_reaches_the_samples(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one two three"}\n')
    assert len(load_samples(path, tokenizer, max_length=2)[0]["input_ids"]) == 2


# -- folders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one.json", "one.jsonl", "one/train.json", "one/train.jsonl"])
@pytest.mark.parametrize("as_list", [True, False])
def test_a_folder_holds_data_sets_by_name(tmp_path: Path, name: str, as_list: bool) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, json.dumps(ROWS) if as_list else lines)
    write(tmp_path / "two.json", '{"text": "other"}')
    assert read_rows(f"{tmp_path}:one") == ROWS
    assert local_file(f"{tmp_path}:one") == tmp_path / name


@pytest.mark.parametrize("config", ["", ":", ":three", ":one:test"])
def test_a_name_that_is_not_in_the_folder_comes_with_those_that_are(tmp_path: Path, config: str) -> None:
    write(tmp_path / "two.json", json.dumps(ROWS))
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / "train.jsonl", json.dumps(ROWS))
    write(tmp_path / "README.md", "not data")
    with pytest.raises(DataError, match=r"has no data set .*; there is: one, two\."):
        read_rows(f"{tmp_path}{config}")


def test_other_splits_and_folders_with_colons_in_their_path(tmp_path: Path) -> None:
    folder = tmp_path / "12:30" / "data"
    (folder / "one").mkdir(parents=True)
    for split, row in zip(("train", "test"), ROWS, strict=True):
        write(folder / "one" / f"{split}.json", json.dumps(row))
    assert read_rows(f"{folder}:one") == read_rows(f"{folder}:one:train") == ROWS[:1]
    assert read_rows(f"{folder}:one:test") == ROWS[1:]
    with pytest.raises(DataError, match=r"has no data set 'one:dev'"):
        read_rows(f"{folder}:one:dev")


def test_some_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": str(i)} for i in range(5)]
    path = tmp_path / "level.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for some, expected in (("[:2]", rows[:2]), ("[3:]", rows[3:]), ("[1:4]", rows[1:4]), ("[:]", rows), ("[:9]", rows)):
        for source in (str(path), f"{tmp_path}:level"):
            assert read_rows(source + some) == expected
            assert local_file(source + some) == path
    with pytest.raises(DataError, match=r"level\[5:\]' names none of the 5 rows"):
        read_rows(f"{tmp_path}:level[5:]")
    for odd in ("[-3:]", "[0]", "[::2]", "[: 1]"):
        for source in (str(path), str(tmp_path / "missing.jsonl"), "owner/name", "owner/name:a"):
            with pytest.raises(DataError, match=r"rows are named \[first:end\]"):
                read_rows(f"{source}{odd}")
    for twice in ("[:3][1:]", "[-3:][:1]"):
        with pytest.raises(DataError, match="names rows twice"):
            read_rows(f"{path}{twice}")
    assert source_content(f"{path}[:2]") != source_content(f"{path}[2:]") != source_content(str(path))
    monkeypatch.setattr("rosu_llm.data.sources.read_hub", lambda source: rows if source == "owner/name:a:b" else [])
    assert read_rows("owner/name:a:b[4:]") == rows[4:]
    for several in ("owner/name:a:b+c[:2]", "owner/name:a:b[:2]+c[3:]"):  # for the hub's library, as it stands
        assert named_rows(several) == (several, slice(None))


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    rows = [{"text": str(i)} for i in range(3)]
    for name in ("mine[0:1]", "other[v2]", "both[0][v2]"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        in_folder = [] if ":" in name else [f"{tmp_path}:{name}"]
        for source in (f"{tmp_path}/{name}.jsonl", *in_folder):
            assert read_rows(source) == rows
            assert read_rows(f"{source}[1:]") == rows[1:]
            assert local_file(f"{source}[1:]") == tmp_path / f"{name}.jsonl"


def test_slices_in_the_words_of_the_hub_are_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*args: Any, split: str) -> Any:
        asked.append(split)
        return [] if split == "none[:5%]" else ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    assert read_rows("owner/name:a:train[:5%]") == ROWS
    with pytest.raises(DataError, match=r"'owner/name:a:none\[:5%\]' holds no row"):
        read_rows("owner/name:a:none[:5%]")
    assert asked == ["train[:5%]", "none[:5%]"]


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is: no \.jsonl, \.json, \.csv or \.parquet file"):
        read_rows(f"{tmp_path}:one")


def test_the_hub_is_no_local_file() -> None:
    assert local_file("owner/name:config") is None


# -- the real thing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("forget01", 40), ("holdout01", 40), ("retain_perturbed", 400)])
def test_tofu_files_have_the_rows_they_are_known_to_have(shared_data: Path, name: str, count: int) -> None:
    assert len(read_rows(str(shared_data / "tofu" / f"{name}.json"))) == count


def test_tofu_answers_come_back_from_the_labels(shared_data: Path) -> None:
    """Through a real byte-fallback tokenizer: decoding the labels gives the answer, decoding the rest the question."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260K")
    path = shared_data / "tofu" / "forget01.json"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    dataset = load_samples(str(path), tokenizer)
    assert len(dataset) == len(lines) == 40
    for sample, row in zip(dataset, lines, strict=True):
        answer = [label for label in sample["labels"] if label != -100]
        start = len(sample["labels"]) - len(answer)
        assert sample["labels"] == [-100] * start + answer
        assert sample["input_ids"][start:] == answer
        assert answer[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer[:-1]).strip() == row["answer"]
        prompt = tokenizer.decode(sample["input_ids"][:start], skip_special_tokens=True)
        assert prompt.strip() == f"Question: {row['question']}\nAnswer:"


@pytest.mark.parametrize("name", ["management.test", "sociology.test"])
def test_mmlu_files_with_unicode_line_breaks_are_read_line_by_line(shared_data: Path, name: str) -> None:
    path = shared_data / "mmlu" / f"{name}.jsonl"
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    assert read_rows(str(path)) == [json.loads(line) for line in lines]
