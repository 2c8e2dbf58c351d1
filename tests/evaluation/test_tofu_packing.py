"""Answers that share a row get the numbers they have alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rosu_llm.data.chat_format import Encoded
from rosu_llm.evaluation.tofu.packing import common_length, pack, packed_length
from rosu_llm.evaluation.tofu.token_statistics import may_share, token_statistics
from rosu_llm.experiments.demo.world import small_llama

PAD = 2  # also the end-of-text token, which stands inside prompts


def answers(prompt: list[int], *endings: list[int]) -> list[Encoded]:
    return [Encoded([*prompt, *end], [-100] * len(prompt) + end, prompt) for end in endings]


FIRST = answers([5, 6, PAD, 7, 8, PAD, 9], [10, 11, 12, PAD], [10, 11, 13, 14, 15, PAD], [PAD])
SECOND = answers([5, 30, 31], [32, 33, 34, 35, 36, PAD])
THIRD = answers([20, 21], [22, PAD], [22, 23, PAD])
#: The tokenizer merged the prompt's last letters with an answer's first: the prompt is 7, 8, 9, a row begins 7, 8, 30.
MERGED = [
    Encoded([7, 8, 9, 10, PAD], [-100, -100, -100, 10, PAD], [7, 8, 9]),
    Encoded([7, 8, 30, 11, 12, PAD], [-100, -100, -100, 11, 12, PAD], [7, 8, 9]),
]
BATCH = [*FIRST, *SECOND, *THIRD, *MERGED]


@pytest.fixture(scope="module")
def model() -> Any:
    made = small_llama(40, 3, hidden=32, layers=2).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.mul_(4)  # an untrained model is so unsure that everything is alike
    return made


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_of_several_gives_the_numbers_of_rows_of_one(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    shared = token_statistics(model, BATCH, PAD, full=True, share=True)
    for each, together in zip(BATCH, shared, strict=True):
        (alone,) = token_statistics(model, [each], PAD, full=True)
        np.testing.assert_allclose(together.log_prob, alone.log_prob, atol=5e-6)
        np.testing.assert_allclose(together.z, alone.z, atol=5e-5)
        assert together.hit.tolist() == alone.hit.tolist()


def test_the_question_is_read_once() -> None:
    packed = pack(BATCH, PAD, share=True)
    assert packed.inputs["input_ids"].shape == (4, 7 + 4 + 6 + 1)
    assert packed.inputs["input_ids"][0].tolist() == [5, 6, 2, 7, 8, 2, 9, 10, 11, 12, 2, 10, 11, 13, 14, 15, 2, 2]
    assert packed.inputs["position_ids"][0].tolist() == [*range(7), 7, 8, 9, 10, 7, 8, 9, 10, 11, 12, 7]
    assert packed.counts == [4, 6, 1, 6, 2, 3, 2, 3]
    assert (common_length(FIRST), packed_length(FIRST)) == (7, 18)
    assert (common_length(MERGED), packed_length(MERGED)) == (2, 2 + 3 + 4)
    assert pack(BATCH, PAD, share=False).inputs.keys() == {"input_ids", "attention_mask"}
    assert pack([*SECOND, *FIRST[:1]], PAD, share=True).inputs.keys() == {"input_ids", "attention_mask"}


class Recurrent(torch.nn.Module):
    """Adds to every token the mean of all before it in the row, which no attention mask can forbid."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config, self.dtype = inner, inner.config, inner.dtype

    def forward(self, input_ids: Any, **inputs: Any) -> Any:
        embedded = self.inner.get_input_embeddings()(input_ids)
        count = torch.arange(1, input_ids.shape[1] + 1)[None, :, None]
        return self.inner(inputs_embeds=embedded + embedded.cumsum(1) / count, **inputs)


def test_a_model_that_cannot_share_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation("sdpa")
    assert may_share(model, FIRST, PAD)
    assert not may_share(Recurrent(model), FIRST, PAD)
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    assert not may_share(model, FIRST, PAD)
