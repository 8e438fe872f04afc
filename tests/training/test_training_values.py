"""Whole functions of the training loop, with fake parts, against values computed by hand."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from gac.config import load
from gac.control.term_pair import TermPair
from gac.data.rows import Counts
from gac.methods import Observation
from gac.methods.base import Mix, StepNeeds
from gac.parallel import collectives
from gac.training import budget, trainer
from gac.training.metrics import observe
from gac.training.optim import OptimConfig, clip_gradient, learning_rate, set_learning_rate
from gac.training.run import Run
from gac.train_config import TrainConfig
from gac.training.step import Measured, Rewards, Step, Update
from gac.training.trainer import Trainer
from gac_kernels import TokenMoments

MOMENTS = TokenMoments(
    torch.tensor([2.0, 0.1, 0.2, 0.5, 0.7, 0.3, 0.6], dtype=torch.float64),
    torch.tensor([-math.inf, 0.5, 0.25, 1.5, -math.inf], dtype=torch.float64),
    torch.tensor([8.0, 5.0, 0.8, 2.0, 4.0, 9.0], dtype=torch.float64),
)
STEP = Step(
    6,
    (),
    Mix(0.9),  # replaced by the mix of the update
    Counts(rollouts=2, rollout_tokens=9, demos=3, demo_tokens=5, rows=5, tokens=31),
    Rewards.of([1.5, 0.0, 0.5, 1.0]),
    StepNeeds(kl=True, trim=0.34),
    (),
    seed=1,
)


def test_the_row_of_metrics_and_the_observation_of_a_step() -> None:
    losses, after = TermPair(demo=1.5, rollout=-0.25), TermPair(demo=1.0, rollout=-0.5)
    evidence, update = object(), Update(Mix(0.4, 3.0), 7.0, 0.01, None)
    measured = Measured(losses, MOMENTS, evidence=evidence, sources=("", "b", "a", "b", ""))
    row, observation = observe(STEP, measured, update, after)
    signals = MOMENTS.signals(0.34)
    assert signals.sft_variance == 0 < MOMENTS.signals().sft_variance
    expected = {
        "step": 7,
        "mu": 0.4,
        "mu_star": None,
        "prior": None,
        "alpha": None,
        "kl": 0.1,
        **signals._asdict(),
        "rollout_loss": -0.25,
        "demo_loss": 1.5,
        "reward_mean": 0.75,
        "entropy": 0.5,
        "clip_fraction": 0.25,
        "completions/mean_length": 4.5,
        "grad_norm": 7.0,
        "tokens": 31,
        "lr": 0.01,
        "demo_nll/a": 0.25,
        "demo_nll/b": 1.0,
    }
    assert row == expected and list(row)[-2:] == ["demo_nll/b", "demo_nll/a"]
    assert observation == Observation(
        7,
        kl=0.1,
        entropy=0.5,
        reward_mean=0.75,
        reward_variance=0.3125,
        rollout_loss=-0.25,
        demo_loss=1.5,
        evidence=evidence,
        losses_before=losses,
        losses_after=after,
        demo_losses=(0.5, 0.25, 1.5),
        demo_sources=("b", "a", "b"),
        lr=0.01,
    )
    sampled = Measured(losses, MOMENTS, kl=0.7)
    row, observation = observe(STEP, sampled, update)
    assert (row["kl"], observation.kl, observation.demo_sources) == (0.7, 0.7, None)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"needs": StepNeeds(kl=False)}, {"kl"}),
        ({"rewards": Rewards.of([])}, {"kl", "reward_mean"}),
        (
            {"counts": Counts(0, 0, 3, 5, 3, 9)},
            {"rollout_loss", "clip_fraction", "completions/mean_length"},
        ),
        ({"counts": Counts(2, 9, 0, 0, 2, 9)}, {"demo_loss"}),
    ],
)
def test_what_a_step_has_not_measured_is_missing_in_its_row(changes, missing) -> None:
    measured = Measured(TermPair(demo=1.5, rollout=-0.5), MOMENTS)
    step = Step(**{**vars(STEP), **changes})
    row, observation = observe(step, measured, Update(Mix(0.4), 1.0, 0.1, None))
    never = {"mu_star", "prior", "alpha"}
    assert {name for name, value in row.items() if value is None} == missing | never
    if "rewards" in changes:
        assert observation.reward_variance is None


@pytest.mark.parametrize(("schedule", "rates"), [("constant", [1.0] * 4), ("linear", [1, 1, 0, 0])])
def test_a_learning_rate_after_a_warmup_up_to_the_last_steps(schedule, rates) -> None:
    """Of 3 steps, 2 or 3 are warm-up; then the first other step is the last one, or too late."""
    config = OptimConfig(lr=1.0, warmup_steps=2, min_lr_ratio=0.0, schedule=schedule)
    assert [learning_rate(config, step, 4) for step in (1, 2, 3, 4)] == rates
    config = OptimConfig(lr=0.5, warmup_steps=3, min_lr_ratio=0.0, schedule="linear")
    assert [learning_rate(config, step, 3) for step in (0, 2, 3, 4)] == [0.5 / 3, 0.5, 0.5, 0.0]


def test_the_learning_rate_is_that_of_all_parameter_groups() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(("limit", "clipped"), [(0.0, [3.0, 4.0]), (2.5, [1.5, 2.0])])
def test_a_gradient_is_clipped_to_its_maximum_norm(limit, clipped) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradient([parameter], limit) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor(clipped), rtol=1e-5, atol=0)


# ---- the default micro-batches


class Policy(nn.Module):
    """50 trainable numbers of 4 bytes; half of them on this rank: 300 bytes of gradients and
    moments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(99))
        self.frozen.requires_grad = False


