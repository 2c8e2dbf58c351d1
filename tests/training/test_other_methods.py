"""SSD, SCRUB and LLMU against dense transcriptions of their equations, in float64, through the trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainingArguments

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer, UnlearningStep
from rosu_llm.data.mismatch import mismatched
from rosu_llm.data.sweep import SweepDataset
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.recipes.run import instead_of_training, run
from rosu_llm.recipes.settings import build
from rosu_llm.training.config import MethodArguments
from tests.models import CleanLM, flat, samples, tiny_llama
from tests.training.test_trainer_step import FORGET, RETAIN, train
from tests.training.tiny_world import World

Sample = dict[str, list[int]]


def logprobs(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
    """log p at each answer position of one sample, and the answer's tokens."""
    ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])
    rows = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    keep = labels[1:] != -100
    return rows[keep], labels[1:][keep]


def nll(model: nn.Module, chosen: list[Sample]) -> Tensor:
    """Mean over all answer tokens, one sample after the other."""
    found = [logprobs(model, sample) for sample in chosen]
    return -torch.cat([rows.gather(1, tokens[:, None])[:, 0] for rows, tokens in found]).mean()


def kl(initial: nn.Module, model: nn.Module, chosen: list[Sample]) -> Tensor:
    terms = []
    for sample in chosen:
        before, now = logprobs(initial, sample)[0].detach(), logprobs(model, sample)[0]
        terms.append((before.exp() * (before - now)).sum(-1))
    return torch.cat(terms).mean()


def gradient(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def descend(model: nn.Module, loss: Tensor, rate: float) -> None:
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradient(loss, model), strict=True):
            p -= rate * g


def far(model: nn.Module, expected: nn.Module, start: nn.Module) -> float:
    """‖w − w*‖ over how far w* moved."""
    w, truth, before = (flat(m.parameters()) for m in (model, expected, start))
    return float((w - truth).norm() / (truth - before).norm())


# -- llmu --------------------------------------------------------------------------------------------------------------


