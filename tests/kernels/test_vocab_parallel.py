"""The vocabulary-parallel LM head against an unsharded one."""

import dataclasses
import functools
import os

import pytest
import torch

from bench import interpreter
from gac_kernels import (
    DemoWeight,
    LossSpec,
    TokenMoments,
    backends,
    epilogue,
    fused_linear_gac_loss,
    reference,
    vocab_parallel,
)
from gac_kernels.vocab_parallel import vocab_parallel_gac_loss
from tests import ranks
from tests.kernels.cases import check, check_grads, require_backend

pytestmark = pytest.mark.dist
B, T, H, V = 6, 7, 16, 53  # neither 2 nor 3 divides V


def batch(dtype=torch.float32, bias=True):
    """Build rollouts and demonstrations of unequal length, one of them empty."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    targets = torch.randint(0, V, (B, T), generator=generator)
    for b, length in enumerate((7, 3, 0, 5, 1, 7)):
        targets[b, length:] = -100
    return {
        "hidden": (normal(B, T, H) / 4).to(dtype),
        "weight": normal(V, H).to(dtype),
        "bias": normal(V).to(dtype) if bias else None,
        "targets": targets,
        "advantages": torch.tensor([1.0, -0.5, 1.0, 0.0, 1.0, 1.0]),
        "is_demo": torch.tensor([False, False, False, False, True, True]),
        "old_logps": -normal(B, T).abs() - 3,
        "ref_logps": -normal(B, T).abs() - 3,
    }


def teacher():
    """A teacher's likeliest tokens."""
    generator = torch.Generator().manual_seed(1)
    logps, ids = (2 * torch.randn(B, T, V, generator=generator)).log_softmax(-1).topk(6, -1)
    ids[0, 0, 2:] = ids[1, 0, 0] = -100  # fewer tokens, and none
    return {"teacher_logps": logps, "teacher_ids": ids}


