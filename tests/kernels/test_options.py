"""Random combinations of the loss's options against float64 autograd of a naive implementation."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gac_kernels import (
    DemoWeight,
    LossOutput,
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear,
    loss,
    loss_from_logprobs,
    reference,
)
from gac_kernels.contract import CHOICES, REDUCTIONS, TOP_K_LOSSES
from gac_kernels.projection import Head, Projection
from tests.kernels.cases import LEAVES, each_backend, require_backend
from tests.kernels.loss_oracle import distributions, oracle

V, H = 13, 5


class Batch(NamedTuple):
    """A packed float32 batch."""

    leaves: tuple[Tensor, Tensor, Tensor]  # hidden, weight, bias
    inputs: tuple[Tensor, Tensor, Tensor]  # targets, advantages, is_demo
    keywords: dict[str, Any]
    ends: list[int]

    @property
    def scaling(self) -> dict[str, Any]:
        return {k: self.keywords[k] for k in ("logit_scale", "softcap")}

    def per_token(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([0, *self.ends]).diff()
        return x.repeat_interleave(lengths) if len(x) == len(self.ends) else x

    def truth(self, leaves: tuple[Tensor, ...]) -> dict[str, Tensor]:
        hidden, weight, bias = leaves
        targets, advantages, is_demo = self.inputs
        keywords = {k: v for k, v in self.keywords.items() if k != "cu_seqlens"}
        per_token = self.per_token(advantages).double(), self.per_token(is_demo)
        return oracle(hidden @ weight.T + bias, targets, *per_token, self.ends, **keywords)


@st.composite
def specs(draw: st.DrawFn) -> LossSpec:
    policy = draw(st.sampled_from(CHOICES["policy_loss"]))
    correction = draw(st.sampled_from(CHOICES["correction"]))
    bounds = {"correction_max": draw(st.sampled_from([2.0, 0.05]))}
    if not correction.startswith("probability"):
        bounds = {
            "correction_min": draw(st.sampled_from([None, 0.5])),
            "correction_max": draw(st.sampled_from([2.0, 1.2, None])),
        }
    return LossSpec(
        policy_loss=policy,
        importance_sampling_level=draw(st.sampled_from(CHOICES["importance_sampling_level"])),
        correction=correction,
        **bounds,
        clip_low=draw(st.sampled_from([0.2, None])),
        clip_high=draw(st.sampled_from([0.2, -0.1] if policy == "cispo" else [0.2, None])),
        dual_clip=draw(st.sampled_from([None, 1.3])),
        sapo_tau=(1.0, 1.3),
        kl_coef=draw(st.sampled_from([0.0, 0.3, 1.0])),
        kl_estimator=draw(st.sampled_from(CHOICES["kl_estimator"])),
        use_bias_correction_kl=draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.1, 1.0])),
        demo_weight=draw(st.sampled_from(list(DemoWeight))),
        rollout_reduction=draw(st.sampled_from(REDUCTIONS)),
        demo_reduction=draw(st.sampled_from(REDUCTIONS)),
        max_tokens=7,
        temperature=draw(st.sampled_from([1.0, 0.7])),
        teacher_coef=draw(st.sampled_from([0.0, 0.0, 0.7])),
        teacher_loss=draw(st.sampled_from(CHOICES["teacher_loss"])),
    )


def teacher(spec: LossSpec, logps: Tensor, g: torch.Generator) -> dict[str, Tensor]:
    """What a teacher says of tokens whose current log-probs are `logps`, by argument."""
    tokens = len(logps)
    if spec.teacher_loss not in TOP_K_LOSSES:
        return {"teacher_logps": logps + 0.5 * torch.randn(tokens, generator=g).abs().neg()}
    log_p = (2 * torch.randn(tokens, V, generator=g)).log_softmax(-1)
    found, ids = log_p.topk(4, -1)
    ids[torch.rand(tokens, 4, generator=g) < 0.1] = -100  # often the first of a token
    return {"teacher_logps": found.where(ids != -100, torch.nan), "teacher_ids": ids}


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    spec = draw(specs())
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    ends = torch.tensor(lengths).cumsum(0)
    tokens, sequences = int(ends[-1]), len(lengths)
    leaves = tuple(torch.randn(*s, generator=g) for s in ((tokens, H), (V, H), (V,)))
    targets = torch.randint(V, (tokens,), generator=g)
    masked = torch.rand(tokens, generator=g) < 0.15
    masked[ends - 1] = False  # no sequence is empty
    targets[masked] = -100
    scaling = {
        "logit_scale": draw(st.sampled_from([1.0, 0.5])),
        "softcap": draw(st.sampled_from([None, 3.0])),
    }
    logps, _ = distributions(leaves[0] @ leaves[1].T + leaves[2], targets, spec, **scaling)

    def near(spread: float) -> Tensor:
        return logps + spread * torch.randn(tokens, generator=g)

    rollout_logps, weights = None, None
    if spec.correction != "none":
        rollout_logps = near(0.4).where(torch.rand(tokens, generator=g) > 0.1, torch.nan)
    if draw(st.booleans()):
        weights = 2 * torch.rand(tokens, generator=g).where(
            torch.rand(tokens, generator=g) > 0.2, 0
        )
    has_ref = spec.kl_coef != 0 or draw(st.booleans())
    keywords = {
        "spec": spec,
        "mu": draw(st.sampled_from([0.3, 0.6])),
        "cu_seqlens": torch.nn.functional.pad(ends, (1, 0)),
        "old_logps": near(0.3) if draw(st.booleans()) else None,
        "ref_logps": near(0.3) if has_ref else None,
        "rollout_logps": rollout_logps,
        "weights": weights,
        **scaling,
    }
    if spec.teacher_coef != 0 or draw(st.booleans()):
        keywords |= teacher(spec, logps, g)
    roles, advantages = (draw(st.sampled_from([tokens, sequences])) for _ in range(2))
    a = torch.randn(advantages, generator=g)
    a = a.where(torch.rand(advantages, generator=g) > 0.2, 0)
    return Batch(
        leaves, (targets, a, torch.rand(roles, generator=g) < 0.4), keywords, ends.tolist()
    )


def gradients(loss: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def copies(leaves: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype).clone().requires_grad_() for x in leaves)


def assert_near(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.nan_to_num(0, 0, 0).abs().max().clamp(min=1).item() if expected.numel() else 1
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=0,
        atol=tolerance * scale,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def check(out: LossOutput, grads: list[Tensor], batch: Batch, tolerance: float) -> None:
    leaves = copies(batch.leaves, torch.float64)
    truth = batch.truth(leaves)
    for name, value in truth.items():
        assert_near(name, getattr(out, name).detach(), value.detach(), tolerance)
    for name, ours, theirs in zip(LEAVES, grads, gradients(truth["loss"], leaves), strict=True):
        assert_near(f"gradient of {name}", ours, theirs, tolerance)


search = settings(deadline=None, max_examples=60, derandomize=True)
brief_search = settings(
    deadline=None,
    max_examples=12,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@search
@given(batches())
def test_float64_reference_in_every_form(batch: Batch) -> None:
    hidden, weight, bias = leaves = copies(batch.leaves, torch.float64)
    keywords = {**batch.keywords, "bias": bias}
    out = fused_linear_gac_loss(*leaves[:2], *batch.inputs, **keywords, chunk_bytes=300)
    check(out, gradients(out.loss, leaves), batch, 1e-9)
    dense = reference.fused_linear_gac_loss(*leaves[:2], *batch.inputs, **keywords)
    check(dense, gradients(dense.loss, leaves), batch, 1e-9)
    if "teacher_ids" in keywords:
        return
    x = hidden @ weight.T + bias
    logps, entropy = reference.token_logprobs(
        x, batch.inputs[0], temperature=keywords["spec"].temperature, **batch.scaling
    )
    rest = {k: v for k, v in batch.keywords.items() if k not in batch.scaling}
    indirect = loss_from_logprobs(logps, *batch.inputs, entropy=entropy, **rest)
    check(indirect, gradients(indirect.loss, leaves), batch, 1e-9)
    for name in ("rollouts", "demo_nll", "totals"):
        values = (getattr(o.moments, name) for o in (indirect, dense, out))
        first, *others = (v.nan_to_num(-1, neginf=-2) for v in values)
        for other in others:
            assert_near(name, other, first, 1e-9)


def check_kernels(batch: Batch, backend: str) -> None:
    """Logits and linear form in float32, with moments and clip fraction."""
    hidden, weight, bias = leaves = copies(batch.leaves, torch.float32)
    keywords = {**batch.keywords, "backend": backend}
    if "teacher_ids" not in keywords:
        logits = fused_gac_loss(hidden @ weight.T + bias, *batch.inputs, **keywords)
        check(logits, gradients(logits.loss, leaves), batch, 1e-4)
    linear_keywords = {**keywords, "bias": bias, "chunk_bytes": 200}
    out = fused_linear_gac_loss(hidden, weight, *batch.inputs, **linear_keywords)
    check(out, gradients(out.loss, leaves), batch, 1e-4)
    exact = copies(batch.leaves, torch.float64)
    linear_keywords |= {"backend": "reference", "bias": exact[2]}
    truth = fused_linear_gac_loss(*exact[:2], *batch.inputs, **linear_keywords)
    for name in ("rollouts", "demo_nll", "totals"):
        ours, theirs = (getattr(o.moments, name).nan_to_num(-1, neginf=-2) for o in (out, truth))
        assert_near(name, ours, theirs, 1e-4)


@search
@given(batches())
def test_native(batch: Batch) -> None:
    check_kernels(batch, require_backend("native"))


@pytest.mark.parametrize("backend", ["triton", "cuda"], indirect=True)
@brief_search
@given(batches())
def test_triton_and_cuda(backend: str, batch: Batch) -> None:
    check_kernels(batch, backend)


def make(spec: LossSpec, **keywords: Any) -> tuple[Batch, Tensor]:
    """Three rollouts of four tokens, and the current log-probs."""
    g = torch.Generator().manual_seed(0)
    leaves = tuple(torch.randn(*s, generator=g) for s in ((12, H), (V, H), (V,)))
    targets = torch.randint(V, (12,), generator=g)
    inputs = targets, torch.tensor([1.0, -1.0, 0.5]), torch.zeros(3).bool()
    logps, _ = distributions(leaves[0] @ leaves[1].T + leaves[2], targets, spec, 1.0, None)
    keywords = {"spec": spec, "mu": 0.3, "cu_seqlens": torch.tensor([0, 4, 8, 12]), **keywords}
    return Batch(leaves, inputs, keywords, [4, 8, 12]), logps


@each_backend
@pytest.mark.parametrize("dead", ["weight", "correction", "sequence ratio"])
def test_dead_rows_are_skipped(backend: str, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sequences with a nonzero gradient have rows in the backward GEMMs."""
    spec = {
        "weight": LossSpec(),
        "correction": LossSpec(correction="sequence_mask"),
        "sequence ratio": LossSpec(importance_sampling_level="sequence"),
    }[dead]
    batch, logps = make(spec)
    first, second = torch.arange(12) < 4, (torch.arange(12) >= 4) & (torch.arange(12) < 8)
    extra = {
        "weight": {"weights": torch.tensor([0.0, 1.0, 1.0])},
        "correction": {"rollout_logps": logps - 5.0 * first, "old_logps": logps},
        # the first sequence is clipped from above, the second (A < 0) from below
        "sequence ratio": {"old_logps": logps - 0.5 * first + 0.5 * second},
    }[dead]
    counts, add = [], Head.add

    def counting(self: Any, index: Tensor, *args: Any, **keywords: Any) -> None:
        counts.append(len(index))
        add(self, index, *args, **keywords)

    monkeypatch.setattr(Head, "add", counting)
    hidden, weight, bias = copies(batch.leaves, torch.float32)
    keywords = batch.keywords | extra | {"bias": bias, "backend": backend}
    fused_linear_gac_loss(hidden, weight, *batch.inputs, **keywords).loss.backward()
    assert counts == [12 - {"weight": 4, "correction": 4, "sequence ratio": 8}[dead]]
    assert (hidden.grad[:4] == 0).all()
    assert (hidden.grad[8:] != 0).any(1).all()


