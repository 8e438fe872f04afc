"""One, two and four processes compute the same losses, gradients, signals and weights."""

import math
import random
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from gac.data.rows import Row
from gac.methods import Mix
from gac.rollouts import engines
from gac.rollouts.generation import Completion
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


@pytest.fixture(scope="module")
def single_process(task, tmp_path_factory):
    """Single-process results, cached by configuration."""
    cache: dict[str, object] = {}

    def get(**changes):
        key = repr(sorted(changes.items()))
        if key not in cache:
            cache[key] = ranks.run(
                train_steps, config(task, tmp_path_factory.mktemp("single"), **changes), ranks=1
            )[0]
        return cache[key]

    return get


def assert_same(expected, actual):
    """Compare two results of `train_steps`."""
    for a, b in zip(expected[0], actual[0], strict=True):
        assert a["skipped"] == b["skipped"] == 0 and a["tokens"] == b["tokens"]
        for key, value in a.items():
            if key in TIMING_KEYS:
                continue
            if value is not None:
                value = pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True)
            assert b[key] == value, key
    for i in (1, 2):
        assert expected[i].keys() == actual[i].keys() and expected[i]
        for name, x in expected[i].items():
            torch.testing.assert_close(actual[i][name], x, rtol=1e-4, atol=3e-6, msg=name)


FSDP = {"mode": "fsdp"}
BART = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
FULL = pytest.mark.full(reason="other cases combine the same properties")


@pytest.mark.parametrize(
    ("count", "parallel", "micro_batch_size"),
    [
        pytest.param(2, {}, None, id="ddp-2"),
        pytest.param(4, {}, 3, id="ddp-4-accumulated", marks=FULL),
        pytest.param(2, FSDP, 3, id="fsdp-2-accumulated"),
        pytest.param(2, {**FSDP, "defer_reduce": True}, 3, id="fsdp-2-deferred"),
        pytest.param(4, {**FSDP, "replicas": 2}, None, id="hsdp-2x2"),
    ],
)
def test_results_do_not_depend_on_the_number_of_processes(
    task, tmp_path, single_process, count, parallel, micro_batch_size
):
    many = ranks.run(
        train_steps,
        config(task, tmp_path, parallel=parallel, micro_batch_size=micro_batch_size),
        ranks=count,
    )
    for rank in many:
        assert_same(single_process(), rank)
    total, local = single_process()[3], [rank[3] for rank in many]
    shards = count // parallel.get("replicas", 1) if parallel else 1
    assert sum(local) == total * count / shards  # the model is really sharded, without duplicates
    assert max(local) <= 0.6 * total or not parallel


def half_constant(completion, example):
    """Every second prompt has a constant reward, so its rows need no backward pass."""
    return 1.0 if int(example.id) % 2 else digit_reward(completion, example)


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        pytest.param(FSDP, {"untied": True}, id="fsdp-untied-head"),
        pytest.param(FSDP, {"lora": {"rank": 4}}, id="fsdp-adapters"),
        pytest.param({}, {"lora": {"rank": 4}}, id="ddp-adapters", marks=FULL),
        pytest.param(
            FSDP, {"gradient_checkpointing": True}, id="fsdp-recomputed-layers", marks=FULL
        ),
        pytest.param(FSDP, {"num_iterations": 2}, id="fsdp-reused-rollouts"),
        pytest.param(FSDP, {"method": "pcgrad"}, id="fsdp-gram", marks=FULL),
        pytest.param(FSDP, {"method": "pcgrad", "flat": True}, id="fsdp-gram-zero-gradient-rows"),
        pytest.param({}, {"method": "cagrad"}, id="ddp-gram", marks=FULL),
        pytest.param({**FSDP, "replicas": 2}, {"method": "mgda"}, id="hsdp-gram", marks=FULL),
    ],
)
def test_results_agree_across_processes_with(task, tmp_path, parallel, changes):
    changes = dict(changes)
    folder = task
    if changes.pop("untied", None):
        folder = with_config(task, tmp_path / "task", tie_word_embeddings=False)
    if changes.get("lora"):
        pytest.importorskip("peft", reason="needs the extra `lora`")
    rollouts = {
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "num_iterations": changes.pop("num_iterations", 1),
        "scale_rewards": "batch",  # of all ranks
    }
    settings = {"rollouts": rollouts}
    if changes.pop("flat", False):
        settings |= {"reward": "tests.parallel.test_distributed:half_constant", "loss": {}}
        settings |= {"monitor_kl_every": 1, "kl_sample_size": 17}  # all 16 rollouts
    if "method" in changes:
        settings["method"] = {"name": changes.pop("method")}
    settings["model"] = {"path": str(folder / "init"), "random_init": True, **changes}
    single = ranks.run(train_steps, config(folder, tmp_path / "one", **settings), ranks=1)[0]
    count = 2 * parallel.get("replicas", 1)
    for rank in ranks.run(
        train_steps, config(folder, tmp_path / "many", parallel=parallel, **settings), ranks=count
    ):
        assert_same(single, rank)


