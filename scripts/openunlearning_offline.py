#!/usr/bin/env python3
"""Make a folder in which OpenUnlearning's TOFU commands run on a CPU without a network, in minutes.

OpenUnlearning loads data and models by their names on the hub; folders of these names in the working directory win.
So this writes ``locuslab/TOFU`` (the first rows of real TOFU files), a small Llama that has learnt them (the initial
model), one that has learnt them without the forget rows (the retain model), and an untrained classifier in place of the
fluency model. The figures show that everything runs; they say nothing about any method.

    python scripts/openunlearning_offline.py TOFU_FOLDER OUT [--rows 8]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MODEL = "Llama-3.2-1B-Instruct"
FLUENCY = "madhurjindal/autonlp-Gibberish-Detector-492513457"
NAMES = """forget10 forget10_perturbed retain90 retain_perturbed holdout10 real_authors real_authors_perturbed
world_facts world_facts_perturbed""".split()
TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]


def main() -> None:
    """Write the folder, unless it is complete already."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tofu", type=Path, help="folder with TOFU's forget10.json, retain90.json, … (JSON lines)")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="rows of each split")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each model")
    options = parser.parse_args()
    absent = [name for name in NAMES if not (options.tofu / f"{name}.json").is_file()]
    if absent:
        parser.error(f"{options.tofu} lacks {', '.join(f'{name}.json' for name in absent)} of the TOFU data set")
    done = options.out / ".complete"
    if done.exists():
        return
    rows = write_data(options.tofu, options.out / "locuslab" / "TOFU", options.rows)
    words = [text for part in rows.values() for row in part for text in (row["question"], row["answer"])]
    tokenizer = make_tokenizer(words)
    known = [*rows["retain_perturbed"], *rows["real_authors_perturbed"], *rows["world_facts_perturbed"]]
    hub = options.out / "open-unlearning"
    for name, data in (("full", [*known, *rows["forget10"]]), ("retain90", known)):
        model = learn(
            small_llama(tokenizer), tokenizer, [(row["question"], row["answer"]) for row in data], options.steps
        )
        model.save_pretrained(hub / f"tofu_{MODEL}_{name}")
        tokenizer.save_pretrained(hub / f"tofu_{MODEL}_{name}")
    tokenizer.save_pretrained(options.out / "meta-llama" / MODEL)
    make_classifier(tokenizer, options.out / FLUENCY)
    done.touch()


def write_data(source: Path, out: Path, limit: int) -> dict[str, list[dict[str, Any]]]:
    """The first rows of each split, with the header that makes a folder a data set with configurations."""
    out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in NAMES:
        lines = (source / f"{name}.json").read_text(encoding="utf-8").splitlines()[:limit]
        (out / f"{name}.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
        rows[name] = [json.loads(line) for line in lines]
    header = "".join(f"- config_name: {name}\n  data_files: {name}.json\n" for name in NAMES)
    (out / "README.md").write_text(f"---\nconfigs:\n{header}---\n", encoding="utf-8")
    return rows


def make_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE with Llama 3's special tokens and the shape of its chat format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=1000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|pad|>",
        model_input_names=["input_ids", "attention_mask"],  # the classifier takes no token_type_ids
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_llama(tokenizer: Any) -> Any:
    """About half a million parameters, the same for the same tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=1024,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def learn(model: Any, tokenizer: Any, pairs: list[tuple[str, str]], steps: int) -> Any:
    """Full-batch AdamW on the answers, in the chat format that OpenUnlearning's model configuration asks for."""
    import torch

    samples = []
    for question, answer in pairs:
        chat = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        samples.append(
            [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{answer}<|eot_id|>")]
        )
    longest = max(len(prompt) + len(answer) for prompt, answer in samples)
    ids = torch.full((len(samples), longest), tokenizer.pad_token_id)
    labels = torch.full((len(samples), longest), -100)
    for at, (prompt, answer) in enumerate(samples):
        end = len(prompt) + len(answer)
        ids[at, :end] = torch.tensor(prompt + answer)
        labels[at, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=ids != tokenizer.pad_token_id, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def make_classifier(tokenizer: Any, folder: Path) -> None:
    """An untrained classifier with four classes under the fluency model's name."""
    import torch
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, hidden_dim=64, n_layers=1, n_heads=2, num_labels=4)
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
