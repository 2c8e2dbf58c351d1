"""What audits of an unlearned model share: the models to compare, their figures, and results that survive a kill."""
