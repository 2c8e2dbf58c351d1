"""Commands in a real OpenUnlearning checkout, offline and on a CPU.

OpenUnlearning asks the hub for data and models by name; folders of those names in the working directory win. So every
command runs in a workspace that holds the first rows of real TOFU files and a real Llama of 260 000 parameters.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MODEL = "Llama-3.2-1B-Instruct"
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

#: What a CPU needs, from OpenUnlearning's own options.
CPU_MODEL = ("model.model_args.attn_implementation=sdpa", "model.model_args.torch_dtype=float32")
CPU_TRAINER = (
    "trainer.args.warmup_epochs=0",
    "trainer.args.optim=adamw_torch",
    "trainer.args.bf16=false",
    "trainer.args.bf16_full_eval=false",
    "trainer.args.report_to=none",
)
#: Three steps of two micro-batches, logged each.
SMALL = (
    "forget_split=forget01",
    "retain_split=retain99",
    "trainer.args.per_device_train_batch_size=2",
    "trainer.args.gradient_accumulation_steps=2",
    "+trainer.args.max_steps=3",
    "trainer.args.learning_rate=1e-3",
    "trainer.args.logging_steps=1",
)
NO_EVALUATION = (
    "trainer.args.eval_on_start=false",
    "trainer.args.eval_strategy=no",
    "trainer.args.do_eval=false",
)
TWO_PROCESSES = (
    "+trainer.args.use_cpu=true",
    "+trainer.args.ddp_backend=gloo",
    "trainer.args.ddp_find_unused_parameters=false",  # the default is the string 'None'
)


def make_workspace(folder: Path, data: Path, rows: int) -> None:
    """The folders OpenUnlearning would otherwise download."""
    tofu = folder / "locuslab" / "TOFU"
    tofu.mkdir(parents=True)
    names = sorted(file.stem for file in (data / "tofu").glob("*.json"))
    for name in names:
        lines = (data / "tofu" / f"{name}.json").read_text().splitlines(keepends=True)
        (tofu / f"{name}.json").write_text("".join(lines[: 24 if name.startswith("holdout") else rows]))
    listing = "".join(f"- config_name: {name}\n  data_files: {name}.json\n" for name in names)
    (tofu / "README.md").write_text(f"---\nconfigs:\n{listing}---\n")
    (folder / "data").mkdir()
    (folder / "data" / "idk.jsonl").write_text("I don't know.\nI am not sure about that.\nThat is beyond me.\n")
    for name in (f"meta-llama/{MODEL}", f"open-unlearning/tofu_{MODEL}_full"):
        shutil.copytree(data / "stories260K", folder / name, copy_function=shutil.copyfile)
        file = folder / name / "tokenizer_config.json"
        settings = {**json.loads(file.read_text()), "chat_template": TEMPLATE}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the stored name is newer than OpenUnlearning's pins
        settings.pop("backend", None)
        file.write_text(json.dumps(settings))


@dataclass(frozen=True)
class Checkout:
    """A checkout, the interpreter of its environment, a workspace, and our package as an installed wheel."""

    root: Path
    python: str
    workspace: Path
    site: Path

    def start(
        self, command: list[str], *, installed: bool = True, timeout: int = 500, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the workspace; ``installed=False`` hides our package."""
        variables = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "PYTHON"))},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "HF_HOME": str(self.workspace / "hf"),
            "HF_DATASETS_CACHE": str(self.workspace / "cache"),
            **({"PYTHONPATH": str(self.site)} if installed else {}),
            **environment,
        }
        return subprocess.run(
            command,
            cwd=self.workspace,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def train(self, task: str, *overrides: str, world: int = 1, launch: tuple[str, ...] = (), **options: Any) -> str:
        """``python src/train.py --config-name=unlearn.yaml …`` with ``overrides`` last; returns what it printed."""
        command = [self.python, *launch]
        if world > 1 and not launch:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
            options.setdefault("ACCELERATE_USE_CPU", "true")
        flags = [o for o in overrides if o.startswith("-")]  # argparse wants them before the overrides
        overrides = tuple(o for o in overrides if not o.startswith("-"))
        command += [str(self.root / "src" / "train.py"), "--config-name=unlearn.yaml", *flags]
        if not any(o.startswith("experiment=") for o in overrides):
            command.append("experiment=unlearn/tofu/default")
        done = self.start([*command, f"task_name={task}", *CPU_MODEL, *CPU_TRAINER, *SMALL, *overrides], **options)
        text = done.stdout + done.stderr
        assert done.returncode == 0, text[-4000:]
        return text

    def saved(self, task: str) -> Path:
        """Where a run put its model."""
        return self.workspace / "saves" / "unlearn" / task

    def weights(self, task: str) -> torch.Tensor:
        """All weights a run saved, as one vector."""
        tensors = load_file(self.saved(task) / "model.safetensors")
        return torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])
