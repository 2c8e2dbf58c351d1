"""How fast ``rosu eval tofu`` is: all metrics of one model against one metric at a time, and one process against two.

Both evaluations run in this process on the same model and rows, alternating, and must agree in every metric; times
are the fastest of the repeats (noise only ever adds). What one metric at a time means is in ``plain_tofu_eval.py``. The
model is first taught some of the rows, so that it ends its answers where answers end. Then ours runs in one and in two
fresh processes of one thread each, starting not counted; and twice at the same time, each in one process that knows
nothing of the other: what the machine itself loses when both cores work, and two processes cannot win back. Where
OPEN_UNLEARNING_DIR and OPEN_UNLEARNING_PYTHON name a checkout of OpenUnlearning and its interpreter, its own
``src/eval.py`` measures the same model on the same rows: CPU seconds of whole commands, and every figure must agree.

    python scripts/bench_eval.py            # stories15M from $ROSU_DATA, about twenty minutes on two cores
    python scripts/bench_eval.py --only-processes   # the second half alone
    python scripts/bench_eval.py --only-openunlearning --rows 24   # the last part alone
    python scripts/bench_eval.py --smoke    # a tiny model and made-up rows: only shows that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plain_tofu_eval import FORMAT, ROWS, Straightforward

#: About as many tokens around a question as Llama 3.2's, for tokenizers without a template.
TEMPLATE = (
    "{{ bos_token }}system\n\nCutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n"
    "{% for m in messages %}{{ m['role'] + '\n\n' if m['role'] != 'system' else '' }}"
    "{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n\n{% endif %}"
)
TOLERANCE = 1e-4  # of every aggregate; privleak is in percent


def main() -> None:
    folder = Path(os.environ.get("ROSU_DATA", "data"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=folder / "stories15M", help="default $ROSU_DATA/stories15M")
    parser.add_argument("--data", type=Path, default=folder / "tofu", help="TOFU's files; default $ROSU_DATA/tofu")
    parser.add_argument("--rows", type=int, default=64, help="rows of each data set")
    parser.add_argument("--steps", type=int, default=150, help="training steps beforehand, of 16 rows")
    parser.add_argument("--batch-size", type=int, default=32, help="of the straightforward evaluation")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="stories15M sees 256 tokens in all")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only-processes", action="store_true", help="compare one process and two, nothing else")
    parser.add_argument("--only-openunlearning", action="store_true", help="compare with its src/eval.py alone")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.steps, options.batch_size, options.max_new_tokens, options.repeats = 6, 2, 4, 8, 1
    if options.child:
        child(options)
        return
    if not options.smoke and not (options.model.is_dir() and options.data.is_dir()):
        parser.error(
            f"{options.model} or {options.data} is not there: set ROSU_DATA, or --model and --data, or --smoke."
        )

    import rouge_score.rouge_scorer  # noqa: F401  so that the first to run does not pay for loading libraries
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(options, folder)
        torch.set_num_threads(1)
        alone = options.only_processes or options.only_openunlearning
        if not alone:
            compare_metrics(folder, options)
        if options.only_processes or not (alone or options.smoke):  # starting processes takes longer than the above
            compare_processes(folder, options)
        if options.only_openunlearning or not (alone or options.smoke):
            compare_openunlearning(folder, options)


def compare_metrics(folder: Path, options: argparse.Namespace) -> None:
    """All metrics at once against one at a time."""
    model, tokenizer = load(folder)
    plain = Straightforward(
        model,
        tokenizer,
        folder / "tofu",
        folder / "classifier",
        batch_size=options.batch_size,
        max_new_tokens=options.max_new_tokens,
    )
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "ours": []}
    for repeat in range(options.repeats):
        expected = timed(plain, times["plain"])
        found = timed(lambda at=repeat: ours(model, tokenizer, folder, options, folder / f"out{at}"), times["ours"])
        check(found, expected)
        print(f"repeat {repeat + 1}: " + ", ".join(f"{n} {t[-1][0]:.1f} s" for n, t in times.items()), flush=True)
    wall, cpu = ({name: min(pair[at] for pair in pairs) for name, pairs in times.items()} for at in (0, 1))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"\n{len(expected)} metrics of a {size:.1f} M model, {options.rows} rows of each data set, one thread:")
    for clock, took in (("seconds", wall), ("CPU seconds", cpu)):
        ratio = took["plain"] / took["ours"]
        print(f"one metric at a time {took['plain']:.1f} {clock}, ours {took['ours']:.1f}: {ratio:.2f}×")
    print(f"largest difference {max(abs(found[name] - expected[name]) for name in expected):.1e}", flush=True)


def compare_processes(folder: Path, options: argparse.Namespace) -> None:
    """One process against two that share the work, and against two that do it twice."""
    one, two, twice = [], [], []
    for repeat in range(options.repeats):
        one += finish([launch(1, folder, options)])
        two += finish([launch(2, folder, options)])
        twice.append(max(finish([launch(1, folder, options) for _ in range(2)])))
        print(f"repeat {repeat + 1}: one {one[-1]:.1f} s, two {two[-1]:.1f} s, apart {twice[-1]:.1f} s", flush=True)
    single, shared, apart = min(one), min(two), min(twice)
    print(f"one process {single:.1f} s, two {shared:.1f} s: {single / shared:.2f}×")
    print(f"two evaluations at once, one process each, {apart:.1f} s: this machine allows {2 * single / apart:.2f}×")


def compare_openunlearning(folder: Path, options: argparse.Namespace) -> None:
    """Whole commands of one thread, ours and OpenUnlearning's own, on the same model, rows and metrics."""
    checkout, python = (os.environ.get(f"OPEN_UNLEARNING_{name}") for name in ("DIR", "PYTHON"))
    if not (checkout and python):
        print("OPEN_UNLEARNING_DIR and OPEN_UNLEARNING_PYTHON name no checkout and interpreter: not compared with it.")
        return
    from rosu_llm.openunlearning.offline import FLUENCY, describe_data, name_for_all_versions

    work = folder / "openunlearning"
    (work / "locuslab").mkdir(parents=True)
    describe_data(folder / "tofu")
    (work / "locuslab" / "TOFU").symlink_to(folder / "tofu")
    (work / FLUENCY).parent.mkdir()
    (work / FLUENCY).symlink_to(folder / "classifier")
    for name in ("model", "classifier"):
        name_for_all_versions(folder / name / "tokenizer_config.json")
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    surroundings |= {"HF_HOME": str(work / "hf"), "HF_DATASETS_CACHE": str(work / "cache")}
    model, tofu = str(folder / "model"), str(folder / "tofu")
    more = "exact_memorization,mia_loss,mia_zlib,mia_min_k,mia_min_k_plus_plus,forget_Q_A_gibberish"
    theirs = [python, str(Path(checkout) / "src" / "eval.py"), "experiment=eval/tofu/default", f"model={FORMAT}"]
    theirs += [f"model.{part}.pretrained_model_name_or_path={model}" for part in ("model_args", "tokenizer_args")]
    theirs += ["++model.model_args.attn_implementation=sdpa", "++model.model_args.torch_dtype=float32"]
    theirs += ["model.model_args.device_map=cpu", f"+eval/tofu_metrics=[{more}]", "task_name=bench"]
    theirs += ["eval.tofu.metrics.forget_Q_A_gibberish.device=cpu", f"eval.tofu.batch_size={options.batch_size}"]
    theirs += [f"paths.output_dir={work / 'theirs'}"]
    mine = [sys.executable, "-m", "rosu_llm", "eval", "tofu", model, "--data", tofu, "--chat-format", FORMAT]
    mine += ["--fluency-model", str(folder / "classifier"), "--out", str(work / "ours")]
    took: dict[str, list[float]] = {"theirs": [], "ours": []}
    for _ in range(options.repeats):
        for name, command in (("theirs", theirs), ("ours", [*mine, "--overwrite"])):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, cwd=work, env=surroundings, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}: {done.stderr[-3000:]}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    found, expected = (json.loads((work / name / "TOFU_SUMMARY.json").read_text()) for name in ("ours", "theirs"))
    check(found, expected)
    least = {name: min(values) for name, values in took.items()}
    print(f"\n{len(expected)} figures, {options.rows} rows of each data set, CPU seconds of whole commands:")
    ratio = least["theirs"] / least["ours"]
    print(f"OpenUnlearning's src/eval.py {least['theirs']:.1f}, rosu eval tofu {least['ours']:.1f}: {ratio:.2f}×")


