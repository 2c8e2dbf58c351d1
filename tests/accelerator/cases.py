"""What runs on the simulated accelerator, and on the CPU for comparison.

A case is a kind of run (in `runs.py`) and its settings; ``world`` processes share it, spread as ``layout``.
"""

from __future__ import annotations

from typing import Any

from rosu_llm.geometry import METHODS

Case = dict[str, Any]

#: Settings of ROSUTrainer on one device.
TRAINED: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS},
    # the KL's gradient is rounding noise at the first step, of which Adam's own ε would make steps
    "llmu": {"method": "llmu", "adam_epsilon": 1e-3},
    "scrub": {"method": "scrub", "max_steps": 6, "adam_epsilon": 1e-3},  # likewise; the fifth step begins to forget
    "ssd": {"method": "ssd", "ssd_alpha": 1.5},  # of random weights α = 10 selects none
    "npo": {"forget_loss": "npo"},
    "simnpo": {"forget_loss": "simnpo"},
    **{loss: {"forget_loss": loss} for loss in ("idk_nll", "idk_dpo", "altpo", "undial", "wga", "satimp", "odds")},
    "kl": {"retain_loss": "kl"},
    "micro means": {"reduction": "micro_mean"},
    "direct": {"amplify": "direct", "beta": 0.01},
    "through the optimizer": {"amplify": "optimizer"},
    "zero-order": {"jacobian": "none"},
    "exact Jacobian": {"jacobian": "exact"},
    "no_a1": {"jacobian": "no_a1"},
    "no_a2": {"jacobian": "no_a2"},
    # with Adam's own ε coordinates of rounding noise make up D⁻¹q
    "metric of Adam": {"metric": "adam", "adam_epsilon": 1e-3},
    "metric of Adam, rank 2": {"metric": "adam", "adam_epsilon": 1e-3, "protect_rank": 2},
    "rank 3": {"protect_rank": 3, "include_mean": True},
    "memory": {"protect": "memory"},
    "refreshed memory": {"protect": "memory", "memory_refresh": 2},
    "bounded, automatic radius": {"forget_until": "holdout", "forget_margin": 0.2, "rho": "auto"},
    "bounded by token": {"forget_until": "holdout", "forget_level": "both", "forget_margin": 0.2},
    "calibrated": {"calibrate": "holdout"},
    # steps 2 and 4 are looked at, as the last one always is
    "budget": {"budget": 10.0, "budget_every": 2, "max_steps": 4, "watched": 3},
    "budget of KL": {"budget": 10.0, "budget_measure": "kl", "budget_every": 2, "max_steps": 4, "watched": 3},
    "captures in host memory": {"capture_device": "cpu"},
    "captures in bf16": {"capture_dtype": "bfloat16"},
    "a budget of tokens": {"micro_batch_tokens": 16},
    "one row without padding": {"padding_free": True},
    "lora": {"lora": True},
    "evaluated": {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1},
}
#: Of RepresentationTrainer.
REPRESENTED: dict[str, dict[str, Any]] = {
    "representation": {},
    "representation, rmu": {"method": "graddiff", "forget_loss": "rmu"},
}
#: Settings whose weights cannot be those of the CPU: the device draws other numbers, or rounds bf16 elsewhere.
RANDOM: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.5, "rho": 1e-3},
    "dropout, checkpointing": {
        "dropout": 0.5,
        "rho": 1e-3,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "bf16": {"bf16": True, "rho": 1.0},
}
#: Kinds of runs that end in numbers instead of weights.
NUMBERS = ("diagnosis", "memorisation", "tofu")

LAYOUTS = ("ddp", "fsdp2", "zero2", "zero3")
#: Settings of ROSUTrainer on two devices.
SPREAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "calibrated npo": {"calibrate": "holdout", "forget_loss": "npo"},
    "bounded by the base": {"forget_until": "base", "forget_margin": 0.2},
}
#: What goes wrong on the second of two devices, in which pass of the second step.
FAULTS: dict[str, dict[str, Any]] = {
    "out of memory, forget": {"fault": "oom", "where": "forget"},
    "out of memory, retain": {"fault": "oom", "where": "retain"},
    "out of memory, perturbed": {"fault": "oom", "where": "surrogate"},
    "killed": {"fault": "kill", "where": "surrogate"},
}
SLOW = {"fault": "slow", "where": "surrogate"}


def plan(layouts: tuple[str, ...]) -> list[dict[str, Case]]:
    """All launches: a list of the cases that the same processes run one after another."""
    every: dict[str, Case] = {name: {"kind": "train", **settings} for name, settings in TRAINED.items()}
    every |= {name: {"kind": "represent", **settings} for name, settings in REPRESENTED.items()}
    every |= {kind: {"kind": kind} for kind in NUMBERS}
    alone = {name: {"kind": "train", **settings} for name, settings in RANDOM.items()}
    alone |= {kind: {"kind": kind} for kind in ("checks", "hard")}
    on_cpu = {**every, **{f"two: {name}": {"kind": "train", **settings} for name, settings in SPREAD.items()}}
    launches = [
        {f"cpu/{name}": {**case, "on": "cpu"} for name, case in on_cpu.items()},
        {f"npu/{name}": {**case, "on": "npu"} for name, case in {**every, **alone}.items()},
    ]
    for layout in layouts:
        both = {"kind": "train", "on": "npu", "world": 2, "layout": layout}
        honest = {**SPREAD, "slow": SLOW}
        launches.append({f"{layout}/{name}": {**both, **settings} for name, settings in honest.items()})
        launches += [{f"{layout}/{name}": {**both, **settings}} for name, settings in FAULTS.items()]
    return launches
