"""The generated people: as many as asked for, the same for the same seed, nobody in two splits."""

from __future__ import annotations

from collections import Counter

import pytest

from rosu_llm.data.people import SPLITS, generate
from rosu_llm.errors import ConfigError
from rosu_llm.experiments.demo.world import build_world, word_tokenizer

CORPUS = generate(3, forget=4, retain=9, calibration=2, holdout=3, perturbed=5)
ITEMS = [item for split in SPLITS for item in CORPUS.items[split]]


def test_every_split_has_its_people_with_one_question_per_attribute() -> None:
    assert tuple(CORPUS.items) == SPLITS
    for split, count in zip(SPLITS, (4, 9, 2, 3), strict=True):
        per_person = Counter(item.person for item in CORPUS.items[split])
        assert len(per_person) == count
        assert set(per_person.values()) == {8}
        for person in per_person:
            assert len({i.attribute for i in CORPUS.items[split] if i.person == person}) == 8


def test_nobody_is_in_two_splits_however_many_there_are() -> None:
    """Up to the last name there is; the limit itself is read off the error message."""
    with pytest.raises(ConfigError, match=r"there are \d+ names") as caught:
        generate(0, forget=10**6)
    most = int(str(caught.value).split("there are ")[1].split()[0])
    corpus = generate(1, forget=most - 30, retain=10, calibration=10, holdout=10)
    people = [{item.person for item in corpus.items[split]} for split in SPLITS]
    assert sum(map(len, people)) == len(set.union(*people)) == most


def test_first_names_do_not_repeat_at_the_demos_size() -> None:
    corpus = generate(0)
    people = {item.person for split in corpus.items.values() for item in split}
    assert len(people) == len({p.split()[0] for p in people}) == 70


def test_the_same_seed_gives_the_same_people_and_another_does_not() -> None:
    again = generate(3, forget=4, retain=9, calibration=2, holdout=3, perturbed=5)
    assert again == CORPUS
    other = generate(4, forget=4, retain=9, calibration=2, holdout=3, perturbed=5)
    assert {i.person for i in other.items["forget"]} != {i.person for i in CORPUS.items["forget"]}


def value_of(answer: str, others: tuple[str, ...]) -> tuple[str, str, str]:
    """(before, value, after) of an answer, from where it and its perturbed versions agree."""
    words, rest = answer.split(), [o.split() for o in others]
    before = 0
    while before < len(words) and all(len(o) > before and o[before] == words[before] for o in rest):
        before += 1
    after = 0
    while after < len(words) - before and all(o[-1 - after] == words[-1 - after] for o in rest):
        after += 1
    return " ".join(words[:before]), " ".join(words[before : len(words) - after]), " ".join(words[len(words) - after :])


def test_questions_name_the_person_and_answers_hold_the_fact() -> None:
    for item in ITEMS:
        assert item.person in item.question
        assert item.person in item.answer
        assert item.person in item.paraphrased_question
        assert item.person in item.paraphrased_answer
        _, value, _ = value_of(item.answer, item.perturbed_answers)
        assert value
        assert value not in item.question
        assert value in item.paraphrased_answer
        assert item.question != item.paraphrased_question
        assert item.answer != item.paraphrased_answer


def test_perturbed_answers_are_the_same_sentence_with_other_facts() -> None:
    for item in ITEMS:
        assert len(item.perturbed_answers) == 5
        assert len({item.answer, *item.perturbed_answers}) == 6
        before, _, after = value_of(item.answer, item.perturbed_answers)
        assert item.person in before
        assert after.endswith(".")
        assert all(p.startswith(before) and p.endswith(after) for p in item.perturbed_answers)


def test_every_word_has_a_token_of_its_own() -> None:
    words = CORPUS.words()
    assert words == sorted(set(words))
    tokenizer = word_tokenizer(words)
    for item in ITEMS:
        texts = (
            item.question,
            item.answer,
            item.paraphrased_question,
            item.paraphrased_answer,
            *item.perturbed_answers,
        )
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.convert_ids_to_tokens(ids) == text.split()


def test_the_demos_world_tokenises_question_then_answer() -> None:
    world = build_world(2, people={"forget": 1, "retain": 2, "calibration": 1, "holdout": 1})
    for split in SPLITS:
        for sample, item in zip(world.data[split], world.corpus.items[split], strict=True):
            tokens = world.tokenizer.convert_ids_to_tokens(sample["input_ids"])
            assert tokens == [*item.question.split(), *item.answer.split(), "</s>"]
            assert sample["labels"].count(-100) == len(item.question.split())


@pytest.mark.parametrize("split", SPLITS)
def test_an_empty_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="each split needs at least one"):
        generate(0, **{split: 0})


def test_more_wrong_answers_than_there_are_facts_is_refused() -> None:
    with pytest.raises(ConfigError, match="perturbed"):
        generate(0, perturbed=1000)
