"""One process of representation-level training runs for the tests; started by torchrun.

    representation_worker.py FOLDER CASES_JSON

For every case (name → settings) a tiny checkpoint in FOLDER/original is trained. Windows hold twelve pairs however many
processes share them. Rank 0 writes θ, the logs and which corpus each step forgot from.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed.leaving import leave

WINDOW = 12


def run(folder: Path, name: str, settings: dict[str, Any]) -> None:
    from rosu_llm.data.corpus import AlternatingCorpora
    from tests.representation.running import Recorder, configuration, documents

    world = int(os.environ.get("WORLD_SIZE", "1"))
    resume, batch = settings.pop("resume", None), settings.pop("batch", 2)
    config = configuration(
        folder / name / "run",
        **{
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": WINDOW // (batch * world),
            "max_steps": 5,
            "learning_rate": 0.5,
            "rho": 0.3,
            "noise_std": 0.3,
            "max_grad_norm": 0.0,
            **({"ddp_backend": "gloo"} if world > 1 else {}),
            **settings,
        },
    )
    forget = [[{"input_ids": ids, "corpus": c} for ids in documents(14, 10 + c)] for c in (0, 1)]
    retain = [{"input_ids": ids, "corpus": 0} for ids in documents(15, 20)]
    trainer = Recorder(
        str(folder / "original"), config, train_dataset=AlternatingCorpora(forget, retain, window=WINDOW, seed=1)
    )
    if trainer.accelerator.num_processes != world:
        raise SystemExit(f"accelerate sees {trainer.accelerator.num_processes} processes instead of {world}")
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / name / "model"))
    mine = trainer.theta()
    drawn = [{int(c) for batch in window for c in batch["forget"]["corpus"]} for window in trainer.windows]
    if world > 1:
        everyone = [torch.zeros_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        if not all(torch.equal(theta, mine) for theta in everyone):
            raise SystemExit("replicas have drifted apart")
        turns: list[Any] = [None] * world
        dist.all_gather_object(turns, drawn)
        drawn = [set().union(*(turn[step] for turn in turns)) for step in range(len(drawn))]
    if trainer.accelerator.process_index == 0:
        save_file({"theta": mine, "start": trainer.path_of_theta[0]}, folder / name / "theta.safetensors")
        logs = [entry for entry in trainer.state.log_history if "loss/forget" in entry]
        record = {"layout": trainer.layout, "world": world, "logs": logs, "corpora": [sorted(d) for d in drawn]}
        (folder / name / "logs.json").write_text(json.dumps(record))


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    for name, settings in cases.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        run(folder, name, settings)
    leave()


if __name__ == "__main__":
    main()
