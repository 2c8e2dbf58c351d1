"""Whether this machine can train, and whether every layout gives the weights of one process here."""
