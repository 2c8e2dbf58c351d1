"""Calls of ``rosu`` that nobody would make on purpose: verbs × flags × broken inputs, drawn from a seed.

Every call must end with an exit code and at most one line of explanation: no exception may leave ``main``, no traceback
may be printed, and no error may be one that nobody thought of (``unexpected …``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rosu_llm.cli import common
from rosu_llm.cli.main import main
from rosu_llm.recipes.settings import RunArguments
from rosu_llm.training.config import ROSUConfig
from tests.training.tiny_world import World

#: Seconds after which a call counts as hanging.
PATIENCE = 120

#: Text that is no good value anywhere.
NONSENSE = [
    "",
    " ",
    "abc",
    "-",
    "nan",
    "-inf",
    "-1",
    "0",
    "1e400",
    "0x10",
    "None",
    "true",
    "[1,",
    "{a: b}",
    "a=b",
    "é",
    "--",
]
#: Where a large number is only large, not slow.
LARGE = ["999999999999999999999", "1e30", "2147483648"]
#: Settings whose large values would take long, start processes, or ask the network.
SLOW = {"max_steps", "num_train_epochs", "dataloader_num_workers", "dataloader_prefetch_factor", "max_length"} | {
    *("gradient_accumulation_steps", "torch_empty_cache_steps", "retain_per_forget", "lora_r"),
    *("per_device_train_batch_size", "protect_rank"),
}
LEFT_OUT = {"push_to_hub", "torch_compile", "torch_compile_backend", "torch_compile_mode", "hub_token", "deepspeed"} | {
    *("log_level", "log_level_replica", "report_to", "dataloader_multiprocessing_context", "debug"),
}


class Inputs:
    """A small world, and everything that can be wrong with a file or folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "world").mkdir()
        self.folder, self.world = folder, World(folder / "world")
        self.run = folder / "run"
        assert main(["train", *self.world.flags(self.run, max_steps=2, save_steps=1)]) == 0
        self.config = folder / "run.yaml"
        settings = self.world.settings(folder / "configured", method="rosu", forget_data=self.forget, max_steps=1)
        self.config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
        self.broken = [str(path) for path in self._broken_files()]
        self.broken += [
            "/",
            "/dev/null",
            "/proc/self/mem",
            "/proc/1/x",
            "~nobody-here/x",
            "a" * 5000,
            "nul\0l",
            "\udcff",
        ]

    @property
    def forget(self) -> str:
        return f"{self.world.data}:forget10"

    def _broken_files(self) -> Iterator[Path]:
        place = self.folder / "broken"
        place.mkdir()
        contents: dict[str, bytes] = {
            "empty.jsonl": b"",
            "cut.jsonl": b'{"question": "a", "ans',
            "list.json": b"[1, 2]",
            "text.json": b'"text"',
            "latin.jsonl": '{"question": "é", "answer": "é"}'.encode("latin-1"),
            "numbers.jsonl": b'{"question": 1, "answer": [1]}\n',
            "nan.jsonl": b'{"question": "q", "answer": NaN}\n',
            "deep.json": b"[" * 100_000,
            "zeros.safetensors": bytes(64),
            "short.csv": b"question,answer\nq\n",
            "broken.parquet": b"PAR1",
            "twice.yaml": b"rho: 1\nrho: 2\n",
            "list.yaml": b"- 1\n",
            "tabs.yaml": b"a:\n\t- b\n",
            "bytes.yaml": b"\xff\xfe\x00",
            "python.yaml": b"a: !!python/object/apply:os.system [true]\n",
            "no_study.db": b"SQLite format 3\0 no",
        }
        for name, content in contents.items():
            (place / name).write_bytes(content)
            yield place / name
        yield place  # a folder where a file is meant
        yield place / "absent"
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            copy = place / f"model_without_{name}"
            shutil.copytree(self.world.model, copy)
            half = (copy / name).read_bytes()
            (copy / name).write_bytes(half[: len(half) // 2])
            yield copy
        for name, text in {
            "trainer_state.json": "[]",
            "rosu_run.json": '{"settings": 3}',
            "README.md": "---\n: :\n---",
        }.items():
            copy = place / f"run_{name}"
            shutil.copytree(self.run, copy)
            (copy / name).write_text(text)
            yield copy
        adapter = place / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": 3}')
        yield adapter
        evals = place / "evals"
        evals.mkdir()
        (evals / "TOFU_EVAL.json").write_text('{"model_utility": {"agg_value": "high"}, "forget_Q_A_Prob": []}')
        (evals / "rosu_eval.json").write_text('{"conditions": [], "weights": 7}')
        yield evals

    def commands(self) -> list[list[str]]:
        """Sound calls of every verb, each a second or two, to be spoilt."""
        out, flags = str(self.folder / "out"), self.world.flags
        rosu = {"method": "rosu", "forget_data": self.forget, "max_steps": 1, "save_strategy": "no", "overwrite": True}
        measured = ["--data", str(self.world.data), "--chat-format", "Llama-2-7b-hf", "--max-new-tokens", "1"]
        return [
            ["train", *flags(Path(out), **rosu)],
            ["train", *flags(Path(out), **rosu, lora_r=2)],
            ["train", *flags(self.run, max_steps=3, save_steps=1, resume_from_checkpoint=True)],
            ["train", "--config", str(self.config), "--overwrite", "true"],
            ["diagnose", "--config", str(self.config), "--pairs", "1", "--points", "0", "--out", out],
            [
                "audit",
                "orthogonality",
                "--config",
                str(self.config),
                "--pairs",
                "2",
                "--batch-sizes",
                "1",
                "--out",
                out,
            ],
            ["audit", "safeguards", str(self.run), "--out", out],
            ["audit", "sensitivity", str(self.run), "--out", out],
            ["report", str(self.run), "--out", out],
            ["table", str(self.run)],
            ["eval", "tofu", str(self.run), *measured, "--out", out, "--fluency-model", "none"],
            ["eval", "wmdp", str(self.run), "--out", out, "--data-dir", str(self.folder), "--limit", "1"],
            ["ablate", "--config", str(self.config), "--out", out, "--axis", "rho=0.2"],
            ["sweep", "--config", str(self.config), "--out", out, "--set", "rho=0.1,0.2", "--trials", "1"],
            ["demo", "--smoke", "--out", str(self.folder / "broken" / "empty.jsonl")],
        ]


def settings() -> list[str]:
    names = [f.name for kind in (RunArguments, ROSUConfig) for f in dataclasses.fields(kind) if f.init]
    return [name for name in names if name not in LEFT_OUT and not name.startswith(("hub_", "push_", "fsdp", "_"))]


def spoil(call: list[str], inputs: Inputs, draw: random.Random) -> list[str]:
    """One to three things go wrong."""
    call = list(call)
    names = settings()
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        flags = [at for at, word in enumerate(call) if word.startswith("--") and at + 1 < len(call)]
        kind = draw.random()
        if kind < 0.35 and flags:  # a flag's value, or the flag itself
            at = draw.choice(flags)
            slow = call[at][2:].replace("-", "_") in SLOW | {
                "pairs",
                "trials",
                "points",
                "max_new_tokens",
                "batch_sizes",
            }
            call[at + 1] = draw.choice([*NONSENSE, *inputs.broken, *([] if slow else LARGE)])
        elif kind < 0.45 and len(call) > 2:
            at = draw.randrange(1, len(call))
            if call[at] != "--smoke":  # the demo itself takes minutes
                del call[at]
        elif kind < 0.55:  # what has no flag
            at = draw.randrange(1, len(call) + 1)
            call.insert(at, draw.choice([*NONSENSE, *inputs.broken]))
        elif kind < 0.9:  # a setting of rosu train
            name = draw.choice(names)
            value = draw.choice([*NONSENSE, *inputs.broken, *([] if name in SLOW else LARGE)])
            call += [f"--{name.replace('_', '-')}", value]
        else:
            call += [
                draw.choice(["--no-such-flag", "--smok", "--out", "--config", "-x", "--seed"]),
                draw.choice(NONSENSE),
            ]
    return call


class Hangs(BaseException):
    """A call took longer than :data:`PATIENCE`."""


def run_call(call: list[str]) -> str | None:
    """What was wrong with how the call ended; None if nothing was."""

    def hang(*_: Any) -> None:
        raise Hangs

    shown, printed = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(printed):
            code: Any = main(call)
    except SystemExit as error:  # argparse: usage and one line
        code = error.code
    except Hangs:
        return "hangs"
    except BaseException as error:
        return f"{type(error).__name__} left main: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    text = shown.getvalue() + printed.getvalue()
    if "Traceback (most recent call last)" in text:
        return "printed a traceback: " + text.strip().splitlines()[-1]
    strange = [line for line in text.splitlines() if ": unexpected " in line]
    if strange:
        return strange[0]
    if code not in (0, None) and not text.strip():
        return f"exit code {code} without a word"
    return None


def fuzz(folder: Path, calls: int, seed: int = 0) -> tuple[list[str], Counter[str]]:
    """Make so many calls; returns what went wrong, and how many calls each verb had."""
    inputs = Inputs(folder)
    draw = random.Random(seed)
    sound = inputs.commands()
    problems, counts = [], Counter[str]()
    real, common.os.execv = common.os.execv, _instead_of_launching  # type: ignore[attr-defined]
    try:
        for _ in range(calls):
            call = spoil(draw.choice(sound), inputs, draw)
            counts[call[0] if call else "none"] += 1
            shutil.rmtree(folder / "out", ignore_errors=True)
            if (problem := run_call(call)) is not None:
                problems.append(f"{problem[:300]}\n    rosu {' '.join(map(repr, call))[:900]}")
    finally:
        common.os.execv = real  # type: ignore[attr-defined]
    return problems, counts


def _instead_of_launching(*_: Any) -> None:
    raise SystemExit(0)
