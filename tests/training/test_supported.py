"""Nothing that Trainer knows does nothing here without a word: it works, is refused by name, or says so."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from rosu_llm import ROSUConfig, ROSUTrainer, UnlearningStep
from rosu_llm.cli.main import main
from rosu_llm.data.pairing import ForgetRetainCollator, ForgetRetainDataset
from rosu_llm.errors import ConfigError, RosuError
from rosu_llm.training.supported import NO_EFFECT, REFUSED, SUPPORT, WORKS, as_table
from tests.conftest import ROOT
from tests.models import samples, tiny_llama
from tests.training.tiny_world import World

FIELDS = {f.name for f in dataclasses.fields(TrainingArguments) if f.init}


def config(out: Path, **changes: Any) -> ROSUConfig:
    base = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 1, "save_strategy": "no"}
    return ROSUConfig(output_dir=str(out), **{**base, **changes})


def trainer(out: Path, model: Any = None, *, changes: dict[str, Any] | None = None, **kwargs: Any) -> ROSUTrainer:
    pairs = ForgetRetainDataset(samples(4, 1), samples(4, 2))
    if model is None and "model_init" not in kwargs:
        model = tiny_llama()
    return ROSUTrainer(model, config(out, **(changes or {})), train_dataset=pairs, **kwargs)


def test_every_field_of_the_installed_version_is_known() -> None:
    """A new one is to be looked at, and put into the table with what becomes of it."""
    assert not FIELDS - SUPPORT.keys()
    assert {support.status for support in SUPPORT.values()} == {WORKS, REFUSED, NO_EFFECT}
    assert all(support.note for support in SUPPORT.values() if support.status != WORKS)


def test_the_page_shows_the_table() -> None:
    assert as_table() in (ROOT / "docs" / "training_arguments.md").read_text(encoding="utf-8")


#: A value that asks for something, of each field that is refused (wholly or for some values) or has no effect.
ASKING: dict[str, Any] = {
    "label_smoothing_factor": 0.1,
    "remove_unused_columns": True,
    "auto_find_batch_size": True,
    "include_num_input_tokens_seen": "all",
    "ddp_static_graph": True,
    "parallelism_config": {"tp_size": 2},
    "optim": "lomo",
    "train_sampling_strategy": "group_by_length",
    "average_tokens_across_devices": False,
    "torch_empty_cache_steps": 2,
    "length_column_name": "size",
}
#: Only of versions that are not installed, or in Trainer itself without effect.
OTHERS = {"group_by_length", "include_tokens_per_second", "mp_parameters", "tpu_num_cores", "save_safetensors"} | {
    *("dispatch_batches", "split_batches", "overwrite_output_dir", "fsdp_min_num_params"),
    *("do_train", "do_eval", "do_predict"),
}


def test_each_is_tried_below() -> None:
    special = {
        name for name, each in SUPPORT.items() if each.status != WORKS or each.wrong is not SUPPORT["fsdp"].wrong
    }
    assert special - OTHERS == ASKING.keys()


@pytest.mark.parametrize("name", sorted(ASKING))
def test_what_cannot_work_is_refused_or_said(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if name not in FIELDS:
        pytest.skip("not a field of the installed version")
    args = config(tmp_path)
    setattr(args, name, ASKING[name])  # past checks of TrainingArguments that need other packages
    pairs = ForgetRetainDataset(samples(4, 1), samples(4, 2))
    if SUPPORT[name].status == NO_EFFECT:
        with caplog.at_level(logging.WARNING, "rosu_llm"):
            ROSUTrainer(tiny_llama(), args, train_dataset=pairs)
        assert f"{name}={ASKING[name]!r} has no effect" in caplog.text
        return
    with pytest.raises(ConfigError, match=rf"{name}=.* is not supported: "):
        ROSUTrainer(tiny_llama(), args, train_dataset=pairs)


def test_defaults_are_neither_refused_nor_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rosu_llm"):
        trainer(tmp_path)
    assert not caplog.text


def test_rosu_train_refuses_before_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-name-or-path", "not/there", "--forget-data", "f", "--retain-data", "r", "--use-cpu", "true"]
    assert main(["train", *flags, "--label-smoothing-factor", "0.1", "--output-dir", str(tmp_path)]) == 2
    assert "label_smoothing_factor=0.1 is not supported" in capsys.readouterr().err


def test_losses_and_metrics_that_would_never_be_called(tmp_path: Path) -> None:
    pairs = ForgetRetainDataset(samples(4, 1), samples(4, 2))
    with pytest.raises(ConfigError, match="compute_loss_func would never be called"):
        trainer(tmp_path, compute_loss_func=lambda *_: None)
    for data in (pairs, {"held_out": pairs}):
        with pytest.raises(ConfigError, match="compute_metrics would never be called"):
            trainer(tmp_path, compute_metrics=lambda _: {}, eval_dataset=data)
    trainer(tmp_path, compute_metrics=lambda _: {}, eval_dataset=samples(4, 3))  # plain samples: as in Trainer


def test_a_routers_loss_is_not_left_out_silently(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=61, num_local_experts=2, output_router_logits=True)
    model = MixtralForCausalLM(given)
    with pytest.raises(ConfigError, match=r"output_router_logits=True.*auxiliary loss"):
        trainer(tmp_path, model)
    model.config.output_router_logits = False
    trainer(tmp_path, model)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("graddiff", {"jacobian": "exact"}),
        ("graddiff", {"components": "v_only"}),
        ("pcgrad", {"jacobian": "none"}),
        ("rosu", {"reflection": 1.0}),
        ("rosu", {"forget_weight": 2.0}),
        ("gu", {"eps_q": 1e-3}),
    ],
)
def test_options_of_other_methods_are_refused(method: str, option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))}=.* does nothing for method='{method}'"):
        config(tmp_path, method=method, **option)


@pytest.mark.parametrize("given", [{"rho_schedule": "cosine"}, {"beta": "two_phase"}], ids=str)
def test_schedules_need_the_length_of_the_run(given: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = UnlearningStep(model, optimizer, **given)
    rows = torch.randn(4, 3)
    with pytest.raises(ConfigError, match=rf"{next(iter(given))}=.* needs total_steps"):
        step(lambda: model(rows[:2]).square().mean(), lambda: model(rows[2:]).square().mean())
    again = UnlearningStep(model, optimizer, **given, total_steps=4)
    again(lambda: model(rows[:2]).square().mean(), lambda: model(rows[2:]).square().mean())


# -- models made later, adapters ----------------------------------------------------------------------------


def test_an_adapter_and_float32_weights_with_model_init(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    made = trainer(tmp_path, model_init=lambda: tiny_llama(dtype=torch.bfloat16), peft_config=adapter)
    assert hasattr(made.model, "disable_adapter")
    made = trainer(tmp_path, model_init=lambda: tiny_llama(dtype=torch.bfloat16))
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}


def test_an_adapter_follows_the_seed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed() % 2**31)
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        made = trainer(tmp_path, changes={"seed": seed}, peft_config=adapter)
        return next(p.detach().clone() for name, p in made.model.named_parameters() if "lora_A" in name)

    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))


@pytest.mark.parametrize(
    ("targets", "message"),
    [("q_proj, v_proj", None), ("q_proj,nowhere", "no layer is called nowhere"), ("q_proj,", "")],
)
def test_every_named_layer_gets_its_adapter(
    targets: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    world = World(tmp_path / "w" if (tmp_path / "w").mkdir() is None else tmp_path)
    flags = world.flags(tmp_path / "out", lora_r=2, lora_target_modules=targets, max_steps=1, save_strategy="no")
    code = main(["train", *flags])
    if message is not None:
        assert code == 2 and message in capsys.readouterr().err
        return
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert all(any(target in name for name in names) for target in ("q_proj", "v_proj"))


def test_virtual_tokens_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ConfigError, match="PromptTuningConfig puts virtual tokens before the text"):
        trainer(tmp_path, peft_config=prompt)
    with pytest.raises(ConfigError, match="virtual tokens"):
        trainer(tmp_path, peft.get_peft_model(tiny_llama(), prompt))


# -- models that cannot be served ---------------------------------------------------------------------------


def families() -> dict[str, Any]:
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM, BertLMHeadModel

    bert = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bart = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    return {
        "masked": BertForMaskedLM(BertConfig(**bert, vocab_size=61)),
        "bidirectional": BertLMHeadModel(BertConfig(**bert, vocab_size=61)),
        "encoder-decoder": BartForConditionalGeneration(
            BartConfig(**bart, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=61)
        ),
        "decoder": BertLMHeadModel(BertConfig(**bert, vocab_size=61, is_decoder=True)),
    }


@pytest.mark.parametrize("kind", ["masked", "bidirectional", "encoder-decoder", "decoder"])
def test_only_causal_language_models_are_served(kind: str, tmp_path: Path) -> None:
    model = families()[kind]
    if kind == "decoder":
        trainer(tmp_path, model).train()
        return
    with pytest.raises(ConfigError, match="not a causal language model"):
        trainer(tmp_path, model)


class SeesImages(torch.nn.Module):
    """A stand-in for a vision-language model: logits depend on an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm = tiny_llama()
        self.eye = torch.nn.Linear(4, 61)
        self.seen: list[torch.Size] = []

    def forward(self, input_ids: Any, attention_mask: Any = None, pixel_values: Any = None) -> Any:
        self.seen.append(pixel_values.shape)
        out = self.lm(input_ids=input_ids, attention_mask=attention_mask)
        out.logits = out.logits + self.eye(pixel_values).unsqueeze(1)
        return out


