"""Where gradients and weights live: capture, inner products, exact perturb and restore."""

from .local import LocalSpace, trainable
from .protocol import ParameterSpace, Realized
from .tensors import TensorSpace

__all__ = ["LocalSpace", "ParameterSpace", "Realized", "TensorSpace", "trainable"]
