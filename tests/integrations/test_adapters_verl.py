"""The adapter for verl, against stand-ins for the few parts of verl that it extends or calls."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gac import Mixer
from gac.demo.task import make_tokenizer
from gac.integrations.demonstrations import encode
from gac.methods import DEFAULT, METHODS, Constant
from gac.order import Order
from gac_kernels import DemoWeight
from tests.integrations.stand_ins import modules


class Batch(dict):
    """Stand-in for a TensorDict; `padded` and `selected` return itself."""

    def select(self, *names: str) -> "Batch":
        assert set(names) <= set(self)
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> "Batch":
        return self


class Worker:
    """Stand-in for TrainingWorker; records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.engine_config: Any = SimpleNamespace(strategy="fsdp2")
        self.model_config: Any = SimpleNamespace(processor=None, mtp=None, tokenizer="words")
        self.engine: Any = SimpleNamespace(get_data_parallel_group=lambda: "group")
        self.output: Any = None

    def set_loss_fn(self, loss_fn: Any) -> None:
        self.calls.append(loss_fn)

    def train_batch(self, data: Any) -> Any:
        self.calls.append(data)
        return self.output

    def save_checkpoint(self, *args: Any) -> str:
        self.calls.append(args)
        return "saved"

    def load_checkpoint(self, *args: Any) -> str:
        self.calls.append(args)
        return "loaded"


class ActorWorker:
    """Stand-in for ActorRolloutRefWorker."""

    actor_worker_cls: Any = None


@dataclass
class Options:
    """Stand-in for PolicyLossConfig."""

    loss_mode: str = "vanilla"


def registered(**options: Any) -> Any:
    return lambda function: vars(function).update(registered=options) or function


CONTENTS = {
    "tensordict": {"TensorDict": Batch},
    "verl.single_controller.base.decorator": {
        "Dispatch": SimpleNamespace(ONE_TO_ALL="all"),
        "make_nd_compute_dataproto_dispatch_fn": lambda mesh_name: mesh_name,
        "register": registered,
    },
    "verl.utils": {
        "tensordict_utils": SimpleNamespace(
            get=lambda data, name, default=None: data.get(name, default),
            get_tensordict=lambda tensors, options: Batch(tensors | options),
        )
    },
    "verl.workers.config": {"PolicyLossConfig": Options},
    "verl.workers.engine_workers": {
        "ActorRolloutRefWorker": ActorWorker,
        "TrainingWorker": Worker,
    },
    "verl.workers.utils.losses": {
        "ppo_loss": lambda config, model_output, data, dp_group: (
            config.factor * model_output["log_probs"].sum(),
            {"its own": "are those of the whole loss"},
        )
    },
    "verl.workers.utils.padding": {"no_padding_2_padding": lambda x, data: x + data["shift"]},
}


@pytest.fixture
def verl() -> Iterator[Any]:
    with modules(CONTENTS, "gac.integrations.verl") as adapter:
        yield adapter


ROWS = [
    {"prompt": "1+2=", "completion": "3"},
    {"prompt": "9+9=", "completion": "18"},
    {"prompt": "1=", "completion": "1"},
]


@pytest.fixture
def options(verl: Any, tmp_path: Path) -> Any:
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    method = {"name": "constant", "mu": 0.25, "weight": "shaped"}
    return verl.GACPolicyLoss(demo_path=str(path), demo_batch=3, method=method, demo_seed=5)


class Engine:
    """Stand-in for verl's engine: one of two data-parallel ranks."""

    def __init__(self, rank: int = 0, ranks: int = 2) -> None:
        self.rank, self.ranks = rank, ranks
        self.passes: list[Any] = []

    def get_data_parallel_size(self) -> int:
        return self.ranks

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def forward_backward_batch(self, data: Any, loss: Any, forward_only: bool = False) -> str:
        self.passes.append((data, loss, forward_only))
        return f"output {len(self.passes)}"


def mixture(verl: Any, options: Any, **engine: int) -> Any:
    words = make_tokenizer()

    def policy_loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        return torch.tensor(8.0), {"group": dp_group}

    return verl.TwoPassStep(Engine(**engine), words, options, policy_loss)


