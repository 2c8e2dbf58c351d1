"""Greedy answers against a loop over argmax without cache or padding; the texts that are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rosu_llm.data.chat_format import FORMATS, encode_chat
from rosu_llm.evaluation.tofu import generation
from rosu_llm.evaluation.tofu.generation import generate, rouge, text_of
from rosu_llm.experiments.demo.world import small_llama, word_tokenizer

WORDS = "Question: Answer: who was born in Riga ? she wrote . it 's , Oslo we do n't the The".split()
QUESTIONS = ["who was born in Riga ?", "who ?", "who was she in Oslo , the born ?", "do we ?"]
NEW = 12


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer(WORDS)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    made = small_llama(len(tokenizer), 1, hidden=32, layers=2).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.mul_(4)
        made.model.embed_tokens.weight[tokenizer.eos_token_id] *= 1.5  # so that some answers end early
    return made


def greedy(model: Any, prompt: list[int], end: int) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize(("tokens", "cache"), [(1, None), (5, None), (100, None), (5, "static")])
def test_answers_of_a_ragged_batch_are_those_of_single_prompts(
    model: Any, tokenizer: Any, tokens: int, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds of some tokens, after which ended rows leave; also where a cache cannot be taken along."""
    monkeypatch.setattr(generation, "ROUND", tokens)
    monkeypatch.setattr(model.generation_config, "cache_implementation", cache)
    samples = [encode_chat(q, "she was born in Riga .", tokenizer, FORMATS["Llama-2-7b-hf"]) for q in QUESTIONS]
    assert len({len(sample.prompt_ids) for sample in samples}) > 1
    found = generate(model, tokenizer, samples, tokenizer.pad_token_id, NEW)
    plain = [greedy(model, sample.prompt_ids, tokenizer.eos_token_id) for sample in samples]
    assert [each["generation"] for each in found] == [text_of(tokenizer, ids).strip() for ids in plain]
    lengths = {len(ids) for ids in plain}
    assert len(lengths) > 1, "some answers must end before others for this to test anything"


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 6},
        {"num_beams": 2},
        {"forced_eos_token_id": 2},
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 0},
        {"exponential_decay_length_penalty": (4, 1.5)},
    ],
    ids=str,
)
def test_settings_that_count_from_the_first_token_are_not_cut_into_rounds(
    model: Any, tokenizer: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setattr(model.generation_config, name, value)
    monkeypatch.setattr(generation, "ROUND", 3)
    form = FORMATS["Llama-2-7b-hf"]
    samples = [encode_chat(question, "she wrote .", tokenizer, form) for question in QUESTIONS]
    found = generate(model, tokenizer, samples, tokenizer.pad_token_id, NEW)
    for sample, each in zip(samples, found, strict=True):
        ids = torch.tensor([sample.prompt_ids])
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
        whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
        assert each["generation"] == text_of(tokenizer, whole[0, ids.shape[1] :].tolist()).strip()


def test_the_reference_is_the_conversation_without_the_prompt(model: Any, tokenizer: Any) -> None:
    sample = encode_chat(QUESTIONS[0], "she was born in Riga , Oslo .", tokenizer, FORMATS["Llama-2-7b-hf"])
    found = generate(model, tokenizer, [sample], tokenizer.pad_token_id, 1)[0]
    assert found["input"] == "Question: who was born in Riga? Answer:"
    assert found["ground_truth"] == "she was born in Riga, Oslo."


def test_spaces_before_punctuation_are_removed_also_for_byte_pair_tokenizers() -> None:
    """transformers 5 ignores the request for them; OpenUnlearning's transformers follows it."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: at for at, letter in enumerate(["<pad>", "</s>", "a", " ", ".", "'", "s"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    ids = tokenizer("a 's .")["input_ids"]
    assert text_of(tokenizer, [*ids, 1]) == "a's."
    assert text_of(tokenizer, [*ids, 1], clean=False) == "a 's ."


def test_rouge_by_hand() -> None:
    """All four words of the truth are there (the stemmer joins book and books), three of them in order."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    found = rouge(scorer, "she wrote many books", "many she wrote book")
    assert found["rouge1_recall"] == pytest.approx(1.0)
    assert found["rougeL_recall"] == pytest.approx(0.75)
    assert found["rougeL_f1"] == pytest.approx(0.75)
