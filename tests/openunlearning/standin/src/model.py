from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def get_model(config, dtype="float32"):
    """The saved model that the configuration names, or a new one of its size."""
    path = config.model_args.pretrained_model_name_or_path
    if path and Path(path).is_dir():
        return LlamaForCausalLM.from_pretrained(path).to(getattr(torch, dtype))
    size = {key: value for key, value in config.items() if key != "model_args"}
    return LlamaForCausalLM(LlamaConfig(**size)).to(getattr(torch, dtype))
