"""``--smoke``: run a recipe's every setting on a toy model and toy people, in seconds, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import ROSUConfig
from .launch import train
from .recipe import RunArguments, build
from .trainer import ROSUTrainer

#: What a smoke run replaces; everything else of the recipe stays.
REPLACED: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 0,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "push_to_hub": False,
}


def run_smoke(values: dict[str, Any]) -> ROSUTrainer:
    """Train two steps with the recipe's method on the demo's world.

    The toy model goes to a folder ``smoke`` inside ``output_dir``, where it can overwrite nothing real.
    """
    arguments: RunArguments
    config: ROSUConfig
    arguments, config = build({**values, **REPLACED})
    config.output_dir = str(Path(config.output_dir) / "smoke")
    from ..demo.run import SMOKE
    from ..demo.world import build_world, small_llama

    world = build_world(config.seed, people=SMOKE.people)
    model = small_llama(len(world.tokenizer), config.seed, hidden=SMOKE.hidden, layers=SMOKE.layers)
    data = world.data
    return train(model, world.tokenizer, data["forget"], data["retain"], data["calibration"], arguments, config)
