"""Runs that would go wrong without a word: workers, references, evaluation, resumption, second derivatives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rosu_llm import ROSUConfig, ROSUTrainer, UnlearningStep
from rosu_llm.cli.main import main
from rosu_llm.compat import transformers_is
from rosu_llm.data.pairing import ForgetRetainDataset
from rosu_llm.errors import ConfigError, DataError, UnsupportedLayoutError
from rosu_llm.files import parse_yaml
from rosu_llm.losses import ReferenceModel, logits_of
from rosu_llm.recipes.record import check_same_run
from rosu_llm.recipes.settings import build, read_config
from rosu_llm.space.hessian import hessian_product, probe
from rosu_llm.space.preconditioner import check_adaptive, preconditioners_of
from tests.models import CleanLM, flat, samples, tiny_llama
from tests.training.tiny_world import World


def config(out: Path, **changes: Any) -> ROSUConfig:
    base = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2}
    return ROSUConfig(output_dir=str(out), **{**base, "max_steps": 1, "logging_steps": 1, **changes})


# -- workers ------------------------------------------------------------------------------------------------


class Recording(ForgetRetainDataset):
    """Items say which pairs they are, so that what reaches the trainer can be compared."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        first = self.partners(index)[0]
        return {**item, "retain": [{"input_ids": [5, 6, 7, 10 + first], "labels": [-100, -100, -100, 10 + first]}]}


class Seen(ROSUTrainer):
    def training_step(self, model: nn.Module, inputs: Any, *rest: Any) -> Tensor:
        self.__dict__.setdefault("seen", []).append(inputs["retain"]["labels"][:, -1].tolist())
        return super().training_step(model, inputs, *rest)


def seen(out: Path, resume: bool = False, **changes: Any) -> tuple[list[Any], Tensor]:
    data = Recording(samples(4, 1), samples(9, 2), seed=3)
    args = config(out, num_train_epochs=3, max_steps=-1, per_device_train_batch_size=2, seed=1, **changes)
    trainer = Seen(tiny_llama(), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer.__dict__["seen"], flat(trainer.model.parameters())


def test_persistent_workers_see_every_epochs_own_pairs(tmp_path: Path) -> None:
    alone, weights = seen(tmp_path)
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    together, other = seen(tmp_path, **workers, save_strategy="steps", save_steps=3)
    assert together == alone and torch.equal(weights, other)
    assert len({tuple(map(tuple, alone[at : at + 2])) for at in (0, 2, 4)}) == 3  # the epochs differ
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    resumed, again = seen(tmp_path, resume=True, **workers)
    assert resumed == alone[3:] and torch.equal(weights, again)


def test_persistent_workers_of_a_data_set_that_cannot_share_its_epoch(tmp_path: Path) -> None:
    class Own(list):
        def set_epoch(self, epoch: int) -> None: ...

    with pytest.raises(ConfigError, match="dataloader_persistent_workers=True keeps copies of Own"):
        ROSUTrainer(
            tiny_llama(),
            config(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True),
            train_dataset=Own([{"forget": s, "retain": s} for s in samples(2, 0)]),
        )


# -- the initial model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bias", "norms", "adapter alone"])
def test_the_initial_model_stays_what_it_was_when_more_than_the_adapter_trains(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_llama(attention_bias=True)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    before = logits_of(model.eval(), batch)
    bias = "all" if kind == "bias" else "none"
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], bias=bias))
    if kind == "norms":
        for name, p in adapted.named_parameters():
            if "norm" in name:
                p.requires_grad_(True)
    reference = ReferenceModel(adapted)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.add_(0.3)
    moved = flat(adapted.parameters())
    assert torch.equal(reference(batch), before)
    assert torch.equal(flat(adapted.parameters()), moved) and not torch.allclose(logits_of(adapted, batch), before)
    assert bool(reference.beside) == (kind != "adapter alone")