@pytest.mark.parametrize(
    ("device", "free", "other_rank", "longest", "unit", "packed", "padded"),
    [
        # 0.5 (free - 300) / 10 tokens fit: exactly 64, and slightly less than 128
        ("cpu", 300 + 20 * 64, 999, 2, 1, (64, "1.3e-06 GB are free"), 32),
        ("cpu", 300 + 20 * 127.9, 999, 3, 1, (64, "2.6e-06 GB are free"), 21),
        ("cpu", 1e9, 33, 40, 2, (80, "1 GB are free"), 2),
        ("cpu", 1e9, 1e9, 100, 1, (2048, "the maximum"), 20),
        ("cuda", 1e9, 1e9, 100, 1, (16384, "the maximum"), 163),
        ("xpu", 1e9, 1e9, 100, 1, (16384, "the maximum"), 163),
        ("cpu", 200, 999, 1, 1, (1, "0 GB are free"), 1),
        ("cpu", 300 + 20, 999, 1, 7, (7, "2e-08 GB are free"), 7),
    ],
)
def test_micro_batches_by_hand(
    monkeypatch, caplog, device, free, other_rank, longest, unit, packed, padded
) -> None:
    policy, reference, lengths = Policy(), nn.Identity(), []
    accelerator = SimpleNamespace(
        device=torch.device(device), unwrap_model=lambda model: (model, "unwrapped")
    )

    def measure(model, length):
        assert model == (policy, "unwrapped")
        lengths.append(length)
        return 10.0

    monkeypatch.setattr(budget, "free_memory", {accelerator.device: float(free)}.__getitem__)
    monkeypatch.setattr(budget, "activation_bytes", measure)
    monkeypatch.setattr(budget, "local", lambda parameter: parameter[: len(parameter) // 2])
    monkeypatch.setattr(collectives, "largest", lambda values: [max(values[0], -other_rank)])
    config = load(TrainConfig, {"steps": 7})
    for refused, rows in ((None, None), (policy, padded), (reference, padded)):
        monkeypatch.setattr(budget, "packs_by_row", lambda model, no=refused: model is not no)
        with caplog.at_level(logging.INFO, "gac"):
            chosen = budget.choose_micro_batches(
                config, accelerator, policy, reference, longest, unit
            )
        tokens = None if rows else packed[0]
        assert (chosen.steps, chosen.max_tokens_per_micro_batch, chosen.micro_batch_size) == (
            7,
            tokens,
            rows,
        )
        message = caplog.messages[-1]
        assert message.startswith(
            f"micro_batch_size={rows}, " if rows else f"max_tokens_per_micro_batch={tokens}, "
        )
        assert f"({packed[1]})" in message
    assert lengths == [min(longest, 64)] * 3


@pytest.mark.parametrize("explicit", [{"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 96}])
def test_explicit_micro_batches_stay(explicit) -> None:
    config = load(TrainConfig, explicit)
    assert budget.choose_micro_batches(config, None, None, None, 9, 1) is config


@pytest.mark.parametrize("packs", [True, False])
def test_only_models_that_pack_keep_their_attention_by_row(monkeypatch, packs) -> None:
    model, events = object(), []
    monkeypatch.setattr(budget, "supports_packing", lambda m: events.append("forward") or packs)
    monkeypatch.setattr(budget, "reshard", lambda m: events.append(("reshard", m)))
    attention = SimpleNamespace(
        is_by_row=lambda m: events.append("by row?") or m is model,
        disable=lambda m: events.append(("disable", m)),
    )
    monkeypatch.setattr(budget, "row_attention", attention)
    assert budget.packs_by_row(model) is packs
    last = "by row?" if packs else ("disable", model)
    assert events == ["forward", ("reshard", model), last]


def test_free_memory_of_a_process(monkeypatch) -> None:
    memory = SimpleNamespace(available=1200)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert budget.free_memory(torch.device("cpu")) == 1200
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget.free_memory(torch.device("cpu")) == 300
    numbers = {"mem_get_info": (1000, 9999), "memory_reserved": 70, "memory_allocated": 30}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert budget.free_memory(torch.device("cuda")) == 1040


class Exponential(nn.Module):
    """Keeps 4 bytes of its input and 12 of its output per token, and its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, input_ids, attention_mask, request):
        y = input_ids.float()[..., None] * (self.weight * self.weight)
        return request(SimpleNamespace(logprobs=lambda targets: (y.exp(), None)))


def test_bytes_per_token_do_not_include_weights(monkeypatch) -> None:
    resharded: list = []
    monkeypatch.setattr(budget, "reshard", resharded.append)
    model = Exponential()
    with torch.no_grad():
        assert budget.activation_bytes(model, 5) == 16
        assert resharded == [model, model]
        model.weight.requires_grad = False
        assert budget.activation_bytes(model, 5) == 1  # at least one byte


# ---- decisions between steps


@pytest.mark.parametrize(
    ("every", "reuse", "due"),
    [
        (0, 1, []),
        (2, 1, [2, 4, 6, 8, 10, 12]),
        (5, 1, [5, 10]),
        (2, 3, [3, 6, 9, 12]),
        (5, 3, [6, 12]),
        (4, 3, [6, 9, 12]),
    ],
)
def test_periodic_actions_wait_for_the_last_use_of_the_rollouts(every, reuse, due) -> None:
    run = SimpleNamespace(config=load(TrainConfig, {"rollouts": {"num_iterations": reuse}}))
    dues = [run.step for run.step in range(1, 13) if Trainer._due(run, every)]
    assert dues == due


def decide(monkeypatch, step, accuracy=None, *, requested=False, **changes):
    """The actions after `step` of 12, and the best checkpoint."""
    events: list = []
    run = SimpleNamespace(
        **{
            "step": step,
            "ended": False,
            "feed": SimpleNamespace(steps=12),
            "config": load(
                TrainConfig,
                {"checkpoint_every": 6, "rollouts": {"num_iterations": 2}, "method": "constant"},
            ),
            "method": SimpleNamespace(keeps_best=False),
            "best": {"step": 2, "accuracy": 0.5},
            "stop": SimpleNamespace(requested=False),
            "checkpoints": "folder",
            "_evaluate": lambda: events.append("evaluate") or accuracy,
            "save": lambda: events.append(("save", run.best["step"])),
            **changes,
        }
    )
    evaluation = SimpleNamespace(every=4)
    run.config = SimpleNamespace(
        **{**vars(run.config), "eval": evaluation}  # without evaluation data
    )
    run._done = lambda: Trainer._done(run)
    run._due = lambda every: Trainer._due(run, every)
    monkeypatch.setattr(collectives, "largest", lambda values: [float(max(values[0], requested))])
    try:
        Trainer._checkpoint(run)
    except KeyboardInterrupt as interrupt:
        events.append(str(interrupt))
    return events, run.best


KEEPS = {"method": SimpleNamespace(keeps_best=True)}
OLD, STOPPED = {"step": 2, "accuracy": 0.5}, "saved step 10 in folder"


@pytest.mark.parametrize(
    ("step", "accuracy", "changes", "events", "best"),
    [
        (5, None, {}, [], OLD),
        (6, None, {}, [("save", 2)], OLD),
        # a better evaluation without a checkpoint cannot be the best
        (4, 0.6, {}, ["evaluate"], OLD),
        (4, 0.6, KEEPS, ["evaluate", ("save", 4)], {"step": 4, "accuracy": 0.6}),
        (4, 0.5, KEEPS, ["evaluate"], OLD),
        (4, None, KEEPS, ["evaluate"], OLD),
        (4, 0.1, {**KEEPS, "best": {}}, ["evaluate", ("save", 4)], {"step": 4, "accuracy": 0.1}),
        (12, 0.6, {}, ["evaluate", ("save", 12)], {"step": 12, "accuracy": 0.6}),
        (12, 0.4, {"requested": True}, ["evaluate", ("save", 2)], OLD),
        (10, None, {"requested": True}, [("save", 2), STOPPED], OLD),
        (10, None, {"stop": SimpleNamespace(requested=True)}, [("save", 2), STOPPED], OLD),
        (9, None, {"requested": True}, [], OLD),  # rollouts that are still in use
        (9, 0.4, {"requested": True, "ended": True}, ["evaluate", ("save", 2)], OLD),
        (13, 0.6, {}, ["evaluate", ("save", 13)], {"step": 13, "accuracy": 0.6}),
    ],
)
def test_what_is_evaluated_and_saved(monkeypatch, step, accuracy, changes, events, best) -> None:
    assert decide(monkeypatch, step, accuracy, **changes) == (events, best)


@pytest.mark.parametrize(
    ("best", "keeps", "exported"),
    [({}, True, 9), ({"step": 4}, True, 4), ({"step": 4}, False, 9), ({"step": 0}, True, 0)],
)
def test_the_exported_checkpoint(monkeypatch, best, keeps, exported) -> None:
    method = SimpleNamespace(keeps_best=keeps)
    run = SimpleNamespace(best=best, method=method, step=9, checkpoints="folder")
    monkeypatch.setattr(trainer.checkpoint, "find", lambda *arguments: arguments)
    assert Trainer._exported_checkpoint(run) == ("folder", exported)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("in_loss", [True, False])
@pytest.mark.parametrize("kl", [True, False])
def test_what_a_step_must_measure(named: bool, in_loss: bool, kl: bool) -> None:
    """Rollouts in all steps but 4, demonstrations in all but 3; the KL is monitored every 2."""
    method = SimpleNamespace(needs=lambda t: StepNeeds(t != 4, t != 3, kl=kl, trim=t / 9))
    run = SimpleNamespace(method=method, kl_in_loss=in_loss)
    run.feed = SimpleNamespace(names_sources=named)
    for every, monitored in ((2, {0, 2}), (1, {0, 1, 2, 3}), (0, set())):
        run.config = SimpleNamespace(monitor_kl_every=every)
        for t in range(5):
            measures = in_loss or t in monitored or (kl and t != 4)
            expected = StepNeeds(t != 4, t != 3, kl=measures, trim=t / 9, sources=named and t != 3)
            assert Run.needs(run, t) == expected


def test_seeds_are_those_of_earlier_versions() -> None:
    """A different seed would change the results of a resumed run."""
    assert trainer._derive_seed(0, 3, 1) == 7457243429707895
    seeds = {trainer._derive_seed(*key) for key in ((0, 3, 1), (3, 0, 1), (0, 1, 3), (0, 31))}
    assert len(seeds) == 4
