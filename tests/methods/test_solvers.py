"""Gradient solvers: golden values, properties on random Gram matrices, and TorchJD as an oracle."""

import math

import pytest
import torch

from gac.methods import METHODS, Mix
from gac.methods.solvers import Gram, cross_gram

GOLDEN = Gram(18.0, -22.0, 38.0)  # rows (-4, 1, 1) and (6, 1, 1)


def solver(name, **fields):
    """The weights of a solver for a Gram matrix; SDMGrad gets the same matrix for both halves."""
    method = METHODS[name](**fields)
    if name != "sdmgrad":
        return method.closed_form

    def solve(gram):
        a, b, c = gram.unit()
        return method.from_halves(((a, b), (b, c)))

    return solve


mgda, pcgrad, cagrad, sdmgrad = map(solver, ("mgda", "pcgrad", "cagrad", "sdmgrad"))
halves = METHODS["sdmgrad"]().from_halves
nash_mtl, aligned_mtl = solver("nash-mtl"), solver("aligned-mtl")
SOLVERS = {
    "mgda": mgda,
    "pcgrad": pcgrad,
    "pcgrad +0.2": solver("pcgrad", threshold=0.2),
    "cagrad 0.5": cagrad,
    "cagrad 1": solver("cagrad", radius=1.0),
    "nash": nash_mtl,
    "aligned min": aligned_mtl,
    "aligned rmse": solver("aligned-mtl", mode="rmse"),
    "sdmgrad": sdmgrad,
}
each_solver = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS.keys())


def random_grams(count: int = 300) -> list[Gram]:
    """Norms over six decades, norm ratios 1e-3 to 1e3, cosines in (-0.999, 0.999)."""
    rows = torch.rand(count, 3, dtype=torch.float64).tolist()
    grams = []
    for size, ratio, angle in rows:
        s = 10 ** (6 * size - 3)
        r = s * 10 ** (6 * ratio - 3)
        grams.append(Gram(s * s, 0.999 * (2 * angle - 1) * s * r, r * r))
    return grams


def gains(gram: Gram, weights) -> tuple[float, float]:
    """Cosine-like progress of both objectives along the update: <g_i, d> / (|g_i| |d|)."""
    s, r = weights
    size = gram.norm_of(weights) or 1.0
    return (
        (s * gram.sft + r * gram.dot) / (math.sqrt(gram.sft) * size),
        (s * gram.dot + r * gram.rl) / (math.sqrt(gram.rl) * size),
    )


@pytest.mark.parametrize(
    ("solve", "expected"),
    [
        (mgda, (0.6, 0.4)),
        (pcgrad, (20 / 9, 30 / 19)),
        (cagrad, (0.7041, 0.5)),
        (aligned_mtl, (0.5591, 0.4083)),
        (nash_mtl, (0.41823, 0.28784)),
        (solver("sdmgrad", regularization=0.0), (0.6, 0.4)),
        # inner optimum x = (60 * 1.15 - 40 * 0.15) / 100 = 0.63
        (sdmgrad, ((0.63 + 0.15) / 1.3, (0.37 + 0.15) / 1.3)),
        (solver("cagrad", rescale=1), (0.7041 / 1.25, 0.4)),
        (solver("cagrad", rescale=2), (0.7041 / 1.5, 0.5 / 1.5)),
        (solver("pcgrad", threshold=-0.9), (1.0, 1.0)),  # the cosine is -0.841
    ],
)
def test_golden_values(solve, expected) -> None:
    assert solve(GOLDEN) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("solve", "slack"),
    [(mgda, 1e-7), (pcgrad, 1e-9), (nash_mtl, 1e-9), (solver("cagrad", radius=1.0), 1e-6)],
    ids=["mgda", "pcgrad", "nash", "cagrad 1"],
)
def test_the_update_worsens_neither_objective(solve, slack: float) -> None:
    for gram in random_grams():
        assert min(gains(gram, solve(gram))) >= -slack, gram


@pytest.mark.parametrize("name", ["cagrad 0.5", "aligned min", "aligned rmse", "sdmgrad"])
def test_solvers_that_may_worsen_an_objective(name: str) -> None:
    assert any(min(gains(gram, SOLVERS[name](gram))) < -0.01 for gram in random_grams())


@each_solver
def test_swapping_the_objectives_swaps_the_weights(solve) -> None:
    for gram in random_grams():
        s, r = solve(gram)
        assert solve(Gram(gram.rl, gram.dot, gram.sft)) == pytest.approx((r, s), 1e-8, abs=1e-10)


