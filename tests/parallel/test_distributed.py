"""One, two and four processes compute the same losses, gradients, signals and weights."""

import math
import random
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from gac.methods import Mix
from gac.rollouts import engines
from gac.rollouts.generation import Completion
from gac.rows import Row
from gac.training.trainer import Trainer, train
from tests import ranks
from tests.tiny import TIMING_KEYS, digit_reward, take_steps, tiny_config, with_config

pytestmark = pytest.mark.dist
STEPS = 3


def fixed_responses(model, tokenizer, prompts, *, num_generations, **_):
    """Fake generation: 1 to 6 tokens that depend only on the prompt, not on the number of ranks."""
    responses = []
    for prompt in prompts:
        for i in range(num_generations):
            rng = random.Random(f"{prompt}/{i}")
            responses.append(Completion(rng.randrange(3, 18) for _ in range(rng.randint(1, 6))))
    return responses


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def gradients(model) -> dict[str, torch.Tensor]:
    return {
        n.removeprefix("module."): full_tensor(p.grad)
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def record_gradients(trainer) -> list[dict[str, torch.Tensor]]:
    """Return a list to which each optimizer step appends its gradients."""
    recorded: list[dict[str, torch.Tensor]] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: recorded.append(gradients(trainer.model)))
    return recorded


def weights(model) -> dict[str, torch.Tensor]:
    return {n.removeprefix("module."): full_tensor(p) for n, p in model.named_parameters()}


def train_steps(config, steps=STEPS):
    """Train; return each step's metrics, the first step's gradients, the final weights and the
    number of elements on this rank.
    """
    engines.generate = fixed_responses  # runs in its own process
    trainer = Trainer(config)
    size, own = config.kl_sample_size, trainer.gradients.kl_sample_size
    assert own == (size and math.ceil(size / trainer.accelerator.num_processes))
    grads = record_gradients(trainer)
    rows = take_steps(trainer, steps)
    trainer.heartbeat.stop()  # the process may run more cases
    local = (p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters())
    return rows, grads[0], weights(trainer.model), sum(x.numel() for x in local)


def config(task, out, **changes):
    return tiny_config(
        task,
        out,
        **{
            "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
            "method": {"name": "gac", "update_every": 1},
            "data": {
                "prompts": str(task / "prompts.jsonl"),
                "demos": str(task / "demos.jsonl"),
                "source_field": "id",  # so that the losses of the single rows are compared, too
            },
            # eps: where a gradient is 0, AdamW would scale rounding noise up to a full-size update
            "optim": {"lr": 1e-2, "warmup_steps": 1, "max_grad_norm": 0.5, "eps": 1e-4},
            **changes,
        },
    )


def assert_same(expected, actual):
    """Compare two results of `train_steps`."""
    for a, b in zip(expected[0], actual[0], strict=True):
        assert a["skipped"] == b["skipped"] == 0
        assert a["tokens"] == b["tokens"]
        for key, value in a.items():
            if key in TIMING_KEYS:
                continue
            if value is not None:
                value = pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True)
            assert b[key] == value, key
    for i in (1, 2):
        assert expected[i].keys() == actual[i].keys()
        assert expected[i]
        for name, x in expected[i].items():
            torch.testing.assert_close(actual[i][name], x, rtol=1e-4, atol=3e-6, msg=name)


OWNERS = {
    "a rank without rows": [0] * 8,
    "rollouts and demonstrations on different ranks": [0, 1] * 4,
    "a rank without demonstrations": [1, 0, 0, 0, 1, 0, 0, 0],
    "seven rows and one": [0, 0, 0, 0, 0, 0, 0, 1],
}


