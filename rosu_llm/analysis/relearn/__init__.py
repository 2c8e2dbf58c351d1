"""Does it come back after a little fine-tuning? The same attack on the unlearned, the retain and the initial model."""