@each_solver
def test_a_common_scale_changes_the_size_of_the_update_only(solve) -> None:
    for gram in random_grams(100):
        weights = solve(gram)
        scaled = solve(Gram(*(x * 2.0**40 for x in gram)))  # gradients times 2^20
        factor = 2.0**-20 if solve == nash_mtl else 1.0  # Nash: an update of norm 1 at any scale
        assert scaled == pytest.approx([w * factor for w in weights], rel=1e-12)


def test_mgda_meets_the_kkt_conditions_of_the_shortest_point() -> None:
    for gram in random_grams():
        s, r = weights = mgda(gram)
        assert s + r == pytest.approx(1, abs=1e-15)
        assert min(s, r) >= 0
        length = gram.norm_of(weights) ** 2
        products = s * gram.sft + r * gram.dot, s * gram.dot + r * gram.rl
        assert min(products) >= length - 1e-9 * max(gram.sft, gram.rl)


def test_pcgrad_is_linear_in_the_gradient_norms() -> None:
    def parts(s: float, r: float) -> torch.Tensor:
        weights = pcgrad(Gram(s * s, -0.6 * s * r, r * r))
        return torch.tensor([weights[0] * s, weights[1] * r], dtype=torch.float64)

    assert torch.allclose(parts(1, 2) + parts(3, 1), parts(4, 3), atol=1e-12)


@pytest.mark.parametrize("radius", [0.2, 0.5, 0.8, 1.0])
def test_cagrad_is_optimal_and_stays_on_its_sphere(radius: float) -> None:
    x = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for gram in random_grams(60):
        a, b, c = gram.unit()
        s, r = solver("cagrad", radius=radius)(gram)
        mean = gram.unit().norm_of((0.5, 0.5))
        assert gram.unit().norm_of((s - 0.5, r - 0.5)) == pytest.approx(radius * mean, rel=1e-6)

        def dual(x: torch.Tensor, a=a, b=b, c=c, mean=mean) -> torch.Tensor:
            """g_w . g_0 + radius |g_0| |g_w| for g_w = x g_s + (1 - x) g_r."""
            y = 1 - x
            length = (x * x * a + 2 * x * y * b + y * y * c).clamp(min=0).sqrt()
            return 0.5 * (x * (a + b) + y * (b + c)) + radius * mean * length

        solution = torch.tensor((s - 0.5) / (s + r - 1), dtype=torch.float64)
        assert dual(solution) <= dual(x).min() + 1e-12


def test_nash_solves_its_equation_and_clips_to_the_unit_bisector() -> None:
    for gram in random_grams():
        s, r = solver("nash-mtl", max_norm=None)(gram)
        assert s * (s * gram.sft + r * gram.dot) == pytest.approx(1, rel=1e-9)
        assert r * (s * gram.dot + r * gram.rl) == pytest.approx(1, rel=1e-9)
        clipped = nash_mtl(gram)
        assert gram.norm_of(clipped) == pytest.approx(1, rel=1e-9)
        first, second = gains(gram, clipped)
        assert first == pytest.approx(second, rel=1e-7)


def weights_of(name, gram, **fields):
    """Weights of a real step with one gradient per term."""
    a, b, c = gram
    method = METHODS[name](**fields)
    products = torch.tensor([[a, b], [b, c]], dtype=torch.float64)
    return method.solve(method.init(), products, Mix(0.5))[1]


def test_unit_rl_changes_mgda_but_not_nash() -> None:
    for gram in random_grams(50):
        assert weights_of("nash-mtl", gram, unit_rl=True) == pytest.approx(nash_mtl(gram), rel=1e-9)
    s, r = weights_of("mgda", Gram(4.0, 0.0, 9.0), unit_rl=True)  # norms 2 and 1: 1/5 and 4/5
    assert (s, r) == pytest.approx((0.2, 0.8 / 3), abs=1e-15)
    assert weights_of("mgda", Gram(4.0, 0.0, 0.0), unit_rl=True) == (0.0, 1.0)


@pytest.mark.parametrize("mode", ["min", "rmse"])
def test_aligned_mtl_makes_the_gram_matrix_a_multiple_of_the_identity(mode: str) -> None:
    for gram in random_grams():
        a, b, c = gram.unit()
        matrix = torch.tensor([[a, b], [b, c]], dtype=torch.float64)
        columns = [
            solver("aligned-mtl", mode=mode, preference=unit)(gram)
            for unit in ((1.0, 0.0), (0.0, 1.0))
        ]
        balance = torch.tensor(columns, dtype=torch.float64).T
        values = torch.linalg.eigvalsh(matrix)
        scale = values[0] if mode == "min" else values.mean()
        identity = torch.eye(2, dtype=torch.float64)
        assert torch.allclose(balance @ matrix @ balance / scale, identity, atol=1e-6), gram