@pytest.mark.parametrize(
    ("spec", "keywords", "passes"),
    [
        (LossSpec(policy_loss="cispo"), ["old_logps"], 1),
        (LossSpec(policy_loss="sapo", kl_coef=0.1, use_bias_correction_kl=True), ["ref_logps"], 1),
        (LossSpec(importance_sampling_level="sequence"), [], 1),
        (
            LossSpec(importance_sampling_level="sequence", policy_loss="sapo", kl_coef=0.1),
            ["ref_logps"],
            1,
        ),
        (LossSpec(correction="sequence_mask"), ["rollout_logps", "old_logps"], 1),
        (LossSpec(correction="token_mask"), ["rollout_logps"], 1),
        (LossSpec(importance_sampling_level="sequence", policy_loss="reinforce"), ["old_logps"], 1),
        (LossSpec(importance_sampling_level="sequence", policy_loss="cispo"), ["old_logps"], 2),
        (
            LossSpec(importance_sampling_level="sequence", use_bias_correction_kl=True),
            ["ref_logps"],
            1,
        ),
        (
            LossSpec(
                importance_sampling_level="sequence", policy_loss="cispo", correction="token_mask"
            ),
            ["rollout_logps"],
            1,
        ),
        (
            LossSpec(importance_sampling_level="sequence", correction="token_mask"),
            ["rollout_logps"],
            2,
        ),
        (LossSpec(importance_sampling_level="sequence"), ["old_logps"], 2),
        (LossSpec(correction="sequence_truncate"), ["rollout_logps"], 2),
        (
            LossSpec(
                importance_sampling_level="sequence", kl_coef=0.1, use_bias_correction_kl=True
            ),
            ["ref_logps"],
            2,
        ),
    ],
)
def test_number_of_forward_passes(
    spec: LossSpec, keywords: list[str], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss takes 6 N H V FLOPs where the contract says so, and 8 N H V elsewhere."""
    require_backend("native")
    batch, logps = make(spec)
    rows = []
    logits = Projection.logits

    monkeypatch.setattr(
        Projection, "logits", lambda self, x, *a: rows.append(len(x)) or logits(self, x, *a)
    )
    hidden, weight, bias = copies(batch.leaves, torch.float32)
    columns = dict.fromkeys(keywords, logps)
    fused_linear_gac_loss(
        hidden, weight, *batch.inputs, bias=bias, **batch.keywords, **columns, backend="native"
    )
    assert sum(rows) == 12 * passes


def test_without_a_gradient_a_coupled_loss_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    require_backend("native")
    batch, logps = make(LossSpec(importance_sampling_level="sequence"), mu=0.0)
    hidden, weight, bias = batch.leaves
    logits, keywords = hidden @ weight.T + bias, {**batch.keywords, "old_logps": logps - 0.1}
    expected = fused_gac_loss(logits, *batch.inputs, **keywords, backend="reference")
    monkeypatch.setattr("gac_kernels.backends.cpu.row_loss", None)
    out = fused_gac_loss(logits, *batch.inputs, **keywords, backend="native")
    assert_near("loss", out.loss, expected.loss, 1e-6)


@pytest.mark.parametrize(
    ("dead", "exact", "bound"), [("ratio", 8, 12), ("correction", 8, 12), ("advantage", 4, 4)]
)
def test_two_passes_synchronize_once(
    dead: str, exact: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the second pass uses a bound on its rows that is known before the first pass."""
    require_backend("native")
    spec = LossSpec(importance_sampling_level="token" if dead == "correction" else "sequence")
    if dead == "correction":
        spec = LossSpec(correction="sequence_mask")
    batch, logps = make(spec)
    shifted = logps - 0.5 * (torch.arange(12) < 4)
    extra: dict[str, Tensor] = {"rollout_logps" if dead == "correction" else "old_logps": shifted}
    if dead == "advantage":  # of a token whose sequence has others; their sum is 0
        targets, _, is_demo = batch.inputs
        advantages, weights = torch.zeros(12), torch.ones(12)
        advantages[:2], weights[2] = torch.tensor([1.0, -1.0]), 0
        batch = batch._replace(inputs=(targets, advantages, is_demo))
        extra["weights"] = weights
    rows, syncs = [], []
    logits, read_counts = Projection.logits, linear.read_counts
    monkeypatch.setattr(
        Projection, "logits", lambda self, x, *a: rows.append(len(x)) or logits(self, x, *a)
    )
    monkeypatch.setattr(
        linear, "read_counts", lambda x: syncs.append(isinstance(x, Tensor)) or read_counts(x)
    )
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(loss, "ASYNCHRONOUS", devices)
        hidden, weight, bias = leaves = copies(batch.leaves, torch.float32)
        keywords = batch.keywords | extra | {"bias": bias, "backend": "native"}
        out = fused_linear_gac_loss(hidden, weight, *batch.inputs, **keywords)
        check(
            out, gradients(out.loss, leaves), batch._replace(keywords=batch.keywords | extra), 1e-4
        )
    assert rows == [12, exact, 12, bound]
    assert sum(syncs) == 2 + 1


@each_backend
def test_weights_affect_no_statistic(backend: str) -> None:
    batch, logps = make(LossSpec(kl_coef=0.1))
    old = logps + torch.linspace(-0.5, 0.5, 12)
    keywords = batch.keywords | {"old_logps": old, "ref_logps": old, "backend": backend}
    hidden, weight, bias = batch.leaves
    x = hidden @ weight.T + bias
    plain = fused_gac_loss(x, *batch.inputs, **keywords)
    weighted = fused_gac_loss(x, *batch.inputs, **keywords, weights=torch.tensor([0.0, 3.0, 0.5]))
    assert weighted.loss != plain.loss
    clipped = plain.moments.clip_fraction.float()
    assert weighted.clip_fraction == plain.clip_fraction == clipped > 0
    assert_near("kl", weighted.kl, plain.kl, 1e-6)
    for name in ("rollouts", "totals"):
        assert_near(name, *(getattr(out.moments, name) for out in (weighted, plain)), 1e-6)


@each_backend
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_roles_of_a_sequence_given_per_token(backend: str, reduction: str) -> None:
    """The same roles per sequence and per token give the same results, empty sequences included."""
    g = torch.Generator().manual_seed(0)
    spec = LossSpec(rollout_reduction=reduction, demo_reduction=reduction, max_tokens=5)
    logits, targets = torch.randn(4, 3, V, generator=g), torch.randint(V, (4, 3), generator=g)
    targets[1:3] = -100
    targets[0, 1] = -100
    is_demo = torch.tensor([False, False, True, True])
    inputs = targets, torch.randn(4, generator=g)
    plain = fused_gac_loss(logits, *inputs, is_demo, spec=spec, backend=backend, mu=0.5)
    per_token = is_demo[:, None].expand(4, 3)
    same = fused_gac_loss(logits, *inputs, per_token, spec=spec, backend=backend, mu=0.5)
    for name in ("loss", "rollout_loss", "demo_loss"):
        assert_near(name, getattr(same, name), getattr(plain, name), 1e-7)
    for name in ("rollouts", "demo_nll", "totals"):
        values = (getattr(o.moments, name).nan_to_num(-1, neginf=-2) for o in (same, plain))
        assert_near(name, *values, 1e-7)


TARGETS = torch.tensor([[1, 2], [0, 1]])
VALID = {
    "targets": TARGETS,
    "advantages": torch.ones(2),
    "is_demo": torch.tensor([False, True]),
}
CORRECTED = {"spec": LossSpec(correction="token_mask"), "rollout_logps": torch.zeros(2, 2)}
INVALID = {
    "negative weight": ({"weights": torch.tensor([1.0, -2.0])}, r"weights\[1\] = -2.0: use finite"),
    "nan weight": (
        {"weights": torch.full((2, 2), torch.nan)},
        r"weights\[0, 0\] = nan: use finite",
    ),
    "nan weight of a masked token": (
        {"targets": -100 * TARGETS, "weights": torch.full((2, 2), torch.nan)},
        r"weights\[0, 0\] = nan: use finite",
    ),
    "infinite weight": (
        {"weights": torch.full((2,), torch.inf)},
        r"weights\[0\] = inf: use finite",
    ),
    "shape of weights": ({"weights": torch.ones(3)}, r"weights has shape \[3\]: expected \[2\] or"),
    "dtype of weights": ({"weights": torch.ones(2).int()}, "weights has dtype torch.int32"),
    "shape of is_demo": ({"is_demo": torch.ones(2, 3).bool()}, r"is_demo has shape \[2, 3\]"),
    "no rollout_logps": (
        {"spec": LossSpec(correction="token_mask")},
        "rollout_logps is None: spec.correction='token_mask' requires it",
    ),
    "no correction": (
        {"rollout_logps": torch.zeros(2, 2)},
        "rollout_logps is given but spec.correction='none'",
    ),
    "shape of rollout_logps": (
        CORRECTED | {"rollout_logps": torch.zeros(2)},
        r"rollout_logps has shape \[2\]: expected \[2, 2\]",
    ),
    "softcap": ({"softcap": 0}, "softcap=0: use a finite number > 0"),
    "logit_scale": ({"logit_scale": -1.0}, "logit_scale=-1.0: use a finite number > 0"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_inputs(name: str) -> None:
    changes, message = INVALID[name]
    keywords = VALID | changes
    with pytest.raises((ValueError, TypeError), match=message):
        fused_gac_loss(torch.zeros(2, 2, 3), **keywords, mu=0.5)
    with pytest.raises((ValueError, TypeError), match=message):
        fused_linear_gac_loss(torch.zeros(2, 2, 4), torch.zeros(3, 4), **keywords, mu=0.5)
    if name not in ("softcap", "logit_scale"):
        with pytest.raises((ValueError, TypeError), match=message):
            loss_from_logprobs(torch.zeros(2, 2), **keywords, mu=0.5)
