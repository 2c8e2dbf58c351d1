"""Hidden activations of a decoder, the parameters that move them, and the checkpoint files both come from."""
