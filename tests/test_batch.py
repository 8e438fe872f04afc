"""`plan` and `reduce` of the kernel backends against their definitions in `gac_kernels.tokens`.

Tolerances: copied values and counts are equal; float32 values may differ by one ulp; float64 sums
may differ by summation order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gac_kernels import DemoWeight, LossSpec, backends, fused_gac_loss, reference
from gac_kernels.inputs import BatchInputs
from gac_kernels.tokens import Summary, Tokens, TokenTerms, reduce, plan

from .cases import Case, available, build, each_case

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
KERNELS = ("native", "triton")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the Triton blocks, so that short sequences span several, as real ones do."""
    if backends.unavailable("triton", CPU, torch.float32) is None:
        from gac_kernels.backends.triton import launch

        monkeypatch.setattr(launch, "BLOCK", 16)


class Given(NamedTuple):
    """The arguments of `plan`."""

    inputs: BatchInputs
    spec: LossSpec = LossSpec()

    def change(self, **fields: Any) -> Given:
        return self._replace(inputs=self.inputs._replace(**fields))


def of_case(case: Case) -> Given:
    batch = build(case)
    keywords = {k: v for k, v in batch.keywords.items() if k != "spec"}
    inputs = BatchInputs(batch.targets, batch.advantages, batch.is_demo, **keywords)
    return Given(inputs, case.spec)


def terms_of(tokens: Tokens, spec: LossSpec) -> TokenTerms:
    """Token terms as a backend would return them, for random log-probabilities."""
    g = torch.Generator().manual_seed(1)
    logps = -2 * torch.rand(len(tokens.live), generator=g).where(tokens.live, 0)
    entropy = torch.rand(len(tokens.live), generator=g).where(tokens.live, 0)
    return TokenTerms(*(x.detach() for x in reference.token_terms(logps, entropy, tokens, spec)))


