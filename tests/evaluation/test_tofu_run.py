"""The evaluation of a toy model end to end: what it writes, how it goes on, what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.evaluation.processes import BatchJob, Finished
from rosu_llm.evaluation.tofu import passes
from rosu_llm.evaluation.tofu.document import SIDECAR
from rosu_llm.evaluation.tofu.evaluate import _architecture, evaluate_tofu
from rosu_llm.evaluation.tofu.metrics import METRICS, TofuSettings
from rosu_llm.evaluation.tofu.results import read_result
from rosu_llm.evaluation.tofu.summary import FLUENCY, INPUTS
from tests.evaluation.tofu_world import World, edit, read, save_classifier

ALL_BUT_FLUENCY = {name for name in METRICS if name != FLUENCY}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path, dict[str, float]]:
    """One whole evaluation, with the results of a retain model; tests read it only."""
    folder = tmp_path_factory.mktemp("tofu")
    world = World(folder)
    world.evaluate(folder / "retain", seed=1)
    model = world.model()
    model.train()
    found = evaluate_tofu(model, world.tokenizer, world.settings, folder / "evals", retain=folder / "retain")
    assert model.training, "the mode is given back"
    return world, folder / "evals", found


def test_all_metrics_in_the_layout_of_openunlearning(done: tuple[World, Path, dict[str, float]]) -> None:
    _, out, found = done
    content = read(out / "TOFU_EVAL.json")
    assert set(found) == set(content) == ALL_BUT_FLUENCY
    assert read(out / "TOFU_SUMMARY.json") == found == {name: content[name]["agg_value"] for name in content}
    assert list(content["forget_Q_A_Prob"]["value_by_index"]) == ["0", "1", "2", "3"]
    assert set(content["forget_Q_A_Prob"]["value_by_index"]["0"]) == {"prob", "avg_loss"}
    several = content["forget_Q_A_PERT_Prob"]["value_by_index"]["0"]
    assert len(several["prob"]) == len(several["avg_loss"]) > 1
    assert set(content["mia_zlib"]) == {"forget", "holdout", "auc", "agg_value"}
    assert set(content["ra_Q_A_ROUGE"]["value_by_index"]["0"]) == {
        "rouge1_recall",
        "rougeL_f1",
        "rougeL_recall",
        "input",
        "ground_truth",
        "generation",
    }
    result = read_result(out / "TOFU_EVAL.json")
    assert result.split == "forget10" and result.model == "Llama-2-7b-hf" and result.questions == 4
    assert set(result.figures) >= set(INPUTS) - {FLUENCY}
    assert not result.derived_truth_ratio


def test_figures_agree_with_each_other(done: tuple[World, Path, dict[str, float]]) -> None:
    """The attack by loss is made of the same losses, and the means are means."""
    _, out, _ = done
    content = read(out / "TOFU_EVAL.json")
    losses = [each["avg_loss"] for each in content["forget_Q_A_Prob"]["value_by_index"].values()]
    assert [each["score"] for each in content["mia_loss"]["forget"]["value_by_index"].values()] == losses
    probs = [each["prob"] for each in content["forget_Q_A_Prob"]["value_by_index"].values()]
    assert content["forget_Q_A_Prob"]["agg_value"] == pytest.approx(sum(probs) / 4)


def test_batches_do_not_change_the_numbers(done: tuple[World, Path, dict[str, float]], tmp_path: Path) -> None:
    world, _, found = done
    other = world.evaluate(tmp_path, settings=replace(world.settings, batch_size=64))
    for name in ALL_BUT_FLUENCY - {"forget_quality", "privleak"}:
        assert other[name] == pytest.approx(found[name], abs=2e-6), name


def test_a_killed_run_goes_on(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its seventh pass it keeps six, does the others only, and ends with the same file."""
    whole = world.evaluate(tmp_path / "whole")
    real, titles = passes.run_jobs, dict[str, None]()

    def killed(jobs: Sequence[BatchJob], finished: Finished) -> None:
        def watched(job: BatchJob) -> BatchJob:
            def work(batch: Sequence[int]) -> Sequence[Any]:
                titles[job.title] = None
                if len(titles) == 8 and not (tmp_path / "killed").exists():  # the fifth pass scores two data sets
                    (tmp_path / "killed").touch()
                    raise KeyboardInterrupt
                return job.work(batch)

            return replace(job, work=work)

        real([watched(job) for job in jobs], finished)

    monkeypatch.setattr(passes, "run_jobs", killed)
    with pytest.raises(KeyboardInterrupt):
        world.evaluate(tmp_path / "evals")
    assert set(read(tmp_path / "evals" / "TOFU_EVAL.json")) == {
        "forget_Q_A_Prob",
        "extraction_strength",
        "exact_memorization",
        "mia_loss",
        "mia_zlib",
        "mia_min_k",
        "mia_min_k_plus_plus",
        "forget_Q_A_PARA_Prob",
        "forget_Q_A_PERT_Prob",
        "forget_Q_A_ROUGE",
        "retain_Q_A_ROUGE",
        "ra_Q_A_ROUGE",
        "wf_Q_A_ROUGE",
    }
    assert "mia_zlib" in read(tmp_path / "evals" / "TOFU_SUMMARY.json")
    before = list(titles)
    titles.clear()
    assert world.evaluate(tmp_path / "evals") == whole
    assert len(before) == 8 and len(titles) == 3 and set(before) & set(titles) == {before[-1]}
    assert read(tmp_path / "evals" / "TOFU_EVAL.json") == read(tmp_path / "whole" / "TOFU_EVAL.json")
    seconds = read(tmp_path / "evals" / SIDECAR)["seconds"]
    assert len(seconds) == 9


