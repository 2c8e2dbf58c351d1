"""What cannot work is refused in one line, before anything is loaded, written or deleted."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rosu_llm.cli.main import main
from rosu_llm.data.chat_format import FORMAT_FILE
from rosu_llm.errors import ConfigError
from rosu_llm.experiments.demo.world import word_tokenizer
from rosu_llm.recipes import next_token
from rosu_llm.recipes.prepare import load
from rosu_llm.recipes.settings import build
from tests.models import tiny_llama
from tests.training.tiny_world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``rosu train`` writes, apart from the bar of loading weights."""
    capsys.readouterr()
    assert main(["train", *flags]) == 2
    (line,) = (line for line in capsys.readouterr().err.split("\n") if line and not line.startswith("\r"))
    return line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs=0 takes no step: pass --num-train-epochs 5"),
        ({"eval_strategy": "epoch"}, "eval_strategy='epoch' needs evaluation data"),
        ({"eval_on_start": True}, "eval_on_start=True needs evaluation data"),
        ({"limit": 0}, "limit=0 leaves no row"),
        ({"lora_r": 4, "lora_alpha": 0}, "lora_alpha=0 scales the adapter away"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0 is no share"),
        ({"lora_r": 4, "lora_target_modules": "nowhere"}, "lora_target_modules='all-linear' fits any model"),
        ({"accelerate-config": ""}, "option of the command: write --accelerate-config"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_with_which_nothing_can_be_trained(
    changes: dict[str, Any], message: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "accelerate-config" in changes:  # in a file, where it cannot be obeyed
        file = tmp_path / "run.yaml"
        file.write_text("accelerate_config: ddp\n")
        flags = ["--config", str(file), *world.flags(tmp_path / "out")]
    else:
        flags = world.flags(tmp_path / "out", **changes)
    assert message in refusal(flags, capsys)
    assert not [*(tmp_path / "out").glob("*")]


def test_a_count_of_no_process_is_refused(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And is not taken for none given."""
    for layout, message in (([], "needs a layout"), (["--accelerate-config", "ddp"], "--num-processes 0 must be at")):
        assert message in refusal([*layout, "--num-processes", "0", *world.flags(tmp_path / "out")], capsys)


def test_an_adapter_is_no_model_to_train(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be loaded with all its weights frozen."""
    few = {"max_steps": 1, "save_strategy": "no"}
    assert main(["train", *world.flags(tmp_path / "adapter", lora_r=2, **few)]) == 0
    error = refusal(world.flags(tmp_path / "out", model_name_or_path=str(tmp_path / "adapter"), **few), capsys)
    assert "is an adapter, not a model" in error and f"--model-name-or-path {world.model}" in error


# -- the output folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["itself", "above"])
def test_a_run_does_not_write_over_its_own_model(
    place: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``above``: the model is a checkpoint of the run that is to be replaced."""
    model = tmp_path / "run" / "checkpoint-2"
    tiny_llama(vocab_size=len(world.tokenizer)).save_pretrained(model)
    world.tokenizer.save_pretrained(model)
    before = contents(tmp_path)
    out = model if place == "itself" else tmp_path / "run"
    flags = world.flags(out, model_name_or_path=str(model), overwrite=True)
    assert "is where the model itself lies" in refusal(flags, capsys)
    assert contents(tmp_path) == before


def test_models_below_the_output_folder_are_safe(world: World, tmp_path: Path) -> None:
    """Starting over deletes checkpoints and nothing else."""
    model = tmp_path / "full"
    tiny_llama(vocab_size=len(world.tokenizer)).save_pretrained(model)
    world.tokenizer.save_pretrained(model)
    before = contents(model)
    flags = world.flags(tmp_path, model_name_or_path=str(model), overwrite=True, max_steps=1, save_strategy="no")
    assert main(["train", *flags]) == 0
    assert contents(model) == before and (tmp_path / "model.safetensors").is_file()


def test_an_output_folder_that_cannot_be(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    error = refusal(world.flags(tmp_path / "file" / "out", model_name_or_path="not/there"), capsys)
    assert f"{str(tmp_path / 'file')!r} is a file" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_without_permission(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    error = refusal(world.flags(tmp_path / "closed" / "out", model_name_or_path="not/there"), capsys)
    assert "cannot be written to" in error


@pytest.mark.parametrize(
    "wrong",
    [
        {"retain_data": "nowhere.json"},
        {"lora_r": 2, "lora_target_modules": "nowhere"},
        {"method": "rosu", "metric": "adam", "optim": "sgd"},
    ],
    ids=["data", "adapter", "method"],
)
def test_starting_over_deletes_nothing_until_the_new_run_has_taken_a_step(
    wrong: dict[str, Any], world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One mistake is found when data are read, one when the trainer is built, one in the first step."""
    out = tmp_path / "out"
    assert main(["train", *world.flags(out)]) == 0
    before = contents(out)
    refusal(world.flags(out, overwrite=True, forget_data=f"{world.data}:forget10", **wrong), capsys)
    assert contents(out) == before and FORMAT_FILE in before
    assert main(["train", *world.flags(out, overwrite=True, max_steps=2)]) == 0
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]


# -- model and data do not belong together ------------------------------------------------------------------


def test_tokens_without_an_embedding(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU this would be an assertion deep in a kernel."""
    samples = load(build(world.settings(tmp_path / "out"))).retain
    highest = max(max(sample["input_ids"]) for sample in samples)
    model = tmp_path / "model"
    world.tokenizer.save_pretrained(model)
    flags = world.flags(tmp_path / "out", model_name_or_path=str(model), max_steps=1, save_strategy="no")
    tiny_llama(vocab_size=highest).save_pretrained(model)
    assert f"gives token {highest} " in (error := refusal(flags, capsys)) and f"embeddings for {highest} only" in error
    tiny_llama(vocab_size=highest + 1).save_pretrained(model)
    assert main(["train", *flags]) == 0


def test_learning_beside_data_to_forget_says_what_an_epoch_is(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = world.settings(tmp_path, forget_data=f"{world.data}:forget10", limit=2)
    with caplog.at_level(logging.WARNING, "rosu_llm"):
        load(build(settings))
    assert "an epoch is 2 samples of it, as in a run that forgets, not all 2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rosu_llm"):
        load(build({**settings, "method": "graddiff"}))
    assert not caplog.text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('a system turn is missing') }}", "refuses a question and its answer (a system turn is"),
        (
            "{{ ['Question:', 'Answer:'][messages | length - 1] }} {{ messages[0]['content'] }}",
            "renders the question differently",
        ),
    ],
)
def test_chat_templates_that_cannot_be_used(
    template: str, message: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(world.model).save_pretrained(model)
    world.tokenizer.save_pretrained(model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    flags = world.flags(tmp_path / "out", model_name_or_path=str(model))
    at = flags.index("--chat-format")
    error = refusal([*flags[:at], *flags[at + 2 :]], capsys)
    assert message in error and "pass --chat-format" in error


# -- what sets the level, and what is watched --------------------------------------------------------------


@pytest.fixture
def places(world: World, tmp_path: Path) -> dict[str, str]:
    """Sources, and base models: one with other words behind its numbers, one that is not whole."""
    forget, retain = f"{world.data}:forget10", f"{world.data}:full"
    other, broken = tmp_path / "other", tmp_path / "broken"
    for folder in (other, broken):
        tiny_llama(vocab_size=len(world.tokenizer)).save_pretrained(folder)
    words = sorted(world.tokenizer.get_vocab(), key=world.tokenizer.get_vocab().__getitem__)
    word_tokenizer(words[:3:-1]).save_pretrained(other)
    (broken / "model.safetensors").write_bytes(b"not whole")
    return {"forget": forget, "retain": retain, "other": str(other), "broken": str(broken)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"forget_until": "holdout", "holdout_data": "{forget}"},
            "holdout_data: all of its 5 samples are in forget_data",
        ),
        ({"forget_until": "holdout", "holdout_data": "{retain}[1:3]"}, "holdout_data: all of its 2 samples are in"),
        ({"budget": 0.1, "budget_data": "{retain}"}, "budget_data: all of its 5 samples are in forget_data or retain"),
        ({"budget": 0.1, "budget_data": "{forget}[:1]"}, "forget10[:1]' has 1 row: give at least 2"),
        ({"budget": 0.1, "limit": 3}, "3 rows are too few to divide: pass --budget-data FILE"),
        ({"budget": 0.1, "method": "forget_only", "memory_file": "x"}, "memory_file stands in for retain_data: pass"),
        ({"forget_until": "base", "base_model": "{other}"}, "has another vocabulary: its token"),
        ({"forget_until": "base", "base_model": "{broken}"}, "base_model="),
        (
            {"forget_until": "alternates", "retain_data": None, "method": "forget_only", "memory_file": "x"},
            "--alternates-key perturbed_answer",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_unseen_data_that_is_none_is_refused(
    changes: dict[str, Any],
    message: str,
    world: World,
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {name: value.format(**places) if isinstance(value, str) else value for name, value in changes.items()}
    settings = world.settings(tmp_path / "out", **{"method": "rosu", "forget_data": places["forget"], **given})
    named = {name: value for name, value in settings.items() if value is not None}
    flags = [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    error = refusal(flags, capsys)
    assert message in error, error
    assert not [*(tmp_path / "out").glob("*.safetensors")]


def test_a_base_model_without_a_tokenizer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For some families transformers makes a tokenizer of a few words where there is none."""
    own, stub = word_tokenizer(["a", "b", "c", "d", "e"]), word_tokenizer([])
    monkeypatch.setattr(next_token, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: stub))
    stub.get_vocab = lambda: {"<|endoftext|>": 0}
    next_token._check_same_words("base", own)
    stub.get_vocab = lambda: {word: number + 1 for word, number in own.get_vocab().items()}
    with pytest.raises(ConfigError, match="another vocabulary"):
        next_token._check_same_words("base", own)


def test_some_seen_samples_among_unseen_ones_are_counted(
    world: World, places: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.loads(line) for name in ("forget10", "full") for line in (world.data / f"{name}.json").open()]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps({**row, "question": f"{row['question']} ?"}) + "\n" for row in rows[:4]))
    with mixed.open("a") as file:
        file.write(json.dumps(rows[0]) + "\n")
    own = {"method": "rosu", "forget_data": places["forget"], "forget_until": "holdout", "holdout_data": str(mixed)}
    load(build(world.settings(tmp_path / "out", **own)))
    assert "1 of the 5 samples of holdout_data are also in forget_data or retain_data" in caplog.text


def test_a_memory_that_could_not_be_written_or_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--out", str(tmp_path)], "is a folder: name the file, such as"),
        (["--out", str(tmp_path / "m.safetensors"), "--method", "rosu"], "--method rosu reads no stored gradients"),
    ):
        assert main(["memory", "build", "--smoke", *flags]) == 2
        assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