def test_options(verl: Any, options: Any) -> None:
    assert ActorWorker.actor_worker_cls is verl.GACWorker
    defaults = verl.GACPolicyLoss(demo_path="x", demo_batch=1)
    assert (defaults.method, defaults.demo_seed) == ({"name": DEFAULT}, 0)
    for changes, message in (
        ({"demo_path": ""}, "policy_loss.demo_path is empty: set it to a file of"),
        ({"demo_batch": 0}, "policy_loss.demo_batch=0: use a number of demonstrations >= 1"),
        *(({"method": x}, f"controller={x} needs") for x in ("luffy", "gac-gated")),
        ({"method": "gacc"}, "policy_loss.method"),
    ):
        with pytest.raises(ValueError, match=message):
            verl.GACPolicyLoss(**{"demo_path": "x", "demo_batch": 1, **changes})
    model = SimpleNamespace(processor=None, mtp=None)
    off = SimpleNamespace(processor=None, mtp=SimpleNamespace(enable=False))
    fsdp = {"strategy": "fsdp2"}
    for engine, network, message in (
        (fsdp, model, None),
        (fsdp | {"ulysses_sequence_parallel_size": 1}, off, None),
        ({"strategy": "fsdp"}, model, "strategy=fsdp: use fsdp2"),
        (
            fsdp | {"ulysses_sequence_parallel_size": 2},
            model,
            "ulysses_sequence_parallel_size=2: use 1",
        ),
        (fsdp, SimpleNamespace(processor="p", mtp=None), "model.processor=an image processor: use"),
        (
            fsdp,
            SimpleNamespace(processor=None, mtp=SimpleNamespace(enable=True)),
            "mtp.enable=True",
        ),
    ):
        refused = pytest.raises(ValueError, match=f"GACPolicyLoss does not support {message}")
        with refused if message else contextlib.nullcontext():
            verl.check_supported(SimpleNamespace(**engine), network)


class Mixing:
    """Records how the worker makes, saves and loads its mixture."""

    rollout_loss = "the mixed loss"

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.saved: list[Any] = []
        self.mixer = SimpleNamespace(
            close=lambda group: {"mu": 0.5, "group": group},
            save=self.saved.append,
            load=self.saved.append,
        )


def loss_of(policy_loss: Any) -> Any:
    return SimpleNamespace(keywords={"config": SimpleNamespace(policy_loss=policy_loss)})


def test_the_methods_of_the_worker_are_registered(verl: Any) -> None:
    for name in ("set_loss_fn", "save_checkpoint", "load_checkpoint"):
        assert getattr(verl.GACWorker, name).registered == {"dispatch_mode": "all"}
    assert verl.GACWorker.train_batch.registered == {"dispatch_mode": "train", "blocking": False}


@pytest.mark.parametrize("loss", [loss_of(Options()), "no partial"])
def test_with_verls_own_options_the_worker_is_verls(verl: Any, loss: Any) -> None:
    worker = verl.GACWorker()
    worker.set_loss_fn(loss)
    assert worker.calls.pop() is loss
    assert worker.mixture is None
    worker.output = Batch(metrics={"own": 1})
    assert worker.train_batch("data") == {"metrics": {"own": 1}}
    assert worker.save_checkpoint("a") == "saved"
    assert worker.calls[-1] == ("a", None, 0, None)
    assert worker.load_checkpoint("a") == "loaded"
    assert worker.calls[-1] == ("a", None, False)


@pytest.fixture
def worker(verl: Any, options: Any, monkeypatch: Any) -> Any:
    """A worker with our options, whose mixture only records its calls."""
    monkeypatch.setattr(verl, "TwoPassStep", Mixing)
    made = verl.GACWorker()
    made.set_loss_fn(loss_of(options))
    return made


def test_the_worker_trains_with_the_mixed_loss(worker: Any, options: Any) -> None:
    engine, words, given, loss = worker.mixture.arguments
    assert engine is worker.engine
    assert (words, given) == ("words", options)
    assert loss.keywords["config"].policy_loss is options
    assert worker.calls[-1] == "the mixed loss"
    worker.output = Batch(metrics={"own": 1})
    assert worker.train_batch("data")["metrics"] == {"own": 1, "gac/mu": 0.5, "gac/group": "group"}
    worker.output = None  # not the rank that reports
    assert worker.train_batch("data") is None