def test_inputs_that_the_model_takes_reach_it(tmp_path: Path) -> None:
    model = SeesImages()
    data = [
        [
            {**sample, "pixel_values": torch.full((4,), float(i)), "note": "text"}
            for i, sample in enumerate(samples(4, s))
        ]
        for s in (1, 2)
    ]
    before = model.eye.weight.detach().clone()
    made = ROSUTrainer(
        model,
        config(tmp_path, per_device_train_batch_size=2),
        train_dataset=ForgetRetainDataset(*data),
        data_collator=ForgetRetainCollator(0),
    )
    made.train()
    assert set(model.seen) == {torch.Size([2, 4])} and not torch.equal(model.eye.weight, before)


def test_images_of_different_size_are_joined_or_refused() -> None:
    collate = ForgetRetainCollator(0)
    sample = {"input_ids": [1, 2], "labels": [1, 2]}
    both = collate([{**sample, "patches": torch.ones(2, 5)}, {**sample, "patches": torch.ones(3, 5)}])
    assert both["patches"].shape == (5, 5)
    types = collate([{**sample, "token_type_ids": torch.ones(2)}, {"input_ids": [1], "token_type_ids": torch.ones(1)}])
    assert types["token_type_ids"].tolist() == [[1, 1], [1, 0]]
    with pytest.raises(RosuError, match="patches have shapes that cannot be batched"):
        collate([{**sample, "patches": torch.ones(2, 5)}, {**sample, "patches": torch.ones(2, 4)}])


def test_a_checkpoint_without_some_of_its_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "w").mkdir()
    world = World(tmp_path / "w")
    path = Path(world.model) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert main(["train", *world.flags(tmp_path / "out")]) == 2
    message = "lack 1 of the model's tensors, first model.layers.1.mlp.down_proj.weight"
    assert message in capsys.readouterr().err
    assert main(["eval", "tofu", world.model, "--data", str(world.data), "--chat-format", "Llama-2-7b-hf"]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="lack 1 of"):
        trainer(tmp_path, world.model)


class _Lomo(torch.optim.SGD):
    pass


def test_optimizers_that_step_inside_backward(tmp_path: Path) -> None:
    model = tiny_llama()
    made = trainer(tmp_path, model, optimizers=(_Lomo(model.parameters(), lr=0.1), None))
    with pytest.raises(ConfigError, match="_Lomo steps inside every backward pass"):
        made.train()
