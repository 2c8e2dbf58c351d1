"""A ROSU step on real TOFU windows against plain passes and OpenUnlearning's steps: ratios of time and activations.

A Llama with the proportions of Llama-3.2-1B (output layer 21 % of all parameters, tied; grouped heads) at a size for
two CPU cores, random weights, windows of 32 questions in micro-batches of 8 as a trainer collates them. In one process,
alternating, medians over medians of the CPU seconds of one thread, which other work on the machine changes little:

* *plain*: three forward+backward passes as Hugging Face makes them, all logits, padded;
* *ROSU*: a whole step, three passes, algebra, AdamW and pull;
* *OpenUnlearning NPO, GradDiff*: the loss of its own trainers, from a checkout that OPEN_UNLEARNING_DIR names, backward
  over the window, and AdamW.

    python scripts/bench_windows.py --data locuslab/TOFU --tokenizer meta-llama/Llama-3.2-1B-Instruct
    python scripts/bench_windows.py --smoke     # toy sizes: only shows that it runs

The tokenizer's ids are taken modulo the small vocabulary; lengths and answers are the real ones. Where it has no chat
template, as many tokens as Llama-3.2's has stand in front of question and answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Hidden size, layers and vocabulary in the proportions of 2048, 16 and 128256.
SIZES = {"toy": (32, 2, 256), "14M": (256, 12, 11_904), "30M": (320, 16, 19_712), "77M": (512, 16, 31_488)}
#: Tokens that Llama-3.2's template puts before the question, and between question and answer.
TEMPLATE = (35, 5)
WINDOW, MICRO = 32, 8


def samples(options: argparse.Namespace, vocabulary: int) -> list[dict[str, list[int]]]:
    """Two windows of questions and answers as tokens."""
    import torch

    count = 2 * WINDOW
    if options.smoke:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 12, (count, 2), generator=generator).tolist()
    else:
        from transformers import AutoTokenizer

        from rosu_llm.data.tofu import tofu_rows

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        rows = []
        for split in ("forget10", "retain90"):  # shuffled, as a trainer does
            found = tofu_rows(options.data, split)
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:WINDOW]
            rows += [found[i] for i in order.tolist()]
        lengths = [
            [len(tokenizer(row[key], add_special_tokens=False).input_ids) for key in ("question", "answer")]
            for row in rows
        ]
    result = []
    for i, (question, answer) in enumerate(lengths):
        prompt = question if options.smoke else sum(TEMPLATE) + question
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(4, vocabulary, (prompt + answer + 1,), generator=generator).tolist()
        result.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return result


def build(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """The model, and the micro-batches of a window as a trainer collates them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rosu_llm.data.pairing import ForgetRetainCollator

    hidden, layers, vocabulary = SIZES[options.size]
    if options.vocabulary:
        vocabulary = options.vocabulary
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=4 * hidden,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    data, collate = samples(options, vocabulary), ForgetRetainCollator(0)
    starts = range(0, options.window, min(MICRO, options.window))
    return model, [
        {
            part: collate(data[first + start : first + start + MICRO][: options.window])
            for part, first in (("forget", 0), ("retain", WINDOW))
        }
        for start in starts
    ]


