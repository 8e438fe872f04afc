"""`plan` and `reduce` of the kernel backends against their definitions in `gac_kernels.tokens`.

Copied values and counts must be equal; float32 values may differ by one ulp, and float64 sums in
their summation order.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossOutput, LossSpec, backends, fused_gac_loss, reference
from gac_kernels.tokens import BatchInputs, Tokens, TokenTerms, plan, reduce
from tests.kernels.cases import CASES, CPU, Case, build, require_backend

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
KERNELS = ("native", "triton")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the Triton blocks, so that short sequences span several, as real ones do."""
    if backends.unavailable("triton", CPU, torch.float32) is None:
        from gac_kernels.backends.triton import launch

        monkeypatch.setattr(launch, "BLOCK", 16)


class PlanArgs(NamedTuple):
    """The arguments of `plan`."""

    inputs: BatchInputs
    spec: LossSpec = LossSpec()

    def change(self, **fields: Any) -> "PlanArgs":
        return self._replace(inputs=self.inputs._replace(**fields))


def plan_args(case: Case) -> "PlanArgs":
    batch = build(case)
    keywords = {k: v for k, v in batch.keywords.items() if k in BatchInputs._fields}
    return PlanArgs(BatchInputs(*batch.inputs, **keywords), case.spec)


def terms_of(tokens: Tokens, spec: LossSpec) -> TokenTerms:
    """Token terms as a backend would return them, for random log-probabilities."""
    g = torch.Generator().manual_seed(1)
    logps = -2 * torch.rand(len(tokens.live), generator=g).where(tokens.live, 0)
    entropy = torch.rand(len(tokens.live), generator=g).where(tokens.live, 0)
    terms = TokenTerms(*(x.detach() for x in reference.token_terms(logps, entropy, tokens, spec)))
    clipped = (torch.arange(len(logps)) % 3 != 1) & tokens.rollout
    return terms._replace(kl=logps.square() * tokens.rollout, clipped=clipped.float())


def assert_close(name: str, actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Assert equality up to one float32 ulp, or 2^-40 of `scale` for float64 sums."""
    assert actual.dtype == expected.dtype, name
    assert actual.shape == expected.shape, name
    if expected.dtype == torch.float32:
        tolerance = {"rtol": 2.0**-23, "atol": 2.0**-24 * scale}
    else:
        tolerance = {"rtol": 1e-12, "atol": 2.0**-40 * scale}
    torch.testing.assert_close(
        actual, expected, **tolerance, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def functions(name: str) -> tuple[Callable[..., Tokens], Callable[..., LossOutput]]:
    """`plan` and `reduce` of a backend; Triton uses its kernels only on a GPU."""
    module, suffix = backends.load(name, CPU), "_by_kernels" if name == "triton" else ""
    return getattr(module, f"plan{suffix}"), getattr(module, f"reduce{suffix}")


def check_plan(name: str, args: PlanArgs) -> Tokens:
    """Check that the backend's `plan` equals the definition, and return the definition's tokens."""
    ours, definition = functions(name)[0](*args, torch.float32), plan(*args)
    for field in Tokens._fields:
        actual, expected = getattr(ours, field), getattr(definition, field)
        if field in ("weight", "scale"):
            assert_close(field, actual, expected, scale=0.0)
        elif isinstance(expected, Tensor):
            assert actual.dtype == expected.dtype, field
            assert torch.equal(actual, expected), field
        else:
            assert actual == expected, field
    return definition


def flat(output: LossOutput) -> dict[str, Tensor]:
    """Every tensor of an output by name."""
    tensors = {k: v for k, v in output._asdict().items() if isinstance(v, Tensor)}
    return tensors | (vars(output.moments) if output.moments else {})


def check_reduce(name: str, tokens: Tokens, terms: TokenTerms, moments: bool = True) -> LossOutput:
    """Check that the backend's `reduce` equals the definition and is bitwise reproducible."""
    ours, repeated = (functions(name)[1](tokens, terms, moments) for _ in range(2))
    definition = flat(reduce(tokens, terms, moments))
    assert flat(ours).keys() == definition.keys()
    for field, expected in definition.items():
        actual = flat(ours)[field]
        assert_close(field, actual, expected)
        assert actual.numpy().tobytes() == flat(repeated)[field].numpy().tobytes(), field
    return ours


# the first case of each group that is the same for the kernels, which see no logits
DISTINCT = {
    (
        *(case.lengths, case.demos, case.packed, case.per_token),
        *(x is None for x in (case.old, case.ref, case.rollout)),
        *(spec.rollout_reduction, spec.demo_reduction, spec.demo_weight is DemoWeight.SHAPED),
    ): case
    for case in reversed(CASES)
    for spec in [case.spec]
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "native") for case in CASES),
        *((case, "triton") for case in CASES if case in DISTINCT.values()),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_every_case(case: Case, name: str, poison: None) -> None:
    tokens = check_plan(require_backend(name), plan_args(case))
    summary = check_reduce(name, tokens, terms_of(tokens, case.spec))
    assert summary.loss != 0
    assert summary.moments is not None
    assert summary.moments.rollouts[3] > 0


