"""TOFU as a task: the scores of the paper, and a glance made of memorisation and utility alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm.data.chat_format import find_format
from rosu_llm.data.sources import load_samples
from rosu_llm.errors import DataError
from rosu_llm.evaluation.tofu.metrics import TofuSettings
from rosu_llm.evaluation.tofu.results import Result, read_result
from rosu_llm.evaluation.tofu.summary import summarise
from rosu_llm.experiments.attempt import Started
from rosu_llm.experiments.config_task import ConfigTask, complete
from rosu_llm.experiments.demo.world import learn
from rosu_llm.experiments.sweep import tofu
from rosu_llm.experiments.sweep.scoring import REFERENCE_NAMES, Scoring
from rosu_llm.experiments.sweep.tofu import TofuEvaluation, TofuTask, find, tofu_scoring
from rosu_llm.recipes.settings import build
from rosu_llm.toys import TOY_EVALUATION, toy_tofu, toy_values
from tests.experiments.test_config_task import NAMES

QUIET: Any = lambda *_: None


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], TofuSettings, Path]:
    folder = tmp_path_factory.mktemp("toy")
    values = {**toy_values(NAMES, folder), **toy_tofu(folder, "forget05")}
    data = values["forget_data"].rpartition(":")[0]
    settings = TofuSettings(data=data, forget_split="forget05", chat_format=values["chat_format"], **TOY_EVALUATION)
    _teach(values["model_name_or_path"], data, values["chat_format"])
    return values, settings, folder


def _teach(folder: str, data: str, chat_format: str) -> None:
    """Some of the answers: a model without any utility has no Util to be relative to."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    form = find_format(chat_format, tokenizer)
    names = ("forget05", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed")
    sets = [load_samples(f"{data}:{name}", tokenizer, chat_format=form) for name in names]
    learn(model, [samples[at] for samples in sets for at in range(len(samples))], epochs=40, seed=0, batch_size=16)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def trial(toy: tuple[dict[str, Any], TofuSettings, Path]) -> tuple[Any, Scoring, Path]:
    """One started trial with the initial model as its target, evaluated."""
    values, settings, folder = toy
    how = TofuEvaluation(settings=settings, target=find(values["model_name_or_path"], "forget05"))
    task = TofuTask(values, how, folder / "references")
    references = refer(task)
    run = task.start(values, 0, folder / "trial", QUIET)
    return (run, references, run.measure()), tofu_scoring(how), folder


def refer(task: TofuTask) -> dict[str, Any]:
    return {REFERENCE_NAMES[name]: task.refer(name, 0, QUIET).measure() for name in task.references}


def test_scores_are_the_papers_from_what_the_evaluation_wrote(trial: tuple[Any, Scoring, Path]) -> None:
    (_, references, figures), scoring, folder = trial
    written = read_result(folder / "trial" / "evals" / "TOFU_EVAL.json").figures
    expected = summarise(written, target=references["initial"], with_fluency=False)
    scores = scoring.scores(figures, references)
    assert scores == {name: expected.columns()[name] for name in ("Agg_MU", "Mem", "Util", "Priv", "Agg")}
    assert scores["Priv"] is None and scores["Mem"] == pytest.approx(
        harmonic_mean(
            1 - written[n]
            for n in (
                "extraction_strength",
                "exact_memorization",
                "forget_Q_A_PARA_Prob",
                "forget_truth_ratio_prob_mean",
            )
        )
    )
    assert scoring.headings["Agg_MU"] == "Agg_MU (MU only)" and scoring.headings["Mem"] == "Mem"
    assert "relative to the initial model" in scoring.notes[0] and "give --retain" in scoring.notes[1]


def test_the_glance_is_built_from_memorisation_and_utility_only(
    trial: tuple[Any, Scoring, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run, _, figures), _, _ = trial
    asked: list[TofuSettings] = []
    real = tofu.evaluate_tofu
    monkeypatch.setattr(
        tofu,
        "evaluate_tofu",
        lambda m, t, settings, *a, **k: asked.append(settings) or real(m, t, settings, *a, **k),
    )
    mem = harmonic_mean(
        1 - figures[name]
        for name in (
            "extraction_strength",
            "exact_memorization",
            "forget_Q_A_PARA_Prob",
            "forget_truth_ratio_prob_mean",
        )
    )
    parts = ["retain_Q_A_Prob", "ra_Q_A_Prob_normalised", "wf_Q_A_Prob_normalised"]
    parts += [f"{name}_Truth_Ratio" for name in ("retain", "ra", "wf")]
    assert run.glance() == pytest.approx(harmonic_mean([mem, harmonic_mean(figures[part] for part in parts)]))
    assert len(asked[0].metrics) == 10 and not [m for m in asked[0].metrics if "mia" in m or "ROUGE" in m]
    assert asked[0].limit == 100


def test_a_reference_model_is_evaluated_once_and_its_results_do_as_well(
    trial: tuple[Any, Scoring, Path],
    toy: tuple[dict[str, Any], TofuSettings, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (_, references, _), _, folder = trial
    values, settings, _ = toy
    (file,) = (folder / "references").glob("initial-*/TOFU_EVAL.json")
    how = TofuEvaluation(settings=settings, target=find(str(file), settings), retain=find(str(file.parent), settings))
    monkeypatch.setattr(tofu, "load", lambda *_: pytest.fail("loaded"))
    task = TofuTask(values, how, folder / "elsewhere")
    again = refer(task)
    assert again["initial"] == again["retain"] == references["initial"]
    assert tofu_scoring(how).scores(again["initial"], again)["Priv"] == 1.0
    others = [TofuTask(values, replace(how, **{name: None}), folder / "elsewhere") for name in ("retain", "target")]
    first, second, third = (each.identity(complete(values)) for each in (task, *others))
    assert first != second != third != first and first["task"] == "tofu"


def test_references_of_other_questions_are_refused(
    trial: tuple[Any, Scoring, Path], toy: tuple[dict[str, Any], TofuSettings, Path], tmp_path: Path
) -> None:
    values, settings, folder = toy
    (file,) = (folder / "references").glob("initial-*/TOFU_EVAL.json")
    target = find(str(file), settings)
    fewer = TofuEvaluation(settings=replace(settings, limit=2), target=target)
    with pytest.raises(DataError, match="of 4 questions of forget05, but trials are asked 2 of forget05"):
        refer(TofuTask(values, fewer, tmp_path))
    content = json.loads(file.read_text())
    del content["model_utility"]
    (tmp_path / "TOFU_EVAL.json").write_text(json.dumps(content))
    lacking = TofuEvaluation(settings=settings, target=find(str(tmp_path), settings))
    with pytest.raises(DataError, match="it needs model_utility"):
        refer(TofuTask(values, lacking, tmp_path))


def test_a_trial_notes_what_its_preset_and_flags_mean(
    toy: tuple[dict[str, Any], TofuSettings, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of its results learn from it that the run was bounded, and by which questions."""
    values, settings, _ = toy
    noted: dict[str, Any] = {}
    given = {**values, "preset": "recommended", "holdout_data": "locuslab/TOFU:holdout05", "limit": "3", "rho": "0.05"}
    config = build({**given, "output_dir": "unused"}).config
    trainer = SimpleNamespace(model=None, processing_class=None, method_args=config)
    monkeypatch.setattr(ConfigTask, "start", lambda *_: Started(trainer, dict))
    monkeypatch.setattr(tofu, "evaluate_tofu", lambda *_, training, **how: noted.update(training) or {})
    TofuTask(values, TofuEvaluation(settings=settings), tmp_path).start(given, 0, tmp_path, QUIET).measure()
    (tmp_path / "TOFU_SUMMARY.json").write_text("{}")
    (tmp_path / "rosu_eval.json").write_text(json.dumps({"training": noted}, default=str))
    result = Result(tmp_path / "TOFU_SUMMARY.json")
    assert (noted["rho"], noted["limit"]) == (0.05, 3)
    assert result.depth == "bounded by held-out data" and result.reuses_non_members


def test_a_retain_model_attacked_with_other_questions_is_refused_before_training(
    trial: tuple[Any, Scoring, Path], toy: tuple[dict[str, Any], TofuSettings, Path], tmp_path: Path
) -> None:
    values, settings, folder = toy
    (file,) = (folder / "references").glob("initial-*/TOFU_EVAL.json")
    how = TofuEvaluation(settings=replace(settings, held_out_questions=1), retain=find(str(file), settings))
    with pytest.raises(DataError, match=r"had 4 non-members, and those of the trials have 3: .*--held-out-questions"):
        refer(TofuTask(values, how, tmp_path))