class WithMismatch(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sample i of each set, and question i with the answer of the next retain sample."""

    def __init__(self) -> None:
        self.forget, self.retain = FORGET, RETAIN
        self.wrong = [mismatched(FORGET[i], RETAIN[(i + 1) % 8]) for i in range(8)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"forget": FORGET[i], "retain": RETAIN[i], "mismatch": self.wrong[i]}


def test_llmu_is_its_three_losses(tmp_path: Path) -> None:
    """Two steps, since the KL has no gradient at the initial weights."""
    model, data = CleanLM().double(), WithMismatch()
    initial, expected = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(2):
        loss = -0.5 * nll(expected, FORGET) + nll(expected, data.wrong) + kl(initial, expected, RETAIN)
        descend(expected, loss, 0.1)
    trainer = train(model, tmp_path, method="llmu", pairs=data, max_steps=2)
    assert trainer.method_args.retain_loss == "kl"
    assert far(model, expected, initial) < 1e-10  # float64; nothing but the order of sums differs


def test_llmus_weights_are_options(tmp_path: Path) -> None:
    model, data = CleanLM().double(), WithMismatch()
    initial, expected = copy.deepcopy(model), copy.deepcopy(model)
    descend(expected, -2.0 * nll(expected, FORGET) + 0.25 * nll(expected, data.wrong), 0.1)
    train(model, tmp_path, method="llmu", pairs=data, ascent_weight=2.0, mismatch_weight=0.25, normal_weight=9.0)
    assert far(model, expected, initial) < 1e-10


def test_a_mismatched_sample_is_one_question_and_the_others_answer() -> None:
    asked = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 0]}
    told = {"input_ids": [1, 2, 3, 9, 10], "labels": [-100, -100, -100, 9, 10]}
    assert mismatched(asked, told) == {
        "input_ids": [5, 6, 9, 10], "labels": [-100, -100, 9, 10], "attention_mask": [1, 1, 1, 1],
    }  # fmt: skip
    text, other = {"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7, 8, 9, 10]}
    assert mismatched(text, other) == {"input_ids": [1, 2, 8, 9, 10], "labels": [-100, -100, 8, 9, 10]}


def test_wrong_answers_change_with_the_epoch_and_never_belong_to_the_question() -> None:
    forget, retain = samples(4, seed=1), samples(9, seed=2)
    data = ForgetRetainDataset(forget, retain, mismatch=True)
    answers = [tuple(s["input_ids"][3:]) for s in retain]
    drawn = []
    for epoch in range(2):
        data.set_epoch(epoch)
        for i, sample in enumerate(forget):
            wrong = data[i]["mismatch"]
            assert wrong["input_ids"][:3] == sample["input_ids"][:3]
            drawn.append(answers.index(tuple(wrong["input_ids"][3:])))
    assert len(set(drawn)) == 8  # a deck of nine


# -- scrub -------------------------------------------------------------------------------------------------------------


def test_scrub_keeps_and_forgets_in_turn(tmp_path: Path) -> None:
    """Epochs of two steps: min, max, min, and from then on min, for one max epoch is asked for."""
    model = CleanLM().double()
    initial, expected = copy.deepcopy(model), copy.deepcopy(model)
    for epoch in range(4):
        for rows in (slice(0, 4), slice(4, 8)):
            if epoch == 1:
                loss = -kl(initial, expected, FORGET[rows])
            else:
                loss = 0.3 * kl(initial, expected, RETAIN[rows]) + 2.0 * nll(expected, RETAIN[rows])
            descend(expected, loss, 0.1)
    trainer = train(
        model, tmp_path, method="scrub", scrub_max_epochs=1, scrub_kl_weight=0.3, scrub_task_weight=2.0,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=4,
    )  # fmt: skip
    logged = ["forget" if "loss/forget" in entry else "retain" for entry in trainer.state.log_history[:-1]]
    assert logged == ["retain"] * 2 + ["forget"] * 2 + ["retain"] * 4
    assert far(model, expected, initial) < 1e-10


def test_a_llama_needs_no_copy_of_the_teacher(tmp_path: Path) -> None:
    """Hidden states of both sets and the output layer give the same run as a frozen copy, to float32."""
    results = []
    for kind in (list, ForgetRetainDataset):
        model = tiny_llama()
        pairs: Any = ForgetRetainDataset(FORGET, RETAIN)
        if kind is list:  # a data set that lists no retain samples: a copy is kept
            pairs = [pairs[i] for i in range(8)]
        settings = {"per_device_train_batch_size": 4, "max_steps": 4, "scrub_max_epochs": 1, "learning_rate": 0.5}
        trainer = train(model, tmp_path, method="scrub", pairs=pairs, **settings)
        assert (trainer._references.states is None) == (kind is list)
        results.append(flat(model.parameters()))
    moved = (results[0] - flat(tiny_llama().parameters())).norm()
    assert float((results[0] - results[1]).norm() / moved) < 1e-4


def test_scrub_never_runs_without_forgetting(tmp_path: Path) -> None:
    """Whatever way the settings come: an epoch that is too short is refused at once, steps before the first of them."""
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "remove_unused_columns": False}
    data = ForgetRetainDataset(FORGET, RETAIN)
    with pytest.raises(ConfigError, match="num_train_epochs=1 with method='scrub'"):
        ROSUTrainer(
            tiny_llama(), TrainingArguments(num_train_epochs=1, **arguments), train_dataset=data,
            method_args=MethodArguments(method="scrub"),
        )  # fmt: skip
    short = ROSUTrainer(
        tiny_llama(), TrainingArguments(max_steps=2, per_device_train_batch_size=4, **arguments), train_dataset=data,
        method_args=MethodArguments(method="scrub"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="max_steps=2 ends in the first epoch, and method='scrub' keeps"):
        short.train()
    assert torch.equal(flat(short.model.parameters()), flat(tiny_llama().parameters()))
    assert instead_of_training(short, lambda: "measured") == "measured"  # where no step is made, none is missed


# -- ssd ---------------------------------------------------------------------------------------------------------------


def fisher(model: nn.Module, chosen: list[list[Sample]]) -> list[Tensor]:
    """Mean over groups of the squared gradient of the group's mean loss."""
    squares = [[g.square() for g in gradient(nll(model, group), model)] for group in chosen]
    return [torch.stack(column).mean(0) for column in zip(*squares, strict=True)]


def dampened(model: nn.Module, forget: list[Tensor], retain: list[Tensor], alpha: float, lam: float) -> nn.Module:
    result = copy.deepcopy(model)
    with torch.no_grad():
        for p, f, r in zip(result.parameters(), forget, retain, strict=True):
            for i in range(p.numel()):
                if f.view(-1)[i] > alpha * r.view(-1)[i]:
                    p.view(-1)[i] *= min(1.0, float(lam * r.view(-1)[i] / f.view(-1)[i]))
    return result


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (3, 2)])
def test_ssd_is_its_equation(tmp_path: Path, batch: int, accumulation: int) -> None:
    """Sets of different length, in windows that do not divide them: every sample counts once."""
    model, retain = CleanLM().double(), samples(11, seed=2)
    initial = copy.deepcopy(model)
    truth = fisher(model, [[s] for s in FORGET]), fisher(model, [[s] for s in retain])
    expected = dampened(model, *truth, alpha=3.0, lam=0.7)
    trainer = train(
        model, tmp_path, method="ssd", ssd_alpha=3.0, ssd_lambda=0.7,
        pairs=SweepDataset(FORGET, retain, multiple=batch),
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=-1, num_train_epochs=9,
        optim="adamw_torch", weight_decay=0.5,  # neither has a part
    )  # fmt: skip
    assert trainer._step is None or trainer._step.sweep is not None
    assert far(model, expected, initial) < 1e-10
    logs = trainer.state.log_history[-2]
    chosen = sum(int((f > 3.0 * r).sum()) for f, r in zip(*truth, strict=True))
    assert logs["ssd/selected"] == pytest.approx(chosen / sum(int((f > 0).sum()) for f in truth[0]))
    assert 0.0 < logs["ssd/kept"] < 0.7 / 3.0


