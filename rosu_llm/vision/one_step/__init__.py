"""Methods that edit the weights once, without training: Fisher forgetting and influence unlearning."""