def uneven_gradients(config):
    """Signals, losses and gradients of the same rows in each of the placements `OWNERS`."""
    engines.generate = fixed_responses
    trainer = Trainer(config)
    rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
    rows = []
    for i, example in enumerate(trainer.feed.prompts[:8]):
        (response,) = fixed_responses(None, None, [example.prompt], num_generations=1)
        ids = example.prompt + response
        advantage = 0.0 if i % 2 else (-1.0) ** (i // 2) * (1 + i)
        rows.append(Row(ids, len(example.prompt), i % 2 == 1, advantage))
    trainer.heartbeat.stop()
    results = {}
    for name, owners in OWNERS.items():
        step = trainer._assemble(
            [row for row, owner in zip(rows, owners, strict=True) if owner % count == rank],
            Mix(0.4),
        )
        assert step.needs.kl
        measured = trainer.gradients(step)
        results[name] = measured.moments.signals(), measured.losses, gradients(trainer.model)
        trainer.optimizer.zero_grad()
    return results


FSDP = {"mode": "fsdp"}
HSDP = {"parallel": {**FSDP, "replicas": 2}}
FULL = pytest.mark.full(reason="other cases combine the same properties")


def half_constant(completion, example):
    """Every second prompt has a constant reward, so its rows need no backward pass."""
    return 1.0 if int(example.id) % 2 else digit_reward(completion, example)


ROLLOUTS = {
    "num_prompts": 4,
    "num_generations": 4,
    "max_completion_length": 5,
    "scale_rewards": "batch",  # of all ranks
}
ALL = {"rollouts": ROLLOUTS}
FLAT = {
    **ALL,
    "method": {"name": "pcgrad"},
    "reward": "tests.parallel.test_distributed:half_constant",
    "loss": {},
    "monitor_kl_every": 1,
    "kl_sample_size": 17,  # all 16 rollouts
}
ONE_BACKWARD = {
    "method": "sft",
    "optim": {"lr": 1e-2, "warmup_steps": 1, "max_grad_norm": 0},
    "loss": {},
}
BFLOAT16 = {"parallel": FSDP, "model": {"dtype": "bfloat16"}}
# the number of processes, the changes that only they have, and those of the single process too
CASES = {
    "ddp-2": (2, {"micro_batch_size": None}, {}),
    "fsdp-2-accumulated": (2, {"parallel": FSDP, "micro_batch_size": 3}, {}),
    "fsdp-2-deferred": (2, {"parallel": {**FSDP, "defer_reduce": True}, "micro_batch_size": 3}, {}),
    "hsdp-2x2": (4, {**HSDP, "micro_batch_size": None}, {}),
    "fsdp-untied-head": (2, {"parallel": FSDP}, {**ALL, "untied": True}),
    "fsdp-adapters": (2, {"parallel": FSDP}, {**ALL, "model": {"lora": {"rank": 4}}}),
    "fsdp-adapters-on-a-tied-head": (
        *(2, {"parallel": FSDP}),
        {**ALL, "model": {"lora": {"rank": 4, "target_modules": ["lm_head", "embed_tokens"]}}},
    ),
    "fsdp-reused-rollouts": (
        *(2, {"parallel": FSDP}),
        {"rollouts": {**ROLLOUTS, "num_iterations": 2}},
    ),
    "fsdp-gram-zero-gradient-rows": (2, {"parallel": FSDP}, FLAT),
}
ROUNDED = {"bfloat16-gac": (2, BFLOAT16, {}), "bfloat16-sft": (2, BFLOAT16, ONE_BACKWARD)}
UNEVEN = {"micro_batch_size": 2, "rollouts": {**ROLLOUTS, "max_completion_length": 6}}
UNEVEN_CASES = {mode: (2, {"parallel": {"mode": mode}}, UNEVEN) for mode in ("ddp", "fsdp")}
FULL_CASES = {
    "ddp-4-accumulated": (4, {"micro_batch_size": 3}, {}),
    "ddp-adapters": (2, {}, {**ALL, "model": {"lora": {"rank": 4}}}),
    "fsdp-recomputed-layers": (
        *(2, {"parallel": FSDP}),
        {**ALL, "model": {"gradient_checkpointing": True}},
    ),
    "fsdp-gram": (2, {"parallel": FSDP}, {**ALL, "method": {"name": "pcgrad"}}),
    "ddp-gram": (2, {}, {**ALL, "method": {"name": "cagrad"}}),
    "hsdp-gram": (4, HSDP, {**ALL, "method": {"name": "mgda"}}),
}

TABLE = CASES | ROUNDED | UNEVEN_CASES | FULL_CASES


def selected(request):
    """The cases of the tests that use the fixture of `request` and will run."""
    items = [i for i in request.session.items if request.fixturename in i.fixturenames]
    return [i.callspec.params["case"] for i in items if i.path == request.path]


@pytest.fixture(scope="module")
def results(request, task, tmp_path_factory):
    """For each case, the results in the single process and on each rank.

    One job computes all cases with the same number of processes.
    """
    names, jobs = dict.fromkeys(selected(request)), {}
    for name in names:
        count, own, shared = TABLE[name]
        for number, key, changes in ((1, str(shared), shared), (count, name, shared | own)):
            folder = tmp_path_factory.mktemp("case")
            work = uneven_gradients if name in UNEVEN_CASES else train_steps
            jobs.setdefault(number, {})[key] = work, case_config(task, folder, **changes)
    found = {count: ranks.run(ranks.each, cases, ranks=count) for count, cases in jobs.items()}
    return {
        name: (found[1][0][str(TABLE[name][2])], [rank[name] for rank in found[TABLE[name][0]]])
        for name in names
    }


def case_config(task, folder, untied=False, model=None, **changes):
    if untied:
        task = with_config(task, folder / "task", tie_word_embeddings=False)
    model = {"path": str(task / "init"), "random_init": True, **(model or {})}
    return config(task, folder / "run", model=model, **changes)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(x, marks=FULL) for x in FULL_CASES)])
