"""MUSE (Shi et al., 2024): verbatim and knowledge memorisation, privacy leakage and utility on News and Books."""
