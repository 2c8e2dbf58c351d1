"""What differs between the supported versions of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def dtype_argument(dtype: torch.dtype) -> dict[str, Any]:
    """The argument of ``from_pretrained`` that sets the type, by the name the installed transformers has for it."""
    import transformers
    from packaging.version import Version

    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    return {name: dtype}
