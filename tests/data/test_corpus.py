"""Text corpora: what a file holds is detected, checked and reported; corpora take turns by the step."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.data.corpus import AlternatingCorpora, TextCorpus, load_corpus
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.errors import DataError


def characters(text: str, truncation: bool, max_length: int) -> dict[str, list[int]]:
    """A tokenizer of one token per character, behind a first one."""
    ids = [1, *(ord(c) for c in text)]
    return {"input_ids": ids[:max_length] if truncation else ids}


def texts(path: Path | str, **settings: Any) -> list[str]:
    return list(load_corpus(str(path), characters, **settings).texts)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ROWS = ['{"text": "first one"}', '{"text": "second", "more": 1}']


# -- what a file holds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a"])
def test_json_lines_are_recognised_whatever_the_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / name, "\n".join(ROWS))
    with caplog.at_level(logging.INFO, logger="rosu_llm"):
        assert texts(path) == ["first one", "second"]
    assert f"{path}: JSON lines, field 'text', 2 documents, 0 too short" in caplog.text


def test_plain_lines_are_recognised_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.txt", "one document\n\n  \nanother: {not json}\n[1, 2]\n42\n")
    with caplog.at_level(logging.INFO, logger="rosu_llm"):
        assert texts(path, min_length=3) == ["one document", "another: {not json}", "[1, 2]"]
    assert f"{path}: plain lines, 3 documents, 1 too short and left out" in caplog.text


def test_json_strings_are_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(t) for t in ('say "hi"\nthere', "z")))
    assert texts(path) == ['say "hi"\nthere', "z"]


def test_another_field_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"abstract": "x", "text": "y"}')
    assert texts(path, text_key="abstract") == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n\nplain words\n', r"line 3, is not JSON .* although the first one is\. Write one JSON object"),
        ("plain words\n\n" + ROWS[0], r"line 3, is a JSON object although the first line is plain text"),
        ('{"text": "a"}\n{"text": "b"', r"line 2, is not JSON"),
        ('{"text": "a"}\n\n{"body": "b"}', r"line 3, has fields \['body'\], but no text under 'text'.*text_key"),
        ('{"text": null}', r"line 1, has fields \['text'\], but no text under 'text'"),
        ('{"text": "a"}\n[1]', r"line 2, has a list, but no text"),
        ("", "is empty"),
        ("\n \n", "is empty"),
    ],
)
def test_a_file_that_is_neither_names_the_line(content: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(DataError, match=message) as caught:
        texts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_that_promises_json_is_held_to_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\njust text\n")
    with pytest.raises(DataError, match=r"line 2, is not JSON .* although the file's name says so.*plain lines in a"):
        texts(path)


def test_marks_and_line_ends(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, and Unicode's line separators, which end no line here."""
    rows = [json.dumps({"text": "one\u2028and\u0085two"}, ensure_ascii=False), '{"text": "three"}']
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert texts(path) == ["one\u2028and\u0085two", "three"]
    plain = write(tmp_path / "b.txt", b"\xef\xbb\xbf" + "one\u2028still one\r\ntwo\r\n".encode())
    assert texts(plain) == ["one\u2028still one", "two"]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not UTF-8 text .*Save it as UTF-8"):
        texts(write(tmp_path / "a.txt", "café".encode("latin-1")))


# -- lengths ----------------------------------------------------------------------------------------------


def test_documents_of_up_to_min_length_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\n".join("x" * n for n in (2, 5, 3, 4, 6)))
    assert texts(path, min_length=3) == ["x" * n for n in (5, 4, 6)]
    assert texts(path, min_length=3, limit=2) == ["x" * n for n in (5, 4)]
    assert texts(path, min_length=3, limit=9) == ["x" * n for n in (5, 4, 6)]


def test_some_of_the_documents_before_short_ones_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\nx\ntwo\nthree\n")
    assert texts(f"{path}[1:3]", min_length=1) == ["two"]
    with pytest.raises(DataError, match=r"a\.txt\[9:\]' names none of the 4 rows"):
        texts(f"{path}[9:]")


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", '{"text": "   "}\n{"text": ""}\n{"text": "b"}')) == ["b"]


def test_all_short_is_an_error_that_names_the_longest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\nthree\n")
    with pytest.raises(DataError, match=r"2 documents, none with more than min_length=50 char.*\(the longest has 5"):
        texts(path, min_length=50)


def test_documents_are_cut_to_max_length(tmp_path: Path) -> None:
    corpus = load_corpus(str(write(tmp_path / "a.txt", "abcdef\nab\n")), characters, max_length=4, corpus=2)
    assert corpus[0] == {"input_ids": [1, 97, 98, 99], "corpus": 2}
    assert corpus[1] == {"input_ids": [1, 97, 98], "corpus": 2}
    assert len(corpus) == 2
    with pytest.raises(DataError, match=r"max_length=1 .* at least 2"):
        TextCorpus(["a"], characters, max_length=1)


