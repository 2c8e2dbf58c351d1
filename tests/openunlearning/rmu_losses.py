"""Prints RMU's losses as OpenUnlearning's own code has them; run by the interpreter of its environment.

    rmu_losses.py CHECKOUT FOLDER

FOLDER holds a model to train and one to compare with (``model``, ``initial``), and ``batch.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def main() -> None:
    checkout, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, str(checkout / "src"))
    from trainer.unlearn.rmu import RMU
    from transformers import AutoModelForCausalLM

    given = json.loads((folder / "batch.json").read_text())
    trainer = RMU.__new__(RMU)  # its losses alone: no Trainer around them
    model, trainer.ref_model = (AutoModelForCausalLM.from_pretrained(folder / n).eval() for n in ("model", "initial"))
    where = rf"model\.layers\.{given['layer']}"
    trainer.model_module, trainer.ref_module = (
        trainer._get_matching_module(each, where) for each in (model, trainer.ref_model)
    )
    trainer.control_vec = torch.tensor(given["control"]).view(1, 1, -1)
    trainer.retain_loss_type, found = "EMBED_DIFF", {}
    for name, (gamma, alpha) in {"forget": (1.0, 0.0), "retain": (0.0, 1.0)}.items():
        trainer.gamma, trainer.alpha = gamma, alpha
        parts = {part: {k: torch.tensor(v) for k, v in given[part].items()} for part in ("forget", "retain")}
        found[name] = float(trainer.compute_loss(model, parts))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
