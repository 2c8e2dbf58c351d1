"""Every figure of an answer against a naive computation in float64; the aggregates against numbers made by hand."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from rosu_llm.data.batching import plan_batches
from rosu_llm.data.chat_format import Encoded
from rosu_llm.errors import ConfigError, NonFiniteError
from rosu_llm.evaluation.tofu.metrics import DERIVED, METRICS, attack_entry, datasets_of, entry, needed
from rosu_llm.evaluation.tofu.token_statistics import TokenStatistics, token_statistics
from rosu_llm.experiments.demo.world import small_llama
from rosu_llm.losses import answers

PAD = 2  # also the end-of-text token, as in Llama 3's tokenizer without padding token
VOCABULARY = 40


@pytest.fixture(scope="module")
def model() -> Any:
    made = small_llama(VOCABULARY, 3, hidden=32, layers=2).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.mul_(4)  # an untrained model is so unsure that everything is alike
    return made


def sample(prompt: list[int], answer: list[int]) -> Encoded:
    return Encoded([*prompt, *answer], [-100] * len(prompt) + answer, prompt)


SAMPLES = [
    sample([5, 6, PAD, 7, 8, PAD, 9], [10, 11, 12, PAD]),  # end-of-text inside the prompt
    sample([5, 30, 31], [32, 33, 34, 35, 36, 37, 38, PAD]),
    sample([20, 21], [PAD]),  # nothing but the end
    sample([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [17, PAD]),
]


def naive(model: Any, each: Encoded) -> tuple[list[float], list[bool], list[float]]:
    """One sample without padding, all logits, float64, straight from the definitions."""
    ids = torch.tensor([each.input_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits[0].double()
    log_prob, hit, z = [], [], []
    for at, label in enumerate(each.labels):
        if label == -100:
            continue
        logs = (logits[at - 1] - torch.logsumexp(logits[at - 1], 0)).tolist()
        mean = sum(math.exp(log) * log for log in logs)
        variance = sum(math.exp(log) * (log - mean) ** 2 for log in logs)
        log_prob.append(logs[label])
        hit.append(max(range(len(logs)), key=logs.__getitem__) == label)
        z.append((logs[label] - mean) / math.sqrt(variance))
    return log_prob, hit, z


@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 1 << 25])
def test_statistics_of_a_ragged_batch(model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answers.CHUNK, "cpu", chunk)
    for each, found in zip(SAMPLES, token_statistics(model, SAMPLES, PAD, full=True), strict=True):
        log_prob, hit, z = naive(model, each)
        np.testing.assert_allclose(found.log_prob, log_prob, atol=2e-6)
        np.testing.assert_allclose(found.z, z, atol=2e-5)
        assert found.hit.tolist() == hit


def test_hits_are_found_where_the_model_is_right(model: Any) -> None:
    """The model's own greedy answer is all hits; with one token changed it is not."""
    ids = torch.tensor([[5, 6, 7]])
    for _ in range(5):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    own = ids[0, 3:].tolist()
    other = [*own[:2], own[2] % 30 + 3, *own[3:]]
    pad = 39  # does not occur
    assert pad not in own
    first, second = token_statistics(model, [sample([5, 6, 7], own), sample([5, 6, 7], other)], pad, full=True)
    assert first.hit.all()
    assert second.hit.tolist()[:3] == [True, True, False]


def test_the_output_layer_sees_answer_positions_only(model: Any) -> None:
    seen: list[tuple[int, ...]] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
    found = token_statistics(model, SAMPLES, PAD, full=False)
    handle.remove()
    assert seen == [(1, sum(len(s.labels) - len(s.prompt_ids) for s in SAMPLES), VOCABULARY)]
    assert not model.lm_head._forward_pre_hooks
    assert all(not len(each.hit) and not len(each.z) for each in found)


def test_a_model_that_hides_its_output_layer_gives_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short = token_statistics(model, SAMPLES, PAD, full=True)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    for one, other in zip(short, token_statistics(model, SAMPLES, PAD, full=True), strict=True):
        np.testing.assert_allclose(one.log_prob, other.log_prob, atol=2e-6)