def test_ssd_squares_windows_as_the_released_code_squares_batches(tmp_path: Path) -> None:
    model = CleanLM().double()
    initial = copy.deepcopy(model)
    groups = [slice(0, 4), slice(4, 8)]
    truth = (fisher(model, [part[rows] for rows in groups]) for part in (FORGET, RETAIN))
    expected = dampened(model, *truth, alpha=2.0, lam=1.0)
    train(
        model, tmp_path, method="ssd", ssd_alpha=2.0, fisher="window", pairs=SweepDataset(FORGET, RETAIN),
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=1,
    )  # fmt: skip
    assert far(model, expected, initial) < 1e-10


@pytest.mark.parametrize(("count", "groups"), [(4, [(0, 2), (2, 4)]), (3, [(0, 2), (2, 3)])])
def test_windows_in_which_a_set_has_ended_add_nothing_to_it(
    tmp_path: Path, count: int, groups: list[tuple[int, int]]
) -> None:
    """Six windows of two: the forget samples are in the first two, one of which may be half full."""
    model, retain = CleanLM().double(), samples(12, seed=2)
    initial, forget = copy.deepcopy(model), FORGET[:count]
    truth = (
        fisher(model, [forget[a:b] for a, b in groups]),
        fisher(model, [retain[i : i + 2] for i in range(0, 12, 2)]),
    )
    expected = dampened(model, *truth, alpha=2.0, lam=1.0)
    trainer = train(
        model, tmp_path, method="ssd", ssd_alpha=2.0, fisher="window", pairs=SweepDataset(forget, retain, multiple=2),
        per_device_train_batch_size=2, max_steps=-1, num_train_epochs=1,
    )  # fmt: skip
    assert far(model, expected, initial) < 1e-10
    assert ["loss/forget" in entry for entry in trainer.state.log_history[:-1]] == [True] * 2 + [False] * 4


