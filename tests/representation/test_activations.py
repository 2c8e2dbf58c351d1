"""h and h₀ on the fast path equal those of full passes, in every family; checkpoints load in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm.compat import dtype_argument
from rosu_llm.representation.activations import FastActivations, PlainActivations
from rosu_llm.representation.loading import load_truncated
from tests.models import FAMILIES, tiny_decoder
from tests.representation.running import Collator, documents, parameter_names, pattern


def batch(side: str) -> dict[str, Tensor]:
    rows = [{"input_ids": ids} for ids in documents(3, 4, shortest=4, longest=11)]
    return Collator(side)._pad(rows)


def hooked(model: Any, layer: int, given: dict[str, Tensor]) -> Tensor:
    """The output of a layer in an ordinary forward pass."""
    seen: list[Any] = []
    hook = model.get_submodule(f"model.layers.{layer}").register_forward_hook(lambda _, __, out: seen.append(out))
    model(**given, use_cache=False)
    hook.remove()
    output: Tensor = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return output


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_and_gradients_are_those_of_full_passes(family: str, side: str) -> None:
    model, given = tiny_decoder(family), batch(side)
    model.requires_grad_(False)
    named = dict(model.named_parameters())
    theta = [named[name].requires_grad_() for name in parameter_names(family)]
    initial = {name: named[name].detach().clone() for name in parameter_names(family)}
    before = hooked(model, 2, given).detach()
    fast = FastActivations(model, model.model.layers, 1, 2, initial)
    plain = PlainActivations(model, "model.layers", 2)
    with torch.no_grad():
        for p in theta:
            p.add_(0.1 * torch.randn_like(p))
    after = hooked(model, 2, given)
    assert not torch.allclose(after, before, atol=1e-3)
    probe = torch.randn_like(after)
    truth = torch.autograd.grad((after * probe).sum(), theta)
    for activations in (fast, plain):
        prepared = activations.prepare(given)
        assert torch.equal(prepared.reference, before)
        assert not prepared.reference.requires_grad
        for _ in range(2):  # the surrogate pass uses what was prepared once more
            current = activations.current(prepared)
            assert torch.equal(current, after)
            for mine, its in zip(torch.autograd.grad((current * probe).sum(), theta), truth, strict=True):
                assert torch.equal(mine, its)
    # θ₀ is inserted for the reference only
    assert all(torch.equal(named[name], p) for name, p in zip(parameter_names(family), theta, strict=True))
    assert not model.model.layers[2]._forward_hooks and not model.model.layers[1]._forward_pre_hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lower_part_of_a_checkpoint_computes_the_same_bits(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = tiny_decoder(family)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    part = load_truncated(str(tmp_path), target_layer=2, trainable_parameters=pattern(family))
    assert part.stack == "layers" and len(part.model.layers) == 3
    assert list(part.stored.values()) == parameter_names(family)
    assert {name for name, p in part.model.named_parameters() if p.requires_grad} == set(part.stored)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **dtype_argument(torch.float32)).eval()
    # From layer 2 through a pre-hook of the norm: what comes out of the truncated model's last layer.
    seen: list[Any] = []
    part.model.layers[2].register_forward_hook(lambda _, __, out: seen.append(out))
    for side in ("left", "right"):
        given = batch(side)
        with torch.no_grad():
            part.model(**given, use_cache=False)
            output = seen.pop()
            assert torch.equal(output[0] if isinstance(output, tuple) else output, hooked(again, 2, given))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_types_of_a_checkpoint_loaded_in_part(
    family: str, wanted: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    """Frozen weights in the type asked for, trained ones float32; constants of the model do not lose digits."""
    from transformers import AutoModelForCausalLM

    tiny_decoder(family, dtype=stored).save_pretrained(tmp_path)
    part = load_truncated(str(tmp_path), target_layer=2, trainable_parameters=pattern(family), dtype=wanted)
    for name, p in part.model.named_parameters():
        assert p.dtype == (torch.float32 if name in part.stored else wanted), name
        assert not p.is_meta
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **dtype_argument(wanted))
    theirs = dict(again.model.named_buffers())
    for name, buffer in part.model.named_buffers():
        assert torch.equal(buffer.float(), theirs[name].float()), name
    if wanted == torch.float32:
        given = batch("right")
        part.model.layers[2].register_forward_hook(lambda _, __, out: seen.append(out))
        seen: list[Any] = []
        with torch.no_grad():
            part.model(**given, use_cache=False)
            output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
            assert torch.equal(output, hooked(again.eval(), 2, given))


@pytest.mark.parametrize("layer", [0, 3])
def test_the_first_and_the_last_layer_can_be_the_target(layer: int, tmp_path: Path) -> None:
    model, given = tiny_decoder(), batch("right")
    model.save_pretrained(tmp_path)
    where = rf"layers\.{layer}\.mlp\.down_proj\.weight"
    part = load_truncated(str(tmp_path), target_layer=layer, trainable_parameters=where)
    initial = {name: dict(part.model.named_parameters())[name].detach().clone() for name in part.stored}
    fast = FastActivations(part.model, part.model.layers, layer, layer, initial)
    prepared = fast.prepare(given)
    assert torch.equal(prepared.reference, hooked(model, layer, given))
    assert torch.equal(fast.current(prepared), prepared.reference)
