"""Error messages name the argument, the offending value and the fix."""

import math

import pytest
import torch

from gac_kernels import (
    LossSpec,
    checks,
    fused_gac_loss,
    fused_linear_gac_loss,
    linear_token_logprobs,
    token_logprobs,
)
from gac_kernels.tokens import BatchInputs

V, H = 11, 8


def padded() -> dict:
    """A valid padded call of [3, 4] tokens."""
    return {
        "logits": torch.randn(3, 4, V),
        "targets": torch.randint(0, V, (3, 4)),
        "advantages": torch.ones(3),
        "is_demo": torch.tensor([True, False, False]),
        "mu": 0.5,
    }


def linear(**changes) -> dict:
    """A valid padded call of the linear form, with `changes`."""
    head = {"hidden": torch.randn(3, 4, H), "weight": torch.randn(V, H)}
    return {name: x for name, x in padded().items() if name != "logits"} | head | changes


def packed() -> dict:
    """A valid packed call of two sequences, 12 tokens."""
    return {
        "logits": torch.randn(12, V),
        "targets": torch.randint(0, V, (12,)),
        "advantages": torch.ones(2),
        "is_demo": torch.tensor([True, False]),
        "mu": 0.5,
        "cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32),
    }


PADDED = {
    "logits is not a tensor": (TypeError, "logits is a list", {"logits": [1.0]}),
    "integer logits": (
        TypeError,
        "logits has dtype torch.int64",
        {"logits": torch.zeros(3, 4, V).long()},
    ),
    "logits of one dimension": (
        ValueError,
        r"logits has shape \(11,\): use \[B, T, V\]",
        {"logits": torch.zeros(V)},
    ),
    "no vocabulary": (
        ValueError,
        r"logits has shape \(3, 4, 0\)",
        {"logits": torch.zeros(3, 4, 0)},
    ),
    "strided vocabulary": (
        ValueError,
        r"logits has strides \(4, 1, 12\)",
        {"logits": torch.zeros(2, 3, 4).permute(1, 2, 0)},
    ),
    "mu on another device": (
        ValueError,
        "mu is on meta: move it to cpu",
        {"mu": torch.tensor(0.5, device="meta")},
    ),
    "learnable mu": (
        ValueError,
        "mu requires a gradient, which the loss has not",
        {"mu": torch.tensor(0.5, requires_grad=True)},
    ),
    "targets is not a tensor": (TypeError, "targets is a list", {"targets": [[1]]}),
    "targets of another shape": (
        ValueError,
        r"targets has shape \[3, 5\]: expected \[3, 4\]",
        {"targets": torch.zeros(3, 5, dtype=torch.int64)},
    ),
    "int32 targets": (
        TypeError,
        "targets has dtype torch.int32: use int64",
        {"targets": torch.zeros(3, 4, dtype=torch.int32)},
    ),
    "targets on another device": (
        ValueError,
        "targets is on meta: move it to cpu",
        {"targets": torch.zeros(3, 4, dtype=torch.int64, device="meta")},
    ),
    "target too large": (
        ValueError,
        r"targets\[0, 0\] = 11: use a token in \[0, 11\)",
        {"targets": torch.full((3, 4), 11)},
    ),
    "negative target": (ValueError, r"targets\[0, 0\] = -1:", {"targets": torch.full((3, 4), -1)}),
    "advantages is not a tensor": (TypeError, "advantages is a list", {"advantages": [1.0] * 3}),
    "advantages of another shape": (
        ValueError,
        r"advantages has shape \[4\]: expected \[3\] or \[3, 4\]",
        {"advantages": torch.ones(4)},
    ),
    "integer advantages": (
        TypeError,
        "advantages has dtype torch.int64",
        {"advantages": torch.ones(3).long()},
    ),
    "advantages on another device": (
        ValueError,
        "advantages is on meta",
        {"advantages": torch.ones(3, device="meta")},
    ),
    "is_demo on another device": (
        ValueError,
        "is_demo is on meta: move it to cpu",
        {"is_demo": torch.ones(3, device="meta") > 0},
    ),
    "is_demo of another dtype": (
        TypeError,
        "is_demo has dtype torch.int64: use bool",
        {"is_demo": torch.ones(3).long()},
    ),
    "is_demo of another shape": (
        ValueError,
        r"is_demo has shape \[2\]: expected \[3\]",
        {"is_demo": torch.tensor([True, False])},
    ),
    "old_logps of another shape": (
        ValueError,
        r"old_logps has shape \[3\]",
        {"old_logps": torch.zeros(3)},
    ),
    "ref_logps of another dtype": (
        TypeError,
        "ref_logps has dtype torch.int64",
        {"ref_logps": torch.zeros(3, 4).long()},
    ),
    "old_logps on another device": (
        ValueError,
        "old_logps is on meta",
        {"old_logps": torch.zeros(3, 4, device="meta")},
    ),
    "kl_coef without ref_logps": (
        ValueError,
        r"ref_logps is None: spec.kl_coef=0.1",
        {"spec": LossSpec(kl_coef=0.1)},
    ),
    "spec is a dict": (TypeError, "spec is a dict", {"spec": {}}),
    "mu is missing": (ValueError, "mu is None: .*weight of its demonstrations", {"mu": None}),
    "mu above 1": (ValueError, r"mu=1.5: use a number in \[0, 1\]", {"mu": 1.5}),
    "mu below 0": (ValueError, "mu=-0.1", {"mu": -0.1}),
    "mu is nan": (ValueError, "mu=nan", {"mu": math.nan}),
    "mu is a string": (TypeError, "mu='half'", {"mu": "half"}),
    "mu is a bool": (TypeError, "mu=True: use a number", {"mu": True}),
    "mu is not a scalar": (ValueError, r"mu has shape \[1\]", {"mu": torch.tensor([0.5])}),
    "negative norm": (ValueError, "rollout_norm=-1", {"rollout_norm": -1}),
    "norm is nan": (ValueError, "demo_norm=nan", {"demo_norm": math.nan}),
    "cu_seqlens with padded logits": (
        ValueError,
        r"cu_seqlens .* \[3, 4\]: .*packed",
        {"cu_seqlens": torch.tensor([0, 12])},
    ),
    "unknown backend": (ValueError, "backend='cuda': use 'auto' or one of", {"backend": "cuda"}),
}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PACKED = {
    "missing": (ValueError, "cu_seqlens is None: .*packed", None),
    "does not start at 0": (ValueError, r"cu_seqlens=\[1, 5, 12\]: .* start at 0", int32(1, 5, 12)),
    "decreases": (ValueError, r"cu_seqlens=\[0, 13, 12\]: .* never decrease", int32(0, 13, 12)),
    "does not end at N": (
        ValueError,
        r"cu_seqlens=\[0, 5, 11\]: .* end at N = 12",
        int32(0, 5, 11),
    ),
    "of floats": (TypeError, "cu_seqlens has dtype torch.float32", torch.tensor([0.0, 5, 12])),
    "of two dimensions": (ValueError, r"cu_seqlens has shape \[1, 3\]", int32(0, 5, 12)[None]),
    "empty": (ValueError, r"cu_seqlens has shape \[0\]", int32()),
    "on another device": (
        ValueError,
        "cu_seqlens is on meta: move it to cpu",
        int32(0, 5, 12).to("meta"),
    ),
    "lengths": (ValueError, "cu_seqlens has 2 entries, as many as advantages: ", int32(5, 7)),
    "of another length": (
        ValueError,
        r"advantages has shape \[2\]: expected \[3\]",
        int32(0, 5, 7, 12),
    ),
}


