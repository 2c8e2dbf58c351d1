"""Grids of variants in resumable cells (``rosu ablate``)."""