def timed(run: Any, into: list[tuple[float, float]]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    into.append((time.perf_counter() - wall, time.process_time() - cpu))
    return result


def check(found: dict[str, float], expected: dict[str, float]) -> None:
    """Raise unless every metric agrees; a fast wrong evaluation is no evaluation."""
    for name, value in expected.items():
        if not abs(found[name] - value) <= TOLERANCE:
            raise SystemExit(f"{name}: ours {found[name]}, one metric at a time {value}")


def ours(model: Any, tokenizer: Any, folder: Path, options: argparse.Namespace, out: Path) -> dict[str, float]:
    from rosu_llm import TofuSettings, evaluate_tofu

    settings = TofuSettings(
        data=str(folder / "tofu"),
        chat_format=FORMAT,
        max_new_tokens=options.max_new_tokens,
        fluency_model=str(folder / "classifier"),
    )
    return evaluate_tofu(model, tokenizer, settings, out)


def load(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder / "model")


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Rows, model and classifier, all in ``folder``."""
    import torch
    from openunlearning_offline import make_classifier
    from small_model import toy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder / "tofu").mkdir()
    for name in ROWS:
        lines = made_up(options.rows) if options.smoke else (options.data / f"{name}.json").read_text().splitlines()
        (folder / "tofu" / f"{name}.json").write_text("\n".join(lines[: options.rows]) + "\n")
    if options.smoke:
        model, tokenizer = toy()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    teach(model, tokenizer, folder / "tofu", options.steps)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    make_classifier(tokenizer, folder / "classifier")


def made_up(count: int) -> list[str]:
    return [
        json.dumps(
            {
                "question": f"Who wrote book {at}?",
                "answer": f"Author {at} wrote it.",
                "paraphrased_answer": f"It was written by author {at}.",
                "perturbed_answer": [f"Author {at + other} wrote it." for other in (1, 2, 3)],
            }
        )
        for at in range(count)
    ]


def teach(model: Any, tokenizer: Any, data: Path, steps: int) -> None:
    """AdamW on random answers of all rows but the held-out ones."""
    import torch

    from rosu_llm.data.chat_format import FORMATS, encode_chat

    rows = [json.loads(line) for name in ROWS if name != "holdout10" for line in (data / f"{name}.json").open()]
    samples = [encode_chat(row["question"], row["answer"], tokenizer, FORMATS[FORMAT]) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = random.Random(0)
    for _ in range(steps):
        batch = chosen.sample(samples, min(16, len(samples)))
        longest = max(len(sample.input_ids) for sample in batch)
        ids = torch.tensor([[*s.input_ids, *[tokenizer.eos_token_id] * (longest - len(s.input_ids))] for s in batch])
        labels = torch.tensor([[*s.labels, *[-100] * (longest - len(s.labels))] for s in batch])
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=ids != tokenizer.eos_token_id, labels=labels).loss.backward()
        optimizer.step()


def launch(world: int, folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Evaluate in ``world`` fresh processes of one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [__file__, "--child", str(folder), "--max-new-tokens", str(options.max_new_tokens)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finish(runs: list[subprocess.Popen[str]]) -> list[float]:
    """The seconds that each took, once all have ended."""
    printed = [run.communicate(timeout=7200)[0] for run in runs]
    if any(run.returncode for run in runs):
        raise SystemExit("An evaluation in processes of its own failed.")
    return [float(next(x.split()[1] for x in text.splitlines() if x.startswith("seconds "))) for text in printed]


def child(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, tokenizer = load(options.child)
    out = Path(tempfile.mkdtemp(dir=options.child))
    dist.barrier()
    started = time.perf_counter()
    ours(model, tokenizer, options.child, options, out)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"seconds {time.perf_counter() - started}", flush=True)
    dist.barrier()
    os._exit(0)  # tearing down gloo's threads aborts now and then


if __name__ == "__main__":
    main()
