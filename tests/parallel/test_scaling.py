"""Checks the formulas of docs/benchmarks.md against real models and real runs."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from gac.methods import Mix
from gac.parallel import process_group, sharding
from gac.parallel.config import ParallelConfig
from gac.parallel.sharding import prepare
from gac.training.trainer import Trainer
from gac_kernels import TokenMoments
from tests import ranks
from tests.parallel.test_distributed import FSDP, config
from tools import scaling
from tools.scaling import MODELS, Shape

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
TINY = Shape(vocabulary=18, hidden=32, layers=2, intermediate=48, heads=4, kv_heads=2, tied=True)


class Traffic(TorchDispatchMode):
    """Counts the elements of each kind of collective, measured on its unsharded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)]
            kind = func._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
            self.elements.setdefault(kind, []).append(max((x.numel() for x in tensors), default=0))
        return func(*args, **(kwargs or {}))


def traffic(run_config):
    """Collectives of the gradient of a batch of demonstrations, and the sizes of the FSDP units."""
    trainer = Trainer(run_config)
    step = trainer._assemble(trainer.feed.demo_rows(0), Mix(1.0))
    trainer.gradients(step)  # the first call installs hooks
    # leaves no trace
    with sharding.gathered(trainer.model, run_config.parallel.defer_reduce):
        pass
    trainer.optimizer.zero_grad()
    sharding.reshard(trainer.model)
    with Traffic() as collectives:
        trainer.gradients(step)
    layers = [sum(p.numel() for p in m.parameters()) for m in trainer.model.model.layers]
    return (
        collectives.elements,
        layers,
        sum(p.numel() for p in trainer.model.parameters()) - sum(layers),
    )


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_match_the_real_model(name):
    shape = MODELS[name]
    model_config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(model_config)
    assert shape.total == sum(p.numel() for p in model.parameters())
    assert shape.layer == sum(p.numel() for p in model.model.layers[0].parameters())


@pytest.mark.dist
@pytest.mark.parametrize("defer", [False, True])
def test_traffic_of_a_real_run(two_layers, tmp_path, defer):
    """Two micro-batches per rank: each gathers the head once, and each layer twice, for the forward
    and for the backward. FSDP pads each parameter so that every rank holds whole rows.
    """
    run_config = config(
        two_layers,
        tmp_path,
        loss={},
        method={"name": "sft"},
        demo_batch_size=12,
        micro_batch_size=3,
        parallel={**FSDP, "defer_reduce": defer},
    )
    elements, layers, root = ranks.run(traffic, run_config, ranks=2)[0]
    assert (layers, root) == ([TINY.layer] * 2, TINY.root)
    large = [n for n in elements["allgather"] if n > 100]
    assert (len(large), sum(large)) == (
        2 * (1 + 2 * TINY.layers),
        pytest.approx(scaling.gathered_elements(TINY, 2), rel=0.02),
    )
    assert sum(elements["reduce_scatter"]) == pytest.approx(
        scaling.reduced_elements(TINY, 2, defer), rel=0.02
    )


def state_bytes(run_config):
    """Bytes of weights, optimizer moments and reference that a rank holds after a step."""
    trainer = Trainer(run_config)
    trainer._train_step()
    step = trainer._assemble(trainer.feed.demo_rows(0), Mix(1.0))
    for forward in (trainer.gradients.losses, trainer.gradients.forward.row_logprobs):
        forward(step if forward == trainer.gradients.losses else step.rows)
        tensors = [p.to_local() for p in trainer.model.parameters()]
    for state in trainer.optimizer.state.values():
        tensors += [state[k].to_local() for k in ("exp_avg", "exp_avg_sq")]
    tensors += [p.to_local() for p in trainer.reference.parameters()]
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.dist
def test_bytes_per_rank_match_a_real_run(two_layers, tmp_path):
    measured, expected = (
        ranks.run(state_bytes, config(two_layers, tmp_path, parallel=FSDP), ranks=2),
        scaling.state_bytes(TINY, 2),
    )
    # exact when summed over ranks; a single rank may hold an extra row
    assert sum(measured) == 2 * expected
    assert max(measured) == pytest.approx(expected, rel=0.1)


def signal_elements(count):
    """Number of elements that all ranks exchange to merge the statistics of `count` rows."""
    torch.distributed.init_process_group("gloo")
    moments = TokenMoments.zeros() + TokenMoments(
        torch.zeros(7, dtype=torch.float64),
        torch.ones(count, dtype=torch.float64),
        torch.zeros(6, dtype=torch.float64),
    )
    with Traffic() as collectives:
        moments.all_reduce()
    return sum(map(sum, collectives.elements.values()))


@pytest.mark.dist
def test_signals_cost_a_few_hundred_bytes():
    """One collective exchanges the sizes, one the values."""
    elements = ranks.run(signal_elements, 32, ranks=2)[0]
    assert 8 * elements == scaling.controller_bytes(32) + 8 == 360 + 8


def test_page_table_is_up_to_date():
    assert scaling.table() in PAGE.read_text()


def test_prepare_does_not_shard_on_one_process(tmp_path, recwarn):
    accelerator = process_group.make_accelerator(ParallelConfig(mode="fsdp"), (), str(tmp_path))
    model = prepare(torch.nn.Linear(2, 2), accelerator, ParallelConfig(mode="fsdp"), None, None)
    assert type(model.weight.data) is torch.Tensor
    assert not sharding.units(model)
    assert not any("log_with" in str(warning.message) for warning in recwarn)
