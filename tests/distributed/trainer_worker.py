"""One process of a distributed training run for the tests; started by torchrun.

    trainer_worker.py LAYOUT FOLDER SETTINGS_JSON

Trains a tiny Llama with ROSUTrainer and lets rank 0 write ``weights.safetensors`` and ``logs.json`` into FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    layout, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    import torch

    torch.set_num_threads(1)
    extra: dict[str, Any] = {"use_cpu": True}
    if layout.startswith("zero"):
        # On a CPU each rank would think it is alone: claim the state with gloo before the arguments build it.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import PartialState

        PartialState(backend="gloo")
        extra = {
            "accelerator_config": {"use_configured_state": True},
            "deepspeed": {
                "zero_optimization": {"stage": int(layout[-1]), "stage3_gather_16bit_weights_on_model_save": True},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_force_ds_cpu_optimizer": False,
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": "auto"},
            },
        }
    elif world > 1:
        extra["ddp_backend"] = "gloo"

    from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer
    from tests.models import samples, tiny_llama

    options = {key: settings.pop(key, None) for key in ("lora", "resume", "die", "dtype", "uneven")}
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
            **extra,
            **settings,
        }
    )
    model = tiny_llama(dtype=getattr(torch, options["dtype"] or "float32"))
    peft_config = None
    if options["lora"]:
        from peft import LoraConfig

        torch.manual_seed(1)
        peft_config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    count = 37 if options["uneven"] else 32
    trainer = ROSUTrainer(
        model,
        config,
        train_dataset=ForgetRetainDataset(samples(count, seed=1), samples(40, seed=2)),
        holdout_dataset=samples(5, seed=3),
        peft_config=peft_config,
    )
    if trainer.accelerator.num_processes != world:
        raise SystemExit(f"accelerate sees {trainer.accelerator.num_processes} processes instead of {world}")
    if options["die"] and trainer.accelerator.process_index == 1:
        from transformers import TrainerCallback

        class Die(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                os._exit(3)

        trainer.add_callback(Die())
    trainer.train(resume_from_checkpoint=options["resume"])
    trainer.save_model(str(folder / "model"))
    if trainer.accelerator.process_index == 0:
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        (folder / "logs.json").write_text(json.dumps({"layout": trainer.layout, "world": world, "logs": entries}))
    if world > 1 and not layout.startswith("zero"):
        from tests.models import flat

        mine = flat(trainer.model.parameters())
        everyone = [torch.zeros_like(mine) for _ in range(world)]
        torch.distributed.all_gather(everyone, mine)
        if not all(torch.equal(w, mine) for w in everyone):
            raise SystemExit("replicas have drifted apart")


if __name__ == "__main__":
    main()
