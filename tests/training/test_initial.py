"""KL to hidden states of the initial model: against a frozen copy in loss, gradients and weights; files; fallbacks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rosu_llm import ForgetRetainDataset, ROSUTrainer
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.errors import ConfigError, DataError, UnsupportedLayoutError
from rosu_llm.losses import LossContext, ReferenceModel, get_loss
from rosu_llm.training import initial as initial_module
from rosu_llm.training.initial import InitialStates
from rosu_llm.training.ranks import Ranks
from rosu_llm.training.references import INITIAL_FILE, References
from tests.models import flat, samples, tiny_decoder, tiny_llama
from tests.training.test_trainer import FORGET, RETAIN, config, logs

ALONE = Ranks(0, 1, lambda values: values)
KL = get_loss("kl", "retain").function


class Unlisted:
    """The same pairs from a data set that does not list its retain samples."""

    def __init__(self, pairs: ForgetRetainDataset) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Any:
        return self._pairs[index]


def trainer(folder: Path, model: Any = None, *, listed: bool = True, **settings: Any) -> ROSUTrainer:
    pairs = ForgetRetainDataset(FORGET, RETAIN)
    given = {name: settings.pop(name) for name in ("train_dataset", "eval_dataset") if name in settings}
    return ROSUTrainer(
        tiny_llama(dropout=0.1) if model is None else model,
        config(folder, **{"retain_loss": "kl", "max_steps": 3, "optim": "sgd", **settings}),
        data_collator=ForgetRetainCollator(0),
        **{"train_dataset": pairs if listed else Unlisted(pairs), **given},
    )


def kept(model: Any, batches: list[Any]) -> InitialStates:
    states = InitialStates("retain_loss='kl'", "retain_loss='nll'", "retain", frozen_head=True)
    states.capture(model, states.output_layer(model), batches, torch.no_grad, ALONE)
    return states


def moved(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=0.02)


def value_and_gradient(model: nn.Module, batch: Any, context: LossContext) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = KL(model, batch, context)
    loss.backward()
    return float(loss.detach()), flat(p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("chunk", [1, 1 << 22])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_a_frozen_copy(tied: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rosu_llm.losses.answers.CHUNK_WITH_GRADIENT", {"cpu": chunk})
    model, collate = tiny_llama(tie_word_embeddings=tied).eval(), ForgetRetainCollator(0)
    batch, other = collate(RETAIN[:5]), collate(RETAIN[5:])
    reference, states = ReferenceModel(model), kept(model, [collate(RETAIN[:3]), collate(RETAIN[3:])])
    assert states.head_bytes == model.lm_head.weight.numel() * 4
    moved(model)
    for each in (batch, other):
        value, gradient = value_and_gradient(model, each, LossContext(reference_hidden=states))
        expected, truth = value_and_gradient(model, each, LossContext(reference_logits=reference))
        assert expected > 1e-2
        assert value == pytest.approx(expected, rel=1e-5)
        assert float((gradient - truth).norm() / truth.norm()) < 1e-5


def test_bf16_compute_starts_at_zero(tmp_path: Path) -> None:
    """The initial distributions are multiplied as the model multiplies its own, and kept in that type."""
    t = trainer(tmp_path, tiny_llama(), bf16=True, optim="adamw_torch", max_steps=2)
    t.train()
    assert t._references.states is not None
    assert {rows.dtype for rows in t._references.states._hidden.values()} == {torch.bfloat16}
    assert abs(logs(t)[0]["loss/retain"]) < 1e-6
    assert logs(t)[1]["loss/retain"] > 1e-4


@pytest.mark.parametrize("settings", [{}, {"method": "graddiff"}, {"protect": "both", "memory_refresh": 2}])
def test_weights_are_those_of_a_run_with_a_frozen_copy(settings: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for copied in (False, True):
        t = trainer(tmp_path, learning_rate=0.1, **settings)  # seeds dropout
        start = flat(t.model.parameters())
        if copied:
            t._references.states, t._references.model = None, ReferenceModel(t.model)
        t.train()
        runs.append(t)
    ours, theirs = (flat(t.model.parameters()) for t in runs)
    assert float((theirs - start).norm()) > 1e-2
    assert float((ours - theirs).norm() / (theirs - start).norm()) < 1e-5
    size = sum(p.numel() * p.element_size() for p in runs[0].model.parameters())
    held, copied = (t._references for t in runs)
    assert held.model is None and copied.states is None
    assert held.extra_bytes == runs[0].model.lm_head.weight.numel() * 4 < size == copied.extra_bytes
    assert not list(tmp_path.glob(f"*{INITIAL_FILE}*"))  # mapped while training


def test_hidden_states_are_mapped_not_held(tmp_path: Path) -> None:
    model, batch = tiny_llama().eval(), ForgetRetainCollator(0)(RETAIN)
    states = kept(model, [batch])
    before = states(batch)
    states.move_to(tmp_path / "run" / INITIAL_FILE, ALONE, writer=True)
    (base,) = {rows.untyped_storage().data_ptr() for rows in states._hidden.values()}
    after = states(batch)
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    if Path("/proc/self/maps").is_file():
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if INITIAL_FILE in line]
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        assert any(low <= base < high for low, high in ranges)
    states.save(tmp_path / "checkpoint.safetensors")  # another name of the same file
    assert (tmp_path / "checkpoint.safetensors").samefile(tmp_path / "run" / INITIAL_FILE)
    (tmp_path / "run" / INITIAL_FILE).unlink()
    states.save(tmp_path / "later.safetensors")
    again = kept(model, [])
    again.load(tmp_path / "later.safetensors")
    assert torch.equal(again(batch)[0], before[0])


def test_a_file_of_another_run_is_not_taken(tmp_path: Path) -> None:
    """A process that does not see what the writer wrote keeps what it has in memory."""
    model, batch = tiny_llama().eval(), ForgetRetainCollator(0)(RETAIN)
    states, other = kept(model, [batch]), kept(tiny_llama(seed=3).eval(), [batch])
    other.move_to(tmp_path / INITIAL_FILE, ALONE, writer=True)
    before = states(batch)[0]
    states.move_to(tmp_path / INITIAL_FILE, ALONE, writer=False)
    assert torch.equal(states(batch)[0], before)


def test_processes_exchange_them_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_module, "_PIECE", 8)
    rounds: list[dict[str, Any]] = []

    class Two(Ranks):
        def merge(self, values: Any) -> Any:
            rounds.append(dict(values))
            return {**values, f"theirs{len(rounds)}": torch.ones(1)}

        def gather(self, values: Any) -> Any:
            return torch.stack([values, torch.tensor([5.0], dtype=torch.float64)])

    found = initial_module._merged({str(i): torch.ones(3) for i in range(3)}, Two(0, 2, lambda values: values))
    assert [list(values) for values in rounds] == [["0"], ["1"], ["2"], [], []]
    assert len(found) == 8


@pytest.mark.parametrize("listed", [True, False])
def test_resuming_reproduces_the_run(listed: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "listed": listed}
    whole = trainer(tmp_path, optim="adamw_torch", **settings)
    whole.train()
    again = trainer(tmp_path, optim="adamw_torch", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))
    assert (tmp_path / "checkpoint-4" / INITIAL_FILE).is_file() is listed
    assert not (tmp_path / INITIAL_FILE).exists()


def test_a_checkpoint_without_them_is_resumed_with_a_copy(tmp_path: Path) -> None:
    """As one of a run that kept a copy: the model that was given is the initial one."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, listed=False, **settings)
    whole.train()
    again = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again._references.states is None
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))


