"""Search over settings: the space, the objective, the study, what is shown of it."""
