"""The names under which gradients are captured: a slot is a gradient's name in vectors and Gram matrices."""

from __future__ import annotations

#: ∇L_f(w) and ∇L_r(w).
FORGET, RETAIN = "f", "r"
#: ∇ of the loss of wrong answers to the forget questions, which is lowered.
MISMATCH = "x"
#: The gradient at w+δ: ∇L_r(w+δ), or ∇L_f(w+δ) for rules whose surrogate is the forget loss.
SURROGATE = "s"
#: D⁻¹q, where the projection is done in the optimizer's metric.
PRECONDITIONED = "p"
#: What is remembered of the retain gradients of earlier windows, or of the whole retain data at an earlier step.
MEMORY = "m"
#: Hessian-vector products of the two losses.
FORGET_HESSIAN, RETAIN_HESSIAN = "hf", "hr"

#: Loss → the slot of its gradient at w, and of its Hessian-vector product.
GRADIENT = {"forget": FORGET, "retain": RETAIN, "mismatch": MISMATCH}
HESSIAN = {"forget": FORGET_HESSIAN, "retain": RETAIN_HESSIAN}

#: Part → sums of squared gradients over the samples met so far, the diagonal of its Fisher information.
FISHER = {"forget": "ff", "retain": "fr"}


def sample_slot(index: int) -> str:
    """The slot of the gradient of the ``index``-th sampled retain example, counted from 0."""
    return f"r{index + 1}"


def stored_slot(index: int) -> str:
    """The slot of the ``index``-th retain gradient that was stored before the first step, counted from 0."""
    return f"{MEMORY}{index + 1}"