def test_the_first_rank_saves_the_mixture(worker: Any, monkeypatch: Any, tmp_path: Path) -> None:
    for rank in (1, 0, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        folder = tmp_path / "new" / str(rank)
        assert worker.save_checkpoint(str(folder), "hdfs", 7, 3) == "saved"
        assert worker.calls[-1] == (str(folder), "hdfs", 7, 3)
        assert folder.exists() == (rank == 0)
    assert worker.mixture.saved == [str(tmp_path / "new" / "0")] * 2


def test_the_worker_loads_the_mixture_with_the_checkpoint(worker: Any) -> None:
    assert worker.load_checkpoint("b", "hdfs", True) == "loaded"
    assert worker.calls[-1] == ("b", "hdfs", True)
    worker.load_checkpoint(None)
    assert worker.mixture.saved == ["b"]


def test_the_worker_rejects_an_unsupported_strategy(worker: Any, options: Any) -> None:
    worker.engine_config.strategy = "megatron"
    with pytest.raises(ValueError, match="strategy=megatron"):
        worker.set_loss_fn(loss_of(options))


def test_training_makes_a_second_pass(verl: Any, options: Any, monkeypatch: Any) -> None:
    mixed = mixture(verl, options)
    monkeypatch.setattr(mixed, "demo_data", lambda data: f"demonstrations for {data}")
    engine = mixed.engine
    assert engine.forward_backward_batch("batch", "loss", forward_only=True) == "output 1"
    assert engine.passes == [("batch", "loss", True)]
    assert engine.forward_backward_batch("batch", "loss") == "output 2"
    assert engine.passes[1:] == [
        ("batch", "loss", False),
        ("demonstrations for batch", mixed.demo_loss, False),
    ]


def test_the_rollout_loss(verl: Any, options: Any) -> None:
    """Log-probs and entropies are padded as verl does; the mask and the advantages are its own."""
    mixed = mixture(verl, options)
    logps = torch.tensor([[0.5, 0.25], [0.8, 0.1]]).log().requires_grad_()
    output = {"log_probs": logps - 1.0, "entropy": torch.ones(2, 2, requires_grad=True)}
    data = Batch(
        shift=1.0,
        response_mask=torch.tensor([[1, 1], [1, 0]]),
        advantages=torch.tensor([[2.0, 2.0], [-1.0, 9.0]]),
        unused=3,
    )
    with torch.no_grad():
        assert mixed.rollout_loss(output, data, "group")[0].item() == 8
    loss, metrics = mixed.rollout_loss(output, data, "group")
    assert (loss.item(), metrics) == (0.75 * 8, {"group": "group"})
    log = mixed.mixer.close()
    assert log["rollout_loss"] == 8
    assert log["rl_variance"] == 1.5**2
    assert "kl" not in log
    assert log["entropy"] == pytest.approx(2)
    data["ref_log_prob"] = logps.detach() - 1
    mixed.rollout_loss({"log_probs": logps - 1.0}, data)
    log = mixed.mixer.close()
    assert log["kl"] == pytest.approx(math.exp(-1))
    assert "entropy" not in log


def distillation_ppo_loss(config: Any, distillation_config: Any, **given: Any) -> Any:
    """As verl's: the whole loss, or the divergence of each token if there are `student_logits`."""
    if "student_logits" in given:
        return given["student_logits"] * 2, given["data"]
    options, output = distillation_config.distillation_loss, given["model_output"]
    taught = output["log_probs"].square().sum()
    rewarded = config.factor * output["log_probs"].sum()
    return rewarded + options.distillation_loss_coef * taught, {"distillation/loss": 1}


@pytest.mark.parametrize("coef", [0.5, 0.0])
def test_the_loss_of_verls_teacher_keeps_its_weight(verl: Any, options: Any, coef: float) -> None:
    loss = SimpleNamespace(use_task_rewards=True, distillation_loss_coef=coef)
    whole = partial(
        distillation_ppo_loss,
        config=SimpleNamespace(factor=3.0),
        distillation_config=SimpleNamespace(distillation_loss=loss),
    )
    mixed = verl.TwoPassStep(Engine(), make_tokenizer(), options, whole)
    assert mixed.rollout_loss(student_logits=4, data="batch", data_format="thd") == (8, "batch")
    logps = torch.tensor([[-0.5, -1.5]], requires_grad=True)
    data = Batch(shift=0.0, response_mask=torch.ones(1, 2), advantages=torch.ones(1, 2))
    with torch.no_grad():
        assert mixed.rollout_loss({"log_probs": logps}, data)[0].item() == -6 + coef * 2.5
    loss, metrics = mixed.rollout_loss({"log_probs": logps}, data, "group")
    assert loss.item() == 0.75 * -6 + coef * 2.5
    (gradient,) = torch.autograd.grad(loss, logps)
    assert gradient.tolist() == [[0.75 * 3 - coef, 0.75 * 3 - 3 * coef]]
    assert metrics == {"distillation/loss": 1}
    log = mixed.mixer.close()
    assert (log["rollout_loss"], log["teacher_loss"]) == (-6, 2.5 if coef else 0)


def test_without_a_reward_there_is_nothing_to_mix(verl: Any, options: Any) -> None:
    loss = SimpleNamespace(use_task_rewards=False, distillation_loss_coef=1.0)
    config = SimpleNamespace(distillation_loss=loss)
    whole = partial(distillation_ppo_loss, config=None, distillation_config=config)
    with pytest.raises(ValueError, match="use_task_rewards=False: .*: set it to True"):
        verl.TwoPassStep(Engine(), make_tokenizer(), options, whole)


def rows_of(data: Any, name: str) -> list[list[int]]:
    return [part.tolist() for part in data[name].unbind()]


@pytest.mark.parametrize(("micro", "size"), [(None, 2), (1, 1), (8, 2)])
def test_the_demonstrations_of_a_step(verl: Any, options: Any, micro: Any, size: int) -> None:
    """Three rows over two ranks; the second rank gets a row without a loss."""
    words = make_tokenizer()
    encoded = [encode(ROWS[i], "", words) for i in Order(3, 5).take(3)]
    expected = ([encoded[0], encoded[2]], [encoded[1], {"ids": [words.pad_token_id], "start": 1}])
    for rank in (0, 1):
        mixed = mixture(verl, options, rank=rank)
        given = {"use_dynamic_bsz": True, "micro_batch_size_per_gpu": micro, "temperature": 0.7}
        data = mixed.demo_data(Batch(given, own=1))
        assert rows_of(data, "input_ids") == [row["ids"] for row in expected[rank]]
        assert rows_of(data, "position_ids") == [
            [*range(len(row["ids"]))] for row in expected[rank]
        ]
        assert rows_of(data, "loss_mask") == [
            [i >= row["start"] for i in range(len(row["ids"]))] for row in expected[rank]
        ]
        settings = {k: v for k, v in data.items() if not isinstance(v, torch.Tensor)}
        kept = {"use_dynamic_bsz": True, "micro_batch_size_per_gpu": size, "temperature": 1.0}
        # completion tokens and an EOS each
        assert settings == kept
        assert mixed.norm == (2 + 3 + 2) / 2
        mask, ends = data["loss_mask"].values(), data["input_ids"].offsets()
        nll = torch.arange(float(len(mask)))
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(-nll, ends)}
        shaped = 1 / (1 + 0.1 * nll.exp())  # p / (p + 0.1)
        expected_loss = -0.25 * shaped[:-1][mask[1:]].sum().item() / mixed.norm
        assert mixed.demo_loss(output, data)[0].item() == pytest.approx(expected_loss)
        assert mixed.mixer.close()["demo_tokens"] == mask[1:].sum()


def test_rows_are_padded_to_whole_micro_batches(verl: Any, options: Any) -> None:
    words = make_tokenizer()
    words.pad_token = None
    options.demo_batch = 5
    mixed = verl.TwoPassStep(Engine(1, 1 + 1), words, options, None)
    data = mixed.demo_data(Batch(micro_batch_size_per_gpu=2))
    assert rows_of(data, "input_ids")[2:] == [[words.eos_token_id]] * 2
    assert len(rows_of(data, "loss_mask")) == 4
    assert data["micro_batch_size_per_gpu"] == 2


def test_the_mixer_of_a_run(verl: Any, options: Any, monkeypatch: Any) -> None:
    mixer: Mixer = mixture(verl, options).mixer
    assert (mixer.method, mixer.batch) == (Constant(mu=0.25, weight=DemoWeight.SHAPED), 3)
    assert (mixer._order.n, mixer._order.seed) == (3, 5)
    options.method, options.chat_template_kwargs = "kl-ctrl", {"enable_thinking": False}
    monkeypatch.setattr(verl, "tokenized", lambda *given: given)
    mixed = mixture(verl, options)
    assert mixed.mixer.method == METHODS["kl-ctrl"]()
    assert mixed.demos[3] == {"enable_thinking": False}
