"""Sums of products as a device takes them (float32 over short rows, then float64), against float64 throughout."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from rosu_llm.space.blocks import ROW, Sums, inner


def gradients(kind: str, cosine: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float32 vectors with (nearly) the given cosine."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(count, generator=generator)
    if kind == "positive":  # no cancellation among the products: all rounding goes one way or the other
        first = first.abs()
    elif kind == "heavy":  # a few entries make up most of the sum
        first *= torch.randn(count, generator=generator).mul(3.0).exp()
    other = torch.randn(count, generator=generator) * (first if kind == "heavy" else 1.0)
    return first, first + other * (sqrt(1.0 / cosine**2 - 1.0) * first.norm() / other.norm())


@pytest.mark.parametrize("kind", ["normal", "positive", "heavy"])
@pytest.mark.parametrize("cosine", [0.3, 0.9999])
def test_products_are_right_to_seven_digits_of_the_lengths(kind: str, cosine: float) -> None:
    f, r = gradients(kind, cosine, 300 * ROW + 17)
    for a, b in ((f, r), (f, f), (r, r)):
        truth = float(a.double() @ b.double())
        size = float(a.double().norm() * b.double().norm())
        # a matrix: on the CPU only what is not flat is summed in this way
        assert abs(float(inner(a[None], b[None])) - truth) < 2e-7 * size
    # a plain float32 sum over all products is what must not be done
    if kind == "positive":
        assert abs(float(inner(f[None], f[None])) / float(f.double() @ f.double()) - 1.0) < 1e-8


@pytest.mark.parametrize("count", [1, ROW - 1, ROW, ROW + 1, 3 * ROW])
def test_rows_that_do_not_divide(count: int) -> None:
    ones = torch.ones(count)
    assert float(inner(ones[None], ones[None])) == count
    assert inner(ones[None], ones[None]).dtype == torch.float64


def test_sums_of_no_block_are_zero() -> None:
    assert Sums(2).total().tolist() == [0.0, 0.0]
