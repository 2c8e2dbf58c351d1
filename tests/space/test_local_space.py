"""The parameter space: exact restore, float64 scalars, honest report of what a perturbation became."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rosu_llm.errors import ConfigError, PerturbedWeightsError, UnsupportedLayoutError
from rosu_llm.geometry import F, R, Rosu, S, Vector, cosine
from rosu_llm.space import LocalSpace
from tests.models import CleanLM, flat


def make(
    sizes: tuple[tuple[int, ...], ...] = ((300, 500), (7,), (3, 5, 2)), dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def capture(space: LocalSpace, name: str, vectors: list[torch.Tensor]) -> None:
    for p, v in zip(space.parameters, vectors, strict=True):
        p.grad = v.clone()
    space.capture(name)


def filled(space: LocalSpace, seed: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(seed)
    f = [torch.randn(p.shape).to(p.dtype) for p in space.parameters]
    r = [0.5 * a + torch.randn(a.shape).to(a.dtype) for a in f]
    space.begin()
    capture(space, "f", f)
    capture(space, "r", r)
    return f, r


def test_gram_equals_float64_inner_products() -> None:
    space = LocalSpace(make())
    f, r = filled(space)
    gram = space.gram(["f", "r"])
    for x, y, a, b in ((F, F, f, f), (F, R, f, r), (R, R, r, r)):
        # products of float32 are exact in float64; only the order of 150 000 additions differs
        assert gram(x, y) == pytest.approx(float(flat(a) @ flat(b)), rel=1e-12)


def test_known_pairs_are_not_computed_again() -> None:
    space = LocalSpace(make())
    filled(space)
    gram = space.gram(["f", "r"])
    for p in space.parameters:
        p.grad = torch.ones_like(p)
    space.hold("s")
    tampered = type(gram)({**gram.products, ("f", "f"): 123.0}, gram.measure)
    extended = space.gram(["f", "r", "s"], known=tampered)
    assert extended(F, F) == 123.0
    assert extended(S, S) == pytest.approx(sum(p.numel() for p in space.parameters))


def test_long_tensors_keep_their_digits() -> None:
    """Four million equal products: a float32 running sum would stall far from the truth."""
    space = LocalSpace([nn.Parameter(torch.zeros(2**22 + 3))])
    space.begin()
    capture(space, "f", [torch.full((2**22 + 3,), 0.1)])
    expected = (2**22 + 3) * float(torch.tensor(0.1)) ** 2
    assert space.gram(["f"])(F, F) == pytest.approx(expected, rel=1e-11)  # 65 536 · ε/2 per block at worst


@pytest.mark.parametrize("angle", [1e-2, 1e-4, 1e-6])
def test_nearly_parallel_gradients_still_give_a_full_neutral_perturbation(angle: float) -> None:
    """cos θ up to 1 − 5e-13: the naive expansion of ‖q‖² has no digit left there."""
    torch.manual_seed(3)
    r = torch.randn(200_000, dtype=torch.float64)
    side = torch.randn(200_000, dtype=torch.float64)
    side -= (side @ r) / (r @ r) * r
    f = (r + angle * side * r.norm() / side.norm()).float()
    r = r.float()
    space = LocalSpace([nn.Parameter(torch.zeros(200_000))])
    space.begin()
    capture(space, "f", [f])
    capture(space, "r", [r])
    gram = space.gram(["f", "r"])
    inner = Rosu().inner(gram, rho=0.4)
    k = (f.double() @ r.double()) / (r.double() @ r.double() + 1e-8)
    q = f.double() - k * r.double()
    assert inner.precise
    # float64 products and sums throughout; q itself is known to 1e-16/angle
    assert inner.direction_norm == pytest.approx(float(q.norm()), rel=1e-8)
    with space.perturbed(inner.delta, precise=inner.precise) as realized:
        moved = space.parameters[0].detach().double()
        assert float(moved.norm()) == pytest.approx(0.4, rel=1e-6)  # float32 weights
        assert abs(float(moved @ r.double())) / float(r.double().norm()) < 1e-6 * 0.4
        assert realized.norm == pytest.approx(0.4, rel=1e-8)


def test_restoring_is_bit_exact() -> None:
    space = LocalSpace(make())
    filled(space)
    before = [p.detach().clone() for p in space.parameters]
    for seed in range(5):
        with space.perturbed(Vector({"f": 0.37, "r": -0.11}), precise=False, seed=seed):
            assert space.is_perturbed
            assert not torch.equal(space.parameters[0], before[0])
        assert not space.is_perturbed
    assert all(torch.equal(p, b) for p, b in zip(space.parameters, before, strict=True))


def test_weights_come_back_when_the_body_raises() -> None:
    space = LocalSpace(make())
    filled(space)
    before = [p.detach().clone() for p in space.parameters]
    with pytest.raises(KeyboardInterrupt), space.perturbed(Vector({"f": 1.0})):
        raise KeyboardInterrupt
    assert all(torch.equal(p, b) for p, b in zip(space.parameters, before, strict=True))


@pytest.mark.parametrize("action", ["nest", "add", "write", "begin"])
def test_misuse_inside_a_perturbed_pass_is_refused(action: str) -> None:
    space = LocalSpace(make())
    filled(space)
    with space.perturbed(Vector({"f": 1.0})), pytest.raises(PerturbedWeightsError):
        if action == "nest":
            with space.perturbed(Vector({"r": 1.0})):
                pass
        elif action == "add":
            space.add(Vector({"f": 1.0}))
        elif action == "write":
            space.write_gradient(F)
        else:
            space.begin()


def test_realized_perturbation_in_float32_is_whole() -> None:
    space = LocalSpace(make())
    f, r = filled(space)
    delta = Vector({"f": 0.01, "r": -0.02})
    with space.perturbed(delta) as realized:
        pass
    d = 0.01 * flat(f) - 0.02 * flat(r)
    assert realized.norm == pytest.approx(float(d.norm()), rel=1e-6)  # blocks are summed in float32
    assert realized.fraction == pytest.approx(1.0, abs=1e-6)
    assert realized.distortion < 1e-5
    # what arrives in float32 weights differs from δ by their rounding, 6e-8 of |w|
    assert realized.leak == pytest.approx(float(flat(r) @ d), abs=1e-4 * float(flat(r).norm() * d.norm()))


def test_bf16_compute_swallows_a_small_perturbation_and_says_so() -> None:
    """Weights on the bf16 grid, as after loading a bf16 checkpoint, plus a δ far below the grid."""
    params = [nn.Parameter(torch.randn(64, 64).bfloat16().float())]
    space = LocalSpace(params, compute_dtype=torch.bfloat16)
    filled(space)
    with space.perturbed(Vector({"f": 1e-5})) as realized:
        pass
    assert realized.fraction < 0.1
    with space.perturbed(Vector({"f": 1.0})) as realized:
        pass
    assert realized.fraction == pytest.approx(1.0, abs=0.05)


def test_bf16_weights_are_perturbed_by_stochastic_rounding() -> None:
    """Rounding to nearest would lose all of δ; at random, its projection arrives and noise is reported."""
    space = LocalSpace(make(((400, 500),), torch.bfloat16))
    filled(space)
    before = space.parameters[0].detach().clone()
    with space.perturbed(Vector({"f": 2e-4})) as realized:
        pass
    # 200 000 weights, each moved by a whole ulp with small probability: σ of the fraction is about 0.05
    assert realized.fraction == pytest.approx(1.0, abs=0.25)
    assert realized.distortion > 1.0
    assert torch.equal(space.parameters[0], before)


def test_same_seed_rounds_alike_and_another_does_not() -> None:
    space = LocalSpace(make(((50, 50),), torch.bfloat16))
    filled(space)
    seen = []
    for seed in (1, 1, 2):
        with space.perturbed(Vector({"f": 1e-3}), seed=seed):
            seen.append(space.parameters[0].detach().clone())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_tied_weights_count_once_and_frozen_ones_not_at_all() -> None:
    model = CleanLM(tied=True)
    model.mix.weight.requires_grad_(False)
    space = LocalSpace([*model.parameters(), model.head.weight])
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(space.parameters) == len(names)
    assert all(p is not model.mix.weight for p in space.parameters)


def test_parameters_without_gradient_are_zero_in_products_and_left_alone_by_the_optimizer() -> None:
    params = make(((4, 4), (5,)))
    space = LocalSpace(params)
    space.begin()
    params[0].grad = torch.ones(4, 4)
    space.capture("f")
    params[0].grad = torch.ones(4, 4)
    space.hold("r")
    gram = space.gram(["f", "r"])
    assert gram(F, R) == 16.0
    space.write_gradient(R - F * 0.25)
    assert params[1].grad is None
    assert torch.equal(params[0].grad, torch.full((4, 4), 0.75))


def test_a_parameter_used_in_one_pass_only_gets_its_share() -> None:
    params = make(((3,), (3,)))
    space = LocalSpace(params)
    space.begin()
    params[0].grad = torch.ones(3)
    space.capture("f")
    params[1].grad = torch.ones(3)
    space.capture("r")
    space.write_gradient(2.0 * F + 3.0 * R)
    assert params[0].grad.tolist() == [2.0] * 3
    assert params[1].grad.tolist() == [3.0] * 3


def test_non_contiguous_gradients_and_weights() -> None:
    base = torch.randn(6, 8)
    p = nn.Parameter(base.t())
    assert not p.is_contiguous()
    space = LocalSpace([p])
    space.begin()
    g = torch.randn(8, 6)
    p.grad = g.clone()
    space.capture("f")
    p.grad = g.t().contiguous().t()
    space.hold("r")
    assert cosine(space.gram(["f", "r"])) == pytest.approx(1.0)
    before = p.detach().clone()
    with space.perturbed(Vector({"f": 0.5})):
        assert torch.allclose(p, before + 0.5 * g)
    assert torch.equal(p, before)


def test_loss_scale_is_removed_before_scalars_and_put_back_for_the_optimizer() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    space = LocalSpace([p], scaler=scaler)
    space.begin()
    space.backward((p * torch.tensor([3.0, 4.0])).sum())
    space.capture("f")
    assert space.gram(["f"])(F, F) == 25.0
    space.backward(p.sum())
    space.hold("r")
    assert space.gram(["r"])(R, R) == 2.0
    space.write_gradient(F + R)
    assert p.grad.tolist() == [4.0 * 1024, 5.0 * 1024]
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.step(optimizer)
    assert p.tolist() == [-3.0, -3.0]


def test_a_discarded_gradient_makes_the_scaler_skip() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    space = LocalSpace([p], scaler=scaler)
    space.begin()
    space.backward(p.sum())
    space.capture("f")
    space.discard_gradient()
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 2.0


def test_displacement_is_the_optimizers_step() -> None:
    space = LocalSpace(make())
    filled(space)
    with space.perturbed(Vector({"f": 0.1})):
        pass
    change = [0.01 * torch.randn_like(p) for p in space.parameters]
    before = flat(space.parameters)
    with torch.no_grad():
        for p, c in zip(space.parameters, change, strict=True):
            p.add_(c)
    # blocks of 65 536 products are summed in float32
    assert space.displacement() == pytest.approx(float((flat(space.parameters) - before).norm()), rel=1e-6)


def test_adding_moves_by_the_combination() -> None:
    space = LocalSpace(make())
    f, r = filled(space)
    before = flat(space.parameters)
    space.add(Vector({"f": 0.2, "r": -0.1}))
    expected = before + 0.2 * flat(f) - 0.1 * flat(r)
    assert torch.allclose(flat(space.parameters), expected, atol=3e-7)  # float32 rounding of |w| ≲ 5


def test_buffers_are_reused_and_bounded() -> None:
    """Two gradients and a backup: three copies, however many steps."""
    space = LocalSpace(make())
    pointers = set()
    for seed in range(4):
        filled(space, seed)
        with space.perturbed(Vector({"f": 0.1})):
            pass
        pointers |= {t.data_ptr() for ts in (*space._captured.values(), space._backup) for t in ts}
        assert space.held_bytes() == 3 * sum(p.numel() * p.element_size() for p in space.parameters)
    assert len(pointers) == 3 * len(space.parameters)


def test_gradients_are_copied_not_taken() -> None:
    """Under DDP a gradient may be a view of a communication bucket, which the next pass overwrites."""
    p = nn.Parameter(torch.zeros(4))
    space = LocalSpace([p])
    bucket = torch.ones(8)
    space.begin()
    p.grad = bucket[:4]
    space.capture("f")
    bucket.fill_(7.0)
    assert space.gram(["f"])(F, F) == 4.0


def test_no_trainable_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="No trainable parameter"):
        LocalSpace([nn.Parameter(torch.ones(2), requires_grad=False)])


def test_float16_weights_are_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="float16"):
        LocalSpace([nn.Parameter(torch.ones(2, dtype=torch.float16))])


def test_stale_autocast_copies_are_dropped() -> None:
    """Inside one autocast region low-precision copies of weights are cached; w+δ must not see w's copy."""
    layer = nn.Linear(8, 8)
    space = LocalSpace(layer.parameters())
    space.begin()
    for p in space.parameters:
        p.grad = torch.ones_like(p)
    space.capture("f")
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with space.perturbed(Vector({"f": 1.0})):
            inside = layer(x)
        after = layer(x)
    assert not torch.equal(before, inside)
    assert torch.equal(before, after)


