"""Where gradients and weights live: capture, inner products, exact perturb and restore."""

from .base import ParameterSpace, Realized
from .fsdp2 import FSDP2Space
from .local import LocalSpace, ReplicaSpace, trainable
from .select import select_space
from .zero import Zero3Space, Zero12Space, zero_space

__all__ = [
    "FSDP2Space",
    "LocalSpace",
    "ParameterSpace",
    "Realized",
    "ReplicaSpace",
    "Zero3Space",
    "Zero12Space",
    "select_space",
    "trainable",
    "zero_space",
]
