"""Per-sample gradients of representation-level losses, against one document at a time."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.models import tiny_decoder
from tests.representation.naive import Naive
from tests.representation.running import parameter_names, relative, train
from tests.representation.test_step import LARGE, LAYER_NAME, parts


@pytest.mark.parametrize(("side", "path"), [("right", "fast"), ("left", "fast"), ("right", "plain")])
def test_every_document_of_the_window_is_protected(tmp_path: Path, side: str, path: str) -> None:
    model = tiny_decoder()
    settings = {**LARGE, "max_steps": 3, "side": side, "path": path}
    trainer = train(copy.deepcopy(model), tmp_path, protect_rank=4, **settings)
    naive = Naive(model, LAYER_NAME, parameter_names())
    for step in range(3):
        naive.assign(trainer.path_of_theta[step])
        expected = [naive.gradient(naive.distance([document])) for document in parts(trainer, step)[1]]
        got = [trainer.gradients[step][f"r{i + 1}"] for i in range(4)]
        inner = trainer.outcomes[step].inner
        assert inner is not None and not inner.fallback
        if step == 0:  # h = h₀: there is nothing to protect yet
            assert not any(bool(x.any()) for x in (*expected, *got))
            continue
        # in an order of their own: each document is there once
        nearest = [min(range(4), key=lambda j, x=x: relative(expected[j], x)) for x in got]
        assert sorted(nearest) == [0, 1, 2, 3]
        assert all(relative(x, expected[j]) < 1e-4 for x, j in zip(got, nearest, strict=True))
        basis = torch.linalg.qr(torch.stack(expected, 1))[0]
        f = trainer.gradients[step]["f"]
        q = f - basis @ (basis.T @ f)
        assert inner.direction_norm == pytest.approx(float(q.norm()), rel=1e-4)