def test_a_second_training_compares_with_the_model_before_the_first(tmp_path: Path) -> None:
    t = trainer(tmp_path, max_steps=1, learning_rate=0.5)
    t.train()
    t.train()
    assert logs(t)[-1]["loss/retain"] > 1e-4


def test_logits_that_are_changed_after_the_output_layer_take_a_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_decoder("gemma2", final_logit_softcapping=1.0)
    truth = copy.deepcopy(model)
    runs = [trainer(tmp_path, each, listed=listed) for each, listed in ((model, True), (truth, False))]
    with caplog.at_level(logging.WARNING):
        for t in runs:
            t.train()
    assert runs[0]._references.states is None and runs[0]._references.model is not None
    assert "keeps a frozen copy" in caplog.text
    assert torch.equal(flat(model.parameters()), flat(truth.parameters()))
    assert runs[0].preflight is not None
    assert runs[0].preflight.reference == runs[0]._references.extra_bytes > model.lm_head.weight.numel() * 4


def test_compiled_models_take_a_copy(tmp_path: Path) -> None:
    references = References(config(tmp_path, retain_loss="kl"), tiny_llama(), "local", listed=("retain",))
    graph = torch.compile(references._initial, backend="eager")
    references.keep_states(graph, [], None, ALONE, tmp_path / INITIAL_FILE, writer=True)  # type: ignore[arg-type]
    assert references.states is None and references.model is not None


