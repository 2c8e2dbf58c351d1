"""What a Trainer user expects: logs, checkpoints, resuming, LoRA, precision, evaluation, cards."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import EarlyStoppingCallback, LlamaForCausalLM

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer
from rosu_llm.errors import ConfigError, DataError, UnsupportedLayoutError
from tests.conftest import ROOT
from tests.models import flat, samples, tiny_llama

FORGET, RETAIN, HOLDOUT = samples(8, seed=1), samples(12, seed=2), samples(5, seed=3)

GLOSSARY = (
    "loss/forget loss/retain loss/surrogate coupling/cosine coupling/leak perturb/norm perturb/realized "
    "perturb/distortion norm/q norm/retain_sq step/alpha step/fallback step/amplification_ratio"
).split()


def config(folder: Path, **settings: Any) -> ROSUConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return ROSUConfig(**{**defaults, **settings})


def trainer(folder: Path, model: Any = None, **settings: Any) -> ROSUTrainer:
    extra = {key: settings.pop(key) for key in ("callbacks", "eval_dataset", "peft_config") if key in settings}
    return ROSUTrainer(
        tiny_llama() if model is None else model,
        config(folder, **settings),
        train_dataset=ForgetRetainDataset(FORGET, RETAIN),
        holdout_dataset=HOLDOUT,
        **extra,
    )


def logs(t: ROSUTrainer) -> list[dict[str, float]]:
    return [entry for entry in t.state.log_history if "loss" in entry]


def test_every_promised_quantity_is_logged(tmp_path: Path) -> None:
    t = trainer(tmp_path, calibrate="holdout")
    t.train()
    for entry in logs(t):
        for name in (*GLOSSARY, "calibrate/scale", "loss/holdout"):
            assert name in entry, name
        assert entry["perturb/norm"] == pytest.approx(0.4)
        assert abs(entry["coupling/leak"]) < 1e-5 * 0.4 * entry["norm/retain_sq"] ** 0.5 + 1e-9
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    for name in (*GLOSSARY, "calibrate/scale", "loss/holdout", "norm/forget", "coupling/residue"):
        assert f"`{name}`" in glossary, f"{name} is missing from the glossary"


def test_logged_values_are_means_since_the_last_log(tmp_path: Path) -> None:
    fine, coarse = trainer(tmp_path), trainer(tmp_path, logging_steps=2)
    fine.train()
    coarse.train()
    for i, entry in enumerate(logs(coarse)):
        pair = logs(fine)[2 * i : 2 * i + 2]
        for name in ("loss/forget", "norm/q", "coupling/cosine"):
            assert entry[name] == pytest.approx((pair[0][name] + pair[1][name]) / 2)


@pytest.mark.parametrize(
    ("optim", "beta", "mode"),
    [
        ("sgd", "tied", "direct"),
        ("adamw_torch", "tied", "matched"),
        ("adamw_torch", 0.1, "direct"),
        ("adafactor", "tied", "matched"),
    ],
)
def test_auto_amplification(tmp_path: Path, optim: str, beta: Any, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rosu_llm"):
        trainer(tmp_path, optim=optim, beta=beta, max_steps=1).train()
    assert f"amplify=auto resolves to {mode}" in caplog.text


def test_a_negligible_pull_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rosu_llm"):
        trainer(tmp_path, amplify="direct", beta=1e-7).train()
    assert sum("practically nothing" in record.message for record in caplog.records) == 1


def test_a_number_through_the_optimizer_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rosu_llm"):
        trainer(tmp_path, amplify="optimizer", beta=0.2, max_steps=1).train()
    assert any("amplify='direct'" in record.message for record in caplog.records)


def test_a_fixed_calibration_target_below_the_forget_loss_stops_the_pull(tmp_path: Path) -> None:
    t = trainer(tmp_path, calibrate=0.5)  # a random model's loss is about log 61 = 4.1
    t.train()
    assert all(entry["calibrate/scale"] == 0.0 and entry["step/amplification_ratio"] == 0.0 for entry in logs(t))
    t = trainer(tmp_path, calibrate=50.0)
    t.train()
    assert all(entry["calibrate/scale"] == 1.0 and entry["step/amplification_ratio"] > 0.4 for entry in logs(t))


def test_the_holdout_loss_is_the_mean_over_its_answer_tokens(tmp_path: Path) -> None:
    from tests.algorithm1 import Flat, mean_nll

    model = tiny_llama()
    truth = float(mean_nll(model, Flat(model).weights(Flat(model).vector()), HOLDOUT))
    t = trainer(tmp_path, model, calibrate="holdout", max_steps=1)
    t.train()
    assert logs(t)[0]["loss/holdout"] == pytest.approx(truth, rel=1e-5)  # float32 model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"forget_loss": "npo", "gradient_accumulation_steps": 2},
        {"calibrate": "holdout", "calibrate_every": 3, "lr_scheduler_type": "cosine"},
        {"retain_loss": "kl", "optim": "sgd"},
        {"method": "minmax", "rho_schedule": "cosine", "beta": "two_phase"},
    ],
)
def test_resuming_ends_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Dropout on, so that the random state matters too; four samples per epoch, so that epochs matter."""
    common = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **settings}
    whole = trainer(tmp_path / "a", tiny_llama(dropout=0.2, attn_implementation="eager"), **common)
    whole.train()

    class Stop(EarlyStoppingCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 5

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

    first = trainer(tmp_path / "b", tiny_llama(dropout=0.2, attn_implementation="eager"), callbacks=[Stop(1)], **common)
    first.train()
    assert first.state.global_step == 5
    torch.manual_seed(999)
    second = trainer(tmp_path / "b", tiny_llama(dropout=0.2, attn_implementation="eager"), **common)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(flat(second.model.parameters()), flat(whole.model.parameters()))


SCRIPT = """
import sys, time
from pathlib import Path
from transformers import TrainerCallback
from tests.training.test_trainer import trainer
from tests.models import tiny_llama
folder, slow, resume = Path(sys.argv[1]), sys.argv[2] == "slow", sys.argv[3] == "resume"
class Wait(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        (folder / "steps").write_text(str(state.global_step))
        time.sleep(1.0 if slow and state.global_step >= 5 else 0.0)
t = trainer(folder, tiny_llama(dropout=0.2, attn_implementation="eager"), callbacks=[Wait()], max_steps=8,
            save_strategy="steps", save_steps=2, calibrate="holdout", forget_loss="npo")
t.train(resume_from_checkpoint=resume)
t.save_model()
"""


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL in the middle of training, in another process; then resume, in yet another."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()

    def start(folder: str, *mode: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / folder), *mode],
            env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    victim = start("killed", "slow", "fresh")
    try:
        deadline = time.monotonic() + 120
        steps = tmp_path / "killed" / "steps"
        while not (steps.exists() and steps.read_text() == "5"):
            assert victim.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait(timeout=30)
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    for process in (start("killed", "fast", "resume"), start("whole", "fast", "fresh")):
        assert process.wait(timeout=120) == 0
    a, b = (LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("killed", "whole"))
    assert torch.equal(flat(a.parameters()), flat(b.parameters()))


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    t = trainer(tmp_path, save_strategy="steps", save_steps=2)
    t.train()
    (tmp_path / "checkpoint-4" / "incomplete").touch()
    assert t.last_checkpoint() == str(tmp_path / "checkpoint-2")
    again = trainer(tmp_path, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(flat(again.model.parameters()), flat(t.model.parameters()))


def test_resuming_where_nothing_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("method", ["rosu", "minmax", "uam", "graddiff", "ft", "ng"])
def test_lora_trains_the_adapter_alone(tmp_path: Path, method: str) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_llama()
    before = {n: p.detach().clone() for n, p in base.named_parameters()}
    t = trainer(
        tmp_path,
        base,
        method=method,
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    t.train()
    assert t.preflight is not None
    assert t.preflight.trainable < t.preflight.total / 5
    for name, p in t.model.named_parameters():
        if "lora" in name:
            assert p.requires_grad
        else:
            assert torch.equal(p, before[name.replace("base_model.model.", "").replace(".base_layer", "")])
    if method != "ft":
        assert any(p.abs().sum() > 0 for n, p in t.model.named_parameters() if "lora_B" in n)
    t.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not (tmp_path / ".saving").exists()


def test_kl_under_lora_needs_no_copy(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    t = trainer(tmp_path, retain_loss="kl", peft_config=lora)
    t.train()
    assert t._references.model is not None
    assert t._references.model.extra_bytes == 0
    assert logs(t)[0]["loss/retain"] == pytest.approx(0.0, abs=1e-6)  # the adapter starts at zero
    assert logs(t)[-1]["loss/retain"] > 1e-5  # well above float32 rounding of a KL, about 1e-8


def test_bf16_weights_are_upcast_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rosu_llm"):
        t = trainer(tmp_path, tiny_llama(dtype=torch.bfloat16), max_steps=1)
    assert {p.dtype for p in t.model.parameters()} == {torch.float32}
    assert any("GiB" in record.message and "upcast=False" in record.message for record in caplog.records)


def test_bf16_autocast_reports_what_arrives(tmp_path: Path) -> None:
    t = trainer(tmp_path, bf16=True, max_steps=2, rho=2.0)
    t.train()
    entry = logs(t)[0]
    assert 0.5 < entry["perturb/realized"] < 1.5
    assert entry["perturb/distortion"] > 1e-3  # bf16 keeps 8 bits


def test_kept_bf16_weights_are_perturbed_at_random(tmp_path: Path) -> None:
    t = trainer(tmp_path, tiny_llama(dtype=torch.bfloat16), upcast=False, max_steps=2, rho=1.0)
    t.train()
    assert {p.dtype for p in t.model.parameters()} == {torch.bfloat16}
    assert 0.5 < logs(t)[0]["perturb/realized"] < 1.5


def test_float16_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLayoutError, match="float16"):
        trainer(tmp_path, tiny_llama(dtype=torch.float16))


def test_evaluation_early_stopping_and_best_checkpoint(tmp_path: Path) -> None:
    t = trainer(
        tmp_path,
        eval_dataset={"forget": FORGET, "retain": RETAIN},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=12,
        load_best_model_at_end=True,
        metric_for_best_model="eval_retain_loss",
        greater_is_better=False,
        learning_rate=0.3,  # so large that the retain loss explodes and patience runs out
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    t.train()
    values = [e["eval_retain_loss"] for e in t.state.log_history if "eval_retain_loss" in e]
    assert t.state.global_step < 12
    assert t.state.best_metric == min(values)
    best = LlamaForCausalLM.from_pretrained(t.state.best_model_checkpoint)
    assert torch.equal(flat(best.parameters()), flat(t.model.parameters()))


def test_evaluation_on_pairs_reports_both_losses(tmp_path: Path) -> None:
    from tests.algorithm1 import Flat, mean_nll

    model = tiny_llama()
    pairs = [{"forget": f, "retain": r} for f, r in zip(FORGET, RETAIN[:8], strict=True)]
    t = trainer(tmp_path, model, eval_dataset=pairs, per_device_eval_batch_size=8)
    metrics = t.evaluate()
    weights = Flat(model).weights(Flat(model).vector())
    assert metrics["eval_loss"] == pytest.approx(float(mean_nll(model, weights, RETAIN[:8])), rel=1e-5)
    assert metrics["eval_forget_loss"] == pytest.approx(float(mean_nll(model, weights, FORGET)), rel=1e-5)


def test_the_model_card_says_what_was_done(tmp_path: Path) -> None:
    t = trainer(tmp_path, calibrate=3.0, max_steps=1)
    t.train()
    t.create_model_card(model_name="forgetful")
    text = (tmp_path / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert "unlearning" in header["tags"]
    assert "| `rho` | `0.4` |" in text
    assert "calibrated" in text


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "runs")
    try:
        trainer(tmp_path, report_to=["tensorboard"], max_steps=2).train()
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    files = [*tmp_path.rglob("events.out.tfevents*")]
    assert files
    events = EventAccumulator(str(files[0].parent))
    events.Reload()
    assert "train/coupling/cosine" in events.Tags()["scalars"]


def test_the_pair_of_an_epoch_is_seen_by_the_data_set(tmp_path: Path) -> None:
    t = trainer(tmp_path, max_steps=9)  # 4 steps per epoch
    t.train()
    assert t.train_dataset.epoch == 2


def test_memory_is_given_back_after_training(tmp_path: Path) -> None:
    t = trainer(tmp_path, max_steps=1)
    t.train()
    assert t._step is None
    assert t.optimizer is not None
    assert t.preflight is not None
    assert "3 forward+backward passes" in t.preflight.line()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"train_dataset": []}, DataError, "train_dataset is empty"),
        ({"holdout_dataset": None}, DataError, "holdout_dataset"),
        ({"holdout_dataset": []}, DataError, "holdout_dataset is empty"),
        ({"args": "TrainingArguments"}, ConfigError, "ROSUConfig"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    from transformers import TrainingArguments

    arguments: dict[str, Any] = {
        "args": config(tmp_path, calibrate="holdout"),
        "train_dataset": ForgetRetainDataset(FORGET, RETAIN),
        "holdout_dataset": HOLDOUT,
        **change,
    }
    if arguments["args"] == "TrainingArguments":
        arguments["args"] = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(error, match=words):
        ROSUTrainer(tiny_llama(), **arguments)


def test_all_frozen_is_refused(tmp_path: Path) -> None:
    model = tiny_llama().requires_grad_(False)
    with pytest.raises(ConfigError, match="No trainable parameter"):
        trainer(tmp_path, model)


def test_the_reference_of_a_changing_data_set_is_missed_loudly(tmp_path: Path) -> None:
    class Changing(ForgetRetainDataset):
        calls = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            type(self).calls += 1
            ids = [*item["forget"]["input_ids"], 5 + type(self).calls % 40]
            return {**item, "forget": {"input_ids": ids, "labels": ids}}

    t = ROSUTrainer(tiny_llama(), config(tmp_path, forget_loss="npo"), train_dataset=Changing(FORGET, RETAIN))
    with pytest.raises(DataError, match="reference log-probability"):
        t.train()
