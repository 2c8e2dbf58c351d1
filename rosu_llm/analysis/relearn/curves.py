"""What curves of a metric over attack steps say. Pure arithmetic.

With m_t the metric after t steps (larger = more remembered) and Δ = m_end − m_0:

    R      = min(Δ_retain / Δ_unlearned, 1)                                   OpenUnlearning, arXiv 2506.12618
    R_sym  = 1 − |Δ_unlearned − Δ_retain| / (|Δ_unlearned| + |Δ_retain|)      symmetric: also where it learns less
    area   = 1/T · ∫ (m_unlearned − m_retain) dt, trapezoids                  mean distance of the curves
    half   = the first evaluated t with m_t − m_0 ≥ ½ (m_initial,0 − m_0)     half of the gap is back

R is 1 where the unlearned model regains no more than one that never saw the data learns, and goes to 0 as it regains
more. Where it regains nothing R = 1; where only the retain model loses, R = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

Course = Mapping[int, float]


def robustness(unlearned: float, retain: float) -> float:
    """R of the two gains, in [0, 1]; exactly 1 for equal ones."""
    if unlearned <= 0 or unlearned == retain:
        return 1.0
    return min(max(retain, 0.0) / unlearned, 1.0)


def symmetric(one: float, other: float) -> float:
    """1 − |a − b| / (|a| + |b|), in [0, 1]; 1 where both are 0."""
    total = abs(one) + abs(other)
    return 1.0 - abs(one - other) / total if total > 0 else 1.0


def gain(course: Course) -> float:
    """Δ: the last value minus that before the attack."""
    return course[max(course)] - course[min(course)]


def area_between(one: Course, other: Course) -> float:
    """Mean of ``one − other`` over the steps both have, by trapezoids; the difference itself where there is one step.

    Raises ``KeyError`` where they share no step.
    """
    steps = sorted(one.keys() & other.keys())
    if not steps:
        raise KeyError("the curves share no step")
    distance = {step: one[step] - other[step] for step in steps}
    if len(steps) == 1:
        return distance[steps[0]]
    parts = ((distance[a] + distance[b]) / 2 * (b - a) for a, b in pairwise(steps))
    return sum(parts) / (steps[-1] - steps[0])


def steps_to_half(course: Course, initial: float) -> int | None:
    """The first evaluated step at which half of the gap to the initial model is back; None where it never is.

    0 where there is no gap: what knows as much as the initial model has nothing to regain.
    """
    start = course[min(course)]
    gap = initial - start
    if gap <= 0:
        return 0
    return next((step for step in sorted(course) if course[step] - start >= gap / 2), None)


def evaluated_steps(last: int) -> list[int]:
    """0, 1, 2, 4, 8 … and the last one."""
    doubling = [0]
    step = 1
    while step < last:
        doubling.append(step)
        step *= 2
    return [*doubling, last] if last > 0 else [0]