def contenders(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Name → one step; all on the same windows and, but for what AdamW moved, the same weights."""
    import torch

    from rosu_llm import UnlearningStep
    from rosu_llm.losses import LossContext, get_loss
    from rosu_llm.training.regroup import regroup
    from rosu_llm.training.window import WindowLoss

    model, batches = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def plain() -> None:
        for part in ("forget", "retain", "retain"):
            optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                (model(**batch[part]).loss / len(batches)).backward()

    nll = get_loss("nll", "retain")
    loss = WindowLoss(nll, LossContext(), "window_tokens", _nothing, lambda values: values)
    step = UnlearningStep(model, optimizer, rho=0.1, capture_dtype=options.capture_dtype)

    def rosu(tokens: int | None = None) -> None:
        parts = regroup({part: [b[part] for b in batches] for part in ("forget", "retain")}, tokens)
        step(*(loss.closures(model, parts[part], part) for part in ("forget", "retain")))

    found = {"plain": plain, "rosu": rosu, "rosu, not regrouped": lambda: rosu(0)}
    for name, compute in openunlearning(model).items() if not options.only else ():

        def theirs(compute: Callable[[Any], Any] = compute) -> None:
            optimizer.zero_grad(set_to_none=True)
            for batch in batches:
                (compute(batch) / len(batches)).backward()
            optimizer.step()

        found[name] = theirs
    found["adamw"] = optimizer.step
    return {name: run for name, run in found.items() if not options.only or name in options.only}


def openunlearning(model: Any) -> dict[str, Callable[[Any], Any]]:
    """The losses of OpenUnlearning's own trainers on a micro-batch; none where no checkout is named."""
    checkout = os.environ.get("OPEN_UNLEARNING_DIR")
    if not checkout:
        print("OPEN_UNLEARNING_DIR names no checkout: OpenUnlearning's steps are left out.")
        return {}
    import copy

    sys.path.insert(0, str(Path(checkout) / "src"))
    from trainer.unlearn.grad_diff import GradDiff  # type: ignore[import-not-found]
    from trainer.unlearn.npo import NPO  # type: ignore[import-not-found]

    settings = {"gamma": 1.0, "alpha": 1.0, "beta": 0.1, "retain_loss_type": "NLL"}
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    found = {}
    for name, kind in (("OpenUnlearning NPO", NPO), ("OpenUnlearning GradDiff", GradDiff)):
        trainer = kind.__new__(kind)  # without Trainer's set-up: its loss is all that is asked of it
        trainer.__dict__.update(settings, model=model, ref_model=reference)
        found[name] = lambda batch, trainer=trainer: trainer.compute_loss(model, batch)
    return found


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def activations(options: argparse.Namespace, name: str) -> float:
    """Bytes by which the passes of one step raise the resident size, in a process of their own."""
    command = [sys.executable, __file__, "--child", name, "--size", options.size, "--window", str(options.window)]
    command += [] if options.smoke else ["--data", options.data, "--tokenizer", options.tokenizer]
    command += ["--smoke"] if options.smoke else []
    command += ["--vocabulary", str(options.vocabulary)] if options.vocabulary else []
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(printed.splitlines()[-1]))


def child(options: argparse.Namespace) -> None:
    """One retain pass over the window; its peak above weights and gradients."""
    import torch

    from rosu_llm.losses import answer_nll
    from rosu_llm.training.regroup import regroup

    model, batches = build(options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    retain = [b["retain"] for b in batches]
    if options.child == "rosu":
        retain = list(regroup({"retain": retain}, None)["retain"])
        answer_nll(model, {key: value[:1, :4] for key, value in batches[0]["retain"].items()})  # the model is tried
    before = _status()["VmRSS"]
    for batch in retain:
        (answer_nll(model, batch).sum() if options.child == "rosu" else model(**batch).loss).backward()
    print(json.dumps(_status()["VmHWM"] - before))


def _status() -> dict[str, int]:
    lines = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(value.split()[0]) for name, value in lines if name.startswith("Vm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="locuslab/TOFU")
    parser.add_argument("--tokenizer", default="meta-llama/Llama-3.2-1B-Instruct")
    parser.add_argument("--size", choices=list(SIZES), default="14M")
    parser.add_argument("--vocabulary", type=int, help="in place of the size's")
    parser.add_argument("--window", type=int, default=WINDOW, help="questions of a window, at most 32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="'plain', 'rosu' and others of the table")
    parser.add_argument("--capture-dtype", default="float32")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    parser.add_argument("--child", choices=["plain", "rosu"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.size, options.repeats, options.window = "toy", 1, 8
    if options.child:
        child(options)
        return

    import torch
    from rich.console import Console
    from rich.table import Table

    torch.set_num_threads(1)
    runs = contenders(options)
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {f"ROSU step / {name}": median["rosu"] / median[name] for name in runs if name not in ("rosu", "adamw")}
    if "adamw" in median and "plain" in median:
        figures["ROSU step / (three plain passes + AdamW)"] = median["rosu"] / (median["plain"] + median["adamw"])
    peaks = {name: activations(options, name) for name in ("plain", "rosu")}
    figures["activations of a pass, plain = 1"] = peaks["rosu"] / peaks["plain"]
    table = Table("figure", "value", title=f"{options.size}, window of {options.window}, {options.repeats} repeats")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    print({name: round(value, 3) for name, value in median.items()})
    if options.json:
        Path(options.json).write_text(json.dumps({"figures": figures, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
