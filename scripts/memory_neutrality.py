"""How neutral a step is to the whole retain set, by what is protected: a batch, a memory, or stored gradients.

The memory is an average over batches, or the gradient of the whole retain set, taken anew every few steps.

On the embedded people: the model that knows everybody takes steps of unlearning. Every few steps the gradient r of all
retain samples is computed, and compared with the retain gradients that were protected and with δ (with v where there is
no δ). Neutral means cos(δ, r) = 0.

    python scripts/memory_neutrality.py
    python scripts/memory_neutrality.py --smoke      # seconds; only shows that it runs
"""

from __future__ import annotations

import argparse
import copy
from statistics import mean
from typing import Any

import torch


def flat(tensors: Any) -> torch.Tensor:
    """One long float64 vector."""
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def measure(
    world: Any, taught: Any, options: dict[str, Any], steps: int, every: int, batch: int
) -> tuple[float, float]:
    """Mean |cos(δ, r)|, and mean cosine between r and the part of the span that is protected."""
    from rosu_llm import ForgetRetainCollator, UnlearningStep
    from rosu_llm.geometry.slots import MEMORY, RETAIN
    from rosu_llm.losses import COUNT, LossContext, get_loss

    model = copy.deepcopy(taught)
    collate, nll = ForgetRetainCollator(0), get_loss("nll", "retain").function

    def loss(samples: list[Any]) -> torch.Tensor:
        rows = collate(samples)
        return nll(model, rows, LossContext()) / COUNT["token"](rows)

    step = UnlearningStep(model, torch.optim.AdamW(model.parameters(), lr=5e-4), rho=0.4, **options)
    forget, retain = list(world.data["forget"].samples), list(world.data["retain"].samples)
    count = step.rule.stored
    if count:
        step.store([lambda part=retain[i::count]: loss(part) for i in range(count)])
    generator = torch.Generator().manual_seed(0)

    def draw(samples: list[Any]) -> list[Any]:
        return [samples[int(i)] for i in torch.randperm(len(samples), generator=generator)[:batch]]

    found, near = [], []
    for t in range(steps):
        drawn = {"forget": draw(forget), "retain": draw(retain)}
        window = {part: [lambda rows=rows: loss(rows)] for part, rows in drawn.items()}
        if step.refresh_due(t):
            step.refresh(lambda: loss(retain))
        if t % every == every - 1:
            whole = flat(torch.autograd.grad(loss(retain), list(model.parameters())))
        outcome = step.compute(window, step=t, total=steps)
        falls_back = outcome.inner is not None and outcome.inner.fallback
        if t % every == every - 1 and not falls_back:
            captured = {name: flat(own) for name, own in step.space._captured.items()}
            if count:  # the optimizer's gradient is the step itself
                delta = flat(p.grad for p in model.parameters())
            else:
                assert outcome.inner is not None
                delta = torch.stack([c * captured[name] for name, c in outcome.inner.delta.coefficients.items()]).sum(0)
            found.append(abs(float(delta @ whole / (delta.norm() * whole.norm()))))
            names = {"memory": [MEMORY], "both": [RETAIN, MEMORY]}.get(options.get("protect", ""), [RETAIN])
            names = list(step.space.memory) if count else names
            basis, _ = torch.linalg.qr(torch.stack([captured[n] for n in names], 1))
            near.append(float((basis.T @ whole).norm() / whole.norm()))
        if step.space.step(step.optimizer):
            step.after_optimizer_step()
        step.optimizer.zero_grad(set_to_none=True)
    return mean(found), mean(near)


def main() -> None:
    """Print a markdown table."""
    from rosu_llm.experiments.demo.world import FULL, SMOKE, build_world, learn, small_llama

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    size = SMOKE if arguments.smoke else FULL
    if arguments.smoke:
        arguments.steps, arguments.batch = 8, 2
    world = build_world(arguments.seed, people=size.people)
    taught = small_llama(len(world.tokenizer), arguments.seed, hidden=size.hidden, layers=size.layers)
    everybody = [*world.data["forget"].samples, *world.data["retain"].samples]
    learn(taught, everybody, epochs=size.learning_epochs, seed=arguments.seed)
    rows: dict[str, dict[str, Any]] = {"batch": {}}
    for decay in (0.9, 0.97):
        rows[f"memory, decay {decay}"] = {"protect": "memory", "memory_decay": decay}
    rows["both, decay 0.9"] = {"protect": "both"}
    for steps in (1, 5, 15):
        named = f"memory, whole set every {f'{steps} steps' if steps > 1 else 'step'}"
        rows[named] = {"protect": "memory", "memory_refresh": steps}
    rows["both, whole set every 5 steps"] = {"protect": "both", "memory_refresh": 5}
    for count in (1, 8):
        rows[f"stored (`forget_only`), {count} direction{'s' if count > 1 else ''}"] = {
            "method": "forget_only",
            "directions": count,
        }
    print("| protected | cos(δ, r) | share of r inside the protected span |")
    print("|---|---:|---:|")
    for name, options in rows.items():
        leak, inside = measure(world, taught, options, arguments.steps, arguments.every, arguments.batch)
        print(f"| {name} | {leak:.3f} | {inside:.3f} |", flush=True)


if __name__ == "__main__":
    main()
