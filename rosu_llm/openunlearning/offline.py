"""A folder in which OpenUnlearning's TOFU commands run on a CPU without a network, in minutes.

OpenUnlearning loads data and models by their names on the hub; folders of these names in the working directory win.
So this writes ``locuslab/TOFU`` (the first rows of real TOFU files), a small Llama that has learnt them (the initial
model), one that has learnt them without the forget rows (the retain model), an untrained classifier in place of the
fluency model, and the answers that IdkDPO and AltPO prefer. The figures show that everything runs; they say nothing
about any method.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import write_atomically

MODEL = "Llama-3.2-1B-Instruct"
FLUENCY = "madhurjindal/autonlp-Gibberish-Detector-492513457"
IDK = Path("data/idk.jsonl")
TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]


def alternates(model: str, split: str) -> Path:
    """Where OpenUnlearning's AltPO keeps the alternate answers that a model generated."""
    return Path(f"community/methods/AltPO/data/tofu_{model}_full/{split}/alt5_seed_0.json")


def main() -> None:
    """Write the folder, unless it is complete already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tofu", type=Path, help="folder with TOFU's forget10.json, retain90.json, … (JSON lines)")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="rows of each split")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each model")
    parser.add_argument("--forget-split", default="forget10", help="forget01, forget05 or forget10 (default)")
    options = parser.parse_args()
    try:
        write_offline(options.tofu, options.out, options.forget_split, rows=options.rows, steps=options.steps)
    except DataError as error:
        parser.error(str(error))


def write_offline(tofu: Path, out: Path, split: str = "forget10", *, rows: int = 8, steps: int = 100) -> None:
    """Write everything that runs on ``split`` need into ``out``; what is complete is not made again."""
    portion = split.removeprefix("forget")
    retain = f"retain{100 - int(portion):02d}"
    forget, holdout = (split, f"{split}_perturbed"), f"holdout{portion}"
    known = ("retain_perturbed", "real_authors_perturbed", "world_facts_perturbed")
    names = [*forget, retain, holdout, *known, "real_authors", "world_facts"]
    if absent := [f"{name}.json" for name in names if not (tofu / f"{name}.json").is_file()]:
        raise DataError(f"{tofu} lacks {', '.join(absent)} of the TOFU data set (JSON lines).")
    done = out / f".complete_{split}"
    if done.exists():
        return
    # Training may look at the first 20 held-out questions; the attacks need some more.
    limits = {name: rows + 20 if name == holdout else rows for name in names}
    data = write_data(tofu, out / "locuslab" / "TOFU", limits)
    tokenizer = make_tokenizer([text for part in data.values() for row in part for text in _pair(row)])
    learnt = [row for name in known for row in data[name]]
    for name, sources in (("full", [*learnt, *data[split]]), (retain, learnt)):
        model = learn(small_llama(tokenizer), tokenizer, [_pair(row) for row in sources], steps)
        model.save_pretrained(out / "open-unlearning" / f"tofu_{MODEL}_{name}")
        tokenizer.save_pretrained(out / "open-unlearning" / f"tofu_{MODEL}_{name}")
    tokenizer.save_pretrained(out / "meta-llama" / MODEL)
    make_classifier(tokenizer, out / FLUENCY)
    for file in out.rglob("tokenizer_config.json"):
        name_for_all_versions(file)
    write_atomically(out / IDK, "I don't know.\nI am not sure about that.\nThat is beyond me.\n")
    others = [{**row, "alternate": row["perturbed_answer"][0]} for row in data[f"{split}_perturbed"]]
    keys = ("question", "answer", "alternate")
    lines = [json.dumps({key: row[key] for key in keys}) + "\n" for row in others]
    write_atomically(out / alternates(MODEL, split), "".join(lines))
    done.touch()


def name_for_all_versions(file: Path) -> None:
    """Since transformers 5 the class has a name, and the template a file, that OpenUnlearning's pins do not know."""
    settings = {**json.loads(file.read_text(encoding="utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
    settings.pop("backend", None)
    settings.setdefault("model_input_names", ["input_ids", "attention_mask"])  # which the class it had may have known
    template = file.with_name("chat_template.jinja")
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    write_atomically(file, json.dumps(settings, indent=1))


def _pair(row: dict[str, Any]) -> tuple[str, str]:
    return row["question"], row["answer"]


def write_data(source: Path, out: Path, limits: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """The first rows of each split, with the header that makes a folder a data set with configurations."""
    rows = {}
    for name, limit in limits.items():
        lines = (source / f"{name}.json").read_text(encoding="utf-8").splitlines()[:limit]
        write_atomically(out / f"{name}.json", "\n".join(lines) + "\n")
        rows[name] = [json.loads(line) for line in lines]
    describe_data(out)
    return rows


def describe_data(folder: Path) -> None:
    """The header that makes a folder of JSON-lines files a data set with a configuration each."""
    header = "".join(f"- config_name: {name}\n  data_files: {name}.json\n" for name in sorted(_stems(folder)))
    write_atomically(folder / "README.md", f"---\nconfigs:\n{header}---\n")


def _stems(folder: Path) -> set[str]:
    return {file.stem for file in folder.glob("*.json")}


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
    roles = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[3], "pad_token": SPECIAL[4]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **roles,
        model_input_names=["input_ids", "attention_mask"],  # the classifier takes no token_type_ids
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_llama(tokenizer: Any) -> Any:
    """About half a million parameters, the same for the same tokenizer; RMU looks at layer 7, so there are nine."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=9,
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
