"""TOFU: which figures there are, how they are measured, and how they are kept."""
