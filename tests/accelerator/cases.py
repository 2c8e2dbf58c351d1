"""What runs on the simulated accelerator, and on the CPU for comparison.

A case is a kind of run (a function of `runs.py`) and its settings; ``world`` processes share it, spread as ``layout``.
"""

from __future__ import annotations

from typing import Any

from rosu_llm.geometry import METHODS

Case = dict[str, Any]

DROPOUT = {"dropout": 0.3}
#: Settings of ROSUTrainer on one device.
TRAINED: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS},
    "npo": {"forget_loss": "npo"},
    "simnpo": {"forget_loss": "simnpo"},
    "kl": {"retain_loss": "kl"},
    "micro means": {"reduction": "micro_mean"},
    "direct": {"amplify": "direct", "beta": 0.01},
    "through the optimizer": {"amplify": "optimizer"},
    "zero-order": {"jacobian": "none"},
    "exact Jacobian, dropout": {"jacobian": "exact", **DROPOUT},
    "no_a1": {"jacobian": "no_a1"},
    "no_a2": {"jacobian": "no_a2"},
    "dropout, checkpointing": {
        **DROPOUT,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    # with Adam's own ε coordinates of rounding noise make up D⁻¹q
    "adam's metric": {"metric": "adam", "adam_epsilon": 1e-3},
    "adam's metric, rank 2": {"metric": "adam", "adam_epsilon": 1e-3, "protect_rank": 2},
    "rank 3": {"protect_rank": 3, "include_mean": True},
    "memory": {"protect": "memory"},
    "bounded, automatic radius": {"forget_until": "holdout", "forget_margin": 0.2, "rho": "auto"},
    "bounded by token": {"forget_until": "holdout", "forget_level": "token", "forget_margin": 0.2},
    "calibrated": {"calibrate": "holdout"},
    "budget": {"budget": 10.0, "budget_every": 1},
    "lora": {"lora": True},
    "evaluated": {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1},
    "bf16": {"bf16": True, "rho": 1.0},
}
#: Besides: these make their own comparison of numbers.
OTHERS = ("representation", "diagnosis", "memorisation", "tofu")

LAYOUTS = ("ddp", "fsdp2", "zero2", "zero3")
#: Settings of ROSUTrainer on two devices.
SPREAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "calibrated npo": {"calibrate": "holdout", "forget_loss": "npo"},
}
#: What goes wrong on the second of two devices, in which pass of the second step.
FAULTS: dict[str, dict[str, Any]] = {
    "out of memory, forget": {"fault": "oom", "where": "forget"},
    "out of memory, retain": {"fault": "oom", "where": "retain"},
    "out of memory, perturbed": {"fault": "oom", "where": "surrogate"},
    "killed": {"fault": "kill", "where": "surrogate"},
}
SLOW = {"fault": "slow", "where": "surrogate"}


def one_process() -> list[dict[str, Case]]:
    """Everything on the CPU, and everything on the device."""
    every = {name: {"kind": "train", **settings} for name, settings in TRAINED.items()}
    every |= {kind: {"kind": kind} for kind in OTHERS}
    return [{f"{on}/{name}": {**case, "on": on} for name, case in every.items()} for on in ("cpu", "npu")]


def two_processes(layouts: tuple[str, ...]) -> list[dict[str, Case]]:
    """What two devices train, with faults and without, and what one CPU process trains for comparison."""
    plan = [{f"cpu/{name}": {"kind": "train", "on": "cpu", **settings} for name, settings in SPREAD.items()}]
    for layout in layouts:
        both = {"kind": "train", "on": "npu", "world": 2, "layout": layout}
        cases = {**SPREAD, "slow": SLOW}
        plan.append({f"{layout}/{name}": {**both, **settings} for name, settings in cases.items()})
        plan += [{f"{layout}/{name}": {**both, **settings}} for name, settings in FAULTS.items()]
    return plan
