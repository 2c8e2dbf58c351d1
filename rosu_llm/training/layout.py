"""How the model is spread over processes, asked of accelerate's state before the model is wrapped.

What cannot work is refused when the trainer is made, with what to use instead.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedLayoutError
from ..space.fsdp2 import is_dtensor
from ..space.zero import refuse_offload

logger = logging.getLogger(__name__)

_MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: Layouts in which every process holds whole parameters.
_WHOLE = {
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_XPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_HPU",
    "MULTI_NEURON",
}


def layout_of(accelerator: Any) -> str:
    """``local``, ``ddp``, ``fsdp2`` or ``zero``; raises for anything else."""
    kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if kind == "DEEPSPEED":
        return "zero"
    if kind == "FSDP":
        if not getattr(accelerator, "is_fsdp2", False):
            raise UnsupportedLayoutError(
                "FSDP version 1 flattens parameters and is not supported: set fsdp_version: 2 in the accelerate "
                "configuration (configs/accelerate/fsdp2.yaml), or use ZeRO-3."
            )
        return "fsdp2"
    if kind in _WHOLE:
        return "local" if accelerator.num_processes == 1 else "ddp"
    raise UnsupportedLayoutError(f"{kind} is not supported: use DDP, FSDP2 or DeepSpeed ZeRO-1/2/3.")


def check_layout(accelerator: Any, model: nn.Module, n_gpu: int) -> str:
    """The layout, after refusing what cannot work."""
    if n_gpu > 1:
        raise UnsupportedLayoutError(
            f"{n_gpu} GPUs in one process would be driven by torch.nn.DataParallel, which is not supported. Launch one "
            "process per GPU (accelerate launch, torchrun) or set CUDA_VISIBLE_DEVICES=0."
        )
    devices = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UnsupportedLayoutError(
            f"The model is spread over {sorted(devices)} by device_map: load it without device_map and use FSDP2 or "
            "ZeRO-3 (configs/accelerate) for models that do not fit on one device."
        )
    layout = layout_of(accelerator)
    if layout in ("local", "ddp") and any(is_dtensor(p) for p in model.parameters()):
        raise UnsupportedLayoutError(
            "The model holds DTensors although neither FSDP2 nor ZeRO is configured (tensor parallelism): load it "
            "without tp_plan."
        )
    if layout == "zero":
        plugin = accelerator.state.deepspeed_plugin
        refuse_offload(plugin.deepspeed_config)
        zero = plugin.deepspeed_config.get("zero_optimization", {})
        if plugin.zero_stage == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
            logger.warning(
                "ZeRO-3 will not gather the weights when the model is saved, only write partitioned checkpoints: set "
                "zero3_save_16bit_model: true (as in configs/accelerate/zero3.yaml) to get a model folder."
            )
        if plugin.zero_stage == 0:
            raise UnsupportedLayoutError(
                "DeepSpeed without ZeRO (stage 0) is not supported: use stage 1, or plain DDP."
            )
    return layout


def compute_dtype(accelerator: Any) -> torch.dtype | None:
    """The type autocast rounds weights to in a forward pass; None without autocast."""
    return _MIXED_PRECISION.get(accelerator.mixed_precision)