CALLS = {f"padded-{name}": (padded, *case) for name, case in PADDED.items()}
CALLS |= {
    f"cu_seqlens-{name}": (packed, error, match, {"cu_seqlens": offsets})
    for name, (error, match, offsets) in PACKED.items()
}


@pytest.mark.parametrize(("make", "error", "match", "changes"), CALLS.values(), ids=CALLS)
def test_a_call_fails_only_with_the_changes(make, error, match: str, changes: dict) -> None:
    arguments = make()
    fused_gac_loss(**arguments)
    with pytest.raises(error, match=match):
        fused_gac_loss(**(arguments | changes))


def test_a_packed_batch_may_be_empty() -> None:
    nothing = torch.zeros(0)
    out = fused_gac_loss(
        torch.zeros(0, V), nothing.long(), nothing, nothing > 0, mu=0.5, cu_seqlens=int32(0)
    )
    assert out.loss == 0
    assert len(out.moments.demo_nll) == 0


SPECS = {
    "demo_weight": "phi2",
    "rollout_reduction": "mean",
    "demo_reduction": "mean",
    "kl_estimator": "k4",
    "clip_low": -0.1,
    "clip_high": math.nan,
    "dual_clip": 1.0,
    "kl_coef": math.inf,
    "entropy_coef": math.nan,
    "demo_shape": 0.0,
    "max_tokens": -1,
    "temperature": 0.0,
}


