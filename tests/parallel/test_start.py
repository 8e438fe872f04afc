"""Sharded loading: the weights equal those of a full load, and an error on one rank reaches all."""

import functools
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from gac.errors import ConfigError
from gac.models import pretrained
from gac.models.causal_lm import make_model
from gac.models.pretrained import read_model
from gac.models.source import one_line_errors
from gac.parallel import process_group, sharding
from gac.parallel.loading import DISABLE_ASYNC_LOAD, ShardedLoading
from gac.rollouts import engines
from gac.training.trainer import Trainer
from tests import ranks
from tests.parallel.test_distributed import FSDP, FULL, config, fixed_responses, full_tensor
from tests.tiny import TIMING_KEYS

pytestmark = pytest.mark.dist
FILE = "model-00002-of-00004.safetensors"


def write_base(task: Path, folder: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """Copy the task and add weights of odd sizes, in several small files with an index."""
    shutil.copytree(task, folder)
    start = folder / "init"
    model_config = AutoConfig.from_pretrained(start)
    model_config.update(
        {"intermediate_size": 47, "vocab_size": model_config.vocab_size + 1, **changes}
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():  # also norms and biases, which start at constants
            p.add_(torch.randn_like(p) / 50)
    model.generation_config.update(do_sample=True, temperature=0.7)
    model.save_pretrained(start, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def base(two_layers, tmp_path_factory):
    return write_base(two_layers, tmp_path_factory.mktemp("base") / "task")


def sharded_overrides(folder: Path, **model):
    return {"model": {"path": str(folder / "init"), **model}, "parallel": FSDP}


def first_step(run_config, while_loading: bool):
    """Weights, buffers and metrics of a run's first step.

    The weights are sharded while loading or, as FSDP2 does, after the full model has been loaded.
    """
    engines.generate = fixed_responses
    if not while_loading:
        ShardedLoading._keep_shard = lambda *_: None
        pretrained.lazy_tensors = lambda *_: None
    trainer = Trainer(run_config)
    parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
    assert all(isinstance(p, DTensor) for p in parameters.values())
    tied = {n for n, p in parameters.items() if p is trainer.model.get_input_embeddings().weight}
    before = {n: full_tensor(p) for n, p in parameters.items()}
    before |= {n: b.clone() for n, b in trainer.model.named_buffers()}
    if trainer.reference is not None:
        before |= {
            "reference." + n: full_tensor(p) for n, p in trainer.reference.named_parameters()
        }
        assert not any(p.requires_grad for p in trainer.reference.parameters())
    row = {k: v for k, v in trainer._train_step().items() if k not in TIMING_KEYS}
    model = trainer.policy
    after = {n: full_tensor(p) for n, p in parameters.items()}
    metadata = model.config.name_or_path, model.generation_config.temperature, model.plain_head
    return before, row, after, sorted(tied), metadata


def assert_bitwise(actual, expected):
    """Compare two results of `first_step`."""
    for a, b in ((actual[0], expected[0]), (actual[2], expected[2])):
        assert a.keys() == b.keys()
        assert not [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
    missing = [[k for k, x in row.items() if x is None] for row in (actual[1], expected[1])]
    assert missing[0] == missing[1]
    measured = [{k: x for k, x in row.items() if x is not None} for row in (actual[1], expected[1])]
    assert measured[0] == pytest.approx(measured[1], rel=0, abs=0, nan_ok=True)
    assert actual[3:] == expected[3:]


@pytest.mark.parametrize(
    ("changes", "model", "count"),
    [
        pytest.param(
            {"tie_word_embeddings": False}, {"dtype": "bfloat16"}, 2, id="untied-bfloat16"
        ),
        pytest.param({}, {"lora": {"rank": 4}}, 2, id="adapters"),
        pytest.param(
            {}, {"lora": {"rank": 4, "target_modules": ["embed_tokens"]}}, 2, id="adapters-untie"
        ),
        pytest.param({"replicas": 2}, {}, 4, id="hsdp", marks=FULL),
    ],
)
def test_sharded_loading_matches_full_loading(task, base, tmp_path, changes, model, count):
    if model.get("lora"):
        pytest.importorskip("peft", reason="needs the extra `lora`")
    changes = dict(changes)
    parallel = {**FSDP, "replicas": changes.pop("replicas", 1)}
    folder = write_base(task, tmp_path / "task", **changes) if changes else base
    rollouts = {"num_prompts": count, "num_generations": 2, "max_completion_length": 4}
    overrides = {
        **sharded_overrides(folder, **model),
        "parallel": parallel,
        "demo_batch_size": 2 * count,
        "rollouts": rollouts,
    }
    cases = {
        str(now): (first_step, config(folder, tmp_path / str(now), **overrides), now)
        for now in (True, False)  # sharded while loading, or afterwards
    }
    results = ranks.run(ranks.each, cases, ranks=count)[0]
    assert_bitwise(*results.values())
    before, _, after, tied, metadata = results["True"]
    untied = "tie_word_embeddings" in changes or "target_modules" in model.get("lora", ())
    assert len(tied) == (1 if untied else 2)
    assert metadata == (str(folder / "init"), 0.7, True)
    assert any(name.endswith("inv_freq") for name in before)
    trained = r"lora_(B|embedding_A)" if model.get("lora") else "q_proj.weight"
    name = next(n for n in after if re.search(trained, n))
    assert not torch.equal(before[name], after[name])  # the step updates the weights


def bytes_held(run_config):
    """Sizes in bytes: this rank's rows, the storage left in the model, the rank's shards, the full
    model. Also the number of rows left after `prepare`.
    """
    accelerator = process_group.make_accelerator(run_config.parallel, (), run_config.out)
    loading = sharding.sharded_loading(accelerator, run_config.parallel)
    own = {DISABLE_ASYNC_LOAD: "0"} if accelerator.process_index else {}
    os.environ |= own
    model = make_model(run_config.model, 0, loading)
    # the environment and torch's hooks have been restored
    assert {k: v for k, v in os.environ.items() if k == DISABLE_ASYNC_LOAD} == own
    assert torch.nn.Linear(2, 2).weight.untyped_storage().nbytes() == 16
    with loading:
        scalar = torch.nn.Parameter(torch.ones(()))
        scalar._is_hf_initialized = True
        assert torch.nn.ParameterList([scalar])[0] is scalar  # it has no rows
    rows = sum(x.untyped_storage().nbytes() for x in loading._rows.values())
    left = sum(p.untyped_storage().nbytes() for p in model.parameters())
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    devices, fully_shard = set(), sharding.fully_shard
    sharding.fully_shard = lambda unit, **options: (
        devices.update(p.device.type for p in unit.parameters()) or fully_shard(unit, **options)
    )
    prepared = sharding.prepare(model, accelerator, run_config.parallel, None, loading)
    assert devices == {"meta"}
    shards = sum(p.to_local().untyped_storage().nbytes() for p in prepared.parameters())
    return rows, left, shards, total, len(loading._rows)


def test_no_rank_ever_holds_the_full_model(base, tmp_path):
    sizes = ranks.run(bytes_held, config(base, tmp_path, **sharded_overrides(base)), ranks=2)
    total = sizes[0][3]
    assert sum(rows for rows, *_ in sizes) == total > max(rows for rows, *_ in sizes) / 0.51
    # shards are padded to the same number of rows
    assert total <= sum(shards for _, _, shards, *_ in sizes) < 1.02 * total
    assert all(left == rows_left == 0 for _, left, _, _, rows_left in sizes)


def truncate(start: Path) -> None:
    os.truncate(start / FILE, (start / FILE).stat().st_size - 10)


def drop_norms(start: Path, pattern: str = "model.norm.weight") -> None:
    rewrite(start, lambda tensors: [tensors.pop(n) for n in list(tensors) if re.search(pattern, n)])


def change_shape(start: Path) -> None:
    rewrite(start, lambda x: x.update({n: torch.zeros(5, 7) for n in x if "up_proj" in n}))


def rewrite(start: Path, change) -> None:
    for path in start.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(lambda start: (start / FILE).unlink(), FILE, id="missing file"),
        (drop_norms, "contain model.norm.weight: copy or download"),
        (functools.partial(drop_norms, pattern="[.]0[.].*norm"), "norm.weight and 1 more: copy"),
        (change_shape, r"layers.0.mlp.up_proj.weight .*\[5, 7\] .*config.json implies"),
        (truncate, "weights are corrupt .*: copy or download"),
    ],
)
@pytest.mark.parametrize("lazily", [True, False])
def test_damaged_weights_give_a_one_line_error(base, tmp_path, damage, expected, lazily):
    shutil.copytree(base / "init", tmp_path / "init")
    damage(tmp_path / "init")
    path = str(tmp_path / "init")
    with pytest.raises(ConfigError) as error, one_line_errors("model.path", path):
        read_model("model.path", path, lazily, dtype=torch.float32)
    message = str(error.value)
    assert message.startswith(f"model.path={path!r}")
    assert "\n" not in message
    assert re.search(expected, message)


def fail_on_rank_1(run_config):
    """Start a run whose weights cannot be read on rank 1."""
    accelerator = process_group.make_accelerator(run_config.parallel, (), run_config.out)
    if accelerator.process_index == 1:

        def broken(*_):
            raise ConfigError("model.path: rank 1 cannot read it")

        pretrained.lazy_tensors = broken
    Trainer(run_config)


def test_failure_on_one_rank_reaches_all_ranks(base, tmp_path):
    assert (
        ranks.errors(fail_on_rank_1, config(base, tmp_path, **sharded_overrides(base)), ranks=2)
        == ["model.path: rank 1 cannot read it"] * 2
    )
