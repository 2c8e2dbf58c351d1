"""Which words are marked, which questions are shown, and that markdown shows answers as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rosu_llm.errors import DataError
from rosu_llm.presentation.qualitative import (
    AGREES,
    DIFFERS,
    Answer,
    Choice,
    Example,
    choose,
    mark,
    question_of,
    read_answers,
)
from rosu_llm.presentation.writers import markdown

QUESTION = "What is the full name of the geology author born in Karachi, Pakistan on 06/30/1975?"
TRUTH = "The author's name is Hina Ameen."


def marked(text: str, kind: str, truth: str = TRUTH, question: str = QUESTION) -> list[str]:
    return [span.text for span in mark(text, truth, question) if span.kind == kind]


def test_the_papers_figure_is_marked_as_in_the_paper() -> None:
    before = "The full name of the geology author born in Karachi, Pakistan on 06/30/1975 is Hina Ameen."
    after = "The full name of the geologist author born in Karachi, Pakistan on 06/30/1975 is Amanuddin."
    for text in (TRUTH, before):
        assert marked(text, AGREES) == ["Hina Ameen"]
        assert marked(text, DIFFERS) == []
    assert marked(after, AGREES) == []
    assert marked(after, DIFFERS) == ["geologist", "Amanuddin"]


def test_a_second_example_of_the_paper() -> None:
    question = "Were any of the books by Aysha Al-Hashim made into films or TV series?"
    truth = "Her novel 'The Matrimony Plan' is currently under negotiation for a film adaptation."
    after = "As of now, none of the books by Aysha Al-Hashim have been adapted into a TV or film series."
    assert "Matrimony Plan" in marked(truth, AGREES, truth, question)
    assert "none" in marked(after, DIFFERS, truth, question)
    assert not {"books", "TV", "Aysha"} & set(marked(after, DIFFERS, truth, question))


def test_order_counts_and_case_does_not() -> None:
    assert marked("hina AMEEN", AGREES) == ["hina AMEEN"]
    assert marked("Ameen Hina", AGREES) in (["Ameen"], ["Hina"])
    assert marked("not Hina", DIFFERS) == ["not"]


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_spans_are_the_text(text: str, truth: str, question: str) -> None:
    assert "".join(span.text for span in mark(text, truth, question)) == text


@pytest.mark.parametrize(
    "prompt",
    [
        "Who is it?",
        "system\n\nCutting Knowledge Date: 2023\n\nYou are a user of help.user\n\nWho is it?assistant\n\n",
        "system\nYou are helpful.\nuser\nWho is it?\nassistant\n",
        "<|user|>\nWho is it?\n<|assistant|>\n",
        "[INST] Who is it? [/INST]",
        "Question: Who is it?\nAnswer:",
    ],
)
def test_the_question_is_found_in_a_decoded_prompt(prompt: str) -> None:
    assert question_of(prompt) == "Who is it?"


def answers(scores: dict[str, float], text: str = "x") -> dict[str, Answer]:
    return {key: Answer(f"q{key}", "t", text, score) for key, score in scores.items()}


def questions(choice: Choice) -> list[str]:
    return [example.question for example in choice.examples]


def test_the_largest_drops_come_first_and_then_what_did_not_change() -> None:
    before = answers({"0": 1.0, "1": 0.9, "2": 0.5, "3": 0.8, "4": 0.2})
    after = answers({"0": 0.9, "1": 0.1, "2": 0.1, "3": 0.8, "4": 0.6})  # drops: .1 .8 .4 0 −.4
    choice = choose(before, {"run": after}, 4)
    assert questions(choice) == ["q1", "q2", "q0", "q3"]
    assert "the 3 whose ROUGE-L recall fell most, then 1 where it changed least" in choice.how
    assert choice.examples[0].remark == "ROUGE-L recall: before 0.90, run 0.10"
    assert questions(choose(before, {"run": after}, 1)) == ["q1"]


def test_drops_are_averaged_over_runs() -> None:
    before = answers({"0": 1.0, "1": 1.0})
    runs = {"a": answers({"0": 0.0, "1": 0.4}), "b": answers({"0": 1.0, "1": 0.4})}  # drops .5 and .6
    assert questions(choose(before, runs, 2)) == ["q1", "q0"]


def test_without_answers_before_the_lowest_scores_come_first() -> None:
    choice = choose(None, {"run": answers({"0": 0.4, "1": 0.1, "2": 0.9, "3": 0.5})}, 4)
    assert questions(choice) == ["q1", "q0", "q3", "q2"]
    assert "lowest" in choice.how and "highest" in choice.how
    assert [name for name, _ in choice.examples[0].answers] == ["run"]


def test_questions_that_differ_between_models_are_not_compared() -> None:
    after = {"0": Answer("q0", "t", "x", 0.1), "1": Answer("another", "t", "x", 0.1), "5": Answer("q5", "t", "x", 0.1)}
    assert questions(choose(answers({"0": 1.0, "1": 1.0, "2": 1.0}), {"run": after}, 5)) == ["q0"]
    assert choose(None, {}, 3).examples == ()


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_answers_are_read_and_broken_ones_left_out(tmp_path: Path) -> None:
    entry = {"input": "user\n\nWho?assistant\n\n", "ground_truth": " It. ", "generation": "\nHe. "}
    by_index = {"0": {**entry, "rougeL_recall": 0.5}, "1": {**entry, "generation": None}, "2": entry, "3": 7}
    found = read_answers(write(tmp_path / "a.json", {"forget_Q_A_ROUGE": {"agg_value": 1, "value_by_index": by_index}}))
    assert found == {"0": Answer("Who?", "It.", "He.", 0.5), "2": Answer("Who?", "It.", "He.", None)}


@pytest.mark.parametrize("content", [{}, {"forget_Q_A_ROUGE": 0.4}, {"forget_Q_A_ROUGE": {"value_by_index": {}}}])
def test_a_file_without_answers_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    with pytest.raises(DataError, match=r"a\.json holds no generated answers"):
        read_answers(write(tmp_path / "a.json", content))


HARD = "<script>alert(1)</script> | *a* _b_ `c` [d](http://e) ~~f~~ &amp; $g$ \\ <!-- h -->"


def test_markdown_shows_text_as_it_is() -> None:
    shown = MarkdownIt("gfm-like", {"linkify": False}).parseInline(markdown.escape(HARD))[0].children
    assert shown is not None
    assert {token.type for token in shown} <= {"text", "text_special"}
    assert "".join(token.content for token in shown) == HARD


@pytest.mark.parametrize("text", ["# a", "- a", "1. a", "+ a"])
def test_markdown_makes_no_list_or_heading_of_text(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse(markdown.escape(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]


def test_the_page_marks_words_and_runs_nothing() -> None:
    example = Example("Who?", "Hina Ameen", (("before", "Hina Ameen"), ("run|1", f"Amanuddin {HARD}"), ("none", " ")))
    page = MarkdownIt("gfm-like", {"linkify": False}).render(markdown.answers(Choice((example,), "All of them.")))
    assert "<strong>Hina Ameen</strong>" in page
    assert "<s>Amanuddin</s>" in page
    assert "run|1" in page and "(empty)" in page
    assert "<script" not in page and "<a " not in page
