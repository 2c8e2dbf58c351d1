"""One process of distributed training runs for the tests; started by torchrun.

    trainer_worker.py FOLDER PLAN_JSON

For every layout and each of its cases (name → settings) a tiny Llama is trained with ROSUTrainer. Rank 0 writes into
FOLDER/layout/name: the model as
``save_model`` writes it, ``weights.safetensors`` with the trained weights as they are in memory, and ``logs.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed.leaving import leave

OPTIONS = (
    *("lora", "resume", "die", "dtype", "uneven", "evaluate", "state_dict", "fail", "unlike", "base"),
    *("third", "vision"),
)


def claim(layout: str, state_dict: str | None) -> dict[str, Any]:
    """Make accelerate's state the layout's, on a CPU; the TrainingArguments that go with it."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_USE_", "FSDP_"))]:
        del os.environ[name]  # of the layout before
    AcceleratorState._reset_state(reset_partial_state=True)
    if layout == "fsdp2":
        export_fsdp(state_dict)
    if layout.startswith("zero"):
        # On a CPU each rank would think it is alone: claim the state with gloo before the arguments build it.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        return {
            "use_cpu": True,
            "accelerator_config": {"use_configured_state": True},
            "deepspeed": zero_settings(layout),
        }
    if layout == "fsdp2":
        # accelerate takes up FSDP only where it sees accelerators: say so. All the rest is its own path.
        PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
        return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
    return {"use_cpu": True} if layout == "local" else {"use_cpu": True, "ddp_backend": "gloo"}


def zero_settings(layout: str) -> dict[str, Any]:
    """DeepSpeed's configuration for ``zero1``, ``zero2`` or ``zero3``."""
    return {
        "zero_optimization": {"stage": int(layout[-1]), "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
    }


def export_fsdp(state_dict: str | None) -> None:
    """The environment that ``accelerate launch`` makes of the shipped configuration."""
    import yaml

    shipped = Path(__file__).parents[2] / "configs" / "accelerate" / "fsdp2.yaml"
    settings = yaml.safe_load(shipped.read_text())["fsdp_config"]
    if state_dict:
        settings["fsdp_state_dict_type"] = state_dict
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    for key, value in settings.items():
        os.environ[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """What was trained, whole, on every rank."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gathered: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in named.values()):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(named.values()))
    with gathered:
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
        return {name: p.detach().clone().contiguous() for name, p in whole.items()}


def spoil(options: dict[str, Any]) -> contextlib.ExitStack:
    """Until it is closed, one process has an error inside the perturbed pass, or a device that rounds differently."""
    from rosu_llm.space.blocks import Sums
    from rosu_llm.step.engine import StepEngine

    computed, passed = Sums.total, StepEngine._pass

    def fail(engine: Any, name: str, closures: Any) -> float:
        if name == "surrogate":
            raise RuntimeError("out of memory")
        return passed(engine, name, closures)

    stack = contextlib.ExitStack()
    if options["unlike"]:
        stack.enter_context(mock.patch.object(Sums, "total", lambda sums: computed(sums) * (1.0 + 1e-3)))
    if options["fail"]:
        stack.enter_context(mock.patch.object(StepEngine, "_pass", fail))
    return stack


def run(layout: str, folder: Path, settings: dict[str, Any]) -> None:
    from transformers import TrainerCallback

    from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer, WithAlternates
    from rosu_llm.data.sweep import SweepDataset
    from tests.models import samples, tiny_llama

    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = {key: settings.pop(key, None) for key in OPTIONS}
    if options["vision"]:
        finish(image_trainer(layout, folder, settings), layout, folder, world)
        return
    config = ROSUConfig(
        **{
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4 // world,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "max_grad_norm": 0.5,
            "report_to": [],
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            **claim(layout, options["state_dict"]),
            **settings,
        }
    )
    model = tiny_llama(dtype=getattr(torch, options["dtype"] or "float32"))
    peft_config = None
    if options["lora"]:
        from peft import LoraConfig

        torch.manual_seed(1)
        peft_config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    base = folder / f"base{os.environ.get('RANK', '0')}" if options["base"] else None
    if base:  # by hand: of several processes save_pretrained writes on the first alone
        before = tiny_llama(seed=9, initializer_range=0.2)
        before.config.save_pretrained(base)
        save_file(dict(before.named_parameters()), base / "model.safetensors", metadata={"format": "pt"})
    count = 37 if options["uneven"] else 32
    forget: Any = samples(count, seed=1)
    retain = samples(40, seed=2)
    if options["third"]:  # two for each, taken in turn by epoch
        others = samples(2 * count, seed=7)
        forget = WithAlternates(forget, list(zip(others[::2], others[1::2], strict=True)))
    pairs: Any = ForgetRetainDataset(forget, retain, mismatch=config.method == "llmu")
    if config.method == "ssd":
        pairs = SweepDataset(forget, retain[:36] if options["uneven"] else retain[:32], multiple=2 * world)
    trainer = ROSUTrainer(
        model,
        config,
        train_dataset=pairs,
        eval_dataset=ForgetRetainDataset(samples(6, seed=4), samples(6, seed=5)) if options["evaluate"] else None,
        holdout_dataset=samples(5, seed=3),
        budget_dataset=samples(4, seed=6),
        base_model=str(base) if base else None,
        peft_config=peft_config,
    )
    if trainer.accelerator.num_processes != world:
        raise SystemExit(f"accelerate sees {trainer.accelerator.num_processes} processes instead of {world}")
    if options["die"] and trainer.accelerator.process_index == 1:

        class Die(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                os._exit(3)

        trainer.add_callback(Die())
    with spoil(options) if trainer.accelerator.process_index == 1 else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=options["resume"])
    finish(trainer, layout, folder, world)


def image_trainer(layout: str, folder: Path, settings: dict[str, Any]) -> Any:
    """A small CNN after its training."""
    from tests.vision.small import SmallCNN, trainer

    world = int(os.environ.get("WORLD_SIZE", "1"))
    own = {"max_steps": 4, "gradient_accumulation_steps": 4 // world, **claim(layout, None), **settings}
    made = trainer(SmallCNN(), folder / "run", forget=2, retain=4, **own)
    made.train()
    return made


def finish(trainer: Any, layout: str, folder: Path, world: int) -> None:
    """Write what a run has come to; under DDP all replicas must agree."""
    trainer.save_model(str(folder / "model"))
    weights = trained_weights(trainer.model)
    if layout == "ddp":
        mine = torch.cat([w.reshape(-1) for w in weights.values()])
        everyone = [torch.zeros_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        if not all(torch.equal(w, mine) for w in everyone):
            raise SystemExit("replicas have drifted apart")
    if trainer.accelerator.process_index == 0:
        save_file(weights, folder / "weights.safetensors")
        kinds = sorted({type(p.data).__name__ for p in trainer.model.parameters()})
        record = {"layout": trainer.layout, "world": world, "kinds": kinds}
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        (folder / "logs.json").write_text(json.dumps({**record, "logs": logs, "evaluations": evaluations}))


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    for layout, cases in plan.items():
        for name, settings in cases.items():
            place = folder / layout / name
            place.mkdir(parents=True, exist_ok=True)
            run(layout, place, settings)
    leave()


if __name__ == "__main__":
    main()
