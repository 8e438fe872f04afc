"""Trinity's loss class with our policy loss, in verl's own worker: gradients, ranks, restarts."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trinity")

from gac.rows import Row
from tests.integrations import plain, tiny
from tests.integrations.launch import check_example_learns, launch

TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.write_model(folder)
    return folder


def rollout_term(model: Any) -> torch.Tensor:
    """Trinity's clipped policy loss and the KL, token-mean over the training step."""
    from tests.integrations.trinity_task import experiences, reference

    total, tokens = torch.zeros(()), 0
    for row in experiences(False, 10):
        ids = row.tokens[None].long()
        logps = plain.logprobs(model, ids, torch.ones_like(ids))[0][row.prompt_length - 1 :]
        ratio, a = (logps - row.logprobs).exp(), row.advantages
        policy = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a)
        policy = torch.where(a < 0, torch.minimum(policy, -3 * a), policy)
        gap = reference(row) - logps
        total = total + (policy + 0.05 * (gap.exp() - gap - 1)).sum()
        tokens += len(logps)
    return total / tokens


@pytest.mark.parametrize(("ranks", "micro"), [(1, 16), (1, 2), (2, 4)])
def test_step_gradient_matches_plain_torch(folder: Path, tmp_path: Path, ranks: int, micro: int):
    """The gradient does not depend on the number of micro-batches, unlike Trinity's mixed loss."""
    from transformers import AutoModelForCausalLM

    from tests.integrations.trinity_task import experiences

    launch("tests.integrations.trinity_task", str(folder), str(tmp_path), str(micro), ranks=ranks)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [Row((*x.tokens.tolist(),), x.prompt_length, True) for x in experiences(True, 6)]
    demos = plain.demo_term(model, rows, weight="phi")
    mu = results[0]["logs"][0]["actor/gac/mu"][0]
    expected = plain.gradient(model, (1 - mu) * rollout_term(model) + mu * demos)
    for rank in results:
        gradient = {n: g for n, g in rank["gradient"].items() if n in expected}
        assert plain.relative_error(gradient, expected) < TOLERANCE
        assert rank["logs"] == results[0]["logs"]
        assert rank["repeated"] == rank["logs"][2:]
        for name, weight in rank["weights"][0].items():
            assert torch.equal(rank["weights"][1][name], weight), name
        assert re.search(r"gac\.json.*saved without a controller", rank["error_message"])
    first = results[0]["logs"][0]
    assert first["actor/gac/demo_loss"][0] == pytest.approx(demos.item(), rel=1e-5)
    assert {f"actor/gac/{name}" for name in ("kl", "alpha", "rl_variance")} <= set(first)
    assert len({log["actor/gac/mu"][0] for log in results[0]["logs"]}) == 4


def test_dotted_paths_resolve_to_our_classes(tmp_path: Path):
    from trinity.algorithm import ALGORITHM_TYPE, SAMPLE_STRATEGY

    from gac.integrations import trinity as gac_trinity
    from tests.integrations.trinity_task import algorithm

    config = algorithm(str(tmp_path))
    assert ALGORITHM_TYPE.get(config.algorithm_type) is gac_trinity.GACAlgorithm
    assert SAMPLE_STRATEGY.get(config.sample_strategy) is gac_trinity.GACSampleStrategy
    assert config.policy_loss_fn_args["state_dir"] == str(tmp_path)
    assert (config.kl_loss_fn, config.entropy_loss_fn) == ("none", "none")


def actor_config(**options: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"actor": options}}


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("algorithm", "kl_loss_fn", "k3", "algorithm.kl_loss_fn='k3': use 'none'"),
        ("algorithm", "entropy_loss_fn", "default", "algorithm.entropy_loss_fn='default'"),
        ("trainer", "ulysses_sequence_parallel_size", 2, "ulysses_sequence_parallel_size=2: use 1"),
        ("trainer", "trainer_config", actor_config(ppo_epochs=2), "actor.ppo_epochs=2: use 1"),
        (
            "trainer",
            "trainer_config",
            actor_config(ppo_mini_batch_size=8),
            "actor.ppo_mini_batch_size=8: use 16",
        ),
        ("model", "temperature", 0.7, "model.temperature=0.7: use 1.0"),
    ],
)
def test_options_that_change_the_weighting_are_rejected(
    tmp_path: Path, section: str, name: str, value: Any, message: str
):
    from trinity.common.config_validator import AlgorithmConfigValidator

    from tests.integrations.trinity_task import configuration

    config = configuration(str(tmp_path))
    setattr(getattr(config, section), name, value)
    with pytest.raises(ValueError, match=message):
        AlgorithmConfigValidator().validate(config)


def test_arguments_of_the_loss_are_checked(tmp_path: Path):
    from gac.integrations.trinity import GACPolicyLoss

    mode = "seq-mean-token-sum"
    for arguments, message in (
        ({"state_dir": None}, "state_dir is empty"),
        ({"loss_agg_mode": mode}, f"loss_agg_mode='{mode}': use one of"),
        *(
            ({"method": name}, f"controller={name} needs .*use a .* gac")
            for name in ("luffy", "gac-gated")
        ),
    ):
        with pytest.raises(ValueError, match=message):
            GACPolicyLoss(**{"state_dir": str(tmp_path)} | arguments)


def test_rows_carry_the_counts_of_their_batch():
    from gac.integrations.trinity import GACSampleStrategy
    from tests.integrations.trinity_task import Buffer, experiences, sample

    rows = sample(3)
    usual, experts = experiences(False, 10), experiences(True, 6)
    counts = {
        "rollouts": 10,
        "demos": 6,
        "rows": 16,
        "rollout_tokens": sum(int(r.action_mask.sum()) for r in usual),
        "demo_tokens": sum(int(r.action_mask.sum()) for r in experts),
    }
    assert all({k: row.info[k] for k in counts} == counts for row in rows)
    strategy = GACSampleStrategy.__new__(GACSampleStrategy)
    experts[2].action_mask[:] = False
    strategy.usual_exp_buffer, strategy.expert_exp_buffer = Buffer(usual), Buffer(experts)
    with pytest.raises(ValueError, match="a demonstration has no completion tokens"):
        asyncio.run(strategy.sample(1))


def test_the_example_learns():
    check_example_learns("trinity_gac", prefix="actor/gac/")
