"""The attack itself: fine-tune a model in memory on a few rows, and look at it after 0, 1, 2, 4, 8 … steps.

It is ``method: finetune`` of ``rosu train``: the same loss per answer token, the same windows, one process or several.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from ...compat import accelerator_kind
from ...errors import ConfigError
from ...evaluation.processes import started_processes
from ...losses.answers import unwrapped
from ...recipes.prepare import Loaded, assemble
from ...recipes.settings import WITHOUT_OUTPUT, build

FORGET, RETAINED = "forget", "retain"

#: Called with the step and the model as it is then.
Observe = Callable[[int, Any], None]


@dataclass(frozen=True, kw_only=True)
class RelearnAttack:
    """How the model is fine-tuned.

    Attributes:
        on: ``forget`` (a share of the forget set), ``retain`` (data that was kept) or another source: benign
            relearning shows no row of the forget set.
        epochs: passes over the rows, unless ``steps`` says how many updates.
        batch_size: rows per update, over all processes; ``micro_batch`` of them at once on each.
        lora_r: rank of an adapter; None trains all weights.
    """

    on: str = FORGET
    epochs: float = 1.0
    steps: int | None = None
    learning_rate: float = 2e-5
    batch_size: int = 32
    micro_batch: int = 8
    warmup_steps: int = 0
    schedule: str = "linear"
    lora_r: int | None = None
    lora_alpha: int = 16

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch", "steps", "lora_r", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
        if not self.epochs > 0:
            raise ConfigError(f"--epochs {self.epochs:g} takes no step: give more than 0, or --steps N.")
        if not 0 <= self.learning_rate < float("inf"):
            raise ConfigError(f"--learning-rate {self.learning_rate} is no step size: give 0 or more, e.g. 2e-5.")

    def total(self, rows: int) -> int:
        """How many updates an attack with so many rows takes."""
        return self.steps or max(1, ceil(self.epochs * ceil(rows / self.batch_size)))

    def per_process(self, processes: int) -> int:
        """Rows that each of so many processes takes at once; raises where they do not add up to ``batch_size``."""
        if self.batch_size % processes:
            raise ConfigError(
                f"--batch-size {self.batch_size} cannot be divided among {processes} processes: give a multiple of "
                f"{processes}, e.g. {ceil(self.batch_size / processes) * processes}, or another --num-processes."
            )
        own = self.batch_size // processes
        each = min(self.micro_batch, own)
        if own % each:
            fits = max(size for size in range(1, each) if own % size == 0)
            raise ConfigError(
                f"--batch-size {self.batch_size} is {own} rows on each of {processes} process(es), which --micro-batch "
                f"{self.micro_batch} does not divide: give --micro-batch {fits}."
            )
        return each


def check_shares(shares: tuple[float, ...]) -> None:
    """Raise unless every share of the forget set is above 0 and at most 1."""
    if not shares:
        raise ConfigError("--share without a number leaves nothing to attack with: give e.g. --share 0.05 0.2 1.")
    for share in shares:
        if not 0 < share <= 1:
            raise ConfigError(f"--share {share:g} is no share of the forget set: give more than 0 and at most 1.")


def draw(rows: int, share: float, seed: int) -> list[int]:
    """Which rows a share consists of: larger shares of one seed hold the smaller ones. Raises for an empty one."""
    count = round(share * rows)
    if count < 1:
        raise ConfigError(f"--share {share:g} of {rows} rows is empty: give at least {1 / rows:.3g}.")
    order = list(range(rows))
    random.Random(seed).shuffle(order)  # noqa: S311 (no secret)
    return sorted(order[:count])


def relearn(
    model: Any,
    tokenizer: Any,
    samples: list[Any],
    attack: RelearnAttack,
    seed: int,
    at: set[int],
    observe: Observe,
    out: Path,
) -> Any:
    """Fine-tune ``model`` in place; ``observe`` sees it at the steps ``at``. Returns the trained model.

    What was observed before does not change what follows: the generators of random numbers are as without.
    """
    processes = started_processes()
    each = attack.per_process(processes)
    if 0 in at:
        observe(0, model)
    total = attack.total(len(samples))
    if not any(step > 0 for step in at):
        return model
    recipe = build(
        {
            **WITHOUT_OUTPUT,
            "output_dir": str(out),
            "method": "finetune",
            "learning_rate": attack.learning_rate,
            "lr_scheduler_type": attack.schedule,
            "warmup_steps": attack.warmup_steps,
            "weight_decay": 0.0,
            "max_steps": total,
            "per_device_train_batch_size": each,
            "gradient_accumulation_steps": attack.batch_size // (each * processes),
            "lora_r": attack.lora_r,
            "lora_alpha": attack.lora_alpha,
            "seed": seed,
            "use_cpu": accelerator_kind() is None,
            "bf16": False,
        }
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.requires_grad_(True)  # a merged adapter leaves its base frozen; a new one freezes it again
    trainer: Any = assemble(recipe, Loaded(model, tokenizer, None, samples)).trainer

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in at:
                inner = trainer.accelerator.unwrap_model(trainer.model)
                with torch.random.fork_rng():
                    observe(state.global_step, inner)

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Look())
    trainer.train()
    return trainer.model if attack.lora_r else unwrapped(trainer.model)
