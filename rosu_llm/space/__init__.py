"""Where gradients and weights live: capture, inner products, exact perturb and restore."""

from .base import TensorSpace
from .fsdp2 import FSDP2Space
from .local import LocalSpace, trainable
from .protocol import ParameterSpace, Realized
from .replicas import ReplicaSpace
from .zero import Zero3Space, Zero12Space, zero_space

__all__ = [
    "FSDP2Space",
    "LocalSpace",
    "ParameterSpace",
    "Realized",
    "ReplicaSpace",
    "TensorSpace",
    "Zero3Space",
    "Zero12Space",
    "trainable",
    "zero_space",
]
