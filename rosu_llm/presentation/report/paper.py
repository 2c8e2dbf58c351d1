"""The paper's figures for TOFU, as printed in its table of LLM unlearning."""

from __future__ import annotations

PAPER_LABEL = "paper, Llama-3.2-1B, forget10"
PAPER_NOTE = (
    f"Rows under '{PAPER_LABEL}' are the paper's printed figures, not runs; Util there is relative to the initial "
    "model. The paper names no split: forget10 is its pipeline's default. Its main table has no Agg_MU; ROSU's is "
    "from its table over ρ."
)

#: (Agg, Agg_MU, Mem, Priv, Util)
TOFU: dict[str, tuple[float, float | None, float, float, float]] = {
    "Init. ft.": (0.00, None, 0.00, 0.01, 1.00),
    "Retain": (0.61, None, 0.35, 1.00, 0.99),
    "GradDiff": (0.00, None, 0.99, 0.00, 0.77),
    "NPO": (0.02, None, 0.52, 0.01, 0.97),
    "IdkDPO": (0.03, None, 0.56, 0.01, 0.93),
    "AltPO": (0.05, None, 0.67, 0.02, 0.94),
    "PCGrad": (0.06, None, 0.98, 0.02, 0.61),
    "IdkNLL": (0.13, None, 0.10, 0.08, 0.91),
    "UNDIAL": (0.44, None, 0.30, 0.46, 0.79),
    "SimNPO": (0.49, None, 0.36, 0.44, 0.99),
    "UAM": (0.50, None, 0.38, 0.62, 0.57),
    "RMU": (0.54, None, 0.48, 0.53, 0.62),
    "ROSU": (0.58, 0.52, 0.38, 0.74, 0.82),
}
