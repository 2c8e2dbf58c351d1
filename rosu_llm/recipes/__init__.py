"""A run described by settings: read them, prepare the trainer, train, record."""
