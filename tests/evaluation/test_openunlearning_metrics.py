"""Our metrics inside OpenUnlearning: registered once, fed by its evaluator, equal to the table's; their YAML files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rosu_llm.errors import ConfigError
from rosu_llm.evaluation.tofu.summary import ATTACKS, COLUMNS, FLUENCY, MEMORISATION, MODEL_UTILITY, summarise
from rosu_llm.openunlearning.metrics import METRICS, register_metrics
from tests.conftest import ROOT
from tests.evaluation.saves import FIGURES, INITIAL, RETAIN

FOLDER = ROOT / "configs" / "openunlearning" / "eval" / "tofu_metrics"


class StandIn:
    """The seam: a registry of objects that hold a function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._metric_fn = name, function


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    metrics, base = ModuleType("evals.metrics"), ModuleType("evals.metrics.base")
    metrics.METRICS_REGISTRY = {"ks_test": object()}  # type: ignore[attr-defined]
    base.unlearning_metric = lambda name: lambda function: StandIn(name, function)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evals.metrics", metrics)
    monkeypatch.setitem(sys.modules, "evals.metrics.base", base)
    found: dict[str, Any] = metrics.METRICS_REGISTRY  # type: ignore[attr-defined]
    return found


def test_registered_once_beside_the_others(registry: dict[str, Any]) -> None:
    assert register_metrics() == list(METRICS)
    first = dict(registry)
    assert register_metrics() == list(METRICS)
    assert registry == first
    assert set(registry) == {"ks_test", *METRICS}
    assert all(registry[name].name == name for name in METRICS)


def test_a_foreign_metric_of_the_same_name_is_an_error(registry: dict[str, Any]) -> None:
    registry["rosu_mem"] = StandIn("rosu_mem", lambda model, **kwargs: {})
    with pytest.raises(ConfigError, match="already has a metric 'rosu_mem'"):
        register_metrics()


def test_nothing_happens_outside_openunlearning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "evals.metrics", raising=False)
    assert register_metrics() == []
    monkeypatch.setitem(sys.modules, "evals.metrics", ModuleType("evals.metrics"))
    assert register_metrics() == []


def results(figures: dict[str, Any], *names: str) -> dict[str, dict[str, Any]]:
    return {name: {"agg_value": figures[name], "value_by_index": {}} for name in names}


def test_the_numbers_are_those_of_the_table() -> None:
    attacks = list(ATTACKS.values())
    utility = (MODEL_UTILITY, FLUENCY)
    truth = summarise(FIGURES, retain=RETAIN, target=INITIAL).columns()
    mem = METRICS["rosu_mem"](None, pre_compute=results(FIGURES, *MEMORISATION.values()))
    references = {"retain_model_logs": results(RETAIN, *attacks), "target_model_logs": results(INITIAL, *attacks)}
    priv = METRICS["rosu_priv"](
        None, pre_compute=results(FIGURES, *attacks), reference_logs=references, auc_transform="range", batch_size=1
    )
    references = {"target_model_logs": results(INITIAL, *utility)}
    util = METRICS["rosu_util"](None, pre_compute=results(FIGURES, *utility), reference_logs=references)
    agg = METRICS["rosu_agg"](None, pre_compute={"Mem": mem, "Priv": priv, "Util": util})
    agg_mu = METRICS["rosu_agg"](None, pre_compute={"Mem": mem, "Util": util})
    got = [part["agg_value"] for part in (agg, agg_mu, mem, priv, util)]
    assert got == [pytest.approx(truth[name]) for name in COLUMNS]
    assert priv["auc_transform"] == "range"
    assert util["relative_to_initial_model"] is True


def test_a_score_without_its_inputs_is_an_empty_result_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    attacks = results(FIGURES, *ATTACKS.values())
    assert METRICS["rosu_priv"](None, pre_compute=attacks, auc_transform="range") == {}
    assert "No Priv: it needs the results of the retain model." in caplog.text
    logs = {"retain_model_logs": {**results(RETAIN, *ATTACKS.values()), "mia_zlib": None}}
    assert METRICS["rosu_priv"](None, pre_compute=attacks, reference_logs=logs, auc_transform="range") == {}
    assert "mia_zlib of the retain model" in caplog.text
    assert METRICS["rosu_agg"](None, pre_compute={"Mem": {"agg_value": 0.5}, "Util": {}}) == {}
    assert "No aggregate: Util could not be computed." in caplog.text


def test_utility_without_the_initial_model_says_so() -> None:
    util = METRICS["rosu_util"](None, pre_compute=results(FIGURES, MODEL_UTILITY, FLUENCY))
    assert util == {"agg_value": pytest.approx(0.4), "relative_to_initial_model": False}


SUMMARY = (FOLDER / "rosu_summary.yaml").read_text()


def test_each_score_names_its_handler_and_the_inputs_of_its_formula() -> None:
    metrics = yaml.safe_load(SUMMARY)["metrics"]
    attacks, utility = set(ATTACKS.values()), {MODEL_UTILITY, FLUENCY}
    for name, handler, inputs in (
        ("Mem", "rosu_mem", set(MEMORISATION.values())),
        ("Priv", "rosu_priv", attacks),
        ("Util", "rosu_util", utility),
        ("Agg", "rosu_agg", {"Mem", "Priv", "Util"}),
        ("Agg_MU", "rosu_agg", {"Mem", "Util"}),
    ):
        score = metrics[name]
        assert handler in METRICS and score["handler"] == handler
        assert score["pre_compute"] == {part: f"${{eval.tofu.metrics.{part}}}" for part in inputs}
        for logs in score.get("reference_logs", {}).values():
            assert set(logs["include"]) == inputs
    assert metrics[MEMORISATION["TR"]]["aggregator"] == "prob_mean"


def test_the_summary_loads_no_other_file_than_the_callback() -> None:
    """Nested defaults made composition ten times slower."""
    assert SUMMARY.startswith("# @package eval.tofu\n")
    assert yaml.safe_load(SUMMARY)["defaults"] == ["/hydra/callbacks/rosu_llm", "_self_"]


def test_every_folder_on_the_way_is_a_package() -> None:
    folder: Path = FOLDER
    while folder != ROOT / "configs":
        assert (folder / "__init__.py").is_file(), folder
        folder = folder.parent