def padded(*shape: int, demos: tuple[int, ...]) -> "PlanArgs":
    g = torch.Generator().manual_seed(2)
    targets = torch.randint(9, shape, generator=g)
    targets[torch.rand(shape, generator=g) < 0.3] = -100
    return PlanArgs(
        BatchInputs(targets, torch.randn(shape[0], generator=g), torch.tensor(demos) > 0, mu=0.4)
    )


def packed(lengths: list[int]) -> "PlanArgs":
    ends = torch.tensor(lengths).cumsum(0)
    args = padded(1, sum(lengths), demos=(0,))
    g = torch.Generator().manual_seed(3)
    return args.change(
        targets=args.inputs.targets[0],
        advantages=torch.randn(len(lengths), generator=g),
        is_demo=torch.arange(len(lengths)) % 3 == 1,
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).int(),
    )


SMALL = padded(4, 6, demos=(0, 1, 0, 1))
CONSTANT = LossSpec(rollout_reduction="constant", demo_reduction="constant", max_tokens=9)
EDGES: dict[str, Callable[[], PlanArgs]] = {
    "no rollouts, whose signals are nan": lambda: padded(2, 5, demos=(1, 1)).change(
        ref_logps=torch.randn(2, 5)
    ),
    "no demonstrations": lambda: padded(2, 5, demos=(0, 0)),
    "no loss tokens: every norm is 0": lambda: SMALL.change(targets=torch.full((4, 6), -100)),
    "no tokens": lambda: padded(3, 0, demos=(0, 1, 0)),
    "packed without tokens": lambda: packed([0, 0]),
    "one token": lambda: padded(1, 1, demos=(0,)).change(targets=torch.tensor([[3]])),
    "two tokens": lambda: padded(1, 2, demos=(0,)).change(targets=torch.tensor([[3, 4]])),
    "empty sequences at both ends and adjacent": lambda: packed([0, 3, 0, 0, 4, 0]),
    "sequences of several blocks": lambda: packed([50, 2, 33]),
    "a padded row of several blocks": lambda: padded(2, 300, demos=(0, 1)),
    "more sequences than a block": lambda: packed([1, 2, 0] * 7),
    "mu as a tensor": lambda: SMALL.change(mu=torch.tensor(0.3)),
    "all are rollouts": lambda: SMALL.change(is_demo=False, ref_logps=torch.randn(4, 6)),
    "all are demonstrations, without advantages": lambda: SMALL.change(
        is_demo=True, advantages=None
    ),
    "packed demonstrations without advantages": lambda: packed([3, 0, 4]).change(
        is_demo=True, advantages=None
    ),
    "norms from the caller": lambda: SMALL.change(rollout_norm=7, demo_norm=11.0),
    "norms as tensors": lambda: SMALL.change(
        rollout_norm=torch.tensor(7), demo_norm=torch.tensor(11.0, dtype=torch.float64)
    ),
    "a norm of 0 gives zero weight": lambda: SMALL.change(rollout_norm=0.0),
    "constant norms from the caller": lambda: SMALL.change(rollout_norm=5)._replace(
        spec=LossSpec(rollout_reduction="constant", max_tokens=9)
    ),
    "masked sequences of both kinds count": lambda: SMALL.change(
        targets=torch.where(torch.arange(4)[:, None] < 2, -100, SMALL.inputs.targets)
    )._replace(spec=CONSTANT),
    "masked sequences with a role per token count": lambda: SMALL.change(
        targets=torch.where(torch.arange(4)[:, None] < 3, -100, SMALL.inputs.targets),
        is_demo=torch.tensor([[0] * 6, [1] * 6, [1, 0] * 3, [0, 1] * 3]).bool(),
    )._replace(spec=CONSTANT),
    "an empty sequence with a role per token is a rollout": lambda: (
        packed([2, 0, 3, 0])
        .change(is_demo=torch.tensor([0, 1, 1, 1, 0]).bool(), advantages=torch.randn(5))
        ._replace(spec=CONSTANT)
    ),
    "other float dtypes": lambda: SMALL.change(
        advantages=SMALL.inputs.advantages.double(),
        old_logps=torch.randn(4, 6).bfloat16(),
        ref_logps=torch.randn(4, 6).double(),
    ),
    "strided inputs": lambda: SMALL.change(
        targets=SMALL.inputs.targets.repeat(1, 2)[:, ::2].contiguous().T.contiguous().T,
        old_logps=torch.randn(6, 4).T,
        advantages=torch.randn(8)[::2],
        is_demo=torch.tensor([0, 1] * 4).bool()[::2],
    ),
    "advantages of demonstrations under SHAPED": lambda: SMALL.change(
        advantages=torch.randn(4, 6)
    )._replace(spec=LossSpec(demo_weight=DemoWeight.SHAPED)),
    "nan at masked tokens": lambda: SMALL.change(
        advantages=torch.where(SMALL.inputs.targets == -100, math.nan, torch.randn(4, 6)),
        old_logps=torch.where(SMALL.inputs.targets == -100, math.nan, torch.randn(4, 6)),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("make_args", EDGES.values(), ids=EDGES)
def test_edges(make_args: Callable[[], PlanArgs], name: str, poison: None) -> None:
    args = make_args()
    tokens = check_plan(require_backend(name), args)
    check_reduce(name, tokens, terms_of(tokens, args.spec))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sequence", (0, 1), ids=("rollout", "demonstration"))
def test_nan_tokens_propagate_as_in_the_definition(name: str, sequence: int) -> None:
    """An infinite loss does so only if its term has a weight."""
    tokens = plan(*SMALL)
    terms = terms_of(tokens, SMALL.spec)
    token = sequence * 6 + int(tokens.live.view(4, 6)[sequence].nonzero()[0, 0])
    terms.logps[token] = terms.loss[token] = terms.entropy[token] = math.nan
    summary = check_reduce(require_backend(name), tokens, terms)
    assert summary.loss.isnan()
    assert summary.demo_loss.isnan() == (sequence == 1)
    terms.logps[token], terms.loss[token], terms.entropy[token] = -math.inf, math.inf, 0
    for mu in (1.0 - sequence, torch.tensor(1.0 - sequence)):
        assert check_reduce(name, tokens._replace(mu=mu), terms).loss.isfinite()


@pytest.mark.parametrize("name", KERNELS)
def test_centered_sums_do_not_cancel_and_moments_are_optional(name: str) -> None:
    """The advantages are nearly constant."""
    args = SMALL.change(advantages=1e4 + 1e-2 * torch.randn(4, 6))
    tokens = plan(*args)
    terms = terms_of(tokens, args.spec)
    ours = check_reduce(require_backend(name), tokens, terms)
    definition = reduce(tokens, terms, True)
    torch.testing.assert_close(
        ours.moments.rollouts[4], definition.moments.rollouts[4], rtol=1e-6, atol=0
    )
    assert check_reduce(name, tokens, terms, moments=False).moments is None


@pytest.mark.parametrize("name", KERNELS)
def test_the_loss_can_be_modified_in_place(name: str) -> None:
    """Trainers do `loss /= steps` and `loss += auxiliary`."""
    logits = torch.randn(2, 3, 11, requires_grad=True)
    batch: tuple[Any, ...] = (torch.tensor([[1, 2, 3]] * 2), torch.ones(2), torch.arange(2) > 0)
    unmodified = fused_gac_loss(logits, *batch, backend=require_backend(name), mu=0.5).loss
    (expected,) = torch.autograd.grad(unmodified, logits)
    loss = fused_gac_loss(logits, *batch, backend=name, mu=0.5).loss
    loss /= 4
    loss += 1
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, expected / 4)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_inputs_on_the_cpu(pinned: bool) -> None:
    """CPU inputs are copied without synchronization.

    A CUDA graph can capture copies of pinned inputs, and a replay reads their new values.
    """
    cpu = packed([3, 0, 1300, 7]).change(mu=torch.tensor(0.3), demo_norm=torch.tensor(9.0)).inputs
    if pinned:
        cpu = BatchInputs(*(x.pin_memory() if isinstance(x, Tensor) else x for x in cpu))
    inputs = cpu._replace(targets=cpu.targets.cuda())
    triton, spec = backends.load("triton", torch.device("cuda")), LossSpec()
    expected = triton.plan(
        BatchInputs(*(x.cuda() if isinstance(x, Tensor) else x for x in cpu)), spec
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = triton.plan(inputs, spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(tokens, expected, strict=True):
        assert x is y is None or torch.equal(x, y)
    if pinned:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = triton.plan(inputs, spec)
        inputs.advantages.mul_(2)
        graph.replay()
        assert torch.equal(tokens.advantages, 2 * expected.advantages)


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    """No host synchronization; a replay on new inputs gives the results for those inputs."""
    cpu = packed([3, 0, 1300, 7]).change(mu=torch.tensor(0.3)).inputs
    args = PlanArgs(BatchInputs(*(x.cuda() if isinstance(x, Tensor) else x for x in cpu)))
    targets = args.inputs.targets
    triton = backends.load("triton", torch.device("cuda"))
    logps = torch.zeros(len(targets), device="cuda")

    def run() -> tuple[Tokens, LossOutput]:
        tokens = triton.plan(*args)
        return tokens, triton.reduce(tokens, TokenTerms(*[logps] * 5), True)

    run()  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, summary = run()
    targets[1] = -100
    logps.copy_(torch.where(targets == -100, 0.0, -torch.rand_like(logps)))
    graph.replay()
    expected = plan(*args)
    for field in ("live", "lengths", "offsets", "sequence", "advantages"):
        assert torch.equal(getattr(tokens, field), getattr(expected, field)), field
    assert_close("weight", tokens.weight, expected.weight)
    for field, value in flat(reduce(expected, TokenTerms(*[logps] * 5), True)).items():
        assert_close(field, flat(summary)[field], value, scale=float(len(logps)))


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(
    ("ends", "lengths", "first", "last"),
    [
        ([0, 4, 13], [4, 6], 0, 10),
        ([0, 4, 8], [4, 4], 0, 8),
        ([2, 4, 10], [2, 6], 2, 10),
        ([0, 7, 5], [7, 0], 0, 7),
        ([-3, 4, 10], [4, 6], 0, 10),
    ],
)
def test_unchecked_offsets_stay_in_bounds(
    name: str,
    ends: list[int],
    lengths: list[int],
    first: int,
    last: int,
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU nobody reads `cu_seqlens`: nothing is written out of bounds, or left unwritten."""
    guarded: list[torch.Tensor] = []

    def allocate(*shape: int, dtype: torch.dtype, device: object, fill: int = 0) -> torch.Tensor:
        size = math.prod(shape)
        guarded.append(torch.full((size + 64,), 1, dtype=dtype))
        return guarded[-1][32 : 32 + size].fill_(fill).view(shape)

    call = functions(require_backend(name))[0]
    inputs = BatchInputs(
        torch.zeros(10).long(),
        torch.arange(10.0) + 1,
        torch.tensor([False, True]),
        old_logps=torch.ones(10),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
    )
    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch, "empty", functools.partial(allocate, fill=-1))
    tokens = call(inputs, LossSpec(demo_weight="shaped"), torch.float32)
    monkeypatch.undo()
    assert guarded or name == "reference"
    assert all((x[:32] == 1).all() and (x[-32:] == 1).all() for x in guarded)
    assert tokens.lengths.tolist() == lengths
    assert tokens.offsets[0] == first
    assert tokens.offsets[-1] == last
    inside = (torch.arange(10) >= first) & (torch.arange(10) < last)
    assert torch.equal(tokens.live, inside)
    for column in (tokens.weight, tokens.scale, tokens.advantages, tokens.old):
        assert column.isfinite().all()
        assert (column[~inside] == 0).all()
    assert ((tokens.sequence >= 0) & (tokens.sequence < 2)).all()