class Augmented(ForgetRetainDataset):
    """Never the same retain tokens twice."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = super().__getitem__(index)
        own = [dict(row, input_ids=[1 + (t + index) % 9 for t in row["input_ids"]]) for row in pair["retain"]]
        return {**pair, "retain": own}


def test_samples_that_are_not_those_listed_take_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    t = trainer(tmp_path, train_dataset=Augmented(FORGET, RETAIN))
    with caplog.at_level(logging.WARNING):
        t.train()
    assert t._references.states is None and t._references.model is not None
    assert "other retain samples than it lists" in caplog.text


def test_unknown_samples_are_an_error() -> None:
    collate = ForgetRetainCollator(0)
    states = kept(tiny_llama().eval(), [collate(RETAIN[:2])])
    with pytest.raises(DataError, match=r"2 of 4 retain samples.*retain_loss='nll'"):
        states(collate(RETAIN[:4]))
    nothing = collate([dict(row, labels=[-100] * len(row["labels"])) for row in RETAIN[2:4]])
    assert states(nothing)[0].shape == (0, 32)  # batches that only keep a process busy


def test_evaluation_sets_are_listed_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = ForgetRetainDataset(samples(4, seed=21), samples(4, seed=22))
    runs = [
        trainer(tmp_path, listed=listed, eval_dataset=each, eval_strategy="steps", eval_steps=1, learning_rate=0.1)
        for listed, each in ((True, others), (False, Unlisted(others)))
    ]
    for t in runs:
        torch.manual_seed(0)  # of dropout
        t.train()
    seen = [[entry["eval_loss"] for entry in t.state.log_history if "eval_loss" in entry] for t in runs]
    assert len(seen[0]) == 3 and seen[0][-1] > 1e-4
    assert seen[0] == pytest.approx(seen[1], rel=1e-3)  # float32 log-probabilities against a KL of 3e-4
    unseen = ForgetRetainDataset(samples(4, seed=31), samples(4, seed=32))
    with caplog.at_level(logging.WARNING):
        found = runs[0].evaluate(unseen)
    assert caplog.text.count("eval_loss leaves out samples") == 1
    assert "eval_forget_loss" in found and "eval_loss" not in found


def test_evaluation_before_training_asks_the_model_as_it_is(tmp_path: Path) -> None:
    others = ForgetRetainDataset(samples(4, seed=21), samples(4, seed=22))
    t = trainer(tmp_path, eval_dataset=others)
    assert abs(t.evaluate()["eval_loss"]) < 1e-6
    t.train()
    assert t.evaluate()["eval_loss"] > 1e-6


def test_sharding_is_refused_only_where_a_copy_is_needed(tmp_path: Path) -> None:
    settings = config(tmp_path, retain_loss="kl")
    assert References(settings, tiny_llama(), "fsdp2", listed=("retain",)).states is not None
    with pytest.raises(UnsupportedLayoutError, match=r"whole second model.*ForgetRetainDataset"):
        References(settings, tiny_llama(), "zero")
    capped = tiny_decoder("gemma2", final_logit_softcapping=1.0)
    references, batch = References(settings, capped, "fsdp2", listed=("retain",)), ForgetRetainCollator(0)(RETAIN)
    with pytest.raises(ConfigError, match=r"soft-capped or scaled.*retain_loss='nll'"):
        references.keep_states(capped, [batch], [], ALONE, tmp_path / INITIAL_FILE, writer=True)
