"""The five scores, from components chosen so that each can be checked by hand or against the paper's own tables."""

from __future__ import annotations

import pytest

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.evaluation.tofu.summary import ATTACKS, COLUMNS, FLUENCY, INPUTS, MODEL_UTILITY, harmonic_mean, summarise

# 1−x: .5, .25, .5, .25 → Mem = 4/(2+4+2+4) = 1/3.  HM(.6, .3) = .4.
MODEL = {
    "extraction_strength": 0.5,
    "exact_memorization": 0.75,
    "forget_Q_A_PARA_Prob": 0.5,
    "forget_truth_ratio_prob_mean": 0.75,
    "mia_loss": 0.4,
    "mia_zlib": 0.7,
    "mia_min_k": 0.4,
    "mia_min_k_plus_plus": 0.7,
    "model_utility": 0.6,
    "forget_Q_A_gibberish": 0.3,
}
RETAIN = dict.fromkeys(ATTACKS.values(), 0.4)  # range: s = 1, .5, 1, .5 → Priv = 4/6 = 2/3
INITIAL = {**MODEL, "model_utility": 0.75, "forget_Q_A_gibberish": 0.5, "mia_zlib": 1.0, "mia_min_k_plus_plus": 0.8}


def test_all_five_by_hand() -> None:
    summary = summarise(MODEL, retain=RETAIN, target=INITIAL)
    assert summary.mem == pytest.approx(1 / 3)
    assert summary.closeness == pytest.approx({"LOSS": 1, "ZLib": 0.5, "Min-k": 1, "Min-k++": 0.5})
    assert summary.priv == pytest.approx(2 / 3)
    assert summary.util_raw == pytest.approx(0.4)
    assert summary.util == pytest.approx(0.4 / 0.6)  # HM(.75, .5) = .6
    assert summary.agg == pytest.approx(3 / (3 + 1.5 + 1.5))
    assert summary.agg_mu == pytest.approx(2 / (3 + 1.5))
    assert summary.missing == {}
    assert list(summary.columns()) == list(COLUMNS) == ["Agg", "Agg_MU", "Mem", "Priv", "Util"]
    assert summary.columns()["Agg_MU"] == summary.agg_mu


def test_the_initial_model_has_utility_one_and_the_retain_model_privacy_one() -> None:
    assert summarise(INITIAL, target=INITIAL).util == 1
    assert summarise({**MODEL, **RETAIN}, retain=RETAIN).priv == 1


def test_without_the_initial_model_utility_is_raw() -> None:
    summary = summarise(MODEL, retain=RETAIN)
    assert summary.util == summary.util_raw == pytest.approx(0.4)
    assert summary.agg_mu == pytest.approx(2 / (3 + 2.5))


@pytest.mark.parametrize(
    ("mem", "priv", "util", "agg", "agg_mu"),
    [
        # The paper's table of sensitivity to ρ, as printed.
        (0.35, 1.00, 0.81, 0.59, 0.49),
        (0.36, 1.00, 0.78, 0.59, 0.49),
        (0.38, 0.98, 0.73, 0.60, 0.50),
        (0.35, 0.93, 0.80, 0.58, 0.49),
        (0.38, 0.74, 0.82, 0.58, 0.52),
        (0.35, 0.92, 0.81, 0.58, 0.49),
        (0.36, 0.82, 0.76, 0.56, 0.49),
    ],
)
def test_aggregates_are_the_papers(mem: float, priv: float, util: float, agg: float, agg_mu: float) -> None:
    """The printed inputs carry an error of 0.005 each, so the aggregate may be off by 0.01."""
    assert harmonic_mean([mem, priv, util]) == pytest.approx(agg, abs=0.01)
    assert harmonic_mean([mem, util]) == pytest.approx(agg_mu, abs=0.01)


@pytest.mark.parametrize("name", ["extraction_strength", "exact_memorization"])
def test_one_fully_memorised_component_makes_mem_and_the_aggregates_zero(name: str) -> None:
    summary = summarise({**MODEL, name: 1.0}, retain=RETAIN, target=INITIAL)
    assert (summary.mem, summary.agg, summary.agg_mu) == (0, 0, 0)
    assert summary.priv == pytest.approx(2 / 3)


def test_one_attack_at_its_worst_makes_priv_and_agg_zero_but_not_agg_mu() -> None:
    summary = summarise({**MODEL, "mia_loss": 1.0}, retain=RETAIN)
    assert (summary.priv, summary.agg) == (0, 0)
    assert summary.agg_mu


def test_transforms_reach_priv() -> None:
    # privleak: |.7−.4|/.4 = .75 → s = .25; span: .3/.6 and .3/.4 → .5, .25; AUC equal: 1
    assert summarise(MODEL, retain=RETAIN, transform="privleak").priv == pytest.approx(4 / (1 + 4 + 1 + 4))
    assert summarise(MODEL, retain=RETAIN, target=INITIAL, transform="span").priv == pytest.approx(4 / (1 + 2 + 1 + 4))


@pytest.mark.parametrize("name", INPUTS)
def test_each_input_is_needed_by_exactly_the_columns_built_on_it(name: str) -> None:
    summary = summarise({k: v for k, v in MODEL.items() if k != name}, retain=RETAIN, target=INITIAL)
    column = "Priv" if name in ATTACKS.values() else "Util" if name in (MODEL_UTILITY, FLUENCY) else "Mem"
    hit = {column, "Agg"} | ({"Agg_MU"} if column != "Priv" else set())
    assert {key for key, value in summary.columns().items() if value is None} == hit == set(summary.missing)
    assert summary.missing[column] == (name,)
    assert summary.missing["Agg"] == (column,)


def test_missing_references_are_named() -> None:
    assert summarise(MODEL).missing == {"Priv": ("the results of the retain model",), "Agg": ("Priv",)}
    some = {k: v for k, v in RETAIN.items() if k != "mia_zlib"}
    assert summarise(MODEL, retain=some).missing["Priv"] == ("mia_zlib of the retain model",)
    span = summarise(MODEL, retain=RETAIN, transform="span")
    assert span.missing["Priv"] == ("the results of the initial model",)
    dumb = {k: v for k, v in INITIAL.items() if k != FLUENCY}
    summary = summarise(MODEL, retain=RETAIN, target=dumb)
    assert summary.missing["Util"] == (f"{FLUENCY} of the initial model",)
    assert summary.util is None
    assert summary.util_raw == pytest.approx(0.4)


def test_a_useless_initial_model_makes_utility_unknown_rather_than_infinite() -> None:
    summary = summarise(MODEL, target={**INITIAL, MODEL_UTILITY: 0.0})
    assert summary.util is None
    assert summary.missing["Util"] == ("an initial model whose Util is not 0",)


def test_fluency_can_be_left_out_on_purpose_only() -> None:
    without = {k: v for k, v in MODEL.items() if k != FLUENCY}
    assert summarise(without).util is None
    assert summarise(without, with_fluency=False).util == pytest.approx(0.6)
    assert summarise(MODEL, target=INITIAL, with_fluency=False).util == pytest.approx(0.6 / 0.75)


def test_tofus_own_truth_ratio_is_not_mistaken_for_it() -> None:
    other = {k: v for k, v in MODEL.items() if k != "forget_truth_ratio_prob_mean"} | {"forget_truth_ratio": 0.75}
    assert summarise(other).mem is None


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="AUC transform"):
        summarise(MODEL, transform="auc")
    with pytest.raises(DataError):
        summarise({**MODEL, "extraction_strength": 1.5})
