"""Coupling in three real settings: stories15M on TOFU authors, random questions of one author, general text.

    python scripts/coupling_settings.py --out outputs/coupling      # six CPU minutes
    python scripts/coupling_settings.py --smoke                     # seconds: stories260K, tiny sizes

Fine-tunes the model on a few TOFU authors, then measures, before and after, how the gradients of what is to be
forgotten and of what is to be kept lie to each other. Prints the table of docs/diagnosis.md and writes a diagnosis
folder per row. The data is that of ``$ROSU_DATA`` (default: data), with the model in ``stories15M``, TOFU's files in
``tofu``, and general text in ``text/wiki.utf8`` and ``wikitext-2/test.rows.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm import ForgetRetainCollator, QuestionAnswerDataset, measure_coupling
from rosu_llm.losses import COUNT, logits_of, token_nll

QUESTIONS = 20  # per author, in the order of TOFU's file
COLUMNS = "| setting | weights | L_f | L_r | cos θ | ΔL_r std | ΔL_r neutral | ρ* | crossing | regime |"


def read_authors(data: Path, count: int) -> list[list[tuple[str, str]]]:
    """Questions and answers of the first authors."""
    lines = (data / "tofu" / "full.json").read_text(encoding="utf-8").splitlines()[: count * QUESTIONS]
    rows = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    return [rows[i : i + QUESTIONS] for i in range(0, len(rows), QUESTIONS)]


def read_texts(data: Path, count: int) -> tuple[list[str], list[str]]:
    """Paragraphs of two encyclopaedic corpora."""
    plain = re.sub(r"<[^>]+>", "", (data / "text" / "wiki.utf8").read_text(encoding="utf-8")).splitlines()
    lines = (data / "wikitext-2" / "test.rows.jsonl").read_text(encoding="utf-8").split("\n")
    other = [json.loads(line)["text"] for line in lines if line]
    long = [[text.strip() for text in texts if len(text) > 300][:count] for texts in (plain, other)]
    return long[0], long[1]


def fine_tune(model: Any, samples: Any, epochs: int, batch_size: int) -> None:
    """Plain AdamW on the answers."""
    collate = ForgetRetainCollator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    steps = epochs * -(-len(samples) // batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch)).tolist()
        for i in range(0, len(order), batch_size):
            batch = collate([samples[j] for j in order[i : i + batch_size]])
            loss = token_nll(logits_of(model, batch), batch["labels"]).sum() / COUNT["token"](batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ROSU_DATA", "data")))
    parser.add_argument("--out", type=Path, help="folder for one diagnosis per row")
    parser.add_argument("--authors", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    name = "stories260K" if options.smoke else "stories15M"
    if options.smoke:
        options.epochs, options.pairs, options.authors = 1, 2, 2
    tokenizer = AutoTokenizer.from_pretrained(options.data / name)
    model = AutoModelForCausalLM.from_pretrained(options.data / name, dtype=torch.float32)

    authors = read_authors(options.data, options.authors)
    first = torch.randperm(QUESTIONS, generator=torch.Generator().manual_seed(0)).tolist()
    tenth = first[: QUESTIONS // 10]
    wiki, wikitext = read_texts(options.data, 200)

    def answers(pairs: Any) -> QuestionAnswerDataset:
        return QuestionAnswerDataset(pairs, tokenizer, max_length=128)

    def texts(found: list[str]) -> QuestionAnswerDataset:
        return QuestionAnswerDataset([(None, text) for text in found], tokenizer, max_length=64)

    size = options.batch_size
    settings = {
        "one TOFU author against the others": (answers(authors[-1]), answers(chain(*authors[:-1])), size),
        "random 10 % of one author against the rest of that author": (
            answers([authors[-1][i] for i in tenth]),
            answers([authors[-1][i] for i in first if i not in tenth]),
            min(size, len(tenth)),
        ),
        "general text against general text": (texts(wiki), texts(wikitext), size),
    }
    print(COLUMNS + "\n|---|---|" + "---:|" * 7 + "---|")
    for stage in ("pretrained", "fine-tuned on the authors"):
        if stage != "pretrained":
            fine_tune(model, answers(chain(*authors)), options.epochs, 8)
            settings.pop("general text against general text")  # nothing of it was learned
        for at, (setting, (forget, retain, batch)) in enumerate(settings.items()):
            found = measure_coupling(
                model,
                forget,
                retain,
                pairs=options.pairs,
                forget_batch_size=batch,
                retain_batch_size=size,
                rhos=(0.02, 0.1, 0.4),
                rho=0.1,
                points=0,
                progress=False,
            )
            print(line(setting, stage, found.document), flush=True)
            if options.out is not None:
                found.save(options.out / f"{'abc'[at]}_{stage.partition(' ')[0]}")
    return 0


def line(setting: str, stage: str, document: dict[str, Any]) -> str:
    """One row of the table."""
    coupling, radius = document["coupling"], document["radius"]
    (row,) = [row for row in document["at_rho"] if row["rho"] == document["settings"]["rho"]]
    crossing = "–" if coupling["cosine"]["mean"] <= 0.0 else f"> {radius['max_rho']:g}"
    if radius["mean_crossing"] is not None:
        crossing = f"{radius['mean_crossing']:.2f}"
    cells = [
        setting,
        stage,
        f"{coupling['forget_loss']['mean']:.2f}",
        f"{coupling['retain_loss']['mean']:.2f}",
        f"{coupling['cosine']['mean']:.2f} ± {coupling['cosine']['std']:.2f}",
        f"{row['standard']['retain_change']:+.3f}",
        f"{row['neutral']['retain_change']:+.3f}",
        "–" if radius["guaranteed"]["median"] is None else f"{radius['guaranteed']['median']:.3f}",
        crossing,
        document["advice"]["regime"],
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
