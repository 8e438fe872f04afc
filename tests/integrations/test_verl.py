"""verl's own actor with our policy loss, from its own configuration: gradients, ranks, resuming."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("verl")

from gac.demo import task
from gac.integrations.demonstrations import encode
from gac.order import Order
from gac.rows import Row
from tests.integrations import plain, tiny
from tests.integrations.launch import check_example_learns, launch

TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("files")
    tiny.write_model(folder / "model")
    tiny.write_demonstrations(folder / "demos.jsonl")
    return str(folder / "model"), str(folder / "demos.jsonl")


def demo_rows(indices: list[int]) -> list[Row]:
    tokenizer, rows = task.make_tokenizer(), tiny.demonstrations()
    encoded = [encode(rows[i], "row", tokenizer) for i in indices]
    return [Row(tuple(row["ids"]), row["start"], True) for row in encoded]


def rollout_term(model: Any) -> torch.Tensor:
    """verl's vanilla loss and KL, token-mean over the batch, in plain code."""
    from tests.integrations.verl_task import TEMPERATURE, rollouts

    total, tokens = torch.zeros(()), 0
    for row in rollouts():
        ids = torch.cat([row["prompt"], row["response"]])[None]
        logps = plain.logprobs(model, ids, torch.ones_like(ids), TEMPERATURE)[0]
        logps = logps[len(row["prompt"]) - 1 :]
        ratio, a = (logps - row["old"]).exp(), row["advantage"]
        policy = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a)
        policy = torch.where(a < 0, torch.minimum(policy, -3 * a), policy)
        gap = row["ref"] - logps
        loss = policy + 0.001 * (gap.exp() - gap - 1)
        total, tokens = total + (loss * row["mask"]).sum(), tokens + int(row["mask"].sum())
    return total / tokens


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 2)])
def test_step_gradient_matches_plain_torch(
    files: tuple[str, str], tmp_path: Path, ranks: int, micro: int
):
    """Checks the first step's gradient, mu on every rank, and resuming after two of four steps."""
    size = f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}"
    options = size, "+actor_rollout_ref.actor.policy_loss.method=gac"
    launch("tests.integrations.verl_task", "resumed", *files, str(tmp_path), *options, ranks=ranks)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    model = AutoModelForCausalLM.from_pretrained(files[0])
    mu = results[0]["logs"][0]["gac/mu"][0]
    demos = plain.demo_term(model, demo_rows(results[0]["drawn_demos"][0]), weight="phi")
    expected = plain.gradient(model, (1 - mu) * rollout_term(model) + mu * demos)
    for rank in results:
        gradient = {n: g for n, g in rank["gradient"].items() if n in expected}
        assert plain.relative_error(gradient, expected) < TOLERANCE
        assert rank["drawn_demos"] == results[0]["drawn_demos"]
        assert rank["logs"] == results[0]["logs"]
        assert rank["repeated"] == rank["logs"][2:]
        assert re.search(r"gac\.json.*saved without a controller", rank["error_message"])
        for name, weight in rank["weights"].items():
            assert torch.equal(rank["resumed"][name], weight), name
    first = results[0]["logs"][0]
    assert first["gac/demo_loss"][0] == pytest.approx(demos.item(), rel=1e-5)
    assert {"gac/kl", "gac/alpha", "gac/rl_variance", "gac/disagreement"} <= set(first)
    assert len({log["gac/mu"][0] for log in results[0]["logs"]}) == 4


def test_every_verl_loss_is_mixed_unchanged(files: tuple[str, str], tmp_path: Path):
    names = ("gspo", "sapo", "gpg", "geo_mean", "cispo", "clip_cov")
    launch("tests.integrations.verl_task", "modes", *files, str(tmp_path), *names, ranks=1)
    gradients = torch.load(tmp_path / "rank0.pt")
    model = AutoModelForCausalLM.from_pretrained(files[0])
    demos = demo_rows(Order(12, 0).take(5))
    demo_grads = plain.gradient(model, plain.demo_term(model, demos, weight="one"))
    assert set(gradients) == set(names)
    for own, mixed in gradients.values():
        expected = {n: 0.7 * own[n] + 0.3 * demo_grads[n] for n in demo_grads}
        assert plain.relative_error({n: mixed[n] for n in demo_grads}, expected) < TOLERANCE


