"""Running the stand-in checkout as its users would, and composing its configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.preloaded import beside, interpreter

CHECKOUT = Path(__file__).parent / "standin"
SOURCE, CONFIGS = CHECKOUT / "src", CHECKOUT / "configs"
SCRIPT = SOURCE / "train.py"


def run(
    folder: Path, *overrides: str, world: int = 1, command: tuple[str, ...] = (str(SCRIPT),), **variables: str
) -> Any:
    """``python src/train.py --config-name=unlearn.yaml …`` in ``folder``; under torchrun for several processes."""
    start = [interpreter()]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        overrides = ("+trainer.args.ddp_backend=gloo", *overrides)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    environment.update(variables)
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [*start, *command, "--config-name=unlearn.yaml", *overrides],
        cwd=folder,
        env=beside(environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def weights(folder: Path) -> torch.Tensor:
    """All saved weights as one vector."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])


def composed(*overrides: str, configs: Path = CONFIGS, name: str = "unlearn.yaml", **options: Any) -> Any:
    """The configuration of a command line."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(config_dir=str(configs), version_base=None):
        return compose(name, overrides=["task_name=t", *overrides], **options)


def build(checkout: Any, tmp_path: Path, *overrides: str) -> Any:
    """The trainer that ``src/train.py`` would build, in this process."""
    from model import get_model  # type: ignore[import-not-found]
    from transformers import set_seed

    from rosu_llm.openunlearning.registration import register

    config = composed(f"trainer.args.output_dir={tmp_path}", *overrides)
    register(config.trainer.handler)
    set_seed(config.trainer.args.seed)
    model = get_model(config.model, config.dtype)
    data = checkout.data.get_data(config.data, mode=config.mode, tokenizer=None, template_args={})
    return checkout.trainer.load_trainer(
        config.trainer, model, train_dataset=data["train"], data_collator=checkout.data.pad, template_args={}
    )
