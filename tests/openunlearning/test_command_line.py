"""What users type, in separate processes: plain scripts, several processes, multirun, the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rosu_llm import ROSUConfig, ROSUTrainer
from tests.openunlearning.standin_run import CHECKOUT, SCRIPT, SOURCE, composed, run, weights

pytestmark = pytest.mark.xdist_group("processes")


def test_plain_command_gives_the_weights_of_the_stand_alone_trainer(tmp_path: Path, checkout: SimpleNamespace) -> None:
    """``trainer=ROSU`` in an unmodified checkout against ROSUTrainer on the same data, to the bit."""
    from model import get_model  # type: ignore[import-not-found]
    from transformers import set_seed

    done = run(tmp_path, "task_name=a", "trainer=ROSU", "trainer.method_args.amplify=matched")
    assert done.returncode == 0, done.stderr[-2000:]
    config = composed("trainer=ROSU")
    set_seed(0)
    model = get_model(config.model)
    start = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    arguments = {k: v for k, v in config.trainer.args.items() if k not in ("output_dir", "warmup_epochs")}
    settings = {**arguments, "output_dir": str(tmp_path / "b"), "amplify": "matched", "rho": 0.4}
    data = checkout.data.get_data(config.data, mode="unlearn")
    ROSUTrainer(model, ROSUConfig(**settings), train_dataset=data["train"], data_collator=checkout.data.pad).train()
    model.save_pretrained(tmp_path / "b")
    ours, inside = weights(tmp_path / "b"), weights(tmp_path / "saves" / "unlearn" / "a")
    assert torch.equal(ours, inside)
    assert float((ours.sort()[0] - start.sort()[0]).norm()) > 1e-3  # something was trained


def test_evaluators_run_on_the_main_of_two_processes_and_leave_the_training_alone(tmp_path: Path) -> None:
    evaluate = ("eval=standin", *_every_step())
    done = run(tmp_path, "task_name=a", "trainer=ROSU", *evaluate, world=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "layout ddp, 2 processes" in done.stdout + done.stderr
    files = sorted(str(f.relative_to(tmp_path / "saves" / "unlearn" / "a")) for f in tmp_path.rglob("STANDIN_*.json"))
    assert files == [f"checkpoint-{step}/evals/STANDIN_0.json" for step in (1, 2, 3)]
    values = [json.loads((tmp_path / "saves" / "unlearn" / "a" / f).read_text())["weights"] for f in files]
    assert len(set(values)) == 3
    done = run(tmp_path, "task_name=b", "trainer=ROSU", world=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(weights(tmp_path / "saves" / "unlearn" / "a"), weights(tmp_path / "saves" / "unlearn" / "b"))


def test_evaluators_run_on_the_main_process_under_zero2(tmp_path: Path) -> None:
    """Stage 2 splits gradients and optimizer state only, so the main process holds whole weights."""
    pytest.importorskip("deepspeed")
    (tmp_path / "state.json").write_text('{"use_configured_state": true}')
    batch = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    zero = {"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False, **batch}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    spread = ("trainer.args.use_cpu=false", "+trainer.args.deepspeed=zero.json")
    done = run(
        *(tmp_path, "task_name=a", "trainer=ROSU", "eval=standin", *_every_step(), *spread),
        "+trainer.args.accelerator_config=state.json",
        world=2,
        command=(str(Path(__file__).parent / "gloo_worker.py"), str(SCRIPT)),
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
        ACCELERATE_USE_CPU="false",
        ACCELERATE_USE_DEEPSPEED="true",
        TORCH_EXTENSIONS_DIR=str(Path(sys.prefix) / "torch_extensions"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "layout zero, 2 processes" in done.stdout + done.stderr
    files = sorted(tmp_path.rglob("STANDIN_*.json"))
    assert [f.name for f in files] == ["STANDIN_0.json"] * 3
    assert len({f.read_text() for f in files}) == 3


def test_a_failing_evaluator_ends_all_processes_with_its_reason(tmp_path: Path) -> None:
    done = run(
        tmp_path, "task_name=a", "trainer=ROSU", "eval=standin", "eval.standin.fail=true", *_every_step(), world=2
    )
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "ValueError: a metric is broken" in text
    assert "The evaluation failed on the main process: ValueError: a metric is broken" in text


def _every_step() -> tuple[str, ...]:
    return "trainer.args.eval_strategy=steps", "+trainer.args.eval_steps=1"


def test_multirun_over_trainers(tmp_path: Path) -> None:
    """Hydra takes callbacks from the configuration without the sweep, so none of ours is called here."""
    out = "trainer.args.output_dir=" + str(tmp_path) + "/${trainer.handler}"
    done = run(tmp_path, "-m", "task_name=a", out, "trainer=Plain,ROSU,UAM", "trainer.args.max_steps=1")
    assert done.returncode == 0, done.stderr[-2000:]
    plain, rosu, uam = (weights(tmp_path / name) for name in ("Plain", "ROSU", "UAM"))
    assert not torch.equal(rosu, uam)
    assert not torch.equal(rosu, plain)


def test_a_taken_name_stops_the_job_before_the_model_is_built(tmp_path: Path) -> None:
    """Hydra only warns about exceptions in callbacks; ours must not be lost that way."""
    script = tmp_path / "fork.py"
    script.write_text(
        f"import sys, runpy\nsys.path.insert(0, {str(SOURCE)!r})\nimport trainer\n"
        f"trainer._register_trainer(type('ROSU', (trainer.Plain,), {{}}))\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = run(tmp_path, "task_name=a", "trainer=ROSU", command=(str(script),))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rosu-llm: OpenUnlearning already has a trainer called 'ROSU' (__main__.ROSU)")
    assert not list(tmp_path.rglob("model.safetensors"))


def test_launcher_inside_a_checkout(tmp_path: Path) -> None:
    """Works for a handler whose configuration brings no callback, too."""
    arguments = ("task_name=a", "trainer=Plain", "trainer.handler=UAM", f"trainer.args.output_dir={tmp_path / 'a'}")
    done = run(CHECKOUT, *arguments, f"hydra.run.dir={tmp_path}", command=("-m", "rosu_llm.openunlearning", "train"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trainer=UAM: method=uam" in done.stdout + done.stderr
    assert (tmp_path / "a" / "model.safetensors").is_file()


def test_launcher_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rosu_llm.openunlearning.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", "trainer=ROSU"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is no OpenUnlearning checkout" in error
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert main(["tofu"]) == 2
    assert "is no OpenUnlearning checkout" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert main([]) == 2