class WithMaster(LocalSpace):
    """The optimizer's weights in float32, the forward's rounded to bf16: what DeepSpeed has."""

    keeps_master = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.seen = [p.detach().bfloat16() for p in parameters]

    def _forward_weights(self) -> list[torch.Tensor]:
        return self.seen


@pytest.mark.parametrize("measures", [False, True])
def test_a_master_is_backup_enough_unless_the_optimizers_step_is_measured(measures: bool) -> None:
    space = WithMaster(make())
    space.measures_steps = measures
    f, _ = filled(space)
    truth, before = [w.clone() for w in space.weights()], [w.clone() for w in space.seen]
    for fails in (False, True):
        try:
            with space.perturbed(Vector({"f": 0.1})):
                for now, old, step in zip(space.seen, truth, f, strict=True):
                    assert torch.equal(now, (old + 0.1 * step).bfloat16())
                if fails:
                    raise OSError
        except OSError:
            pass
        assert all(torch.equal(a, b) for a, b in zip(space.seen, before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(space.weights(), truth, strict=True))
    size = sum(p.numel() * 4 for p in space.parameters)
    assert space.held_bytes() == (3 if measures else 2) * size
    if measures:
        assert space.displacement() == 0.0
    else:
        with pytest.raises(PerturbedWeightsError, match="backup"):
            space.displacement()


def test_rounding_measured_on_some_blocks_of_large_tensors_is_that_of_all() -> None:
    """bf16 rounding of 21 blocks, of which every eighth is looked at, against all of them."""
    parameter = nn.Parameter(torch.randn(1_350_000, generator=torch.Generator().manual_seed(0)))
    space = LocalSpace([parameter], compute_dtype=torch.bfloat16)
    f, r = filled(space)
    w, step = parameter.detach().clone(), 0.01 * f[0]
    with space.perturbed(Vector({"f": 0.01})) as realized:
        got = parameter.detach().bfloat16().double() - w.bfloat16().double()
    miss, square = got - step.double(), float(step.double() @ step.double())
    assert realized.norm == pytest.approx(square**0.5, rel=1e-6)
    assert realized.fraction == pytest.approx(float(got @ step.double()) / square, rel=0.01)
    assert realized.distortion == pytest.approx(float(miss.norm()) / square**0.5, rel=0.01)
    along, noise = float(r[0].double() @ step.double()), float(miss.norm()) * float(r[0].norm())
    assert realized.leak == pytest.approx(along, abs=1e-2 * noise)
