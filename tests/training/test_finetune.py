"""Fine-tuning: ``method: finetune`` without anything to forget, from TOFU's files, in a chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rosu_llm.cli.main import main
from rosu_llm.data.chat_format import FORMAT_FILE, FORMATS, encode_chat, read_format
from rosu_llm.data.sources import read_rows
from rosu_llm.errors import DataError
from rosu_llm.geometry import build_rule
from rosu_llm.recipes.prepare import assemble, load
from rosu_llm.recipes.record import RECORD_FILE
from rosu_llm.recipes.settings import build
from rosu_llm.training.checkpoints import MARKER
from tests.models import tiny_llama
from tests.training.tiny_world import FORM, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps with checkpoints and TensorBoard."""
    out = tmp_path_factory.mktemp("run") / "out"
    assert main(["train", *world.flags(out, report_to="tensorboard")]) == 0
    return out


def naive_loss(model: Any, world: World) -> torch.Tensor:
    """Mean over all answer tokens of the file, one sample at a time, no padding."""
    losses = []
    for row in read_rows(f"{world.data}:full"):
        encoded = encode_chat(row["question"], row["answer"], world.tokenizer, FORMATS[FORM])
        logits = model(input_ids=torch.tensor([encoded.input_ids])).logits[0, :-1]
        losses.append(cross_entropy(logits, torch.tensor(encoded.labels[1:]), ignore_index=-100, reduction="none"))
    counted = torch.cat(losses)
    return counted.sum() / (counted != 0).sum()


