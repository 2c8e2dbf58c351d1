"""Search settings with Optuna (``rosu sweep``)."""