def test_ssd_refuses_fp16_whatever_way_it_comes(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], remove_unused_columns=False)
    object.__setattr__(arguments, "fp16", True)  # some versions refuse it themselves without a GPU
    with pytest.raises(ConfigError, match="fp16=True with method='ssd'"):
        ROSUTrainer(
            tiny_llama(), arguments, train_dataset=SweepDataset(FORGET, RETAIN),
            method_args=MethodArguments(method="ssd"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "line"),
    [("sample", "one forward+backward pass per sample"), ("window", "2 forward+backward passes per step")],
)
def test_the_passes_of_a_sweep_are_told_as_they_are(tmp_path: Path, how: str, line: str) -> None:
    model, passes = CleanLM().double(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    settings = {"per_device_train_batch_size": 4, "max_steps": -1, "num_train_epochs": 1, "ssd_alpha": 2.0}
    trainer = train(model, tmp_path, method="ssd", fisher=how, pairs=SweepDataset(FORGET, RETAIN), **settings)
    assert len(passes) == (16 if how == "sample" else 2 * 2)
    assert trainer.preflight is not None
    assert trainer.preflight.line().startswith(line)


@pytest.mark.parametrize(("alpha", "what"), [(1e12, "no weight"), (1e-12, "every weight")])
def test_a_threshold_that_selects_nothing_or_everything_is_refused(tmp_path: Path, alpha: float, what: str) -> None:
    """Embeddings of tokens that only the forget set has have no retain information: here both sets have the same."""
    model = CleanLM().double()
    before, other = flat(model.parameters()).clone(), list(reversed(FORGET))
    with pytest.raises(ConfigError, match=rf"selects {what} of the .* 1 selects \d") as error:
        train(model, tmp_path, method="ssd", ssd_alpha=alpha, pairs=SweepDataset(FORGET, other))
    assert "left as they were" in str(error.value)
    assert torch.equal(flat(model.parameters()), before)


def test_ssd_in_a_plain_loop() -> None:
    model = CleanLM().double()
    truth = fisher(model, [[s] for s in FORGET]), fisher(model, [[s] for s in RETAIN])
    expected = dampened(model, *truth, alpha=3.0, lam=1.0)
    initial = copy.deepcopy(model)
    step = UnlearningStep(
        model, torch.optim.SGD(model.parameters(), lr=1.0), method="ssd", ssd_alpha=3.0, total_steps=8
    )
    for f, r in zip(FORGET, RETAIN, strict=True):
        step(lambda f=f: nll(model, [f]), lambda r=r: nll(model, [r]))  # type: ignore[misc]
    assert far(model, expected, initial) < 1e-12
    endless = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=1.0), method="ssd")
    with pytest.raises(ConfigError, match="total_steps"):
        endless(lambda: nll(model, FORGET), lambda: nll(model, RETAIN))