def test_a_step_is_plain_descent_on_what_is_to_be_learned(world: World, tmp_path: Path) -> None:
    """Two steps of SGD over the whole file against autograd on the model itself."""
    flat = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no"}
    sizes = {"max_steps": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    assert main(["train", *world.flags(tmp_path, **flat, **sizes)]) == 0
    model = AutoModelForCausalLM.from_pretrained(world.model)
    for _ in range(2):
        model.zero_grad()
        naive_loss(model, world).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
    learned, start = load_file(tmp_path / "model.safetensors"), load_file(Path(world.model) / "model.safetensors")
    for name, value in model.state_dict().items():
        if name in learned:
            torch.testing.assert_close(learned[name], value, rtol=0, atol=2e-6)
    assert max(float((learned[name] - start[name]).abs().max()) for name in learned) > 1e-3


def test_a_step_costs_one_pass_and_an_epoch_is_every_row_once(world: World, tmp_path: Path) -> None:
    settings = world.settings(tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    recipe = build({**settings, "save_strategy": "no"})
    loaded = load(recipe)
    model = loaded.model
    assert (loaded.forget, loaded.holdout, len(loaded.retain)) == (None, None, 5)
    seen: list[list[int]] = []

    def note(_: Any, __: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():  # one forward without finds out about the output layer
            seen.extend(inputs["input_ids"].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    assemble(recipe, loaded).trainer.train()
    rows = sorted(tuple(t for t in row if t) for row in seen)
    assert rows == sorted([tuple(sample["input_ids"]) for sample in loaded.retain] * 2)


def test_both_names_are_the_same_method() -> None:
    assert build_rule("finetune") == build_rule("ft")


def test_other_methods_still_need_something_to_forget(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("rosu", "graddiff", "ng"):
        assert main(["train", *world.flags(tmp_path / "out", method=method)]) == 2
        assert "forget_data is missing" in capsys.readouterr().err
    flags = world.flags(tmp_path / "out", retain_data="")
    assert main(["train", *flags]) == 2
    assert "retain_data is missing" in capsys.readouterr().err


# -- what a run leaves ----------------------------------------------------------------------------------------


def test_logs_and_settings_are_left_beside_the_model(world: World, finished: Path) -> None:
    state = json.loads((finished / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert [entry["step"] for entry in state["log_history"] if "loss/retain" in entry] == [1, 2, 3, 4]
    record = json.loads((finished / RECORD_FILE).read_text())
    assert record["schema"] == "rosu/run/1"
    expected = {"method": "finetune", "chat_format": FORM, "learning_rate": 1e-2, "retain_data": f"{world.data}:full"}
    assert {name: record["settings"][name] for name in expected} == expected
    assert (record["processes"], record["layout"], record["steps"]) == (1, "local", 4)
    assert record["seconds"] > 0
    assert record["versions"]["torch"] == torch.__version__
    assert not list(finished.glob("*.partial"))


def test_tensorboard_gets_every_value(finished: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = finished.rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if tag.endswith("loss/retain")]
    history = json.loads((finished / "trainer_state.json").read_text())["log_history"]
    logged = [entry["loss/retain"] for entry in history if "loss/retain" in entry]
    assert [event.value for event in events.Scalars(tag)] == pytest.approx(logged, rel=1e-6)


def test_a_missing_logging_tool_is_said_before_anything_is_loaded(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.integrations

    monkeypatch.setattr(transformers.integrations, "get_available_reporting_integrations", list)
    flags = world.flags(tmp_path / "out", report_to="tensorboard", model_name_or_path="not/there")
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert "report_to='tensorboard' is not installed: pip install tensorboard" in error
    assert "--report-to none" in error
    assert error.count("\n") == 1


def test_a_killed_run_goes_on_where_it_was(world: World, finished: Path, tmp_path: Path) -> None:
    """Bit for bit, with the bar, from the newest whole checkpoint."""
    out = tmp_path / "out"
    assert main(["train", *world.flags(out)]) == 0
    expected = (out / "model.safetensors").read_bytes()
    assert expected == (finished / "model.safetensors").read_bytes()
    (out / "checkpoint-4" / MARKER).touch()
    (out / "model.safetensors").unlink()
    assert main(["train", *world.flags(out), "--resume-from-checkpoint", "true"]) == 0
    assert (out / "model.safetensors").read_bytes() == expected
    state = json.loads((out / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss/retain" in entry] == [1, 2, 3, 4]


def test_progress_is_shown(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *world.flags(tmp_path, max_steps=2, disable_tqdm=False, save_strategy="no")]) == 0
    assert "2/2" in capsys.readouterr().err


# -- the chat format ------------------------------------------------------------------------------------------


def test_a_model_is_unlearned_in_the_format_it_learned_in(world: World, finished: Path, tmp_path: Path) -> None:
    """Without being told again; and what it leaves says so too."""
    assert read_format(finished / FORMAT_FILE) == FORMATS[FORM]
    again: dict[str, Any] = {"method": "graddiff", "forget_data": f"{world.data}:forget10", "save_strategy": "no"}
    settings = world.settings(tmp_path, model_name_or_path=str(finished), **again)
    del settings["chat_format"]
    recipe = build(settings)
    forget = load(recipe).forget
    row = read_rows(f"{world.data}:forget10")[0]
    encoded = encode_chat(row["question"], row["answer"], world.tokenizer, FORMATS[FORM])
    assert forget[0]["input_ids"] == encoded.input_ids
    assert "attention_mask" in forget[0]
    recipe.arguments.model_name_or_path = world.model
    assert "attention_mask" not in load(recipe).forget[0]


def test_a_new_run_in_a_folder_does_not_keep_the_old_ones_format(world: World, tmp_path: Path) -> None:
    few = {"max_steps": 1, "save_strategy": "no"}
    assert main(["train", *world.flags(tmp_path, **few)]) == 0
    assert (tmp_path / FORMAT_FILE).is_file()
    flags = world.flags(tmp_path, **few)
    at = flags.index("--chat-format")
    assert main(["train", *flags[:at], *flags[at + 2 :], "--overwrite", "true"]) == 0
    assert not (tmp_path / FORMAT_FILE).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_format": "Llama-3.2-1B-Instruct"}, "needs a chat template and the tokenizer has none"),
        ({"chat_format": "Lama"}, "Unknown chat format 'Lama'"),
        ({"retain_data": "{data}:retain90"}, "no data set 'retain90'; there is: forget10, full"),
        ({"max_length": 8}, "--max-length"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    changes: dict[str, Any], message: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {key: value.format(data=world.data) if isinstance(value, str) else value for key, value in changes.items()}
    assert main(["train", *world.flags(tmp_path / "out", **given)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_samples_longer_than_the_models_context_are_refused(world: World, tmp_path: Path) -> None:
    recipe = build(world.settings(tmp_path / "out"))
    longest = max(len(sample["input_ids"]) for sample in load(recipe).retain)
    recipe.arguments.model_name_or_path = str(tmp_path / "model")
    world.tokenizer.save_pretrained(tmp_path / "model")
    for context in (longest, longest - 1):
        model = tiny_llama(vocab_size=len(world.tokenizer), max_position_embeddings=context)
        model.save_pretrained(tmp_path / "model")
        if context == longest:
            load(recipe)
    with pytest.raises(DataError, match=rf"has {longest} tokens, but .* reads {longest - 1} at once"):
        load(recipe)


def test_a_smoke_run_reads_the_chat_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--smoke", "--method", "finetune", "--output-dir", str(tmp_path)]
    assert main(["train", *flags, "--chat-format", "Llama-3.2-1B-Instruct"]) == 0
    assert read_format(tmp_path / "smoke" / FORMAT_FILE) == FORMATS["Llama-3.2-1B-Instruct"]
    assert main(["train", *flags, "--chat-format", "Lama"]) == 2
    assert "Unknown chat format" in capsys.readouterr().err
