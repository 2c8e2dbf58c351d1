"""Scores are what a loop over single tokens gives; the attack's area is scikit-learn's."""

from __future__ import annotations

from math import exp

import pytest
import torch
from sklearn.metrics import roc_auc_score

from rosu_llm.errors import DataError
from rosu_llm.evaluation.memorisation import Scores, is_degenerate, membership_auc, score
from tests.losses import naive
from tests.models import CleanLM, samples, tiny_llama

DATA = samples(11, seed=9, longest=20)


def truth(model: torch.nn.Module, sample: naive.Sample) -> tuple[float, float]:
    """(mean token loss, share of tokens that are the first choice) of one sample, alone and unpadded."""
    losses = naive.token_losses(model, sample)
    hits = [max(range(len(logits)), key=logits.__getitem__) == label for logits, label in naive.rows(model, sample)]
    return sum(losses) / len(losses), sum(hits) / len(hits)


def taught() -> CleanLM:
    """A model that reproduces some tokens and not others."""
    model = CleanLM(seed=1, dropout=0.2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batch = naive.padded(DATA[:4], 20)
    for _ in range(40):
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_scores_are_those_of_the_loop_in_the_order_of_the_samples(batch_size: int) -> None:
    model = taught().eval()
    got = score(model, DATA, batch_size=batch_size)
    expected = [truth(model, s) for s in DATA]
    assert got.nll.tolist() == pytest.approx([nll for nll, _ in expected], rel=1e-6)  # kept in float32
    assert got.match.tolist() == pytest.approx([match for _, match in expected], rel=1e-6)  # likewise
    assert 0.1 < got.exact_match < 0.9
    assert got.exact_match == pytest.approx(sum(m for _, m in expected) / 11, rel=1e-6)  # likewise
    assert got.probability == pytest.approx(sum(exp(-nll) for nll, _ in expected) / 11, rel=1e-5)  # float32 exp


def test_batch_size_and_pad_token_do_not_matter_for_a_real_architecture() -> None:
    model = tiny_llama(seed=2)
    one = score(model, DATA, batch_size=1)
    for size, pad in ((3, 0), (11, 7)):
        many = score(model, DATA, batch_size=size, pad_token_id=pad)
        # float32 attention over other widths: a few units in the last place of logits near 1
        assert torch.allclose(one.nll, many.nll, rtol=1e-5)
        assert torch.equal(one.match, many.match)


@pytest.mark.parametrize("training", [True, False])
def test_scoring_uses_no_dropout_keeps_the_mode_and_no_graph(training: bool) -> None:
    model = CleanLM(dropout=0.5).train(training)
    first, second = score(model, DATA), score(model, DATA)
    assert torch.equal(first.nll, second.nll)
    assert model.training is training
    assert not first.nll.requires_grad
    with pytest.raises(KeyError):
        score(model, [{"labels": [1]}])
    assert model.training is training


def test_figures_of_a_data_set_are_means_over_samples_not_tokens() -> None:
    scores = Scores(nll=torch.tensor([0.0, 2.0]), match=torch.tensor([1.0, 0.25]))
    assert scores.probability == pytest.approx((1.0 + exp(-2.0)) / 2.0, rel=1e-6)  # float32
    assert scores.exact_match == 0.625


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(DataError, match="no sample"):
        score(CleanLM(), [])


@pytest.mark.parametrize("seed", range(4))
def test_area_is_scikit_learns_also_with_ties(seed: int) -> None:
    """Members are the positives and a low loss is the evidence."""
    generator = torch.Generator().manual_seed(seed)
    members = torch.randint(0, 8, (13 + seed,), generator=generator).float()
    others = torch.randint(2, 10, (7 + 5 * seed,), generator=generator).float()
    if seed % 2:
        members, others = members + torch.rand(members.shape, generator=generator), others + 0.5
    truths = [1] * len(members) + [0] * len(others)
    expected = roc_auc_score(truths, (-torch.cat([members, others])).tolist())
    assert membership_auc(members, others) == pytest.approx(expected, abs=1e-12)  # ratios of small integers


@pytest.mark.parametrize(("members", "others", "area"), [([1, 2], [3, 4], 1.0), ([3, 4], [1, 2], 0.0), ([5], [5], 0.5)])
def test_the_ends_and_the_middle_of_the_scale(members: list[float], others: list[float], area: float) -> None:
    assert membership_auc(torch.tensor(members), torch.tensor(others)) == area


def test_differences_below_float32_are_not_ties() -> None:
    a = torch.tensor([1.0], dtype=torch.float64)
    assert membership_auc(a, a + 1e-12) == 1.0


@pytest.mark.parametrize("empty", ["members", "others"])
def test_the_attack_needs_both_sides(empty: str) -> None:
    sides = {"members": torch.ones(2), "others": torch.ones(2), empty: torch.ones(0)}
    with pytest.raises(DataError, match="one of them is empty"):
        membership_auc(**sides)


@pytest.mark.parametrize(
    ("text", "noise"),
    [
        ("", True),
        ("   ", True),
        ("is is is is is", True),
        ("was born in was born in was born in Uppsala .", True),
        ("The dish of dish of dish of", True),
        ("Zelda Pemberton was born in Quito .", False),
        ("was born in was born in Quito .", False),  # twice may be chance
        ("a b c a b d a b e", False),
        ("1 2 3 4 5 6 7 8 " * 3, True),
        ("1 2 3 4 5 6 7 8 9 " * 3, False),
        ("........................................", True),  # no words, though not empty
        ("? ! ,", True),
        ("explexplexplexplexplexplexplexpl", True),  # one word for whom words are between spaces
        ("The answer is aaaaaaaa.", True),
        ("Hmm... well, she sold 100000000 copies!!", False),
        ("东京", False),
    ],
)
def test_an_answer_is_noise_where_it_says_nothing_or_the_same_again_and_again(text: str, noise: bool) -> None:
    assert is_degenerate(text) is noise
