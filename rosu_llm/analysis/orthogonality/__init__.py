"""How far a direction that is neutral for a retain mini-batch is from neutral for the whole retain set."""
