"""Our losses beside those of OpenUnlearning's trainers: one model, one batch, value and gradient of both.

losses_worker.py CHECKOUT MODEL

Prints a JSON object: name → [their value, our value, ‖difference of the gradients‖ / ‖their gradient‖]. Their trainers'
own ``compute_loss`` runs, on an object that holds what their constructors would set; so weights, signs and means are
theirs as well.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def rows(model: Any, count: int, length: int, prompt: int, seed: int, *, padded: bool) -> dict[str, torch.Tensor]:
    """What the model says itself, so that its tokens are likely; ragged and with a prompt, or of one length."""
    torch.manual_seed(seed)
    start = torch.randint(300, 500, (count, 3))
    start[:, 0] = 1
    ids = model.generate(start, do_sample=True, max_new_tokens=length - 3, min_new_tokens=length - 3, pad_token_id=0)
    mask = torch.ones_like(ids)
    for row in range(count if padded else 0):
        mask[row, length - row :] = 0
    labels = torch.where((mask == 1) & (torch.arange(length) >= prompt), ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main() -> None:
    root, folder = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(root / "src"))
    from trainer.unlearn.dpo import DPO
    from trainer.unlearn.grad_diff import GradDiff
    from trainer.unlearn.npo import NPO
    from trainer.unlearn.satimp import SatImp
    from trainer.unlearn.simnpo import SimNPO
    from trainer.unlearn.undial import UNDIAL
    from trainer.unlearn.wga import WGA
    from transformers import AutoModelForCausalLM

    from rosu_llm.losses import COUNT, LossContext, ReferenceLogProbs, ReferenceModel, get_loss

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    initial = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * p.abs().mean() * torch.randn(p.shape, generator=generator)
    parameters = list(model.parameters())
    answers, others = rows(initial, 4, 20, 6, 0, padded=True), rows(initial, 4, 17, 6, 1, padded=True)
    retain = rows(initial, 4, 18, 5, 2, padded=True)
    everything = rows(
        initial, 4, 20, 0, 0, padded=False
    )  # UNDIAL: nothing but answers, as theirs counts every position

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.reshape(-1).double() for g in torch.autograd.grad(loss, parameters)])

    def theirs(trainer: Any, forget: Any, **settings: Any) -> torch.Tensor:
        own = SimpleNamespace(ref_model=initial, retain_loss_type="NLL", **{"gamma": 1.0, "alpha": 0.1, **settings})
        own.compute_retain_loss = partial(GradDiff.compute_retain_loss, own)
        loss: torch.Tensor = trainer.compute_loss(own, model, {"forget": forget, "retain": retain})
        return loss

    def ours(name: str, forget: Any, gamma: float = 1.0, alpha: float = 0.1, **options: float) -> torch.Tensor:
        known = ReferenceLogProbs()
        known.compute(initial, [forget, *([forget["alternate"]] if "alternate" in forget else [])])
        context = LossContext(options, known, ReferenceModel(initial))
        parts = []
        for role, loss, batch in (("forget", name, forget), ("retain", "nll", retain)):
            spec = get_loss(loss, role)
            parts.append(spec.function(model, batch, context) / COUNT[spec.unit](batch))
        return alpha * parts[1] - gamma * parts[0]

    both = {**answers, "alternate": others}
    nested = {"original": answers, "alternate": others}
    cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "graddiff": (theirs(GradDiff, answers, gamma=0.7, alpha=2.0), ours("nll", answers, 0.7, 2.0)),
        "npo": (theirs(NPO, answers, beta=0.1), ours("npo", answers, npo_beta=0.1)),
        "simnpo": (
            theirs(SimNPO, answers, beta=4.5, delta=0.5, gamma=0.125),
            ours("simnpo", answers, 0.125, simnpo_beta=4.5, simnpo_delta=0.5),
        ),
        "idk_dpo": (theirs(DPO, nested, beta=0.1, alpha=2.0), ours("idk_dpo", both, 1.0, 2.0, dpo_beta=0.1)),
        "altpo": (theirs(DPO, nested, beta=0.5), ours("altpo", both, dpo_beta=0.5)),
        "undial": (theirs(UNDIAL, everything, beta=10.0), ours("undial", everything, undial_beta=10.0)),
        "wga": (theirs(WGA, answers, beta=1.0), ours("wga", answers, wga_beta=1.0)),
        "satimp": (
            theirs(SatImp, answers, beta1=5.0, beta2=1.0, gamma=2.0),
            ours("satimp", answers, 2.0, satimp_beta1=5.0, satimp_beta2=1.0),
        ),
        # On purpose not equal: prompt and padding take part in theirs.
        "undial with a prompt": (theirs(UNDIAL, answers, beta=10.0), ours("undial", answers, undial_beta=10.0)),
    }
    found = {}
    for name, (their, our) in cases.items():
        truth, own = gradient(their), gradient(our)
        found[name] = [float(their), float(our), float((own - truth).norm() / truth.norm())]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