def evaluate(loss, hidden, weight, bias, **rest):
    """Return the outputs, the signals and the gradients of hidden, weight and bias."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    out = loss(*leaves[:2], bias=leaves[2] if bias is not None else None, **{"mu": 0.5, **rest})
    # hidden is used elsewhere, too: that gradient is not added over the ranks
    (2 * out.loss + 1e-3 * leaves[0].sum()).backward()
    values = [x.detach() for x in out if isinstance(x, torch.Tensor)]
    return values, out.moments.signals(), [x.grad for x in leaves]


def shard_of(data):
    """Start the process group; returns the batch with this rank's shard of the head."""
    torch.distributed.init_process_group("gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    head = {name: data[name] for name in ("weight", "bias") if data[name] is not None}
    return data | {name: x.tensor_split(count)[rank] for name, x in head.items()}


def run_sharded(data, *cases):
    """Evaluate the loss of each case on this rank's shard of the head."""
    shard = shard_of(data)
    return [evaluate(vocab_parallel_gac_loss, **shard | settings) for settings in cases]


def run_unchecked(data):
    """Without a gradient and, as on a GPU, without a look at the targets."""
    vocab_parallel.checks.values = lambda *_: None
    out = vocab_parallel_gac_loss(**shard_of(data), mu=0.5, moments=False)
    return out.loss, out.logps, out.moments


def run_unsharded(data, settings):
    """Evaluate the unsharded head in float64; in float32 it is no more accurate than shards."""
    doubles = {
        k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for k, x in (data | settings).items()
    }
    values, signals, grads = evaluate(fused_linear_gac_loss, **doubles)
    return [x.float() for x in values], signals, [g.float() for g in grads]


CASES = {
    "default": {},
    "many-options": {
        "spec": LossSpec(kl_coef=0.2, entropy_coef=0.1, dual_clip=2.0, temperature=0.7)
    },
    "shaped": {"spec": LossSpec(demo_weight=DemoWeight.SHAPED), "mu": 0.9},
    "trust-tokens": {"spec": LossSpec(demo_weight=DemoWeight.TRUST, rollout_reduction="token")},
    # 1 or 2 tokens per chunk, depending on the rows of a rank: all ranks must take the same
    "uneven-chunks": {"chunk_bytes": 212},
    "softcap": {"softcap": 2.0, "logit_scale": 0.5, "spec": LossSpec(policy_loss="cispo")},
    "two-passes": {
        "spec": LossSpec(
            importance_sampling_level="sequence", kl_coef=0.1, use_bias_correction_kl=True
        )
    },
    "values of sequences": {
        "weights": torch.linspace(0.5, 2, B),
        "temperatures": torch.linspace(0.5, 1.5, B),
        "rollout_logps": -torch.linspace(3, 5, B * T).view(B, T),
        "spec": LossSpec(correction="token_truncate"),
    },
    # 6 of 53 entries: every rank has some, and none of some rows
    **{
        f"teacher: {loss}": {
            "spec": LossSpec(teacher_coef=0.5, teacher_loss=loss, entropy_coef=0.1, **spec),
            **teacher(),
        }
        for loss, spec in (
            ("forward_kl", {}),
            ("reverse_kl", {"importance_sampling_level": "sequence"}),
        )
    },
    "teacher: k2": {
        "spec": LossSpec(teacher_coef=0.5),
        "teacher_logps": -torch.linspace(3, 5, B * T).view(B, T),
    },
    "probability mask": {
        "rollout_logps": -torch.linspace(0.1, 5, B * T).view(B, T),
        "spec": LossSpec(correction="probability_mask"),
    },
    "packed": {
        **{name: x.flatten(0, 1) for name, x in batch().items() if x.shape[:2] == (B, T)},
        "cu_seqlens": torch.arange(0, B * T + 1, T, dtype=torch.int32),
    },
}


@functools.cache
def all_cases(count):
    results = ranks.run(run_sharded, batch(), *CASES.values(), ranks=count)
    return {name: [rank[i] for rank in results] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_sharded_head_matches_unsharded_head(count, case):
    data, settings = batch(), CASES[case]
    expected_values, expected_signals, (d_hidden, d_weight, d_bias) = run_unsharded(data, settings)
    results = all_cases(count)[case]
    for values, signals, grads in results:
        for actual, expected in zip(values, expected_values, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
        assert signals == pytest.approx(expected_signals, rel=1e-5)
        torch.testing.assert_close(grads[0], d_hidden, rtol=1e-5, atol=1e-6)
    weights, biases = zip(*(grads[1:] for _, _, grads in results), strict=True)
    torch.testing.assert_close(torch.cat(weights), d_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(biases), d_bias, rtol=1e-5, atol=1e-6)
    assert d_weight.abs().max() > 1e-3


def run_groups(data, settings):
    """Two groups of two ranks; the second has other hidden states."""
    torch.distributed.init_process_group("gloo")
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pair, rank = divmod(torch.distributed.get_rank(), 2)
    shards = [data[name].tensor_split(2)[rank] for name in ("weight", "bias")]
    leaves = [data["hidden"] * (1 + pair), *shards]
    rest = {k: x for k, x in data.items() if k not in ("hidden", "weight", "bias")}
    results = evaluate(vocab_parallel_gac_loss, *leaves, group=groups[pair], **rest, **settings)
    moments = dataclasses.replace(TokenMoments.zeros(), totals=torch.arange(6) + 10.0 * rank)
    return *results, moments.all_reduce(groups[pair]).totals.tolist()


def test_groups_of_ranks_are_independent():
    data, settings = batch(), {"rollout_norm": 9.0, "demo_norm": 40.0}
    results = ranks.run(run_groups, data, settings, ranks=4)
    for pair in (0, 1):
        (loss, *_), _, (d_hidden, d_weight, _) = run_unsharded(
            {**data, "hidden": data["hidden"] * (1 + pair)}, settings
        )
        mine = results[2 * pair : 2 * pair + 2]
        for values, _, grads, totals in mine:
            torch.testing.assert_close(values[0], loss, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(grads[0], d_hidden, rtol=1e-5, atol=1e-6)
            assert totals == [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
        torch.testing.assert_close(
            torch.cat([grads[1] for _, _, grads, _ in mine]), d_weight, rtol=1e-5, atol=1e-6
        )


def test_bfloat16_head():
    data = batch(torch.bfloat16, bias=False)
    (loss, *_), _, (d_hidden, d_weight) = evaluate(fused_linear_gac_loss, **data)
    (first,), (second,) = ranks.run(run_sharded, data, {}, ranks=2)
    torch.testing.assert_close(first[0][0], loss, rtol=1e-5, atol=1e-6)
    # each rank rounds its part of the sum once
    torch.testing.assert_close(second[2][0], d_hidden, rtol=0.02, atol=1e-3)
    gathered = torch.cat([first[2][1], second[2][1]])
    assert gathered.dtype == torch.bfloat16
    torch.testing.assert_close(gathered, d_weight, rtol=0.01, atol=1e-4)


def test_masked_vocabulary_and_nonfinite_rows():
    """A bias of -inf masks vocabulary entries; an infinite hidden state gives a nan loss."""
    data = batch()
    data["bias"][V - 20 :] = -torch.inf  # all entries of one of three ranks and some of another
    data["targets"].clamp_(max=V - 21)
    (loss, *_), _, (d_hidden, *_) = run_unsharded(data, {})
    for ((values, _, grads),) in ranks.run(run_sharded, data, {}, ranks=3):
        torch.testing.assert_close(values[0], loss, rtol=2e-6, atol=2e-6)
        assert all(g.isfinite().all() for g in grads)
        torch.testing.assert_close(grads[0], d_hidden, rtol=1e-5, atol=1e-6)
    data["hidden"][0, 0, 0], data["targets"][0, 1] = torch.inf, V - 1
    for ((values, _, _),) in ranks.run(run_sharded, data, {}, ranks=3):
        assert values[0].isnan()
        assert values[5][0, 1] == -torch.inf


def test_out_of_range_target_is_rejected_or_nan():
    data = batch()
    data["targets"][0, :2] = torch.tensor([V, -1])
    for message in ranks.errors(run_sharded, data, {}, ranks=2):
        assert f"targets[0, 0] = {V}: use a token in" in message
    for loss, logps, moments in ranks.run(run_unchecked, data, ranks=2):
        assert loss.isnan()
        assert moments is None
        assert logps[0].isnan().tolist() == [True] * 2 + [False] * 5


EPILOGUE_CASES = (
    "default",
    "many-options",
    "shaped",
    "uneven-chunks",
    "softcap",
    "two-passes",
    "values of sequences",
    "probability mask",
)


def run_epilogue(data, *cases):
    """`run_sharded` with the epilogue head, in Triton's interpreter; and the heads of each case."""
    from gac_kernels.backends.triton import exponentials

    interpreter.emulate_gpu()
    backends._PREFERRED["cpu"] = backends._PREFERRED["cuda"]
    exponentials.TILES = exponentials.Tiles(rows=16, columns=64, depth=32, group=2, block=16)
    os.environ["GAC_HEAD"] = "epilogue"
    made, init = [], epilogue.EpilogueHead.__init__

    def recorded(self, *arguments):
        made.append(self)
        init(self, *arguments)

    epilogue.EpilogueHead.__init__ = recorded
    shard = shard_of(data)
    results = []
    for settings in cases:
        made.clear()
        results.append((evaluate(vocab_parallel_gac_loss, **shard | settings), len(made)))
    return results


@functools.cache
def epilogue_cases():
    require_backend("triton")
    cases = [CASES[name] for name in EPILOGUE_CASES]
    results = ranks.run(run_epilogue, batch(torch.bfloat16), *cases, ranks=2)
    return dict(zip(EPILOGUE_CASES, zip(*results, strict=True), strict=True))


def check_shards(results, data, settings):
    """Compare the results of all ranks with float64, as far as those of bfloat16 logits."""
    values, _, truth = run_unsharded(data, settings)
    settings = {k: x for k, x in settings.items() if k != "chunk_bytes"}
    _, _, same_dtype = evaluate(reference.fused_linear_gac_loss, **data | settings)
    d_hidden, *d_heads = zip(*(grads for _, _, grads in results), strict=True)
    heads = [torch.cat(parts) for parts in d_heads]
    for (own, _, _), own_d_hidden in zip(results, d_hidden, strict=True):
        check("loss", own[0], values[0], values[0], extra_rtol=2e-5)
        check("logps", own[5], values[5], values[5], extra_rtol=1e-5)
        check("entropy", own[6], values[6], values[6], extra_rtol=2e-5)
        names, eps = ("hidden", "weight", "bias"), torch.finfo(torch.bfloat16).eps
        check_grads(names, [own_d_hidden, *heads], same_dtype, truth, extra_rtol=eps)


@pytest.mark.parametrize("case", EPILOGUE_CASES)
def test_the_epilogue_head_of_a_shard(case):
    results = epilogue_cases()[case]
    assert [heads for _, heads in results] == [1, 1]
    data, settings = batch(torch.bfloat16), dict(CASES[case])
    check_shards([result for result, _ in results], data, settings)


def test_the_epilogue_head_of_shards_that_are_far_apart():
    """One rank has the likeliest entries, by 90 nats or by 200, and the other one the targets."""
    require_backend("triton")
    for distance in (90.0, 200.0, -200.0):
        data = batch(torch.bfloat16)
        data["bias"][V // 2 + 1 :] += distance
        data["targets"].clamp_(max=V // 2)
        # a gradient that is not 0, although the ratio would be clipped
        settings = {"old_logps": None, "ref_logps": None}
        results = ranks.run(run_epilogue, data, settings, ranks=2)
        check_shards([result for ((result, _),) in results], data, settings)
