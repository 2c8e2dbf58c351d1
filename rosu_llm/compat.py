"""Which versions of the libraries are installed, and what differs between those supported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def transformers_is(least: str) -> bool:
    """Whether the installed transformers is of version ``least`` or newer."""
    from packaging.version import Version

    return Version(version("transformers")) >= Version(least)


def dtype_argument(dtype: torch.dtype) -> dict[str, Any]:
    """The argument of ``from_pretrained`` that sets the type, by the name the installed transformers has for it."""
    return {"dtype" if transformers_is("4.56") else "torch_dtype": dtype}


def load_causal_model(name: str, **options: Any) -> Any:
    """``AutoModelForCausalLM.from_pretrained``, but tensors that the checkpoint lacks are an error.

    transformers fills them with random numbers and goes on.
    """
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(name, **options, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"its files lack {len(missing)} of the model's tensors, first {missing[0]}: they are of another model or "
            "not whole"
        )
    return model


@contextmanager
def loading_whole() -> Iterator[None]:
    """Inside, ``from_pretrained`` loads all of a model on every process, whatever layout the run has.

    Where ZeRO-3 is configured it would split the model, and where FSDP is, with ``fsdp_cpu_ram_efficient_loading``, it
    reads the weights on the first process alone: right for a model that is about to be sharded, and for no other.
    """
    from transformers.integrations import deepspeed

    config, variable = deepspeed._hf_deepspeed_config_weak_ref, "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(variable)
    deepspeed._hf_deepspeed_config_weak_ref, os.environ[variable] = None, "false"
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def accelerator_kind() -> str | None:
    """``cuda``, ``xpu``, ``npu``, …: devices that several processes can share out among them; None without any."""
    import torch

    if hasattr(torch, "accelerator"):  # torch ≥ 2.6
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = None if found is None else found.type
    else:
        kinds = ("cuda", "xpu", "npu", "mlu", "musa")
        kind = next((name for name in kinds if hasattr(torch, name) and getattr(torch, name).is_available()), None)
    return None if kind in ("cpu", "mps") else kind


def device_name(kind: str, index: int) -> str:
    """What a device calls itself, or its kind."""
    import torch

    name = getattr(getattr(torch, kind), "get_device_name", None)
    return kind if name is None else str(name(index))


def empty_device_cache() -> None:
    """Give memory that torch holds back to the device, of whatever kind."""
    import torch

    kind = accelerator_kind()
    if kind is not None:
        getattr(torch, kind).empty_cache()


def installed_versions(*packages: str) -> dict[str, str]:
    """Package → version, without those that are not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
