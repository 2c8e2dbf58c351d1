"""What an evaluation must not take over from an earlier one, and what it refuses in one line before it works."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.cli.main import main
from rosu_llm.data.chat_format import Encoded
from rosu_llm.errors import ConfigError, DataError, NonFiniteError
from rosu_llm.evaluation.tofu import document, passes
from rosu_llm.evaluation.tofu.evaluate import evaluate_tofu
from rosu_llm.evaluation.tofu.generation import classifier_available
from rosu_llm.evaluation.tofu.packing import packed_length
from rosu_llm.evaluation.tofu.summary import FLUENCY
from rosu_llm.evaluation.tofu.token_statistics import may_share
from tests.evaluation.tofu_cases import FIXTURE
from tests.evaluation.tofu_world import World, edit, read, save_classifier

PROBABILITY = ("forget_Q_A_Prob",)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be measured."""
    monkeypatch.setattr(passes, "run_jobs", lambda *_: pytest.fail("work was done"))


def test_an_overwriting_run_that_breaks_leaves_no_results_of_the_other_model(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(world.settings, metrics=PROBABILITY)
    first = world.evaluate(tmp_path / "evals", settings=settings)
    truth = world.evaluate(tmp_path / "truth", seed=1, settings=settings)
    real = document.write_json

    def full_disk(path: Path, value: Any) -> Path:
        if path.name == "TOFU_EVAL.json":
            raise OSError("No space left on device")
        return real(path, value)

    with monkeypatch.context() as patched:
        patched.setattr(document, "write_json", full_disk)
        with pytest.raises(OSError, match="No space"):
            world.evaluate(tmp_path / "evals", seed=1, settings=settings, overwrite=True)
    assert world.evaluate(tmp_path / "evals", seed=1, settings=settings) == truth != first


def test_tokenizer_and_generation_settings_are_part_of_the_model(world: World, tmp_path: Path) -> None:
    from tokenizers import normalizers

    settings = replace(world.settings, metrics=PROBABILITY)
    world.evaluate(tmp_path, settings=settings)
    world.tokenizer("with padding and truncation", padding="max_length", truncation=True, max_length=3)
    world.evaluate(tmp_path, settings=settings)  # which is no property of the tokenizer
    other = world.model()
    other.generation_config.repetition_penalty = 3.0
    with pytest.raises(ConfigError, match="another evaluation: model was sha256:"):
        evaluate_tofu(other, world.tokenizer, settings, tmp_path)
    world.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ConfigError, match="another evaluation: model was sha256:"):
        world.evaluate(tmp_path, settings=settings)


def test_another_precision_is_called_that(world: World, tmp_path: Path) -> None:
    settings = replace(world.settings, metrics=PROBABILITY)
    world.evaluate(tmp_path, settings=settings)
    with pytest.raises(ConfigError, match=r"dtype was torch.float32, now torch.bfloat16"):
        evaluate_tofu(world.model().to(torch.bfloat16), world.tokenizer, settings, tmp_path)