UNCLIPPED = {"lr": 1e-2, "warmup_steps": 1, "max_grad_norm": 0}
ONE_BACKWARD = {"method": "sft", "optim": UNCLIPPED, "loss": {}}


@pytest.mark.parametrize("changes", [{}, ONE_BACKWARD], ids=["gac", "sft"])
def test_bfloat16_arithmetic_stays_close(task, tmp_path, single_process, changes):
    """Gradients are reduced in float32 into float32 shards."""
    model = {"path": str(task / "init"), "random_init": True, "dtype": "bfloat16"}
    rows, grads, _, _ = ranks.run(
        train_steps, config(task, tmp_path, parallel=FSDP, model=model, **changes), 1, ranks=2
    )[0]
    expected_rows, expected, _, _ = single_process(**changes)
    assert rows[0]["demo_loss"] == pytest.approx(expected_rows[0]["demo_loss"], rel=0.03)
    for name, exact in expected.items():
        rounded = grads[name].bfloat16()  # as every gradient is before it is reduced
        assert grads[name].dtype == torch.float32 and bool((rounded != grads[name]).any())
        assert 0 < (grads[name] - exact).norm() / exact.norm() < 0.05, name


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


@pytest.fixture(scope="module")
def uneven(task, tmp_path_factory):
    """The results in one process, and a function that returns those of each of two ranks."""
    settings = {
        "micro_batch_size": 2,
        "rollouts": {"num_prompts": 4, "num_generations": 4, "max_completion_length": 6},
    }

    def run(count, **changes):
        return ranks.run(
            uneven_gradients,
            config(task, tmp_path_factory.mktemp("uneven"), **settings, **changes),
            ranks=count,
        )

    return run(1)[0], lambda mode: run(2, parallel={"mode": mode})


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_uneven_ranks_compute_the_same(uneven, mode):
    single_process, two_processes = uneven
    for rank in two_processes(mode):
        for name, (signals, losses, grads) in rank.items():
            expected = single_process[name]
            assert signals == pytest.approx(expected[0], rel=1e-5), name
            assert losses == pytest.approx(expected[1], rel=1e-5), name
            for key, x in expected[2].items():
                torch.testing.assert_close(
                    grads[key], x, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}"
                )


def test_ddp_needs_a_gradient_of_every_weight(task, tmp_path):
    """A decoder of this family owns weights for an encoder's states, which it never uses."""
    folder = with_config(task, tmp_path / "task", model_type="bart", is_decoder=True, **BART)
    message = r"parallel.mode='ddp': 20 weights, such as .*encoder_attn.*: use parallel.mode=fsdp"
    for error in ranks.errors(train, config(folder, tmp_path, eval={}, steps=1), ranks=2):
        assert re.search(message, error)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), pytest.param(2, 4, marks=FULL)])
def test_checkpoint_loads_on_another_world_size(task, tmp_path, single_process, before, after):
    run_config = config(task, tmp_path, parallel={**FSDP, "allow_world_size_change": True})
    ranks.run(save_at, run_config, 3, ranks=before)
    for rank in ranks.run(resume, run_config, ranks=after):
        names = ("mu", "demo_loss", "rollout_loss", "grad_norm", "sft_variance")
        for a, b in zip(single_process()[0][3:], rank[0], strict=True):
            assert [b[n] for n in names] == pytest.approx([a[n] for n in names], rel=2e-4)
        for name, x in single_process()[2].items():
            torch.testing.assert_close(rank[1][name], x, rtol=1e-4, atol=3e-6, msg=name)


def save_at(config, steps):
    engines.generate = fixed_responses
    trainer = Trainer(config)
    take_steps(trainer, steps)
    trainer.save()


def resume(config):
    engines.generate = fixed_responses
    trainer = Trainer(config)
    return take_steps(trainer, STEPS - trainer.step), weights(trainer.model)
