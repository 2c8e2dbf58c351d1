"""Attacks with published settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import unknown

#: Name → settings of :class:`~rosu_llm.analysis.relearn.attack.RelearnAttack`; flags take precedence.
RELEARN_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # OpenUnlearning's meta-evaluation of metrics (arXiv 2506.12618): one epoch, lr 2e-5, batch 32, no warm-up.
    "openunlearning": {"epochs": 1.0, "learning_rate": 2e-5, "batch_size": 32, "warmup_steps": 0},
    # Unlearn-Smooth (arXiv 2410.07163), WMDP/configs/unlearn/wmdp/Relearn+Forget.json: lr 1e-5, batch 1 × 4
    # accumulated, 100 steps, all weights.
    "smooth_wmdp": {"steps": 100, "learning_rate": 1e-5, "batch_size": 4, "warmup_steps": 0},
    # The same, MUSE/baselines/run_muse_relearn.sh: lr 1e-5, batch 4; 50, 75 or 100 steps on Books, 100 to 150 on News.
    "smooth_muse": {"steps": 100, "learning_rate": 1e-5, "batch_size": 4, "warmup_steps": 0},
    # A strong adapter: LoRA r = 128, α = 16, lr 2e-4; epoch and batch as in the first.
    "lora": {
        "epochs": 1.0,
        "learning_rate": 2e-4,
        "batch_size": 32,
        "warmup_steps": 0,
        "lora_r": 128,
        "lora_alpha": 16,
    },
}


def relearn_preset(name: str) -> dict[str, Any]:
    """The settings of the preset of this name."""
    if name not in RELEARN_PRESETS:
        raise unknown("preset of an attack", name, RELEARN_PRESETS)
    return dict(RELEARN_PRESETS[name])