def test_results_do_not_depend_on_the_number_of_processes(results, case):
    single, many = results[case]
    count, own, _ = TABLE[case]
    for rank in many:
        assert_same(single, rank)
    total, local, parallel = single[3], [rank[3] for rank in many], own.get("parallel")
    shards = count // parallel.get("replicas", 1) if parallel else 1
    assert sum(local) == total * count / shards  # the model is really sharded, without duplicates
    assert max(local) <= 0.6 * total or not parallel


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_arithmetic_stays_close(results, case):
    """Gradients are reduced in float32 into float32 shards."""
    (expected_rows, expected, *_), ((rows, grads, *_), _) = results[case]
    assert rows[0]["demo_loss"] == pytest.approx(expected_rows[0]["demo_loss"], rel=0.03)
    for name, exact in expected.items():
        rounded = grads[name].bfloat16()  # as every gradient is before it is reduced
        assert grads[name].dtype == torch.float32
        assert bool((rounded != grads[name]).any())
        assert 0 < (grads[name] - exact).norm() / exact.norm() < 0.05, name


@pytest.mark.parametrize("case", UNEVEN_CASES)
def test_uneven_ranks_compute_the_same(results, case):
    single, many = results[case]
    for rank in many:
        for name, (signals, losses, grads) in rank.items():
            expected = single[name]
            assert signals == pytest.approx(expected[0], rel=1e-5), name
            assert losses == pytest.approx(expected[1], rel=1e-5), name
            for key, x in expected[2].items():
                torch.testing.assert_close(
                    grads[key], x, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}"
                )


def test_ddp_needs_a_gradient_of_every_weight(task, tmp_path):
    """A decoder of this family owns weights for an encoder's states, which it never uses."""
    folder = with_config(
        task,
        tmp_path / "task",
        model_type="bart",
        is_decoder=True,
        num_hidden_layers=2,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=8,
    )
    message = r"parallel.mode='ddp': 20 weights, such as .*encoder_attn.*: use parallel.mode=fsdp"
    for error in ranks.errors(train, config(folder, tmp_path, eval={}, steps=1), ranks=2):
        assert re.search(message, error)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), pytest.param(2, 4, marks=FULL)])
def test_checkpoint_loads_on_another_world_size(task, tmp_path, before, after):
    run_config = config(task, tmp_path, parallel={**FSDP, "allow_world_size_change": True})
    ((expected,), trained), *_ = ranks.run(save_and_continue, run_config, ranks=before)
    for (row,), resumed in ranks.run(resume, run_config, ranks=after):
        names = ("mu", "demo_loss", "rollout_loss", "grad_norm", "sft_variance")
        assert [row[n] for n in names] == pytest.approx([expected[n] for n in names], rel=2e-4)
        for name, x in trained.items():
            torch.testing.assert_close(resumed[name], x, rtol=1e-4, atol=3e-6, msg=name)


def save_and_continue(config):
    """The last step's metrics and the final weights of a run that was saved before that step."""
    engines.generate = fixed_responses
    trainer = Trainer(config)
    take_steps(trainer, STEPS - 1)
    trainer.save()
    return take_steps(trainer, 1), weights(trainer.model)


def resume(config):
    engines.generate = fixed_responses
    trainer = Trainer(config)
    return take_steps(trainer, STEPS - trainer.step), weights(trainer.model)
