"""Grids of variants on one task, in cells that survive interruption: what ``rosu ablate`` runs and shows."""
