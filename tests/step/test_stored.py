"""Stored retain gradients in place of retain data: steps against a transcription, the file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rosu_llm import ForgetRetainCollator, ForgetRetainDataset, ROSUTrainer, UnlearningStep
from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError, DataError
from tests.models import CleanLM, flat, samples, tiny_llama
from tests.step.test_memory import RATE, gradient, loss, outside, put
from tests.training.test_trainer import FORGET, RETAIN, config


def test_steps_are_those_of_a_transcription() -> None:
    model, twin = CleanLM(seed=2).double(), CleanLM(seed=2).double()
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=RATE), method="forget_only")
    parts = [samples(3, seed=30 + i) for i in range(3)]
    stored = [gradient(twin, part) for part in parts]
    step.store([lambda part=part: loss(model, part) for part in parts])
    w = flat(twin.parameters())
    for t in range(4):
        forget = samples(4, seed=10 + t)
        step(lambda f=forget: loss(model, f))
        put(twin, w)
        v = -outside(stored, gradient(twin, forget))
        w = w - RATE * v
        assert float((flat(model.parameters()) - w).norm()) < 1e-9 * RATE * float(v.norm())
        assert all(abs(float(v @ r)) < 1e-12 for r in stored)


def test_nothing_stored_is_an_error() -> None:
    model = CleanLM()
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=RATE), method="forget_only")
    with pytest.raises(DataError, match=r"call store\(\)"):
        step(lambda: loss(model, samples(2, seed=1)))


def trainer(folder: Path, data: Any = None, seed: int = 0, **settings: Any) -> ROSUTrainer:
    own = {key: settings.pop(key, None) for key in ("memory_dataset", "memory_file")}
    made = config(folder, **{"method": "forget_only", "directions": 3, **settings})
    data = [{"forget": [sample]} for sample in FORGET] if data is None else data
    collator = ForgetRetainCollator()
    return ROSUTrainer(tiny_llama(seed, dropout=0.1), made, train_dataset=data, data_collator=collator, **own)


def trained(t: ROSUTrainer) -> torch.Tensor:
    t.train()
    return flat(t.model.parameters())


def test_data_pairs_and_a_file_give_the_same_bits(tmp_path: Path) -> None:
    given = trained(trainer(tmp_path / "a", memory_dataset=RETAIN))
    assert torch.equal(trained(trainer(tmp_path / "b", ForgetRetainDataset(FORGET, RETAIN))), given)
    path = tmp_path / "memory.safetensors"
    from rosu_llm.recipes.run import instead_of_training

    builder = trainer(tmp_path / "c", memory_dataset=RETAIN)
    instead_of_training(builder, lambda: builder.write_memory(path))
    assert torch.equal(trained(trainer(tmp_path / "d", memory_file=str(path))), given)
    with pytest.raises(ConfigError, match="was built on other weights than this run begins with"):
        trainer(tmp_path / "e", seed=3, memory_file=str(path)).train()
    # frozen weights count, too
    frozen = {"trainable_parameters": r"layers\.0\.mlp"}
    builder = trainer(tmp_path / "f", memory_dataset=RETAIN, **frozen)
    part = tmp_path / "part.safetensors"
    instead_of_training(builder, lambda: builder.write_memory(part))
    trainer(tmp_path / "g", memory_file=str(part), **frozen).train()
    changed = trainer(tmp_path / "h", memory_file=str(part), **frozen)
    with torch.no_grad():
        changed.model.model.layers[1].mlp.up_proj.weight.add_(1.0)
    with pytest.raises(ConfigError, match="was built on other weights than this run begins with"):
        changed.train()
    # independent truth: the parts are every third sample, and dropout is off
    model = tiny_llama().eval()
    rows = RETAIN[1::3]
    total, count = torch.zeros(()), 0
    for row in rows:
        labels = torch.tensor([row["labels"]])
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(logits[0], labels[0, 1:], ignore_index=-100, reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    truth = torch.autograd.grad(total / count, list(model.parameters()))
    found = load_file(path)
    for (name, _), expected in zip(model.named_parameters(), truth, strict=True):
        assert torch.allclose(found[f"m2.{name}"], expected, rtol=1e-4, atol=1e-6)  # float32, other batches


def test_a_resumed_run_knows_what_was_stored(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"memory_dataset": RETAIN, "save_strategy": "steps", "save_steps": 2}
    whole = trained(trainer(tmp_path, **settings))
    again = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(again.model.parameters()), whole)
    (tmp_path / "checkpoint-2" / "rosu_memory_0.safetensors").unlink()
    with pytest.raises(ConfigError, match="rosu_memory_0"):
        trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_what_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none was given"):
        trainer(tmp_path).train()
    with pytest.raises(DataError, match="2 samples were given"):
        trainer(tmp_path, memory_dataset=RETAIN[:2]).train()
    with pytest.raises(ConfigError, match="is not there"):
        trainer(tmp_path, memory_file=str(tmp_path / "nothing.safetensors")).train()
    with pytest.raises(ConfigError, match="for method='forget_only'"):
        trainer(tmp_path, method="ng", directions=8, memory_file="x")
    with pytest.raises(ConfigError, match="directions=0"):
        trainer(tmp_path, directions=0)


def test_the_command_writes_a_file_that_training_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rosu_llm.toys import toy_values

    values = toy_values({"output_dir": str(tmp_path / "out"), "method": "forget_only"}, tmp_path)
    model, cpu = ["--model-name-or-path", values["model_name_or_path"]], ["--use-cpu", "true"]
    path = tmp_path / "memory.safetensors"
    build = ["memory", "build", *model, *cpu, "--retain-data", values["retain_data"]]
    assert main([*build, "--directions", "2", "--out", str(path)]) == 0
    train = [
        "train",
        *model,
        *cpu,
        "--forget-data",
        values["forget_data"],
        "--method",
        "forget_only",
        "--memory-file",
        str(path),
        "--max-steps",
        "1",
    ]
    train += ["--report-to", "none", "--output-dir", str(tmp_path / "run")]
    assert main([*train, "--directions", "3"]) == 2
    assert "holds 2 directions" in capsys.readouterr().err
    assert main([*train, "--directions", "2"]) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    cut = path.read_bytes()[:-200]
    path.write_bytes(cut)
    assert main([*train, "--directions", "2", "--overwrite", "true"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main([*build, "--out", str(tmp_path / "none"), "--directions", "99"]) == 2
    assert not (tmp_path / "none").exists()