def test_llmu_and_scrub_in_a_plain_loop() -> None:
    model, wrong = CleanLM().double(), WithMismatch().wrong
    initial, expected = copy.deepcopy(model), copy.deepcopy(model)
    descend(expected, -0.5 * nll(expected, FORGET) + nll(expected, wrong) + nll(expected, RETAIN), 0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = UnlearningStep(model, sgd, method="llmu")
    step(lambda: nll(model, FORGET), lambda: nll(model, RETAIN), mismatch=lambda: nll(model, wrong))
    descend(expected, nll(expected, RETAIN), 0.1)
    descend(expected, -nll(expected, FORGET), 0.1)
    step.release()
    turns = UnlearningStep(model, sgd, method="scrub")
    turns((), lambda: nll(model, RETAIN))
    turns(lambda: nll(model, FORGET))
    assert far(model, expected, initial) < 1e-12
    with pytest.raises(DataError, match="takes micro-batches of one of"):
        turns(lambda: nll(model, FORGET), lambda: nll(model, RETAIN))


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("method", ["llmu", "scrub", "ssd"])
def test_a_resumed_run_ends_with_the_same_weights(method: str, world: World, tmp_path: Path) -> None:
    """To the bit, from a checkpoint in the middle; SSD's holds the sums."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    settings = {"method": method, "forget_data": f"{world.data}:forget10", "max_steps": 6}
    settings |= {"save_steps": 2, "num_train_epochs": 3, "optim": "adamw_torch", "lr_scheduler_type": "constant"}
    if method == "ssd":  # five samples of each set in windows of two
        settings |= {"max_steps": -1, "ssd_alpha": 2.0}
    run(build(world.settings(whole, **settings)))
    assert (whole / "README.md").is_file()
    assert f"| method | {method} |" in (whole / "README.md").read_text().replace("`", "")
    run(build(world.settings(again, **settings, resume_from_checkpoint=str(whole / "checkpoint-2"))))
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, again))
    start = load_file(Path(world.model) / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], start[name]) for name in first)


def test_adapters_work_or_are_refused_with_the_reason(world: World, tmp_path: Path) -> None:
    shared = {"forget_data": f"{world.data}:forget10", "max_steps": 4, "save_strategy": "no", "lora_r": 2}
    for method in ("llmu", "scrub"):
        run(build(world.settings(tmp_path / method, method=method, **shared)))
        tensors = load_file(tmp_path / method / "adapter_model.safetensors")
        assert any(float(t.abs().max()) > 0.0 for name, t in tensors.items() if "lora_B" in name)
    with pytest.raises(ConfigError, match=r"method='ssd' makes weights smaller .* Leave lora_r"):
        run(build(world.settings(tmp_path / "ssd", method="ssd", **shared)))


def test_only_chosen_parameters_move(world: World, tmp_path: Path) -> None:
    """As on WMDP: next-token losses, a few matrices."""
    start = load_file(Path(world.model) / "model.safetensors")
    for method in ("llmu", "scrub", "ssd", "rosu"):
        settings = {"method": method, "forget_data": f"{world.data}:forget10", "save_strategy": "no"}
        settings |= {"trainable_parameters": r"layers\.1\.mlp\.down_proj\.weight$"}
        settings |= {"ssd_alpha": 2.0} if method == "ssd" else {}
        run(build(world.settings(tmp_path / method, **settings)))
        end = load_file(tmp_path / method / "model.safetensors")
        assert [name for name in start if not torch.equal(start[name], end[name])] == [
            "model.layers.1.mlp.down_proj.weight"
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "graddiff", "ssd_alpha": 3.0}, r"ssd_alpha=3.0 does nothing for method='graddiff'.* one of ssd\."),
        ({"method": "ssd", "scrub_max_epochs": 3}, r"scrub_max_epochs=3 does nothing for method='ssd'"),
        ({"method": "ssd", "ssd_lambda": 0.0}, r"ssd_lambda=0.0 must be a positive number"),
        ({"method": "ssd", "fisher": "batch"}, r"fisher 'batch'.*sample, window|fisher='batch'"),
        ({"method": "ssd", "forget_until": 2.5}, r"forget_until=2.5 acts while weights move"),
        ({"method": "ssd", "forget_loss": "npo"}, r"method='ssd' has a forget loss of its own, 'nll'"),
        ({"method": "scrub", "num_train_epochs": 1}, r"num_train_epochs=1 with method='scrub'.* at least 2"),
        ({"method": "scrub", "scrub_max_epochs": 0}, r"scrub_max_epochs=0 must be a whole number"),
        ({"method": "scrub", "scrub_task_weight": 0.0}, r"scrub_task_weight=0 leaves the divergence"),
        ({"method": "scrub", "retain_loss": "kl"}, r"method='scrub' has a retain loss of its own"),
        ({"method": "llmu", "ascent_weight": -1.0}, r"ascent_weight=-1.0 must be a number"),
        ({"method": "llmu", "forget_weight": 2.0}, r"forget_weight=2.0 does nothing for method='llmu'"),
        ({"trainable_parameters": "("}, r"trainable_parameters='\(' is not a regular expression"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ROSUConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)


def test_parameters_that_nothing_matches(tmp_path: Path) -> None:
    config = ROSUConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], trainable_parameters="down_prj")
    with pytest.raises(ConfigError, match=r"matches no parameter\. The nearest are .*down_proj"):
        ROSUTrainer(tiny_llama(), config, train_dataset=ForgetRetainDataset(FORGET, RETAIN))