def test_sharing_is_tried_on_the_longest_row(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a window of attention may share short rows and not long ones."""
    edit(world, "retain_perturbed", lambda rows: rows[-1].update(perturbed_answer=["one two three four"] * 4))
    tried = []

    def noted(model: Any, answers: Sequence[Any], pad: int) -> bool:
        tried.append(packed_length(answers))
        return may_share(model, answers, pad)

    monkeypatch.setattr(passes, "may_share", noted)
    encoded: dict[str, int] = {}
    world.evaluate(tmp_path / "evals", settings=replace(world.settings, metrics=("retain_Truth_Ratio",)))
    real = passes.packed_length
    monkeypatch.setattr(passes, "packed_length", lambda row: encoded.setdefault(str(row), real(row)))
    world.evaluate(tmp_path / "again", settings=replace(world.settings, metrics=("retain_Truth_Ratio",)))
    assert tried == [max(encoded.values())] * 2 and len(set(encoded.values())) > 1


def test_a_model_that_fails_with_shared_rows_gets_single_ones(world: World) -> None:
    model, ids = world.model(), [5, 6, 7]
    pair = [Encoded([*ids, end], [-100] * 3 + [end], ids) for end in (8, 9)]
    assert may_share(model, pair, 1)

    def refuse(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if inputs["attention_mask"].dim() == 4:
            raise ValueError("a mask of four dimensions")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert not may_share(model, pair, 1)


def test_broken_weights_are_noticed_also_when_only_texts_are_generated(world: World, tmp_path: Path) -> None:
    model = world.model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    settings = replace(world.settings, metrics=("forget_Q_A_ROUGE",))
    with pytest.raises(NonFiniteError, match="not finite"):
        evaluate_tofu(model, world.tokenizer, settings, tmp_path)


def test_fluency_switched_off_is_gone_and_other_metrics_stay(world: World, tmp_path: Path) -> None:
    save_classifier(world, tmp_path / "classifier")
    out = tmp_path / "evals"
    with_it = replace(world.settings, metrics=(FLUENCY, *PROBABILITY), fluency_model=str(tmp_path / "classifier"))
    assert set(world.evaluate(out, settings=with_it)) == {FLUENCY, *PROBABILITY}
    more = replace(with_it, metrics=("forget_Q_A_ROUGE",))
    assert set(world.evaluate(out, settings=more)) == {FLUENCY, "forget_Q_A_ROUGE", *PROBABILITY}
    without = replace(world.settings, metrics=PROBABILITY)
    assert set(world.evaluate(out, settings=without)) == {"forget_Q_A_ROUGE", *PROBABILITY}
    assert FLUENCY not in read(out / "TOFU_EVAL.json")
    with pytest.raises(ConfigError, match=r"Nothing is left to measure: .*--fluency-model"):
        world.evaluate(out, settings=replace(without, metrics=(FLUENCY,)))


def test_another_retain_model_replaces_everything_compared_with_the_first(world: World, tmp_path: Path) -> None:
    whole = replace(world.settings, metrics=("forget_quality", "privleak"))
    for seed in (1, 4):
        world.evaluate(tmp_path / f"retain{seed}", seed=seed, settings=whole)
    truth = world.evaluate(tmp_path / "truth", settings=whole, retain=str(tmp_path / "retain4"))
    first = world.evaluate(tmp_path / "evals", settings=whole, retain=tmp_path / "retain1")
    one = replace(world.settings, metrics=("privleak",))
    assert world.evaluate(tmp_path / "evals", settings=one, retain=tmp_path / "retain4") == truth
    assert first["forget_quality"] != truth["forget_quality"]
    unrelated = replace(world.settings, metrics=PROBABILITY)
    world.evaluate(tmp_path / "evals", settings=unrelated, retain=tmp_path / "retain1")
    assert read(tmp_path / "evals" / "rosu_eval.json")["retain"] == str(tmp_path / "retain4")


@pytest.mark.usefixtures("idle")
def test_rows_that_are_no_text(world: World, tmp_path: Path) -> None:
    for key, value, message in (
        ("answer", "  ", "row 2: answer must be text"),
        ("question", "a \ud800 b", r"row 2 holds half a character \('\\ud800'\)"),
    ):
        rows = (world.data / "holdout10.jsonl").read_text()
        edit(world, "holdout10", lambda found, key=key, value=value: found[1].update({key: value}))  # type: ignore[misc]
        with pytest.raises(DataError, match=f"holdout10, {message}"):
            world.evaluate(tmp_path / "evals")
        (world.data / "holdout10.jsonl").write_text(rows)
    edit(world, "retain_perturbed", lambda found: found[2].update(perturbed_answer=["fine", " "]))
    with pytest.raises(DataError, match="retain_perturbed, row 3: perturbed_answer must be a list of texts"):
        world.evaluate(tmp_path / "evals")
    edit(world, "retain_perturbed", lambda found: found[0].update(paraphrased_answer=""))
    with pytest.raises(DataError, match="retain_perturbed, row 1, has no paraphrased_answer"):
        world.evaluate(tmp_path / "evals")


@pytest.mark.usefixtures("idle")
def test_a_folder_that_cannot_be_written(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "evals"):
        with pytest.raises(ConfigError, match=r"folder for results, .*--out.* cannot be written to: .*file. is a file"):
            world.evaluate(out)

    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rosu_llm.files.tempfile.TemporaryFile", full)
    with pytest.raises(ConfigError, match="cannot be written to"):
        world.evaluate(tmp_path / "deep" / "evals")


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(("metric", "value"), [("forget_truth_ratio", None), ("mia_min_k", float("nan"))])
def test_retain_results_without_numbers(world: World, tmp_path: Path, metric: str, value: Any) -> None:
    by_index = {str(at): {"score": 0.5} for at in range(4)}
    entries: dict[str, Any] = {
        "forget_truth_ratio": {"agg_value": 0.5, "value_by_index": by_index},
        "mia_min_k": {"agg_value": 0.5, "forget": {"value_by_index": by_index}},
    }
    entries[metric]["agg_value"] = value
    with pytest.raises(DataError, match=f"{metric} has values that are no numbers"):
        world.evaluate(tmp_path / "evals", retain=entries)


def test_folders_that_are_no_classifier(world: World, tmp_path: Path) -> None:
    save_classifier(world, tmp_path / "good")
    assert classifier_available(str(tmp_path / "good"))
    for name, drop, message in (
        ("weights", "model.safetensors", "there are no weights in it"),
        ("tokenizer", "tokenizer.json", "there is no tokenizer in it"),
    ):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        (tmp_path / name / drop).unlink()
        with pytest.raises(ConfigError, match=message):
            classifier_available(str(tmp_path / name))
    world.model().save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="its architecture is LlamaForCausalLM"):
        classifier_available(str(tmp_path / "llama"))


@pytest.mark.usefixtures("idle")
def test_a_tokenizer_with_more_tokens_than_the_model(world: World, tmp_path: Path) -> None:
    model = world.model()
    world.tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    with pytest.raises(ConfigError, match=r"token \d+ \('\[NEW\]'\) has no row among the model's \d+ embeddings"):
        evaluate_tofu(model, world.tokenizer, world.settings, tmp_path)


@pytest.mark.usefixtures("idle")
def test_answers_past_a_table_of_positions(world: World, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=len(world.tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2)
    settings = replace(world.settings, max_new_tokens=60)
    with pytest.raises(ConfigError, match=r"exceed the model's context of 64 tokens: --max-new-tokens \d+ would fit"):
        evaluate_tofu(GPT2LMHeadModel(config).eval(), world.tokenizer, settings, tmp_path)


def test_answers_that_are_cut_are_counted(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        world.evaluate(tmp_path / "whole", settings=replace(world.settings, metrics=PROBABILITY))
        assert "were cut" not in caplog.text
        world.evaluate(tmp_path / "cut", settings=replace(world.settings, metrics=PROBABILITY, max_length=20))
    assert "answers were cut at --max-length 20" in caplog.text


def test_what_cannot_be_loaded_or_compared_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--data", str(FIXTURE / "tofu"), "--chat-format", "phi-1_5", "--fluency-model", "none"]
    model = tmp_path / "model"
    shutil.copytree(FIXTURE / "padded", model)
    shutil.copytree(FIXTURE / "full", model, dirs_exist_ok=True)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["eval", "tofu", str(model), *rest]) == 2
    assert "cannot be loaded" in (said := capsys.readouterr().err) and "Traceback" not in said
    target = FIXTURE / "openunlearning" / "tags_full" / "TOFU_EVAL.json"
    assert main(["eval", "tofu", str(FIXTURE / "full"), *rest, "--limit", "3", "--target", str(target)]) == 2
    assert "forget questions, and 3 are asked here" in capsys.readouterr().err
