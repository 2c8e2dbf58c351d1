"""Unlearning of image classifiers with the same engine: data, models, protocols, metrics and tables."""
