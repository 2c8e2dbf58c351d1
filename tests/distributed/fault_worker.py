"""Launches of two processes of which one fails; started without a launcher that would end the other.

fault_worker.py FOLDER LAUNCHES_JSON

A case is ``{"layout": …, "world": 2, …settings of trainer_worker.py}``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer  # noqa: F401  once, before the processes part
from tests.distributed import trainer_worker
from tests.distributed.forks import run_launches

if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed  # noqa: F401


def run(case: dict[str, Any], folder: Path) -> None:
    settings = {key: value for key, value in case.items() if key not in ("layout", "world")}
    trainer_worker.run(case["layout"], folder, settings)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_launches(json.loads(sys.argv[2]), Path(sys.argv[1]), run)