def test_a_document_without_tokens_is_named() -> None:
    corpus = TextCorpus(["fine", "\u200b"], lambda *_, **__: {"input_ids": []})
    with pytest.raises(DataError, match="Document 1 has no token"):
        corpus[1]


# -- where it comes from ----------------------------------------------------------------------------------


def test_hub_data_sets_are_read_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"text": ""}, {"text": "some text"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("Salesforce/wikitext:wikitext-2-raw-v1:test") == ["some text"]
    assert texts("cais/wmdp-corpora:cyber-forget-corpus") == ["some text"]
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
        ("cais/wmdp-corpora", "cyber-forget-corpus", "train"),
    ]
    with pytest.raises(DataError, match=r"a/b, row 1, has fields \['text'\], but no text under 'body'"):
        texts("a/b", text_key="body")


@pytest.mark.parametrize(
    ("source", "gated"),
    [
        ("data/bio-forget-corpus.jsonl", True),
        ("cais/wmdp-corpora:bio-forget-corpus", True),
        ("./wmdp/cyber.txt", True),
        ("mine.jsonl", False),
        ("some/other", False),
    ],
)
def test_a_missing_corpus_says_how_to_obtain_it(source: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("gated repository")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="file") as caught:
        texts(source)
    message = str(caught.value)
    assert ("https://huggingface.co/datasets/cais/wmdp-corpora" in message) == gated
    assert ("hf auth login" in message) == gated
    assert "\n" not in message


# -- taking turns -----------------------------------------------------------------------------------------


def numbered(count: int, corpus: int) -> list[dict[str, Any]]:
    return [{"input_ids": [corpus, i], "corpus": corpus} for i in range(count)]


def test_every_step_takes_its_documents_from_one_corpus_in_turn() -> None:
    data = AlternatingCorpora([numbered(7, 0), numbered(3, 1), numbered(5, 2)], numbered(4, 9), window=4)
    assert len(data) == 2 * 4 * 3  # two rounds cover the longest corpus of seven
    drawn = [data[i] for i in range(len(data))]
    assert [item["forget"]["corpus"] for item in drawn] == ([0] * 4 + [1] * 4 + [2] * 4) * 2
    seen = Counter(tuple(item["forget"]["input_ids"]) for item in drawn)
    for corpus, size in ((0, 7), (1, 3), (2, 5)):
        counts = [seen[corpus, i] for i in range(size)]
        assert sum(counts) == 8 and min(counts) >= 1 and max(counts) - min(counts) <= 1
    kept = Counter(item["retain"][0]["input_ids"][1] for item in drawn)
    assert set(kept.values()) == {6}  # 24 draws from 4
    with pytest.raises(IndexError):
        data[len(data)]


def test_what_is_drawn_depends_on_seed_epoch_and_index_alone() -> None:
    def make(seed: int = 0) -> AlternatingCorpora:
        return AlternatingCorpora([numbered(9, 0), numbered(8, 1)], numbered(10, 9), window=2, seed=seed)

    def order(data: AlternatingCorpora, indices: Any) -> list[Any]:
        return [data[i] for i in indices]

    data, everything = make(), range(20)
    first = order(data, everything)
    assert order(make(), reversed(everything)) == first[::-1]
    assert order(make(seed=1), everything) != first
    data.set_epoch(1)
    assert order(data, everything) != first
    again = make()
    again.set_epoch(1)
    assert order(again, everything) == order(data, everything)
    # rounds go on over epochs: 20 draws of corpus 0 (9 documents) are two whole rounds and two more
    counts = Counter(
        item["forget"]["input_ids"][1] for item in first + order(data, everything) if item["forget"]["corpus"] == 0
    )
    assert sorted(counts.values()) == [2] * 7 + [3] * 2


def test_empty_corpora_and_windows_are_refused() -> None:
    for forget, retain in (([], numbered(1, 9)), ([[]], numbered(1, 9)), ([numbered(1, 0)], [])):
        with pytest.raises(DataError, match="A corpus is empty"):
            AlternatingCorpora(forget, retain, window=1)
    with pytest.raises(DataError, match="window=0"):
        AlternatingCorpora([numbered(1, 0)], numbered(1, 9), window=0)


def test_the_collator_keeps_the_corpus() -> None:
    data = AlternatingCorpora([numbered(3, 0), numbered(3, 1)], numbered(3, 0), window=1)
    batch = ForgetRetainCollator(0)([data[0], data[1]])
    assert batch["forget"]["corpus"].tolist() == [0, 1]
    assert batch["forget"]["attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert "corpus" in batch["retain"]