def test_an_adapter_does_not_make_another_architecture(world: World) -> None:
    """Else a LoRA run could not be compared with its own base."""
    from peft import LoraConfig, get_peft_model

    plain = world.model()
    assert _architecture(plain) == "llama, 1 layers, 32 wide"
    assert _architecture(get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear"))) == _architecture(plain)


def test_nothing_is_done_twice_and_retain_results_can_come_later(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.evaluate(tmp_path / "evals")
    retain = world.evaluate(tmp_path / "retain", seed=1)
    assert "forget_quality" not in first
    monkeypatch.setattr(passes, "run_jobs", lambda *_: pytest.fail("measured again"))
    second = world.evaluate(tmp_path / "evals", retain=tmp_path / "retain" / "TOFU_EVAL.json")
    assert 0 <= second["forget_quality"] <= 1
    other = 1 - retain["mia_min_k"]
    assert second["privleak"] == pytest.approx((1 - first["mia_min_k"] - other) / (other + 1e-10) * 100)
    content = read(tmp_path / "retain" / "TOFU_EVAL.json")
    assert world.evaluate(tmp_path / "evals", retain=content) == second
    assert world.evaluate(tmp_path / "evals") == second, "without --retain what is known is kept"


def test_only_what_is_asked_for(world: World, tmp_path: Path) -> None:
    for config in ("holdout10", "retain_perturbed", "real_authors_perturbed", "world_facts_perturbed"):
        (world.data / f"{config}.jsonl").unlink()
    settings = replace(world.settings, metrics=("forget_truth_ratio", "exact_memorization"))
    assert set(world.evaluate(tmp_path / "evals", settings=settings)) == {"forget_truth_ratio", "exact_memorization"}
    assert set(read(tmp_path / "evals" / "TOFU_EVAL.json")) == {
        "forget_truth_ratio",
        "forget_Q_A_PARA_Prob",
        "forget_Q_A_PERT_Prob",
        "exact_memorization",
        "extraction_strength",
        "forget_Q_A_Prob",
    }
    with pytest.raises(DataError, match="'holdout10'; there is: forget10, forget10_perturbed"):
        world.evaluate(tmp_path / "evals", settings=replace(world.settings, metrics=("mia_loss",)))


def test_results_of_something_else_are_refused(world: World, tmp_path: Path) -> None:
    settings = replace(world.settings, metrics=("forget_Q_A_Prob",))
    before = world.evaluate(tmp_path, settings=settings)
    with pytest.raises(ConfigError, match=r"holds results of another evaluation: model was .* --overwrite"):
        world.evaluate(tmp_path, seed=1, settings=settings)
    with pytest.raises(ConfigError, match="limit was None, now 2"):
        world.evaluate(tmp_path, settings=replace(settings, limit=2))
    with pytest.raises(ConfigError, match=r"another evaluation: chat_format\."):
        world.evaluate(tmp_path, settings=replace(settings, chat_format="Llama-2-7b-chat-hf"))
    edit(world, "forget10_perturbed", lambda rows: rows[0].update(paraphrased_answer="other"))
    with pytest.raises(ConfigError, match=r"another evaluation: data.forget10_perturbed was sha256:"):
        world.evaluate(tmp_path, settings=settings)
    assert read(tmp_path / "TOFU_SUMMARY.json") == before
    after = world.evaluate(tmp_path, seed=1, settings=replace(settings, limit=2), overwrite=True)
    assert after != before
    (tmp_path / SIDECAR).unlink()
    with pytest.raises(ConfigError, match="was not written by rosu"):
        world.evaluate(tmp_path, seed=1, settings=settings)


def test_questions_that_training_looked_at_take_no_part_in_attacks(world: World, tmp_path: Path) -> None:
    """As if the file did not have them."""
    settings = replace(world.settings, metrics=("mia_loss", "forget_Q_A_Prob"))
    whole = world.evaluate(tmp_path / "whole", settings=settings)
    with pytest.raises(ConfigError, match="held_out_questions was None, now 3"):
        world.evaluate(tmp_path / "whole", settings=replace(settings, held_out_questions=3))
    aside = world.evaluate(tmp_path / "aside", settings=replace(settings, held_out_questions=3))
    edit(world, "holdout10", lambda rows: rows.__delitem__(slice(3)))
    assert aside == world.evaluate(tmp_path / "cut", settings=settings) != whole
    with pytest.raises(DataError, match="--held-out-questions 50 sets all"):
        world.evaluate(tmp_path / "none", settings=replace(settings, held_out_questions=50))


def test_retain_results_of_other_questions_are_refused(world: World, tmp_path: Path) -> None:
    world.evaluate(tmp_path / "limited", seed=1, settings=replace(world.settings, limit=3))
    with pytest.raises(DataError, match="made with other rows of"):
        world.evaluate(tmp_path / "evals", retain=tmp_path / "limited")
    (tmp_path / "limited" / SIDECAR).unlink()  # as if OpenUnlearning had written it
    with pytest.raises(DataError, match=r"forget_truth_ratio has 3 of them, forget10 here has 4"):
        world.evaluate(tmp_path / "evals", retain=tmp_path / "limited")
    elsewhere = tmp_path / "tofu_Llama-3.2-1B-Instruct_retain99"
    (tmp_path / "limited").rename(elsewhere)
    with pytest.raises(DataError, match="is of forget01, not of forget10"):
        world.evaluate(tmp_path / "evals", retain=elsewhere)
    with pytest.raises(DataError, match="means only"):
        world.evaluate(tmp_path / "evals", retain={"forget_truth_ratio": 0.5})
    assert not (tmp_path / "evals").exists()


def test_questions_that_do_not_fit_are_refused_before_any_work(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "run_jobs", lambda *_: pytest.fail("work was done"))
    edit(world, "forget10", lambda rows: rows.reverse())
    with pytest.raises(DataError, match="forget10_perturbed does not match forget10: row 1"):
        world.evaluate(tmp_path / "evals")
    edit(world, "forget10", lambda rows: rows.reverse())
    edit(world, "world_facts_perturbed", lambda rows: rows[1].pop("perturbed_answer"))
    with pytest.raises(DataError, match="world_facts_perturbed, row 2"):
        world.evaluate(tmp_path / "evals")
    edit(world, "world_facts_perturbed", lambda rows: rows[1].update(perturbed_answer=["long " * 80]))
    with pytest.raises(DataError, match="more than the 64 tokens of the model's context"):
        world.evaluate(tmp_path / "evals")
    edit(world, "holdout10", lambda rows: rows[0].update(question=None))
    with pytest.raises(DataError, match="holdout10, row 1: question must be text"):
        world.evaluate(tmp_path / "evals")
    with pytest.raises(ConfigError, match="forget split 'forget20'"):
        world.evaluate(tmp_path / "evals", settings=replace(world.settings, forget_split="forget20"))
    with pytest.raises(ConfigError, match="chat template"):
        world.evaluate(tmp_path / "evals", settings=replace(world.settings, chat_format=None))
    assert not (tmp_path / "evals").exists()


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="--limit 0"):
        TofuSettings(limit=0)
    with pytest.raises(ConfigError, match="--held-out-questions 0"):
        TofuSettings(held_out_questions=0)
    with pytest.raises(ConfigError, match="--batch-tokens -1"):
        TofuSettings(batch_tokens=-1)
    with pytest.raises(ConfigError, match="Unknown TOFU metric 'rouge'"):
        TofuSettings(metrics=("rouge",))


def test_fluency_by_a_local_classifier(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """p(clean) of each generated answer, against the classifier called by hand; another classifier measures anew."""
    classifier = save_classifier(world, tmp_path / "classifier")
    settings = replace(world.settings, metrics=(FLUENCY,), fluency_model=str(tmp_path / "classifier"))
    found = world.evaluate(tmp_path / "evals", settings=settings)
    content = read(tmp_path / "evals" / "TOFU_EVAL.json")
    generated = [each["generation"] for each in content["forget_Q_A_ROUGE"]["value_by_index"].values()]
    shares = []
    for text in generated:
        inputs = world.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            shares.append(float(classifier(**inputs).logits.softmax(-1)[0, 0]))
    entries = content[FLUENCY]["value_by_index"].values()
    assert [each["score"] for each in entries] == pytest.approx(shares, abs=1e-5)
    assert [each["generation"] for each in entries] == generated
    assert found == {FLUENCY: pytest.approx(sum(shares) / 4, abs=1e-5)}
    with pytest.raises(ConfigError, match="--fluency-model"):
        world.evaluate(tmp_path / "evals", settings=replace(settings, fluency_model=str(tmp_path / "nowhere")))
    again = save_classifier(world, tmp_path / "second")
    with torch.no_grad():
        again.classifier.bias[0] += 3
    again.save_pretrained(tmp_path / "second")
    other = world.evaluate(tmp_path / "evals", settings=replace(settings, fluency_model=str(tmp_path / "second")))
    assert other[FLUENCY] > found[FLUENCY]


def test_without_the_classifier_of_the_hub_fluency_is_left_out_and_said(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TofuSettings(
        data=str(world.data), chat_format="Llama-2-7b-hf", max_new_tokens=2, metrics=(FLUENCY, "forget_Q_A_Prob")
    )
    with caplog.at_level("WARNING"):
        assert set(world.evaluate(tmp_path / "evals", settings=settings)) == {"forget_Q_A_Prob"}
    assert "forget_Q_A_gibberish is left out" in caplog.text