def test_the_loss_of_verls_teacher_keeps_its_weight(files: tuple[str, str], tmp_path: Path):
    """That of the sampled tokens and that of K tokens, which verl computes from the logits."""
    names = ("k3", "forward_kl_topk")
    launch("tests.integrations.verl_task", "distillation", *files, str(tmp_path), *names, ranks=1)
    found = torch.load(tmp_path / "rank0.pt")
    model = AutoModelForCausalLM.from_pretrained(files[0])
    demos = demo_rows(Order(12, 0).take(5))
    demo_grads = plain.gradient(model, plain.demo_term(model, demos, weight="one"))
    assert set(found) == set(names)
    for (rewarded, _), (taught, _), (mixed, logged) in found.values():
        expected = {
            n: 0.7 * rewarded[n] + 0.3 * demo_grads[n] + (taught[n] - rewarded[n])
            for n in demo_grads
        }
        assert plain.relative_error({n: mixed[n] for n in demo_grads}, expected) < TOLERANCE
        gap = {n: taught[n] - rewarded[n] for n in demo_grads}
        assert max(float(g.abs().max()) for g in gap.values()) > 1e-3
        assert logged[0] > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "1"}, r"jsonl.*\['text'\].*prompt and completion, or messages"),
        ({"prompt": "1", "completion": ""}, r"jsonl\[0\].*''.*remove the row"),
    ],
)
def test_bad_demonstrations_are_named(
    files: tuple[str, str], tmp_path: Path, row: dict[str, str], message: str
):
    """The worker reads the demonstrations before its first step, and fails there."""
    from gac.integrations.verl import GACPolicyLoss, TwoPassStep

    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    options = GACPolicyLoss(demo_path=str(path), demo_batch=5)
    with pytest.raises(ValueError, match=message):
        TwoPassStep(None, task.make_tokenizer(), options, lambda **_: None)


def test_invalid_options_are_named(files: tuple[str, str]):
    from verl.workers.config import FSDPEngineConfig, HFModelConfig

    from gac.integrations.verl import GACPolicyLoss, check_supported

    valid = {"demo_path": files[1], "demo_batch": 5}
    for loss, message in (
        ({}, "demo_path is empty: .*file"),
        ({"demo_path": files[1]}, "demo_batch=0: use a number of demonstrations >= 1"),
        *(
            (valid | {"method": name}, f"controller={name} needs .*use a .* gac")
            for name in ("luffy", "gac-gated")
        ),
    ):
        with pytest.raises(ValueError, match=message):
            GACPolicyLoss(**loss)
    model = HFModelConfig(path=files[0])
    fsdp2 = FSDPEngineConfig(strategy="fsdp2")
    two_parts = FSDPEngineConfig(strategy="fsdp2", ulysses_sequence_parallel_size=2)
    images = SimpleNamespace(processor="a processor", mtp=None)
    mtp = SimpleNamespace(processor=None, mtp=SimpleNamespace(enable=True))
    check_supported(fsdp2, model)
    for engine, network, message in (
        (FSDPEngineConfig(strategy="fsdp"), model, "strategy=fsdp: use fsdp2"),
        (two_parts, model, "ulysses_sequence_parallel_size=2: use 1"),
        (SimpleNamespace(strategy="megatron"), model, "strategy=megatron: use fsdp2"),
        (fsdp2, images, "model.processor=an image processor"),
        (fsdp2, mtp, "mtp.enable=True: use False"),
    ):
        with pytest.raises(ValueError, match=f"does not support {message}"):
            check_supported(engine, network)


def test_the_example_learns():
    check_example_learns("verl_gac")


def test_fused_head_equals_verl_s_own():
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from gac_kernels.heads.verl import apply_fused_head

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 16, generator=draw, requires_grad=True)
    weight = torch.randn(33, 16, generator=draw, requires_grad=True)
    labels = torch.randint(0, 33, (2, 7), generator=draw)
    own = FusedLinearForPPO.forward
    results = []
    for fused in (False, True):
        if fused:
            patch = apply_fused_head()
            assert apply_fused_head() is not None  # a second call is a no-op
            assert FusedLinearForPPO.forward is not own
        # verl flattens its outputs for [B, T, H] in some versions
        logps, entropy = (
            x.reshape(2, 7) for x in FusedLinearForPPO()(hidden, weight, labels, temperature=0.7)
        )
        total = (logps * torch.linspace(-1, 1, 7)).sum() + 0.3 * entropy.sum()
        results.append((logps, entropy, *torch.autograd.grad(total, (hidden, weight))))
    torch.testing.assert_close(results[1], results[0])
    kernel = sys.modules["verl.utils.kernel.linear_cross_entropy"]
    flat, _ = kernel.linear_cross_entropy(hidden, weight, labels, 0.7, "none")
    torch.testing.assert_close(flat, results[0][0].flatten())
    patch.undo()
    assert FusedLinearForPPO.forward is own