OPTIONS = [
    *((ValueError, {name: value}, f"{name}={value!r}") for name, value in SPECS.items()),
    *(
        (TypeError, {name: "0.5"}, f"{name}='0.5': use a number")
        for name in ("clip_low", "dual_clip", "kl_coef", "max_tokens", "temperature")
    ),
    *(
        (TypeError, {name: None}, f"{name}=None: use a number$")
        for name in ("kl_coef", "entropy_coef", "demo_shape", "temperature")
    ),
    *(
        (ValueError, {"rollout_reduction": "constant", "max_tokens": value}, f"max_tokens={value}")
        for value in (None, 0, math.inf)
    ),
    (
        ValueError,
        {"policy_loss": "ppo"},
        "policy_loss='ppo': use one of clip, cispo, sapo, reinforce",
    ),
    (
        ValueError,
        {"importance_sampling_level": "word"},
        "importance_sampling_level='word': use one of token, sequence",
    ),
    (ValueError, {"correction": "tis"}, "correction='tis': use one of none, token_truncate"),
    (
        ValueError,
        {"correction_min": 3.0},
        "correction_min=3.0: use a number <= correction_max=2.0",
    ),
    (ValueError, {"correction_max": -1.0}, "correction_max=-1.0: use a number >= 0"),
    (TypeError, {"correction_max": "2"}, "correction_max='2': use a number or None"),
    (TypeError, {"clip_low": True}, "clip_low=True: use a number or None"),
    (TypeError, {"temperature": True}, "temperature=True: use a number"),
    (ValueError, {"sapo_tau": (True, 1.0)}, r"sapo_tau=\(True, 1.0\): use two finite numbers > 0"),
    (ValueError, {"sapo_tau": 1.0}, "sapo_tau=1.0: use two finite numbers > 0"),
    (ValueError, {"sapo_tau": (1.0, 0.0)}, r"sapo_tau=\(1.0, 0.0\): use two finite numbers > 0"),
    (TypeError, {"use_bias_correction_kl": 1}, "use_bias_correction_kl=1: use True or False"),
    (ValueError, {"clip_high": -0.5}, "clip_high=-0.5: use a number >= 0"),
    (
        ValueError,
        {"policy_loss": "cispo", "clip_low": 0.1, "clip_high": -0.5},
        "clip_low=0.1, clip_high=-0.5: use 1 - clip_low <= 1 \\+ clip_high",
    ),
]


