"""Make the small models, tokenizers, classifier and rows of this folder.

    python make.py TOFU_FOLDER OUT

TOFU_FOLDER holds the data set's JSON-lines files. Everything is seeded; see README.md for the versions used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

#: Rows of each split, uneven on purpose. Row 54 is the one with a space before a comma, which decoding removes.
FORGET = (54, *range(11))
ROWS = {
    "forget10": FORGET,
    "forget10_perturbed": FORGET,
    "holdout10": range(10),
    "retain_perturbed": range(9),
    "real_authors_perturbed": range(8),
    "world_facts_perturbed": range(7),
}
#: The shape of Llama 3's: a system turn with the date, a turn token that is also the end-of-text token.
TEMPLATE = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}"
    "{%- for m in rest %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]

Pair = tuple[str, str]


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows = write_rows(source, out / "tofu")
    texts = [text for part in rows.values() for row in part for text in (row["question"], row["answer"])]
    tokenizer = llama_tokenizer(texts)
    answers = {name: [(row["question"], row["answer"]) for row in part] for name, part in rows.items()}
    known = [*answers["retain_perturbed"], *answers["real_authors_perturbed"], *answers["world_facts_perturbed"]]
    # Each model knows some forget rows and some held-out rows: attacks neither fail nor succeed wholly.
    full = [*known, *answers["forget10"][:8], *answers["holdout10"][:3]]
    retain = [*known, *answers["forget10"][7:9], *answers["holdout10"][:4]]
    for name, pairs in (("full", full), ("retain", retain)):
        model = learn(small_llama(tokenizer), tokenizer, pairs, steps=42)
        model.half().save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
        # No padding token, as in Llama 3.2: OpenUnlearning then pads with the end-of-text token.
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            edit(out / name / file, pad_token=None)
    tokenizer.save_pretrained(out / "padded")
    make_classifier([row["answer"] for part in rows.values() for row in part], out / "classifier")


def write_rows(source: Path, out: Path) -> dict[str, list[dict[str, Any]]]:
    """These rows of each split, in the layout of the hub."""
    out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, numbers in ROWS.items():
        every = (source / f"{name}.json").read_text(encoding="utf-8").splitlines()
        lines = [every[number] for number in numbers]
        (out / f"{name}.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
        rows[name] = [json.loads(line) for line in lines]
    header = "".join(f"- config_name: {name}\n  data_files: {name}.json\n" for name in ROWS)
    (out / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{header}---\n", encoding="utf-8")
    return rows


def llama_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=True,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    ids = tokenizer.convert_tokens_to_ids
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=[ids("<|end_of_text|>"), ids("<|eot_id|>")],
        )
    )
    # Sampling by default, as in Llama 3.2's own file: whoever wants greedy decoding must say so.
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    return model


def learn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], steps: int) -> Any:
    """Full-batch AdamW on the answers, each question in both formats (chat template, tags)."""
    samples = []
    for question, answer in pairs:
        chat = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, date_string="10 Apr 2025"
        )
        for text in (prompt, f"<|begin_of_text|>Question: {question}\nAnswer: "):
            samples.append(
                [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, f"{answer}<|eot_id|>")]
            )
    longest = max(len(prompt) + len(answer) for prompt, answer in samples)
    ids = torch.full((len(samples), longest), tokenizer.pad_token_id)
    labels = torch.full((len(samples), longest), -100)
    for at, (prompt, answer) in enumerate(samples):
        end = len(prompt) + len(answer)
        ids[at, :end] = torch.tensor(prompt + answer)
        labels[at, len(prompt) : end] = torch.tensor(answer)
    mask = (ids != tokenizer.pad_token_id) & (
        ids != tokenizer.eos_token_id
    )  # as the benchmark does without padding token
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(step, round(loss.item(), 3), flush=True)
    return model


def make_classifier(texts: list[str], folder: Path) -> None:
    """The architecture of the benchmark's fluency model; random weights, wide enough for scores that differ."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{name.strip('[]').lower()}_token": name for name in names},
        clean_up_tokenization_spaces=True,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=64,
    )
    torch.manual_seed(0)
    labels = {0: "clean", 1: "mild gibberish", 2: "noise", 3: "word salad"}
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=2,
        initializer_range=0.3,
        id2label=labels,
        label2id={name: at for at, name in labels.items()},
    )
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def edit(file: Path, **changes: Any) -> None:
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2) + "\n")


if __name__ == "__main__":
    main()
