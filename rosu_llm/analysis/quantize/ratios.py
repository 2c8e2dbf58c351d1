"""How well a figure survives quantisation. Pure arithmetic.

    Q      = min(after / before, 1)                                  OpenUnlearning, arXiv 2506.12618
    Q_sym  = 1 − |after − before| / (|after| + |before|)

of figures for which more is better: Mem, Priv, utility. Figures of what is remembered enter as 1 − m, as they enter
Mem, so that Q falls when memories come back. Rounding costs every model something; *against the retain model*

    Q_ctrl = min( (after/before) / (after/before of the retain model), 1 )

is 1 where the unlearned model suffers no more than one that has nothing to hide.
"""

from __future__ import annotations


def ratio(after: float, before: float) -> float:
    """after / before, not above what arithmetic allows: 1 where there was nothing to lose."""
    return after / before if before > 0 else 1.0


def surviving(after: float, before: float) -> float:
    """Q."""
    return min(ratio(max(after, 0.0), before), 1.0)


def against_control(after: float, before: float, control_after: float, control_before: float) -> float:
    """Q_ctrl; exactly 1 for the control itself, and where the control loses everything."""
    own, other = ratio(max(after, 0.0), before), ratio(max(control_after, 0.0), control_before)
    return min(own / other, 1.0) if other > 0 else 1.0
