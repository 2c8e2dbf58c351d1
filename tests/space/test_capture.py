"""Captured gradients in bf16: half the memory, and a perturbation that is neutral as far as eight bits go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer, UnlearningStep
from rosu_llm.errors import ConfigError
from rosu_llm.geometry import build_rule
from rosu_llm.space import LocalSpace
from tests.models import samples, tiny_llama


def captured(coupling: float, count: int = 20_000) -> tuple[LocalSpace, torch.Tensor, torch.Tensor]:
    """A space holding bf16 copies of f and r with the given cosine; and both in full."""
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(count, generator=generator)
    other = torch.randn(count, generator=generator)
    other -= other @ r / (r @ r) * r
    f = coupling * r / r.norm() + (1.0 - coupling**2) ** 0.5 * other / other.norm()
    parameter = nn.Parameter(torch.randn(count, generator=generator))
    space = LocalSpace([parameter])
    space.capture_dtype = torch.bfloat16
    space.begin()
    for name, gradient in (("f", f), ("r", r)):
        parameter.grad = gradient.clone()
        space.capture(name)
    return space, f, r


@pytest.mark.parametrize("coupling", [-0.9, 0.0, 0.3, 0.99, 0.9999])
def test_the_leak_is_bounded_by_the_rounding(coupling: float) -> None:
    """δ is orthogonal to the rounded r; |⟨r, δ⟩| ≤ ‖r − r̂‖ρ, and rounding to nearest moves an element by ≤ 2⁻⁹."""
    space, _, r = captured(coupling)
    inner = build_rule("rosu").inner(space.gram(["f", "r"]), 0.4)
    before = space.weights()[0].clone().double()
    with space.perturbed(inner.delta, precise=True):
        moved = space.weights()[0].double() - before
    leak = abs(float(moved @ r.double())) / (float(r.norm()) * 0.4)
    assert leak < 2**-9
    assert float(moved.norm()) == pytest.approx(0.4, rel=1e-3)


def test_two_copies_of_the_weights_are_kept_instead_of_three() -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        model = tiny_llama()
        ids = torch.randint(4, 60, (2, 8), generator=torch.Generator().manual_seed(0))
        step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, capture_dtype=dtype)
        step(lambda: model(input_ids=ids).logits[0].square().mean(), lambda: model(input_ids=ids).logits[1].mean())
        sizes[dtype] = step.space.held_bytes() / sum(p.numel() * 4 for p in model.parameters())
    assert sizes == {"float32": 3.0, "bfloat16": 2.0}


@pytest.mark.parametrize(
    "options", [{}, {"protect": "both"}, {"protect_rank": 2}, {"metric": "adam"}, {"jacobian": "exact"}]
)
def test_training_in_bf16_follows_that_in_float32(options: dict[str, object], tmp_path: Path) -> None:
    """Eight bits of the captured gradients, of which AdamW divides the small ones by small numbers: 5 % of the way."""
    ends = {}
    for dtype in ("float32", "bfloat16"):
        model = tiny_llama(attn_implementation="eager")
        config = ROSUConfig(
            str(tmp_path), rho=0.05, max_steps=3, learning_rate=1e-3, per_device_train_batch_size=3,
            use_cpu=True, report_to=[], capture_dtype=dtype, **options,
        )  # fmt: skip
        data = ForgetRetainDataset(samples(6, seed=1), samples(6, seed=2))
        ROSUTrainer(model, config, train_dataset=data).train()
        ends[dtype] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = torch.cat([p.detach().reshape(-1) for p in tiny_llama().parameters()])
    way = float((ends["float32"] - start).norm())
    assert 0.0 < float((ends["bfloat16"] - ends["float32"]).norm()) < 0.05 * way


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capture_dtype"):
        ROSUConfig(str(tmp_path), capture_dtype="float16")
    with pytest.raises(ConfigError, match="capture_device"):
        ROSUConfig(str(tmp_path), capture_device="disk")
    with pytest.raises(ConfigError, match="metric='euclidean'"):
        ROSUConfig(str(tmp_path), capture_device="cpu", metric="adam")


def test_too_little_host_memory_is_told_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    from rosu_llm.training.checks import check_host_memory

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 3 << 30}))
    check_host_memory(3 << 30)
    with pytest.raises(ConfigError, match=r"keeps 3.0 GiB.*bfloat16"):
        check_host_memory((3 << 30) + 1)