def test_sdmgrad_without_regularization_is_mgda() -> None:
    for gram in random_grams():
        assert solver("sdmgrad", regularization=0.0)(gram) == pytest.approx(mgda(gram), abs=1e-12)


def test_sdmgrad_matches_its_converged_inner_loop() -> None:
    """The published loop w <- Proj(w - lr A (w + lambda p)), run to convergence from (1/2, 1/2)."""
    saddles = 0
    for rows in torch.randn(60, 2, 2, dtype=torch.float64).tolist():
        (ss, sr), (rs, rr) = rows
        saddles += ss - sr - rs + rr < 0
        x = 0.5
        for _ in range(4000):
            u, v = x + 0.15, 1 - x + 0.15
            x = min(max(x - 0.05 * ((ss - rs) * u + (sr - rr) * v) / 2, 0.0), 1.0)
        assert halves(((ss, sr), (rs, rr)))[0] == pytest.approx((x + 0.15) / 1.3, abs=1e-6)
    assert saddles > 10


@pytest.mark.parametrize(("sft", "rl"), [(2, 2), (3, 4), (5, 3)])
def test_gram_of_micro_batches_and_their_halves(sft: int, rl: int) -> None:
    """If a count is odd, the second half is larger."""
    x, y = torch.randn(2, 5, 6, dtype=torch.float64) / 10
    x, y = x[:sft], y[:rl]
    gram = torch.cat([x, y]) @ torch.cat([x, y]).T
    g_s, g_r = x.mean(0), y.mean(0)
    expected = (g_s.dot(g_s).item(), g_s.dot(g_r).item(), g_r.dot(g_r).item())
    assert Gram.of_means(gram, sft) == pytest.approx(expected, rel=1e-12)
    halves = [(z[: len(z) // 2].mean(0), z[len(z) // 2 :].mean(0)) for z in (x, y)]
    for (first, _), row in zip(halves, cross_gram(gram, sft), strict=True):
        assert row == pytest.approx([first.dot(second).item() for _, second in halves], rel=1e-12)
    single = gram.float()  # its means are those of float64
    assert Gram.of_means(single, sft) == Gram.of_means(single.double(), sft)
    assert cross_gram(single, sft) == cross_gram(single.double(), sft)


def test_squared_norms_that_were_rounded_below_zero_count_as_zero() -> None:
    gram = torch.tensor([[-1e-9, 0.25], [0.25, -2e-9]], dtype=torch.float64)
    assert Gram.of_means(gram, 1) == (0.0, 0.25, 0.0)
    assert Gram(4.0, 3.0, 2.0).unit() == (1.0, 0.75, 0.5)
    assert Gram(2.0, 3.0, 4.0).unit() == (0.5, 0.75, 1.0)
    assert [Gram(1.0, dot, 4.0).cosine for dot in (-3.0, -1.0, 3.0)] == [-1.0, -0.5, 1.0]


@pytest.mark.parametrize(
    ("solve", "gram", "expected"),
    [
        (mgda, Gram(4.0, 0.0, 0.0), (0.0, 1.0)),
        (mgda, Gram(1.0, 1.0, 1.0), (0.5, 0.5)),
        (mgda, Gram(1.0, -1.0, 1.0), (0.5, 0.5)),
        (pcgrad, Gram(4.0, 0.0, 0.0), (1.0, 1.0)),
        (pcgrad, Gram(1.0, -1.0, 1.0), (2.0, 2.0)),
        (cagrad, Gram(4.0, 0.0, 0.0), (0.5, 0.5)),
        (cagrad, Gram(1.0, -1.0, 1.0), (0.5, 0.5)),  # a zero mean: the ball has radius zero
        (cagrad, Gram(1.0, 1.0, 1.0), (0.75, 0.75)),
        (solver("cagrad", radius=2.0), Gram(4.0, -2.0, 1.0), (0.0, 0.0)),
        (nash_mtl, Gram(4.0, 0.0, 0.0), (0.5, 0.0)),
        (aligned_mtl, Gram(4.0, 0.0, 0.0), (0.5, 0.0)),
        (aligned_mtl, Gram(1.0, 1.0, 1.0), (0.5, 0.5)),
        (aligned_mtl, Gram(1.0, -1.0, 1.0), (0.0, 0.0)),
        (sdmgrad, Gram(0.0, 0.0, 4.0), (1.15 / 1.3, 0.15 / 1.3)),
        (sdmgrad, Gram(0.0, 0.0, 0.0), (0.5, 0.5)),
        # the slope is exactly 1 or -1: only one gradient gets more than its half
        (solver("cagrad", radius=0.75), Gram(7.0, 0.0, 1.0), (0.5, 0.5 + 0.375 * math.sqrt(8))),
        (solver("cagrad", radius=0.75), Gram(1.0, 0.0, 7.0), (0.5 + 0.375 * math.sqrt(8), 0.5)),
        (solver("cagrad", radius=1e-8), Gram(1.0, 0.0, 1.0), (0.5 + 5e-9, 0.5 + 5e-9)),
        (solver("cagrad", rescale=1), Gram(1.0, 1.0, 1.0), (0.6, 0.6)),
        (solver("cagrad", rescale=2), Gram(4.0, 0.0, 0.0), (1 / 3, 1 / 3)),
        (cagrad, Gram(0.0, 0.0, 4.0), (0.5, 0.5)),
        (cagrad, Gram(0.0, 0.0, 0.0), (0.5, 0.5)),
        (pcgrad, Gram(0.0, 0.0, 4.0), (1.0, 1.0)),
        (solver("pcgrad", threshold=0.5), Gram(4.0, 0.0, 0.0), (1.0, 1.0)),
        (solver("pcgrad", threshold=0.5), Gram(0.0, 0.0, 4.0), (1.0, 1.0)),
        (solver("pcgrad", threshold=0.5), Gram(1.0, 1.0, 4.0), (1.0, 1.0)),  # at the threshold
        (solver("pcgrad", threshold=0.75), Gram(1.0, 1.0, 4.0), (0.0, 0.75)),
        (nash_mtl, Gram(0.0, 0.0, 4.0), (0.0, 0.5)),
        (solver("nash-mtl", scale=3.0), Gram(0.0, 0.0, 0.0), (1.5, 1.5)),
        (solver("nash-mtl", max_norm=0.25), Gram(4.0, 0.0, 0.0), (0.125, 0.0)),
        (solver("nash-mtl", max_norm=9.0), Gram(4.0, 0.0, 1.0), (0.5, 1.0)),  # the norm is sqrt(2)
        (nash_mtl, Gram(1.0, -1.0, 1.0), (math.sqrt(1e7), math.sqrt(1e7))),  # cancel each other
        (solver("aligned-mtl", preference=(0.75, 0.25)), Gram(4.0, 2.0, 1.0), (0.7, 0.35)),
        (solver("aligned-mtl", preference=(0.75, 0.25)), Gram(4.0, -2.0, 1.0), (0.5, -0.25)),
        (solver("aligned-mtl", preference=(0.75, 0.25)), Gram(0.0, 0.0, 0.0), (0.75, 0.25)),
        # without the bound on x, these are equal to MGDA's
        (solver("sdmgrad", preference=(0.8, 0.2)), Gram(1.0, 0.9, 25.0), (1.24 / 1.3, 0.06 / 1.3)),
        (halves, ((0.0, 2.0), (1.0, 0.0)), (0.15 / 1.3, 1.15 / 1.3)),  # saddles
        (halves, ((0.0, 1.0), (2.0, 0.0)), (1.15 / 1.3, 0.15 / 1.3)),
        (solver("sdmgrad", preference=(0.8, 0.2)), Gram(25.0, 0.9, 1.0), (0.24 / 1.3, 1.06 / 1.3)),
    ],
)
def test_zero_equal_and_opposite_gradients(solve, gram, expected) -> None:
    assert solve(gram) == pytest.approx(expected, abs=1e-12)


@each_solver
@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-20, 1e20, 1e300])
def test_extreme_sizes_give_finite_weights(solve, scale: float) -> None:
    for cosine in (-1.0, -0.5, 0.0, 1.0):
        assert all(map(math.isfinite, solve(Gram(scale, cosine * scale, scale))))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["mgda", "moco", "gradnorm", "gta"])
