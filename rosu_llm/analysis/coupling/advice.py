"""One sentence of advice from a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: |cos θ| below which the two perturbations are nearly the same: they differ by less than about ρ/10
#: (‖δ_rosu − δ_std‖ = ρ|cos θ|√(2/(1+sin θ))), and the outer objectives differ accordingly (near-orthogonality).
WEAK = 0.1
#: cos θ from which the standard perturbation does at least half of the most damage to L_r that its length allows.
HIGH = 0.5
#: sin θ below which retain-neutrality keeps less than a tenth of the first-order forget gain.
COLLINEAR = 0.1
#: τ/(‖r‖²+τ) from which a hundredth of the retain component, or more, survives the projection.
VANISHING = 0.01


def advise(figures: Mapping[str, Any]) -> tuple[str, str]:
    """The regime's name, and a sentence that says what follows, from the figures of ``diagnosis.json``."""
    coupling, settings, pairs = figures["coupling"], figures["settings"], figures["pairs_used"]
    cosine, rho, spread = coupling["cosine"]["mean"], settings["rho"], coupling["cosine"]["std"]
    forget_norm, sine = coupling["forget_norm"]["median"], coupling["sine"]["median"]
    shown = f"cos θ = {cosine:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
    shown += " over all samples" if settings["full_batch"] else ""
    if forget_norm <= settings["eps_q"]:
        return "vanishing", (
            f"The forget gradient vanishes (‖f‖ = {forget_norm:.1e}): there is no direction to "
            "forget along; use another forget_loss, or check that the samples have answer tokens the model has learned."
        )
    if coupling["tau_residue"]["median"] >= VANISHING:
        return "vanishing", (
            f"The retain gradient vanishes (‖r‖² = {coupling['retain_square']['median']:.1e} against τ = "
            f"{settings['tau']:g}): nothing is protected to first order here; use tau_mode: relative, or another "
            "retain_loss (kl and representation start at their minimum, so this is expected of them before training)."
        )
    if coupling["fallbacks"] * 2 >= pairs or sine < COLLINEAR:
        return "collinear", (
            f"Forget and retain gradients are nearly parallel ({shown}, {coupling['fallbacks']} of {pairs} pairs would "
            f"fall back to plain retain descent): a retain-neutral step keeps only {sine:.0%} of the forget gain; give "
            "more specific forget data or a larger retain batch."
        )
    if cosine <= -WEAK:
        return "negative", (
            f"Negative coupling ({shown}): forgetting already lowers the retain loss to first order, so there is no "
            "damage to avoid and the retain-neutral perturbation gives that help away; standard min–max (method: "
            "minmax) or gradient difference may do as well."
        )
    if cosine < WEAK:
        return "weak", (
            f"Weak coupling ({shown}): standard and retain-neutral perturbations are nearly the same, so expect ROSU "
            "to match standard min–max rather than to beat it."
        )
    row = next(row for row in figures["at_rho"] if row["rho"] == rho)
    end = figures["radius"]["mean_crossing"]
    change = (
        f"at ρ = {rho:g} the retain loss changes by {row['standard']['retain_change']:+.3g} along the standard "
        f"perturbation, {row['neutral']['retain_change']:+.3g} along the retain-neutral one"
    )
    if row["retain_gap"]["mean"] <= 0.0:
        lower = "" if end is None else f"; use ρ below {end:.2g}"
        return "curvature", (
            f"Curvature dominates ({shown}): {change}, so the first-order advantage is gone at this radius{lower}."
        )
    name, opening = ("high", "High coupling") if cosine >= HIGH else ("moderate", "Moderate coupling")
    reach = f"at all radii measured (up to {figures['radius']['max_rho']:g})" if end is None else f"up to ρ ≈ {end:.2g}"
    return name, (
        f"{opening} ({shown}): {change}, which keeps {coupling['sine']['mean']:.0%} of the first-order forget gain; "
        f"retain-neutrality pays {reach}."
    )
