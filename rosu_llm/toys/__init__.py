"""Toy inputs for every ``--smoke``."""