def test_a_step_with_non_finite_products_is_skipped(name: str, bad: float) -> None:
    for index in range(3):
        values = [2.0, -0.5, 1.0]
        values[index] = bad
        for unit_rl in (False, True):
            assert weights_of(name, Gram(*values), unit_rl=unit_rl) is None
    assert METHODS["sdmgrad"]().from_halves(((1.0, bad), (0.0, 1.0))) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solver("pcgrad", threshold=2.0), "threshold=2.0: use a cosine in [-1, 1]"),
        (lambda: solver("pcgrad", threshold="0"), "threshold='0'"),
        (lambda: solver("cagrad", radius=-1), "radius=-1"),
        (lambda: solver("cagrad", rescale=3), "rescale=3: use one of 0, 1, 2"),
        (lambda: solver("nash-mtl", max_norm=0.0), "max_norm=0.0"),
        (lambda: solver("aligned-mtl", mode="mean"), "mode='mean': use one of min, rmse"),
        (lambda: solver("aligned-mtl", preference=(1.0, -1.0)), "preference=(1.0, -1.0)"),
        (lambda: solver("aligned-mtl", preference=(1.0, 1.0, 1.0)), "preference=(1.0, 1.0, 1.0)"),
        (lambda: solver("sdmgrad", preference=("1", 1.0)), "preference=('1', 1.0): use two"),
        (lambda: solver("sdmgrad", regularization=math.nan), "regularization=nan"),
        (lambda: METHODS["gradnorm"](asymmetry="1"), "asymmetry='1'"),
        (lambda: METHODS["moco"](lr=-1), "lr=-1"),
        (lambda: METHODS["dwa"](window=0), "window=0: use an integer >= 1"),
        (lambda: METHODS["dwa"](temperature=0.0), "temperature=0.0"),
        (lambda: METHODS["famo"](decay=-1.0), "decay=-1.0: use a number >= 0"),
        (lambda: cross_gram(torch.eye(3), 2), "sft_count=2: use at least 2 of each"),
        (lambda: cross_gram(torch.eye(4), 1), "sft_count=1: use at least 2 of each term; there"),
        (lambda: Gram.of_means(torch.eye(3), 0), "sft_count=0: use an integer in [1, 2]"),
        (lambda: Gram.of_means(torch.eye(3), 3), "sft_count=3: use an integer in [1, 2]"),
    ],
)
def test_errors_name_argument_and_value(call, message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def torchjd_weights(weighting, gram: Gram) -> list[float]:
    a, b, c = gram.unit()
    return weighting(torch.tensor([[a, b], [b, c]], dtype=torch.float64)).tolist()


@pytest.mark.parametrize("name", ["mgda", "pcgrad", "aligned min", "aligned rmse"])
def test_agrees_with_torchjd(name: str) -> None:
    lib = pytest.importorskip("torchjd.aggregation", reason="torchjd is an optional test oracle")
    weighting = {
        "mgda": lib.MGDAWeighting(epsilon=1e-9),
        "pcgrad": lib.PCGradWeighting(),
        "aligned min": lib.AlignedMTLWeighting(scale_mode="min"),
        "aligned rmse": lib.AlignedMTLWeighting(scale_mode="rmse"),
    }[name]
    for gram in random_grams():
        expected = torchjd_weights(weighting, gram)
        assert SOLVERS[name](gram) == pytest.approx(expected, rel=1e-6, abs=1e-9), gram


def test_nash_and_sdmgrad_agree_with_torchjd() -> None:
    """The direction of Nash-MTL is IMTL-G's; SDMGrad where torchjd's loop converges."""
    lib = pytest.importorskip("torchjd.aggregation", reason="torchjd is an optional test oracle")
    for gram in random_grams():
        s, r = torchjd_weights(lib.IMTLGWeighting(), gram)
        weights = nash_mtl(gram)
        assert weights[0] / sum(weights) == pytest.approx(s / (s + r), rel=1e-6)
    for gram in (GOLDEN, Gram(1.0, 0.2, 2.0), Gram(3.0, -1.0, 1.0)):
        expected = torchjd_weights(lib.SDMGradWeighting(lr=0.3, n_iter=3000, lambda_=0.3), gram)
        assert sdmgrad(gram) == pytest.approx(expected, abs=1e-9)


def test_cagrad_agrees_with_torchjd() -> None:
    pytest.importorskip("cvxpy", reason="torchjd's CAGrad needs cvxpy, from the extra `oracle`")
    from torchjd.aggregation import CAGradWeighting

    for gram in random_grams(30):
        expected = torchjd_weights(CAGradWeighting(c=0.5, norm_eps=0.0), gram)
        assert cagrad(gram) == pytest.approx(expected, rel=1e-3, abs=1e-5)