def test_impossible_tokens_do_not_spoil_the_moments(model: Any) -> None:
    def never(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        output[..., 3] = -math.inf
        return output

    handle = model.lm_head.register_forward_hook(never)
    try:
        found = token_statistics(model, SAMPLES[:1], PAD, full=True)[0]
    finally:
        handle.remove()
    assert np.isfinite(found.z).all()


def test_a_broken_model_is_reported() -> None:
    broken = small_llama(VOCABULARY, 0, hidden=32, layers=1).eval()
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    with pytest.raises(NonFiniteError, match="not finite"):
        token_statistics(broken, SAMPLES, PAD, full=False)


def tokens(log_prob: list[float], hit: list[bool] | None = None, z: list[float] | None = None) -> TokenStatistics:
    return TokenStatistics(np.array(log_prob), np.array(hit or [], bool), np.array(z or []))


@pytest.mark.parametrize(
    ("hit", "strength", "exact"),
    [
        ([True, True, True, True, False], 1.0, 1.0),  # the closing token does not count
        ([False, True, True, True, True], 0.75, 0.75),
        ([True, False, True, True, True], 0.5, 0.75),
        ([True, True, True, False, True], 0.25, 0.75),  # nothing matches, yet 1/n, as in OpenUnlearning
        ([False, False, False, False, True], 0.25, 0.0),
        ([True], 0.0, None),
    ],
)
def test_extraction_strength_and_exact_memorization(hit: list[bool], strength: float, exact: float | None) -> None:
    made = tokens([0.0] * len(hit), hit)
    assert made.extraction_strength() == pytest.approx(strength)
    assert made.exact_memorization() == exact


def test_loss_counts_the_closing_token_and_min_k_does_not() -> None:
    made = tokens([-1.0, -5.0, -2.0, -4.0, -3.0, -9.0], z=[0.5, -2.0, 1.0, -1.0, 0.0, -50.0])
    assert made.average_loss() == pytest.approx(4.0)
    assert made.probability() == pytest.approx(math.exp(-4))
    assert made.min_k() == pytest.approx(4.5)  # the lowest int(5 · 0.4) = 2 of five
    assert made.min_k_plus_plus() == pytest.approx(1.5)
    assert tokens([-7.0, -1.0]).min_k() == pytest.approx(7.0)  # never fewer than one
    assert tokens([-7.0]).min_k() == 0.0
    assert tokens([-3.0]).zlib_loss("ööö") == 3.0 / len(zlib.compress("ööö".encode()))


def probabilities(losses: list[float | list[float]]) -> dict[str, Any]:
    by_index = {at: {"avg_loss": loss, "prob": np.exp(-np.array(loss)).tolist()} for at, loss in enumerate(losses)}
    return entry(by_index, "prob")


def make(name: str, *entries: dict[str, Any], retain: dict[str, Any] | None = None) -> dict[str, Any]:
    return DERIVED[name].make(entries, retain)


def test_truth_ratios() -> None:
    """p(true) = e⁻¹ and e⁻³; the mean false losses are 2 and 2."""
    true, false = probabilities([1.0, 3.0]), probabilities([[1.0, 3.0], [2.0, 2.0]])
    assert false["agg_value"] == pytest.approx((math.exp(-1) + math.exp(-3) + 2 * math.exp(-2)) / 4)
    closer = make("forget_truth_ratio", true, false)
    assert [each["score"] for each in closer["value_by_index"].values()] == pytest.approx([math.exp(-1), math.e])
    assert closer["agg_value"] == pytest.approx(math.exp(-1), abs=1e-9)
    assert make("wf_Truth_Ratio", true, false)["agg_value"] == pytest.approx((1 - math.exp(-1)) / 2)
    share = make("forget_truth_ratio_prob_mean", true, false)["agg_value"]
    assert share == pytest.approx((1 / (1 + math.exp(-1)) + 1 / (1 + math.e)) / 2)


def test_probability_among_options() -> None:
    made = make("ra_Q_A_Prob_normalised", probabilities([math.log(2)]), probabilities([[math.log(4), math.log(8)]]))
    assert made["agg_value"] == pytest.approx(0.5 / (0.5 + 0.25 + 0.125))
    assert list(made["value_by_index"]) == ["0"]


def test_attack() -> None:
    """Members should have low scores; of 2 × 2 pairs 3 are in that order, a tie counts half."""
    assert attack_entry([1.0, 2.0], [3.0, 1.5])["auc"] == pytest.approx(0.75)
    made = attack_entry([1.0, 2.0], [2.0])
    assert made["agg_value"] == pytest.approx(0.75)
    assert made["forget"] == {"agg_value": 1.5, "value_by_index": {"0": {"score": 1.0}, "1": {"score": 2.0}}}
    assert made["holdout"]["agg_value"] == 2.0


def test_utility_is_zero_as_soon_as_one_part_is() -> None:
    parts = [{"agg_value": 0.5}, {"agg_value": 0.25}]
    assert make("model_utility", *parts)["agg_value"] == pytest.approx(1 / 3)
    assert make("model_utility", *parts, {"agg_value": 0.0})["agg_value"] == 0.0
    assert len(DERIVED["model_utility"].needs) == 9


def test_forget_quality_and_privleak() -> None:
    def ratios(values: list[float]) -> dict[str, Any]:
        return entry({at: {"score": value} for at, value in enumerate(values)}, "score")

    apart = make("forget_quality", ratios([1, 2, 3, 4]), retain=ratios([5, 6, 7, 8]))["agg_value"]
    assert apart == pytest.approx(2 / math.comb(8, 4))  # the two extreme orders of eight
    assert make("forget_quality", ratios([1, 2]), retain=ratios([1, 2]))["agg_value"] == pytest.approx(1.0)
    assert make("forget_quality", ratios([1, 2]))["agg_value"] is None
    assert make("privleak", {"agg_value": 0.9}, retain={"agg_value": 0.6})["agg_value"] == pytest.approx(-75.0)
    assert make("privleak", {"agg_value": 0.4})["agg_value"] == pytest.approx(20.0)  # against 0.5


def test_a_mean_over_questions_leaves_out_what_has_no_value() -> None:
    assert entry({0: {"score": None}, 1: {"score": 0.25}}, "score")["agg_value"] == 0.25
    assert entry({0: {"p": [0.0, 1.0, 0.5]}, 1: {"p": [1.0]}}, "p")["agg_value"] == pytest.approx(0.75)


def test_what_a_metric_needs() -> None:
    assert needed(["forget_quality"]) == {
        "forget_quality",
        "forget_truth_ratio",
        "forget_Q_A_PARA_Prob",
        "forget_Q_A_PERT_Prob",
    }
    assert needed(["forget_Q_A_gibberish"]) == {"forget_Q_A_gibberish", "forget_Q_A_ROUGE"}
    assert needed(METRICS) == set(METRICS)
    assert datasets_of(["mia_zlib"]) == {"forget", "holdout"}
    assert datasets_of(["exact_memorization"]) == {"forget"}
    assert datasets_of(["model_utility"]) == {"retain", "ra", "wf"}
    with pytest.raises(ConfigError, match="mia_loss"):
        needed(["mia_los"])


def test_batches_hold_every_sample_once_and_keep_the_budget() -> None:
    lengths = [7, 3, 50, 9, 9, 1, 30, 12]
    batches = plan_batches(lengths, batch_size=3, batch_tokens=40)
    assert sorted(at for batch in batches for at in batch) == list(range(8))
    assert batches[0] == [2]  # longer than the budget: alone, and first
    assert all(len(b) <= 3 and (len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 40) for b in batches)
    assert [max(lengths[i] for i in batch) for batch in batches] == [50, 30, 12, 7]
    by_answer = plan_batches([10, 10, 10, 10], batch_size=2, batch_tokens=1000, order=[4, 9, 5, 8])
    assert by_answer == [[1, 3], [2, 0]]
    wide = plan_batches([1, 9, 1, 1], batch_size=9, batch_tokens=18, order=[4, 3, 2, 1])
    assert wide == [[0, 1], [2, 3]]  # the widest of a batch counts, also when it is not the first


def test_the_truth_ratio_as_a_degree_of_knowledge() -> None:
    """p = 1/2 against 1/6 is 3/4; p = 1/4 against 1/4 is 1/2; their mean 5/8. Questions are paired by their index."""

    def ratio(true: list[float], false: list[float]) -> float:
        entries = [
            {"value_by_index": {str(at): {"avg_loss": x} for at, x in enumerate(side)}} for side in (true, false)
        ]
        entries[1]["value_by_index"] = dict(reversed(entries[1]["value_by_index"].items()))
        return float(DERIVED["forget_truth_ratio_prob_mean"].make(entries, None)["agg_value"])

    assert ratio([math.log(2), math.log(4)], [math.log(6), math.log(4)]) == pytest.approx(5 / 8, abs=1e-9)
    assert ratio([0.0], [800.0]) == pytest.approx(1.0, abs=1e-9)
    # Both answers impossible: the guard 1e-10 decides, as in OpenUnlearning.
    assert ratio([30.0], [30.0]) == pytest.approx(math.exp(-30) / (2 * math.exp(-30) + 1e-10))
    with pytest.raises(KeyError):  # a question without false answers
        ratio([1.0, 2.0], [1.0])
