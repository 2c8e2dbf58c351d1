"""What the distributed tests train, and in which layouts."""

from __future__ import annotations

from tests.distributed.processes import Cases, Plan

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ADAPTER = {"lora": True, "max_steps": 3}
CALIBRATED = {"calibrate": 5.0, "forget_loss": "npo", "amplify": "optimizer"}
BOUNDED = {"forget_until": "holdout", "forget_margin": 0.2, "forget_refresh": 2, "rho": "auto", "protect": "memory"}
BOUNDED |= {"forget_level": "both"}
#: The model before it learned the data is loaded by its name while the layout is set up.
BASED = {"forget_until": "base", "base": True, "max_steps": 2}
#: Nothing stays inside: back to the start after the second step, and again after the fourth.
BUDGET = {"budget": 1e-9, "budget_every": 2, "budget_tries": 5, "learning_rate": 0.05}
#: Soon beyond the targets, so that the last weights are not the closest.
BEST = {"method": "graddiff", "forget_until": 4.3, "forget_margin": 0.01, "keep_best": "depth", "budget_every": 1}
#: Some answers start beyond the target and join the retain loss, others are short of it.
RETURNED = {"forget_until": 4.3, "forget_margin": 0.2, "forget_beyond": "return"}
REVERSED = {**RETURNED, "forget_beyond": "reverse", "max_steps": 4}
#: Of forty retain samples three batches of a part are counted by two processes, one of them twice.
STORED = {"method": "forget_only", "directions": 3}
#: Two passes over the retain data, a checkpoint between them, and a budget that is measured but never exceeded.
REFRESHED = {"protect": "both", "memory_refresh": 3, "budget": 10.0, "budget_measure": "kl", "budget_every": 1}
#: Hidden states of the initial model in place of a copy, which sharding refuses.
DIVERGENCE = {"retain_loss": "kl", "max_steps": 4}
#: A third answer beside every forget sample, another one in the second epoch (step 5 on).
THIRD = {"third": True, "forget_loss": "altpo", "max_steps": 6, "forget_until": 5.0}
#: Hidden states of the initial model for both losses.
DISTILLED = {"forget_loss": "undial", "retain_loss": "kl", "max_steps": 4}
#: Three gradients of one step; epochs that alternate; a sweep whose samples do not divide by windows and processes.
LLMU = {"method": "llmu", "max_steps": 4}
SCRUB = {"method": "scrub", "max_steps": 6, "scrub_max_epochs": 1}
SSD = {"method": "ssd", "ssd_alpha": 2.0, "max_steps": -1, "uneven": True}
#: A small CNN: by running statistics a loss is a sum over images, however they are spread.
VISION = {"vision": True, "batch_norm": "eval"}
SAVED = {"save_strategy": "steps", "save_steps": 2}
SAVING = {**SAVED, "forget_loss": "npo"}

EVERYWHERE: Cases = {
    "plain": {},
    "saving": SAVING,
    "checkpointing": CHECKPOINTING,
    "lora": {**ADAPTER, **CHECKPOINTING},
    "calibrated": CALIBRATED,
    "bounded": BOUNDED,
    "budget": BUDGET,
    "best": {**BEST, "learning_rate": 0.03},
    "stored": STORED,
    "refreshed": {**REFRESHED, **SAVED},
    "uneven": {"uneven": True, "max_steps": 7, "calibrate": "holdout"},
}
BESIDES: dict[str, Cases] = {
    "ddp": {
        "returned": RETURNED,
        "reversed": REVERSED,
        "twenty": {"max_steps": 20, "calibrate": "holdout"},
        "unlike": {"unlike": True},
        "vision": VISION,
        "divergence": {**DIVERGENCE, **SAVED},
        "third": THIRD,
        "distilled": DISTILLED,
    },
    "zero3": {
        "returned": RETURNED,
        "reversed": REVERSED,
        "based": BASED,
        "divergence": {**DIVERGENCE, **SAVED},
        "third": THIRD,
        "distilled": DISTILLED,
    },
    "fsdp2": {
        "based": BASED,
        "divergence": {**DIVERGENCE, **SAVED},
        "third": THIRD,
        "distilled": DISTILLED,
        "evaluated": {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1},
        "bf16": {"bf16": True, "max_steps": 2, "rho": 1.0},
        "full": {**SAVING, "state_dict": "FULL_STATE_DICT"},
    },
}

#: Where the methods run that are no combination of one forget and one retain gradient.
OTHER_LAYOUTS = ("ddp", "fsdp2", "zero2", "zero3")
OTHERS: Cases = {"llmu": LLMU, "scrub": SCRUB, "ssd": SSD, "ssd_windows": {**SSD, "fisher": "window", "uneven": False}}

#: With Adam's own ε = 1e-8, coordinates whose second moment is rounding noise make up D⁻¹q, in every layout others.
METRIC = {"metric": "adam", "adam_epsilon": 1e-3}
PER_SAMPLE: Cases = {
    "rank": {"protect_rank": 3, "include_mean": True},
    "gu": {"method": "gu"},
    "metric": {**METRIC, "max_steps": 5},
    "both": {**METRIC, "protect_rank": 2, "amplify": "optimizer"},
}
#: Where the cases of single samples run.
PER_SAMPLE_LAYOUTS = ("ddp", "fsdp2", "zero3")
#: On one device and under DDP only: sharded layouts refuse them.
HESSIANS: Cases = {mode: {"jacobian": mode} for mode in ("relaxed", "exact", "no_a1", "no_a2")}


def alone() -> Cases:
    """What one process trains for comparison."""
    names = ("plain", "calibrated", "bounded", "best", "stored", "refreshed")
    found = {name: EVERYWHERE[name] for name in names} | {"lora": ADAPTER, "based": BASED, "divergence": DIVERGENCE}
    found |= {"third": THIRD, "distilled": DISTILLED, "vision": VISION}
    found |= {"returned": RETURNED, "reversed": REVERSED}
    return {**found, **PER_SAMPLE, **HESSIANS, **OTHERS}


def spread(deepspeed: bool) -> Plan:
    """What two processes train; ZeRO-3 last, for it changes how models are built."""
    plan = {layout: {**EVERYWHERE, **BESIDES.get(layout, {})} for layout in LAYOUTS}
    for layout in PER_SAMPLE_LAYOUTS:
        plan[layout].update(PER_SAMPLE)
    for layout in OTHER_LAYOUTS:
        plan[layout].update(
            {name: {**settings, **SAVED} if name == "ssd" else settings for name, settings in OTHERS.items()}
        )
    plan["ddp"].update(HESSIANS)
    return {layout: cases for layout, cases in plan.items() if deepspeed or not layout.startswith("zero")}
