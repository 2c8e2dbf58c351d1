"""The methods the demo compares, as settings of one trainer. One learning rate and one length for all."""

from __future__ import annotations

from typing import Any

#: Row name → settings that differ from :data:`COMMON`.
CONTENDERS: dict[str, dict[str, Any]] = {
    "rosu": {"method": "rosu"},
    "rosu_calibrated": {"method": "rosu", "calibrate": "holdout"},
    "minmax": {"method": "minmax"},
    "graddiff": {"method": "graddiff"},
    "npo": {"method": "graddiff", "forget_loss": "npo"},
}

COMMON: dict[str, Any] = {
    "rho": 0.4,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 16,
    "num_train_epochs": 20,
    "max_grad_norm": 1.0,
}

LABELS = {
    "before": "before",
    "retain_only": "retain-only (gold)",
    "rosu": "ROSU",
    "rosu_calibrated": "ROSU calibrated*",
    "minmax": "min-max",
    "graddiff": "grad. difference",
    "npo": "NPO",
}