def test_a_second_training_compares_with_the_same_initial_model(tmp_path: Path) -> None:
    """NPO's references are of the model before unlearning, not of what the first training made of it."""
    data = ForgetRetainDataset(samples(4, 1), samples(4, 2))
    trainer = ROSUTrainer(tiny_llama(), config(tmp_path, forget_loss="npo", max_steps=2), train_dataset=data)
    trainer.train()
    first = dict(trainer._references.logprobs.values)
    trainer.train()
    assert trainer._references.logprobs.values == first
    again = ROSUTrainer(None, config(tmp_path, forget_loss="npo"), train_dataset=data, model_init=lambda: tiny_llama(7))
    again.train()
    other = dict(again._references.logprobs.values)
    again.model_init = lambda: tiny_llama(8)  # another model: its own references
    again.train()
    assert again._references.logprobs.values.keys() == other.keys()
    assert again._references.logprobs.values != other


# -- evaluation inside training -----------------------------------------------------------------------------


def test_npo_with_held_out_pairs(tmp_path: Path) -> None:
    held = ForgetRetainDataset(samples(3, 5), samples(3, 6))
    args = config(tmp_path, forget_loss="npo", max_steps=2, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    data = ForgetRetainDataset(samples(4, 1), samples(4, 2))
    trainer = ROSUTrainer(tiny_llama(), args, train_dataset=data, eval_dataset={"held": held})
    trainer.train()
    values = [entry["eval_held_forget_loss"] for entry in trainer.state.log_history if "eval_held_forget_loss" in entry]
    # at the initial model every ratio is 1: (2/β) log σ(0) = −20 log 2
    assert values[0] == pytest.approx(-20 * math.log(2)) and values[0] != values[-1]
    other = ForgetRetainDataset(samples(3, 15), samples(3, 16))
    figures = trainer.evaluate(other)
    assert "eval_loss" in figures and "eval_forget_loss" not in figures  # the initial model is gone


def test_the_losses_of_an_evaluation_do_not_depend_on_its_batches(tmp_path: Path) -> None:
    """Ragged samples; means over all answer tokens, counted one by one."""
    forget, retain = samples(5, 5, longest=30), samples(5, 6, longest=30)
    model = tiny_llama()

    def truth(part: list[dict[str, list[int]]]) -> float:
        total, count = 0.0, 0
        for sample in part:
            ids = torch.tensor([sample["input_ids"]])
            logs = model(input_ids=ids).logits[0].log_softmax(-1)
            for at in range(1, ids.shape[1]):
                if sample["labels"][at] != -100:
                    total, count = total - float(logs[at - 1, ids[0, at]]), count + 1
        return total / count

    def kept(dataset: ForgetRetainDataset) -> list[dict[str, list[int]]]:
        return [dataset[i]["retain"][0] for i in range(len(dataset))]

    held = ForgetRetainDataset(forget, retain)
    expected = truth(forget), truth(kept(held))
    for size in (1, 2, 5):
        args = config(tmp_path, per_device_eval_batch_size=size)
        figures = ROSUTrainer(model, args, train_dataset=held).evaluate(held)
        assert (figures["eval_forget_loss"], figures["eval_loss"]) == pytest.approx(expected, rel=1e-5)


# -- resuming -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    assert main(["train", *world.flags(out, max_steps=2, save_steps=1, logging_steps=10)]) == 0
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"data_seed": 3},
        {"neftune_noise_alpha": 5.0},
        {"train_sampling_strategy": "sequential"},
        {"adam_beta1": 0.5},
        {"adam_epsilon": 1e-3},
        {"optim_args": "a=1"},
        {"lr_scheduler_type": "constant"},
        {"dataloader_drop_last": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_decides_the_result_must_be_the_same(changes: dict[str, Any], world: World, begun: Path) -> None:
    name = next(iter(changes))
    if name not in ROSUConfig.__dataclass_fields__:
        pytest.skip("not a field of the installed version")
    recipe = build(world.settings(begun, **changes))
    with pytest.raises(ConfigError, match=rf"{name} was .*--allow-changed true"):
        check_same_run(str(begun / "checkpoint-1"), *recipe)
    recipe.arguments.allow_changed = True
    if name.startswith(("adam", "learning")):
        with pytest.raises(ConfigError, match=r"the optimizer's state .* would override it"):
            check_same_run(str(begun / "checkpoint-1"), *recipe)
    else:
        check_same_run(str(begun / "checkpoint-1"), *recipe)


def test_data_that_changed_since(world: World, begun: Path) -> None:
    path = world.data / "full.json"
    before = path.read_bytes()
    recipe = build(world.settings(begun))
    check_same_run(str(begun / "checkpoint-1"), *recipe)
    try:
        path.write_bytes(before + b'\n{"question": "new", "answer": "new"}')
        with pytest.raises(ConfigError, match=r"contents.retain_data was .*sha256"):
            check_same_run(str(begun / "checkpoint-1"), *recipe)
    finally:
        path.write_bytes(before)


def test_minima_over_a_logs_steps_survive_a_resumption(tmp_path: Path) -> None:
    data = ForgetRetainDataset(samples(8, 1), samples(8, 2))
    given = {"max_steps": 4, "logging_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = ROSUTrainer(tiny_llama(), config(tmp_path, **given), train_dataset=data)
    whole.train()
    resumed = ROSUTrainer(tiny_llama(), config(tmp_path, **given), train_dataset=data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    names = ("norm/retain_sq_min", "norm/q_min", "norm/q", "step/fallbacks")
    one, other = (next(e for e in t.state.log_history if "norm/q_min" in e) for t in (whole, resumed))
    assert {name: one[name] for name in names} == {name: other[name] for name in names}


@pytest.mark.skipif(not transformers_is("4.46"), reason="older versions of Trainer read batches themselves")
def test_a_run_resumed_at_its_end_makes_no_further_step(tmp_path: Path) -> None:
    """In the middle of an epoch; what was killed before it could save its model is asked to go on like that."""
    data = ForgetRetainDataset(samples(8, 1), samples(8, 2))
    given = {"max_steps": 3, "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 1}
    whole, again = (ROSUTrainer(tiny_llama(), config(tmp_path, **given), train_dataset=data) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 3
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))


# -- small things -------------------------------------------------------------------------------------------


def closures(model: nn.Module) -> tuple[Any, Any]:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    return (lambda: model(rows[:3]).square().mean()), (lambda: model(rows[3:]).abs().mean())


def test_a_first_group_without_a_learning_rate_does_not_switch_the_pull_off() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 0.1}]
    step = UnlearningStep(model, torch.optim.SGD(groups), rho=0.1)
    assert step(*closures(model))["step/amplification_ratio"] > 0.0


def test_parameters_outside_the_optimizer_do_not_pile_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    step = UnlearningStep(model, torch.optim.SGD(model[1].parameters(), lr=0.1), rho=0.1)
    window = {part: [closure] for part, closure in zip(("forget", "retain"), closures(model), strict=True)}
    step.compute(window, step=0, total=1)
    assert all(p.grad is None for p in model[0].parameters()) and all(p.grad is not None for p in model[1].parameters())
    mine = torch.ones_like(model[0].weight)
    model[0].weight.grad = mine  # of somebody else's loss: not ours to delete
    step.compute(window, step=0, total=1)
    assert model[0].weight.grad is mine and model[0].bias.grad is None


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_number_that_is_none_is_not_learned_as_text(value: str, world: World, tmp_path: Path, capsys: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "answer": ' + value + "}\n")
    assert main(["train", *world.flags(tmp_path / "out", retain_data=str(rows))]) == 2
    assert "which is no text" in capsys.readouterr().err


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rho: 0.4\nseed: 1\nrho: 0.2\n")
    with pytest.raises(ConfigError, match="the key 'rho' is there twice"):
        read_config(path)
    assert parse_yaml("a: {b: 1}\nc: {b: 2}") == {"a": {"b": 1}, "c": {"b": 2}}
    assert parse_yaml("x: &x {a: 1}\ny: {<<: *x, a: 2}")["y"] == {"a": 2}


def test_tables_are_read_as_they_are(tmp_path: Path) -> None:
    from datasets import Dataset

    from rosu_llm.data.sources import read_rows

    rows = [{"question": "How many, exactly?", "answer": "007"}, {"question": 'A "quoted"\nline', "answer": "NA"}]
    table = tmp_path / "rows.csv"
    table.write_text('question,answer\r\n"How many, exactly?",007\r\n"A ""quoted""\nline",NA\r\n', encoding="utf-8-sig")
    assert read_rows(str(table)) == rows
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    assert read_rows(str(tmp_path / "rows.parquet")) == rows
    assert read_rows(f"{tmp_path}:rows") in (rows, rows)
    for name, content, message in (
        ("short.csv", b"a,b\n1\n", "not as many fields"),
        ("open.csv", b'a,b\n"1,2\n', "cannot be read as CSV"),
        ("latin.csv", "a\né\n".encode("latin-1"), "not UTF-8"),
        ("empty.csv", b"a,b\n", "holds no row"),
        ("broken.parquet", b"PAR1 no", "cannot be read as parquet"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_rows(str(tmp_path / name))


# -- second derivatives -------------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    """x² with a hand-written backward that autograd cannot see through, as fused kernels have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * ctx.x * grads[0]


class Kernel(nn.Module):
    def __init__(self, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer, self.drop = nn.Linear(3, 4), nn.Linear(4, 1), nn.Dropout(dropout)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.outer(self.drop(_Fused.apply(h) if self.fused else h * h))


def test_a_kernel_without_second_derivative_is_noticed() -> None:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    made = {}
    for fused in (False, True):
        model = Kernel(fused)
        parameters = list(model.parameters())
        made[fused] = flat(
            hessian_product([lambda: model(rows).square().mean()], parameters, [p.data for p in parameters])
        )
    assert float((made[True] - made[False]).norm() / made[False].norm()) > 0.1  # wrong, and no exception
    model = Kernel(True)
    before = flat(model.parameters())
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, jacobian="exact")
    with pytest.raises(UnsupportedLayoutError, match=r"\d+% off finite differences"):
        step(*closures(model))
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sound_models_pass_the_probe_and_nothing_moves(dtype: torch.dtype) -> None:
    model = Kernel(False, dropout=0.5).to(dtype).train()
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, state = flat(model.parameters()), torch.get_rng_state()
    probe(
        lambda: model(rows).square().mean(), list(model.parameters()), [torch.randn_like(p) for p in model.parameters()]
    )
    torch.set_rng_state(state)
    lm = tiny_llama(attn_implementation="eager").to(dtype)
    ids = torch.randint(4, 61, (2, 12))
    vector = [torch.randn_like(p) for p in lm.parameters()]
    state = torch.get_rng_state()
    probe(lambda: lm(input_ids=ids).logits.square().mean(), list(lm.parameters()), vector)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(flat(model.parameters()), before)


def test_compiled_or_fused_models_have_no_second_derivative(tmp_path: Path) -> None:
    data = ForgetRetainDataset(samples(4, 1), samples(4, 2))
    for name in ("torch_compile", "use_liger_kernel"):
        args = config(tmp_path, jacobian="exact")
        setattr(args, name, True)
        with pytest.raises((UnsupportedLayoutError, ImportError), match=f"{name}|liger"):
            ROSUTrainer(tiny_llama(), args, train_dataset=data)
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UnsupportedLayoutError, match="attn_implementation='flash_attention_2' has no second derivative"
    ):
        ROSUTrainer(model, config(tmp_path, jacobian="no_a1"), train_dataset=data)


def test_optimizers_whose_moments_have_other_names() -> None:
    class AdamW(torch.optim.AdamW):
        __module__ = "bitsandbytes.optim.adamw"

    model = CleanLM()
    with pytest.raises(ConfigError, match="bitsandbytes's AdamW does not keep"):
        check_adaptive(AdamW(model.parameters()))
    p = next(model.parameters())
    groups = [{"params": [p], "betas": (0.9, 0.99), "eps": 1e-8}]
    stranger: Any = SimpleNamespace(state={p: {"state1": p, "state2": p, "step": 1}}, param_groups=groups)
    with pytest.raises(ConfigError, match="does not keep"):
        preconditioners_of(stranger, [p])


def test_a_diagnosis_with_an_adapter_is_the_same_every_time(world: World, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        torch.manual_seed(torch.seed() % 2**31)
        out = tmp_path / name
        settings = world.settings(out, method="rosu", forget_data=f"{world.data}:forget10", lora_r=2, lora_dropout=0.2)
        flags = [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        assert main(["diagnose", *flags, "--pairs", "2", "--points", "0", "--out", str(out)]) == 0
        document = json.loads((out / "diagnosis.json").read_text())
        found.append({key: value for key, value in document.items() if key not in ("date", "seconds", "output_dir")})
    assert found[0] == found[1]