@pytest.mark.parametrize(("error", "options", "message"), OPTIONS)
def test_invalid_options(error: type[Exception], options: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        LossSpec(**options)
    LossSpec(policy_loss="cispo", clip_low=0.5, clip_high=-0.5, correction_min=2.0)  # the bounds


class Sharded(torch.Tensor):
    """Calling full_tensor() on a DTensor would silently drop the gradient reduction."""

    full_tensor = None


LINEAR = {
    "sharded weight": (
        TypeError,
        "weight is a Sharded: use a plain tensor.*FSDP",
        {"weight": torch.randn(V, H).as_subclass(Sharded)},
    ),
    "weight of another width": (
        ValueError,
        r"weight has shape \[11, 9\]: expected \[V, 8\]",
        {"weight": torch.zeros(V, H + 1)},
    ),
    "weight of one dimension": (ValueError, r"weight has shape \[8\]", {"weight": torch.zeros(H)}),
    "empty weight": (ValueError, r"weight has shape \[0, 8\]", {"weight": torch.zeros(0, H)}),
    "weight is not a tensor": (TypeError, "weight is a list", {"weight": [1.0]}),
    "weight of another dtype": (
        TypeError,
        "weight has dtype torch.float64: use torch.float32.*autocast",
        {"weight": torch.zeros(V, H, dtype=torch.float64)},
    ),
    "weight on another device": (
        ValueError,
        "weight is on meta",
        {"weight": torch.zeros(V, H, device="meta")},
    ),
    "bias is not a tensor": (TypeError, "bias is a list", {"bias": [0.0] * V}),
    "bias of another shape": (
        ValueError,
        r"bias has shape \[8\]: expected \[11\]",
        {"bias": torch.zeros(H)},
    ),
    "bias of another dtype": (
        TypeError,
        "bias has dtype torch.float16",
        {"bias": torch.zeros(V, dtype=torch.float16)},
    ),
    "hidden of one dimension": (
        ValueError,
        r"hidden has shape \(8,\): use \[B, T, H\]",
        {"hidden": torch.zeros(H)},
    ),
    "target too large": (ValueError, r"targets\[0, 0\] = 11", {"targets": torch.full((3, 4), V)}),
    "no bytes for a chunk": (ValueError, "chunk_bytes=0", {"chunk_bytes": 0}),
    "half bytes": (ValueError, "chunk_bytes=1000000.0: use a whole number", {"chunk_bytes": 1e6}),
    "bytes as text": (ValueError, "chunk_bytes='x'", {"chunk_bytes": "x"}),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    error, match, changes = LINEAR[name]
    arguments = linear()
    fused_linear_gac_loss(**arguments)
    with pytest.raises(error, match=match):
        fused_linear_gac_loss(**(arguments | changes))
    with pytest.raises(error, match=match):
        changed = arguments | changes
        del changed["advantages"], changed["is_demo"], changed["mu"]
        linear_token_logprobs(**changed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_converts_only_narrow_floats(dtype: torch.dtype) -> None:
    arguments = linear(weight=torch.ones(V, H, dtype=dtype))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=f"weight has dtype {dtype}"),
    ):
        fused_linear_gac_loss(**arguments)
    if dtype == torch.float64:
        arguments["hidden"] = arguments["hidden"].double()
        with torch.autocast("cpu", torch.bfloat16):
            assert fused_linear_gac_loss(**arguments).loss.dtype == torch.float64


def test_small_inputs_may_be_on_the_cpu() -> None:
    targets = torch.zeros(12, dtype=torch.int64, device="meta")
    two, number = torch.ones(2), torch.tensor(0.5)
    inputs = BatchInputs(targets, two, two > 0, number, weights=two, rollout_norm=number)
    inputs = inputs._replace(cu_seqlens=torch.tensor([0, 5, 12]), demo_norm=number)
    checks.batch_inputs(targets, inputs, LossSpec())
    checks.temperature_tensor("temperature", two, targets.view(2, 6), 2)
    for name in ("old_logps", "ref_logps"):
        with pytest.raises(ValueError, match=f"{name} is on cpu: move it to meta"):
            checks.batch_inputs(targets, inputs._replace(**{name: torch.zeros(12)}), LossSpec())


def test_values_on_an_accelerator_are_read_only_on_request(monkeypatch) -> None:
    """A meta tensor has no values: reading them raises an error."""
    targets, two = torch.zeros(2).long(), torch.ones(2)
    inputs = BatchInputs(targets, two, two > 0)
    for device, column in (
        ("meta", {}),
        ("cpu", {"cu_seqlens": torch.tensor([0, 2], device="meta")}),
        ("cpu", {"weights": torch.ones(2, device="meta")}),
    ):
        arguments = targets.to(device), 3, inputs._replace(**column)
        monkeypatch.delenv("GAC_CHECK", raising=False)
        checks.values(*arguments)
        monkeypatch.setenv("GAC_CHECK", "1")
        with pytest.raises((RuntimeError, NotImplementedError)):
            checks.values(*arguments)


def test_a_vocabulary_of_one_token_needs_no_contiguous_logits() -> None:
    logits = torch.zeros(3, 4).as_strided((3, 4, 1), (4, 1, 7))
    logps, _ = token_logprobs(logits, torch.zeros(3, 4).long())
    assert not logps.any()


def test_a_nan_norm_tensor_gives_a_nan_loss() -> None:
    """Tensor values are not checked; a nan must not silently become 0."""
    assert fused_gac_loss(**padded(), rollout_norm=torch.tensor(math.nan)).loss.isnan()
    assert fused_gac_loss(**padded() | {"mu": torch.tensor(math.nan)}).loss.isnan()
