"""What can be measured about a run beside its scores: coupling, orthogonality, safeguards, sensitivity."""
