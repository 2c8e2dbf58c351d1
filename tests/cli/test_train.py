"""``rosu train`` from file and flags to a model folder: whole runs on a model of a few thousand weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm import MethodArguments
from rosu_llm.cli.main import main
from rosu_llm.data.people import generate
from rosu_llm.experiments.demo.world import word_tokenizer
from rosu_llm.recipes.settings import RunArguments, read_config
from rosu_llm.training.checkpoints import MARKER, last_complete
from tests.conftest import ROOT
from tests.losses import naive
from tests.models import tiny_llama


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer and data files."""
    folder = tmp_path_factory.mktemp("world")
    corpus = generate(0, forget=1, retain=2, calibration=1, holdout=1)
    tokenizer = word_tokenizer(["Question:", "Answer:", *corpus.words()])
    tokenizer.save_pretrained(folder / "model")
    tiny_llama(seed=1, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(
        folder / "model"
    )
    for split, items in corpus.items.items():
        lines = [json.dumps({"question": i.question, "answer": i.answer}) for i in items]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def recipe(world: Path, tmp_path: Path) -> Any:
    """Writes a recipe of four short steps with the given changes; returns its path."""

    def write(**changes: Any) -> str:
        values = {
            "model_name_or_path": str(world / "model"),
            "forget_data": str(world / "forget.jsonl"),
            "retain_data": str(world / "retain.jsonl"),
            "output_dir": str(tmp_path / "out"),
            "max_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 3,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(path)

    return write


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)


def samples_of(path: Path, tokenizer: Any) -> list[naive.Sample]:
    """Tokenised by hand: prompt masked, answer and end token not."""
    result = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(f"Question: {row['question']} Answer:")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        result.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return result


# -- mistakes ---------------------------------------------------------------------------------------------

MISTAKES = {
    "nothing": ([], "model_name_or_path is missing"),
    "word": (["rho", "0.4"], "'rho' is not understood"),
    "unknown": (["--rhoo", "0.4"], "Did you mean rho"),
    "type": (["--rho", "abc"], "rho='abc' cannot be read as float"),
    "method": (["--method", "roso"], "Did you mean 'rosu'"),
    "config": (["--config", "missing.yaml"], "is not a file"),
    "partial": (["--model-name-or-path", "m", "--forget-data", "f.jsonl"], "retain_data is missing"),
    "dtype": (
        ["--model-name-or-path", "m", "--forget-data", "f", "--retain-data", "r", "--dtype", "int8"],
        "dtype 'int8'",
    ),
    "schedule": (["--lr-scheduler-type", "cosin"], "lr_scheduler_type"),
}


@pytest.mark.parametrize(("flags", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes_are_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rosu train: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_broken_yaml_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("rho: [0.4\nmethod: rosu\n")
    assert main(["train", "--config", str(tmp_path / "a.yaml")]) == 2
    error = capsys.readouterr().err
    assert "is not valid YAML" in error
    assert error.count("\n") == 1


def test_a_missing_data_file_is_one_line(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", recipe(forget_data="nowhere.jsonl")]) == 2
    assert "'nowhere.jsonl' is not a file" in capsys.readouterr().err


def test_a_missing_model_folder_is_an_error_of_the_package(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The likeliest mistake of all: one line with the path, not a traceback from the hub's client."""
    assert main(["train", "--config", recipe(model_name_or_path=str(tmp_path / "no" / "model"))]) == 2
    assert "model" in capsys.readouterr().err


def test_holdout_calibration_needs_holdout_data(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", recipe(), "--calibrate", "holdout"]) == 2
    assert "--holdout-data" in capsys.readouterr().err


def test_every_setting_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list-settings"]) == 0
    text = capsys.readouterr().out
    for group in (RunArguments, MethodArguments):
        for f in dataclasses.fields(group):
            assert any(line.split()[1:2] == [f.name] for line in text.splitlines()), f.name


# -- smoke ------------------------------------------------------------------------------------------------


def test_smoke_runs_a_recipe_on_a_toy_and_the_result_loads(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "model_name_or_path: nobody/nothing\nforget_data: nobody/nothing:forget\nretain_data: nobody/nothing:retain\n"
        "method: rosu\ncalibrate: off\nlearning_rate: 1.0e-3\nper_device_train_batch_size: 8\nmax_steps: 500\n"
        "gradient_accumulation_steps: 4\nbf16: true\ngradient_checkpointing: true\ndataloader_num_workers: 2\n"
        "save_strategy: epoch\nlogging_steps: 10\n"
    )
    out = tmp_path / "out"
    assert main(["train", "--smoke", "--config", str(tmp_path / "recipe.yaml"), "--output-dir", str(out)]) == 0
    out = out / "smoke"
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer)
    ids = tokenizer("Where was", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(input_ids=ids).logits).all()
    card = (out / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "transformers"
    assert not list(out.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "graddiff", "forget_loss": "npo", "retain_loss": "kl"},
        {"method": "minmax", "calibrate": "holdout", "rho_schedule": "cosine", "beta": "two_phase"},
        {"forget_loss": "simnpo", "reduction": "micro_mean", "jacobian": "none", "lora_r": 2},
    ],
    ids=str,
)
def test_smoke_runs_any_method(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    flags = ["--config", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / "out")]
    assert main(["train", "--smoke", *flags]) == 0
    name = "adapter_model.safetensors" if "lora_r" in settings else "model.safetensors"
    assert (tmp_path / "out" / "smoke" / name).is_file()


@pytest.mark.parametrize(
    "settings",
    [
        {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 2},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"resume_from_checkpoint": True},
    ],
    ids=str,
)
def test_smoke_disarms_what_depends_on_what_it_replaces(settings: dict[str, Any], tmp_path: Path) -> None:
    """A recipe that is right for a real run must also be right for its smoke run."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    flags = ["--config", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / "out")]
    assert main(["train", "--smoke", *flags]) == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "recipes").rglob("*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_smoke(path: Path, tmp_path: Path) -> None:
    assert read_config(path)
    assert main(["train", "--smoke", "--config", str(path), "--output-dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "smoke" / "README.md").is_file()


# -- whole runs on local files ------------------------------------------------------------------------------


def test_a_run_forgets_and_writes_a_model_that_loads(recipe: Any, world: Path, tmp_path: Path) -> None:
    settings = {
        "max_steps": 8,
        "save_strategy": "no",
        "learning_rate": 5e-3,
        "holdout_data": str(world / "holdout.jsonl"),
    }
    assert main(["train", "--config", recipe(**settings), "--calibrate", "holdout", "--rho=0.2"]) == 0
    out = tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(world / "model").eval()
    after = AutoModelForCausalLM.from_pretrained(out).eval()
    forget, retain = (samples_of(world / f"{part}.jsonl", tokenizer) for part in ("forget", "retain"))
    gap = [
        naive.nll(model, forget) / sum(len(naive.rows(model, s)) for s in forget)
        - naive.nll(model, retain) / sum(len(naive.rows(model, s)) for s in retain)
        for model in (before, after)
    ]
    assert gap[1] > gap[0]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == str(world / "model")
    for line in ("| `rho` | `0.2` |", "| `calibrate` | `holdout` |", "| `learning_rate` | `0.005` |"):
        assert line in card
    assert {p.name for p in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert not (out / ".saving").exists()


def test_flags_override_the_file_for_the_trainers_settings_too(recipe: Any, tmp_path: Path) -> None:
    flags = ["--max-steps", "2", "--learning-rate", "1e-4", "--save-strategy", "no", "--disable-tqdm", "true"]
    assert main(["train", "--config", recipe(), *flags]) == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| `learning_rate` | `0.0001` |" in card
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_bf16_can_be_switched_off_by_a_flag(recipe: Any, tmp_path: Path) -> None:
    """The text "false" is not true."""
    assert main(["train", "--config", recipe(save_strategy="no"), "--bf16", "false"]) == 0
    plain = weights(tmp_path / "out")
    assert main(["train", "--config", recipe(save_strategy="no", output_dir=str(tmp_path / "other"))]) == 0
    assert same(plain, weights(tmp_path / "other"))


def test_a_lora_run_writes_an_adapter_on_an_untouched_base(recipe: Any, world: Path, tmp_path: Path) -> None:
    before = (world / "model" / "model.safetensors").read_bytes()
    assert main(["train", "--config", recipe(), "--lora-r", "2", "--retain-loss", "kl"]) == 0
    out = tmp_path / "out"
    assert (world / "model" / "model.safetensors").read_bytes() == before
    assert not (out / "model.safetensors").exists()
    adapter = load_file(out / "adapter_model.safetensors")
    assert all(2 in t.shape for t in adapter.values())
    base = AutoModelForCausalLM.from_pretrained(world / "model").eval()
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, out).eval()(input_ids=ids).logits
    assert float((adapted - plain).abs().max()) > 0.0


def test_layers_for_the_adapter_can_be_listed(recipe: Any, tmp_path: Path) -> None:
    flags = ["--lora-r", "2", "--lora-target-modules", "q_proj,v_proj"]
    assert main(["train", "--config", recipe(save_strategy="no"), *flags]) == 0
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in adapter} == {"q_proj", "v_proj"}


def test_a_bf16_model_is_trained_in_float32(recipe: Any, tmp_path: Path) -> None:
    assert main(["train", "--config", recipe(save_strategy="no"), "--dtype", "bfloat16"]) == 0
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.float32}


def test_an_output_dir_with_checkpoints_is_refused_untouched(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe()
    assert main(["train", "--config", path]) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    capsys.readouterr()
    assert main(["train", "--config", path]) == 2
    error = capsys.readouterr().err
    assert all(flag in error for flag in ("--resume-from-checkpoint true", "--overwrite true", "--output-dir"))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    assert main(["train", "--config", path, "--overwrite", "true"]) == 0


@pytest.mark.parametrize("settings", [{}, {"method": "graddiff", "forget_loss": "npo"}], ids=["rosu", "npo"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    settings: dict[str, Any], recipe: Any, tmp_path: Path
) -> None:
    """Bit for bit, from the newest whole checkpoint: the last one is marked as half-written here."""
    path = recipe(**settings)
    assert main(["train", "--config", path]) == 0
    out = tmp_path / "out"
    expected, half_way = weights(out), weights(out / "checkpoint-2")
    assert not same(expected, half_way)
    (out / "checkpoint-4" / MARKER).touch()
    (out / "model.safetensors").unlink()
    assert main(["train", "--config", path, "--resume-from-checkpoint", "true"]) == 0
    assert same(weights(out), expected)
    assert last_complete(out) == out / "checkpoint-4"
    (out / "model.safetensors").unlink()
    shutil.rmtree(out / "checkpoint-4")
    assert main(["train", "--config", path, "--resume-from-checkpoint", str(out / "checkpoint-2")]) == 0
    assert same(weights(out), expected)


def test_resuming_without_a_checkpoint_is_refused(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", recipe(), "--resume-from-checkpoint", "true"]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_starting_over_leaves_no_older_checkpoint_to_resume_from(recipe: Any, tmp_path: Path) -> None:
    """Else a resumed run would go on from the run that was to be replaced."""
    assert main(["train", "--config", recipe()]) == 0
    assert main(["train", "--config", recipe(max_steps=2, seed=7), "--overwrite", "true"]) == 0
    assert last_complete(tmp_path / "out") == tmp_path / "out" / "checkpoint-2"


def test_limit_and_retain_per_forget_reach_the_data(recipe: Any, tmp_path: Path) -> None:
    """Two forget rows, one per batch: an epoch is two steps."""
    path = recipe(max_steps=-1, num_train_epochs=1, per_device_train_batch_size=1, save_strategy="epoch")
    assert main(["train", "--config", path, "--limit", "2", "--retain-per-forget", "2"]) == 0
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 2
