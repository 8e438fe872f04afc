"""Sharded loading: weights are sharded while loading and equal those of a full load, and an error
on one rank reaches all ranks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from gac.errors import ConfigError
from gac.models import weights
from gac.models.causal_lm import make_model
from gac.models.pretrained import loading
from gac.models.weights import read_model
from gac.parallel import setup
from gac.parallel.arrival import ONE_BY_ONE, Arrival
from gac.rollouts import engines
from gac.training.trainer import Trainer

from . import ranks
from .test_distributed import FSDP, config, fixed_responses, whole
from .tiny import CLOCKS

pytestmark = pytest.mark.dist
FILE = "model-00002-of-00004.safetensors"


def write_base(task: Path, folder: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """Copy the task and add weights in several small files with an index. The vocabulary and
    intermediate sizes are odd.
    """
    shutil.copytree(task, folder)
    start = folder / "init"
    made = AutoConfig.from_pretrained(start)
    made.update({"intermediate_size": 47, "vocab_size": made.vocab_size + 1, **changes})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    with (
        torch.no_grad()
    ):  # perturb every parameter, so that norms and biases differ from their defaults
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 50)
    model.generation_config.update(do_sample=True, temperature=0.7)
    model.save_pretrained(start, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def base(task, tmp_path_factory):
    return write_base(task, tmp_path_factory.mktemp("base") / "task")


def given(folder: Path, **model):
    return {"model": {"path": str(folder / "init"), **model}, "parallel": FSDP}


def started(made, at_once: bool):
    """Weights, buffers and metrics of a run's first step. The weights are sharded while loading
    (`at_once`) or after all have been read.

    The latter is how FSDP2 treats a fully loaded model.
    """
    engines.generate = fixed_responses
    if not at_once:
        Arrival._arrived = lambda *_: None
        weights.stored = lambda *_: None
    trainer = Trainer(made)
    parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
    assert all(isinstance(p, DTensor) for p in parameters.values())
    tied = {n for n, p in parameters.items() if p is trainer.model.get_input_embeddings().weight}
    before = {n: whole(p) for n, p in parameters.items()}
    before |= {n: b.clone() for n, b in trainer.model.named_buffers()}
    if trainer.reference is not None:
        frozen = trainer.reference.named_parameters()
        before |= {"reference." + n: whole(p) for n, p in frozen}
        assert not any(p.requires_grad for p in trainer.reference.parameters())
    row = {k: v for k, v in trainer._train_step().items() if k not in CLOCKS}
    kept = trainer.accelerator.unwrap_model(trainer.model)
    after = {n: whole(p) for n, p in parameters.items()}
    about = kept.config.name_or_path, kept.generation_config.temperature, kept.plain_head
    return before, row, after, sorted(tied), about


def assert_bitwise(one, other):
    for a, b in ((one[0], other[0]), (one[2], other[2])):
        assert a.keys() == b.keys()
        wrong = [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
        assert not wrong
    assert one[1].keys() == other[1].keys()
    assert all(v == other[1][k] or v != v for k, v in one[1].items())
    assert one[3:] == other[3:]


@pytest.mark.parametrize(
    ("changes", "model", "count"),
    [
        pytest.param({}, {}, 2, id="tied"),
        pytest.param(
            {"tie_word_embeddings": False}, {"dtype": "bfloat16"}, 3, id="untied-bfloat16"
        ),
        pytest.param({}, {"lora": {"rank": 4}}, 2, id="adapters"),
        pytest.param({"replicas": 2}, {}, 4, id="hsdp"),
    ],
)
def test_weights_cut_as_they_arrive_are_those_of_a_whole_model(
    task, base, tmp_path, changes, model, count
):
    if model.get("lora"):
        pytest.importorskip("peft", reason="needs the extra `lora`")
    changes = dict(changes)
    parallel = {**FSDP, "replicas": changes.pop("replicas", 1)}
    folder = write_base(task, tmp_path / "task", **changes) if changes else base
    made = {**given(folder, **model), "parallel": parallel}
    rows = {
        "demo_batch": 2 * count,
        "rollouts": {"prompts": count, "completions": 2, "max_new_tokens": 4},
    }
    found = [
        ranks.run(started, config(folder, tmp_path / str(cut), **made, **rows), cut, ranks=count)[0]
        for cut in (True, False)
    ]
    assert_bitwise(*found)
    before, _, after, tied, about = found[0]
    assert len(tied) == (1 if "tie_word_embeddings" in changes else 2)
    assert about == (str(folder / "init"), 0.7, True)
    assert any(name.endswith("inv_freq") for name in before)
    name = next(
        n
        for n in after
        if n.endswith("lora_B.default.weight" if model.get("lora") else "q_proj.weight")
    )
    assert not torch.equal(before[name], after[name])  # the step updates the weights


def held(made):
    """Bytes of the model's rows that this rank keeps, of storage left in the model, of its shards
    and of the full model; and the rows left after `prepare`.
    """
    accelerator = setup.make_accelerator(made.parallel, "no", (), made.out)
    arrival = setup.arriving(accelerator, made.parallel)
    model = make_model(made.model, 0, arrival)
    assert ONE_BY_ONE not in os.environ  # the environment and torch's hooks have been restored
    assert torch.nn.Linear(2, 2).weight.untyped_storage().nbytes() == 16
    rows = sum(x.untyped_storage().nbytes() for x in arrival._rows.values())
    left = sum(p.untyped_storage().nbytes() for p in model.parameters())
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    prepared = setup.prepare(model, accelerator, made.parallel, "no", arrival)
    shards = sum(p.to_local().untyped_storage().nbytes() for p in prepared.parameters())
    return rows, left, shards, total, len(arrival._rows)


def test_no_rank_holds_the_whole_model_at_any_time(base, tmp_path):
    found = ranks.run(held, config(base, tmp_path, **given(base)), ranks=2)
    total = found[0][3]
    assert sum(rows for rows, *_ in found) == total
    assert (
        total <= sum(shards for _, _, shards, *_ in found) < 1.02 * total
    )  # shards are padded to the same number of rows
    assert all(rows < 0.51 * total and left == kept == 0 for rows, left, _, _, kept in found)


def lose(start: Path) -> None:
    (start / FILE).unlink()


def truncate(start: Path) -> None:
    path = start / FILE
    path.write_bytes(path.read_bytes()[:-10])


def forget(start: Path) -> None:
    rewrite(start, lambda tensors: tensors.pop("model.norm.weight", None))


def widen(start: Path) -> None:
    rewrite(
        start,
        lambda tensors: tensors.update(
            {n: torch.zeros(5, 7) for n in tensors if n == "model.layers.1.mlp.up_proj.weight"}
        ),
    )


def rewrite(start: Path, change) -> None:
    for path in start.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose, FILE),
        (forget, "the weights lack model.norm.weight: copy"),
        (widen, "up_proj.weight is [5, 7] in the weights, and the model that config.json"),
        (truncate, "the weights are damaged"),
    ],
)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_weights_that_do_not_arrive_are_one_line(base, tmp_path, damage, says, one_by_one):
    shutil.copytree(base / "init", tmp_path / "init")
    damage(tmp_path / "init")
    path = str(tmp_path / "init")
    with pytest.raises(ConfigError) as found, loading("model.path", path):
        read_model("model.path", path, one_by_one, dtype=torch.float32)
    message = str(found.value)
    assert message.startswith(f"model.path={path!r}") and says in message and "\n" not in message


def test_a_missing_file_ends_the_start_on_every_rank(base, tmp_path):
    folder = tmp_path / "task"
    shutil.copytree(base, folder)
    lose(folder / "init")
    for message in ranks.errors(
        Trainer, config(folder, tmp_path / "run", **given(folder)), ranks=2
    ):
        assert f"lack {FILE}, which their index names: copy" in message


def only_on_rank_1(made):
    """Start a run whose weights cannot be read on rank 1."""
    accelerator = setup.make_accelerator(made.parallel, "no", (), made.out)
    if accelerator.process_index == 1:

        def broken(*_):
            raise ConfigError("model.path: rank 1 cannot read it")

        weights.stored = broken
    Trainer(made)


def test_a_rank_that_fails_alone_does_not_keep_the_others_waiting(base, tmp_path):
    found = ranks.errors(only_on_rank_1, config(base, tmp_path, **given(base)), ranks=2)
    assert found == ["model.path: rank 1 cannot read it"] * 2