def close(name: str, ours: Tensor, theirs: Tensor, scale: float = 1.0) -> None:
    """Assert equality up to one float32 ulp, or 2^-40 of `scale` for float64 sums."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
    if theirs.dtype == torch.float32:
        tolerance = {"rtol": 2.0**-23, "atol": 2.0**-24 * scale}
    else:
        tolerance = {"rtol": 1e-12, "atol": 2.0**-40 * scale}
    torch.testing.assert_close(
        ours, theirs, **tolerance, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def check_plan(name: str, given: Given) -> Tokens:
    ours, theirs = backends.load(name, CPU).plan(*given), plan(*given)
    for field in Tokens._fields:
        mine, definition = getattr(ours, field), getattr(theirs, field)
        if field in ("weight", "scale"):
            close(field, mine, definition, scale=0.0)
        elif isinstance(definition, Tensor):
            assert mine.dtype == definition.dtype, field
            assert torch.equal(mine, definition), field
        else:
            assert mine == definition, field
    return theirs


def flat(summary: Summary) -> dict[str, Tensor]:
    scalars = {k: v for k, v in summary._asdict().items() if k != "moments"}
    return scalars | (vars(summary.moments) if summary.moments else {})


def check_reduce(name: str, tokens: Tokens, terms: TokenTerms, moments: bool = True) -> Summary:
    """Check that `reduce` equals `finish` and is bitwise reproducible."""
    ours = backends.load(name, CPU).reduce(tokens, terms, moments)
    theirs = reduce(tokens, terms, moments)
    again = flat(backends.load(name, CPU).reduce(tokens, terms, moments))
    assert flat(ours).keys() == flat(theirs).keys()
    for field, definition in flat(theirs).items():
        close(field, flat(ours)[field], definition)
        assert flat(ours)[field].numpy().tobytes() == again[field].numpy().tobytes(), field
    return ours


@pytest.mark.parametrize("name", KERNELS)
@each_case
def test_every_case(case: Case, name: str, poison: None) -> None:
    given = of_case(case)
    tokens = check_plan(available(name), given)
    summary = check_reduce(name, tokens, terms_of(tokens, case.spec))
    assert summary.loss != 0 and summary.moments is not None and summary.moments.rollouts[3] > 0


def padded(*shape: int, demos: tuple[int, ...]) -> Given:
    g = torch.Generator().manual_seed(2)
    targets = torch.randint(9, shape, generator=g)
    targets[torch.rand(shape, generator=g) < 0.3] = -100
    advantages = torch.randn(shape[0], generator=g)
    return Given(BatchInputs(targets, advantages, torch.tensor(demos) > 0, mu=0.4))


def packed(lengths: list[int]) -> Given:
    ends = torch.tensor(lengths).cumsum(0)
    given = padded(1, sum(lengths), demos=(0,))
    g = torch.Generator().manual_seed(3)
    return given.change(
        targets=given.inputs.targets[0],
        advantages=torch.randn(len(lengths), generator=g),
        is_demo=torch.arange(len(lengths)) % 3 == 1,
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).int(),
    )


SMALL = padded(4, 6, demos=(0, 1, 0, 1))
GIVEN: dict[str, Callable[[], Given]] = {
    "no rollouts: their signals are nan": lambda: padded(2, 5, demos=(1, 1)),
    "no demonstrations": lambda: padded(2, 5, demos=(0, 0)),
    "no loss tokens: every norm is 0": lambda: SMALL.change(targets=torch.full((4, 6), -100)),
    "no tokens": lambda: padded(3, 0, demos=(0, 1, 0)),
    "packed without tokens": lambda: packed([0, 0]),
    "one token": lambda: padded(1, 1, demos=(0,)).change(targets=torch.tensor([[3]])),
    "empty sequences at both ends and adjacent": lambda: packed([0, 3, 0, 0, 4, 0]),
    "sequences of several blocks": lambda: packed([50, 2, 33]),
    "a padded row of several blocks": lambda: padded(2, 300, demos=(0, 1)),
    "more sequences than a block": lambda: packed([1, 2, 0] * 7),
    "mu as a tensor": lambda: SMALL.change(mu=torch.tensor(0.3)),
    "norms given by the caller": lambda: SMALL.change(rollout_norm=7, demo_norm=11.0),
    "norms as tensors": lambda: SMALL.change(
        rollout_norm=torch.tensor(7), demo_norm=torch.tensor(11.0, dtype=torch.float64)
    ),
    "a norm of 0 gives zero weight": lambda: SMALL.change(rollout_norm=0.0),
    "constant norms given by the caller": lambda: SMALL.change(rollout_norm=5)._replace(
        spec=LossSpec(rollout_reduction="constant", max_tokens=9)
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
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_edges(given: Callable[[], Given], name: str, poison: None) -> None:
    arguments = given()
    tokens = check_plan(available(name), arguments)
    check_reduce(name, tokens, terms_of(tokens, arguments.spec))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sequence", (0, 1), ids=("rollout", "demonstration"))
def test_a_broken_token_is_seen_where_the_definition_sees_it(name: str, sequence: int) -> None:
    tokens = plan(*SMALL)
    terms = terms_of(tokens, SMALL.spec)
    broken = sequence * 6 + int(tokens.live.view(4, 6)[sequence].nonzero()[0, 0])
    terms.logps[broken] = terms.loss[broken] = terms.entropy[broken] = math.nan
    summary = check_reduce(available(name), tokens, terms)
    assert summary.loss.isnan() and summary.demo_loss.isnan() == (sequence == 1)


@pytest.mark.parametrize("name", KERNELS)
def test_centred_sums_of_a_nearly_constant_advantage_do_not_cancel(name: str) -> None:
    given = SMALL.change(advantages=1e4 + 1e-2 * torch.randn(4, 6))
    tokens = plan(*given)
    summary = check_reduce(available(name), tokens, terms_of(tokens, given.spec))
    ours, exact = (
        x.moments.rollouts[4] for x in (summary, reduce(tokens, terms_of(tokens, given.spec), True))
    )
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_without_moments(name: str) -> None:
    tokens = plan(*SMALL)
    summary = check_reduce(available(name), tokens, terms_of(tokens, SMALL.spec), moments=False)
    assert summary.moments is None


@pytest.mark.parametrize("name", KERNELS)
def test_the_loss_may_change_in_place(name: str) -> None:
    """Trainers do `loss /= steps` and `loss += auxiliary`."""
    logits = torch.randn(2, 3, 11, requires_grad=True)
    batch: tuple[Any, ...] = (torch.tensor([[1, 2, 3]] * 2), torch.ones(2), torch.arange(2) > 0)
    plain = fused_gac_loss(logits, *batch, backend=available(name)).loss
    (whole,) = torch.autograd.grad(plain, logits)
    loss = fused_gac_loss(logits, *batch, backend=name).loss
    loss /= 4
    loss += 1
    (quarter,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(quarter, whole / 4)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_inputs_on_the_cpu(pinned: bool) -> None:
    """CPU inputs, pageable or pinned, are copied without synchronization. Copies of pinned inputs
    can be captured in a CUDA graph, and a replay reads their new values.
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
def test_recorded_in_a_cuda_graph() -> None:
    """No host synchronization; a replay on new inputs gives the results for those inputs."""
    cpu = packed([3, 0, 1300, 7]).change(mu=torch.tensor(0.3)).inputs
    given = Given(BatchInputs(*(x.cuda() if isinstance(x, Tensor) else x for x in cpu)))
    targets = given.inputs.targets
    triton = backends.load("triton", torch.device("cuda"))
    logps = torch.zeros(len(targets), device="cuda")

    def run() -> tuple[Tokens, Summary]:
        tokens = triton.plan(*given)
        return tokens, triton.reduce(tokens, TokenTerms(*[logps] * 5), True)

    run()  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, summary = run()
    targets[1] = -100
    logps.copy_(torch.where(targets == -100, 0.0, -torch.rand_like(logps)))
    graph.replay()
    expected = plan(*given)
    for field in ("live", "lengths", "offsets", "sequence", "advantages"):
        assert torch.equal(getattr(tokens, field), getattr(expected, field)), field
    close("weight", tokens.weight, expected.weight)
    for field, value in flat(reduce(expected, TokenTerms(*[logps] * 5), True)).items():
        close(field, flat(summary)[field], value, scale=float(len(logps)))
