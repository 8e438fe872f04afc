"""Rollouts from a server with vLLM's HTTP API: a real server process with a tiny model."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import socket
import sys

import pytest
import torch
import torch.distributed as dist

from gac.config import ConfigError, load
from gac.errors import MissingExtra, RunError
from gac.rollouts.engines import make_engine
from gac.rollouts.generation import generate
from gac.training.run_config import TrainConfig
from gac.training.trainer import Trainer, train

from . import ranks
from .model_server import meet, serving
from .tiny import metrics, tiny_config

vllm_client = pytest.importorskip("trl.generation.vllm_client", reason="needs the extra `vllm`")
vllm = importlib.import_module("gac.rollouts.vllm")
PROMPTS = [(4, 5, 6), (7,) * 9, (5, 6), (4,) * 7]
ROLLOUTS = {"prompts": 4, "completions": 2, "max_new_tokens": 5, "engine": "vllm"}


def config(task, out, url, vllm=(), **changes):
    rollouts = {**ROLLOUTS, "vllm": {"url": url, "timeout": 30, **dict(vllm)}}
    return tiny_config(task, out, **{"eval": {}, "rollouts": rollouts, **changes})


@pytest.fixture(scope="module")
def server(task):
    with serving(task / "init") as found:
        yield found


@pytest.fixture
def policy(task, tmp_path):
    """A model far from uniform, and its tokenizer."""
    trainer = Trainer(tiny_config(task, tmp_path / "local"))
    for p in trainer.model.parameters():
        p.data.mul_(3 if p.dim() > 1 else 1)
    return trainer.model, trainer.tokenizer


def engine(task, url, tokenizer, folder, **changes):
    given = {**ROLLOUTS, "vllm": {"url": url, "timeout": 30, **changes.pop("vllm", {})}, **changes}
    settings = load(TrainConfig, {"rollouts": given}).rollouts
    greedy = changes.get("temperature") == 1e-6
    object.__setattr__(settings, "temperature", 0.0 if greedy else settings.temperature)
    return make_engine(settings, tokenizer, served=str(task / "init"), longest=20, folder=folder)


def test_its_answers_are_those_of_the_weights_that_it_got(task, server, policy, tmp_path):
    """Greedy responses before and after a weight update. Afterwards only the weight folders of
    other runs remain.
    """
    model, tokenizer = policy
    stop = [tokenizer.decode([15])]
    ask = engine(task, server.url, tokenizer, tmp_path, temperature=1e-6, stop=stop)
    (tmp_path / f"{ask.func.__self__.prefix}left").mkdir()
    (tmp_path / "weights-others").mkdir()
    found = []
    for _ in range(2):
        expected = generate(model, tokenizer, PROMPTS, max_new_tokens=5, temperature=0, stop=stop)
        found.append(ask(model)(PROMPTS, 1))
        assert found[-1] == expected
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    assert found[0] != found[1] and model.training
    assert [path.name for path in tmp_path.glob("weights-*")] == ["weights-others"]


def test_draws_follow_the_seed_and_the_policy(task, server, policy, tmp_path):
    """Total variation distance between 600 sampled first tokens and the model's softmax."""
    model, tokenizer = policy
    ask = engine(task, server.url, tokenizer, tmp_path, max_new_tokens=1, temperature=0.7)(model)

    def drawn(seed, *asked):
        torch.manual_seed(seed)
        return ask(*asked)

    assert drawn(0, PROMPTS, 3) == drawn(0, PROMPTS, 3) != drawn(1, PROMPTS, 3)
    draws = drawn(0, [PROMPTS[0]] * 2, 300)
    assert (
        draws[:300] != draws[300:]
    )  # every prompt has its own seed, even if two prompts are equal
    with torch.no_grad():
        p = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([r[0] for r in draws]), minlength=len(p)) / len(draws)
    assert float((counts - p).abs().sum()) / 2 < 0.1


def test_adapters_are_added_to_the_weights(task, server, tmp_path):
    """The server receives the weights that peft would merge; the policy's own weights stay bitwise
    unchanged.
    """
    pytest.importorskip("peft")
    made = config(
        task,
        tmp_path / "run",
        server.url,
        model={
            "path": str(task / "init"),
            "random_init": True,
            "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]},
        },
    )
    trainer = Trainer(made)
    model = trainer.model
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(2))
    before = copy.deepcopy(model.state_dict())
    trainer.sampler.engine(model)  # compares the server's log-probs with the adapted model's
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with model.disable_adapter():
        bare = dict(vllm.Weights(model))
    adapted = dict(vllm.Weights(model))
    del model.base_model.model.forward  # the patched forward does not survive a copy
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert adapted.keys() == bare.keys() == merged.keys()
    for name, x in merged.items():
        torch.testing.assert_close(adapted[name], x)
        assert torch.equal(bare[name], adapted[name]) != ("q_proj.w" in name or "down_" in name)


def test_large_weights_come_in_several_files(policy, monkeypatch):
    monkeypatch.setattr(vllm, "FILE", 4000)
    weights = vllm.Weights(policy[0])
    parts = list(vllm._files(iter(weights)))
    assert len(parts) > 2 and [n for part in parts for n in part] == [
        d[0] for d in weights.described
    ]
    assert all(sum(x.nbytes for x in list(part.values())[:-1]) < 4000 for part in parts)


def test_a_run_is_repeatable_and_on_policy(task, server, tmp_path):
    """Two runs with the same seed are identical. Every step sends fresh weights, so the ratios are
    1.
    """
    asked = len(server.asked())
    for name in "ab":
        train(config(task, tmp_path / name, server.url, steps=3))
    one, two = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert one == two and len(one) == 3
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["clip_fraction"] == 0 and row["sampled_responses"] == 8
        assert 0 < row["sampling_share"] < 1 and row["responses_per_second"] > 0
    requests = server.asked()[asked:]
    assert requests.count("/collective_rpc") == requests.count("/reset_prefix_cache") == 6


def test_a_server_that_dies_and_another_in_its_place(task, tmp_path):
    """The run ends with a one-line error, and resuming it matches an uninterrupted run."""
    changes = {"steps": 3, "checkpoint_every": 1}
    # one vocabulary check, then per step one weight check and 4 prompts
    died = pytest.raises(RunError, match="there is no answer.*goes on from its last checkpoint")
    with serving(task / "init", dies_after=1 + 5 * 2 + 2) as found, died:
        train(config(task, tmp_path / "run", found.url, **changes))
    assert len(metrics(tmp_path / "run")) == 2
    with serving(task / "init") as found:
        train(config(task, tmp_path / "run", found.url, **changes))
        train(config(task, tmp_path / "whole", found.url, **changes))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            {"folder": "elsewhere"},
            ConfigError,
            "the server has the model '.*elsewhere', and the run",
        ),
        ({"most": 12}, ConfigError, "the server takes 12 tokens, .* --max-model-len 1[3-9]"),
        ({"vocabulary": 12}, RunError, "Token id .. is out of vocabulary"),
    ],
)
def test_another_server_is_refused_before_any_work(task, tmp_path, how, error, message):
    folder = tmp_path / how.pop("folder", "init")
    shutil.copytree(task / "init", folder)
    with serving(folder, **how) as found, pytest.raises(error, match=message):
        served = {} if folder.name == "elsewhere" else {"model": str(folder)}
        Trainer(config(task, tmp_path / "run", found.url, served))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_server_under_another_name(task, tmp_path, policy):
    with serving(task / "init", name="policy") as found:
        ask = engine(task, found.url, policy[1], tmp_path, temperature=1e-6)(policy[0])
        expected = generate(*policy, PROMPTS, max_new_tokens=5, temperature=0)
        assert ask(PROMPTS, 1) == expected


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"deaf": True}, r"log-probs differ from the trainer's by \d.* per token"),
        ({"vocabulary": 60}, "/collective_rpc is refused, 500 .*must match the size"),
    ],
)
def test_weights_that_do_not_arrive(task, tmp_path, policy, how, message):
    with serving(task / "init", **how) as found, pytest.raises(RunError, match=message):
        engine(task, found.url, policy[1], tmp_path)(policy[0])
    assert not list(tmp_path.glob("weights-*"))


def test_nobody_there(task, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(RunError, match=f"vllm.url='{url}': there is no answer: see that") as said:
        Trainer(config(task, tmp_path / "run", url))
    assert "\n" not in str(said.value)
    Trainer(
        config(task, tmp_path / "sft", url, method="sft")
    )  # SFT samples nothing, so it needs no server


def test_a_server_that_does_not_answer_in_time(task, tmp_path):
    """The port is open but nothing answers: two attempts, then the error."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match="there is no answer"):
            Trainer(config(task, tmp_path / "run", url, {"timeout": 0.2}))


def two_steps(made):
    """Run two steps; return the weights that a sharded policy sends, the first step's metrics and
    the second step's error.
    """
    trainer = Trainer(made)
    sent = {name: x.clone() for name, x in vllm.Weights(trainer.model)}
    row = trainer._train_step()
    with pytest.raises(RunError) as said:
        trainer._train_step()
    return sent, row, str(said.value)


@pytest.mark.dist
def test_two_processes_with_sharded_weights(task, tmp_path):
    """Both ranks send weights and sample, and both report a server that dies while one of them
    waits for it.
    """
    alone = dict(vllm.Weights(Trainer(tiny_config(task, tmp_path / "one")).model))
    # 2 vocabulary checks (one per rank), 1 weight check (rank 0) and 4 prompts; then 1 weight check
    # and 2 of the next 4 prompts
    with serving(task / "init", dies_after=2 + 5 + 1 + 2) as found:
        made = config(
            task,
            tmp_path / "two",
            found.url,
            parallel={"mode": "fsdp", "gather_for_rollouts": False},
        )
        (sent, row, said), (other, same, heard) = ranks.run(two_steps, made, ranks=2)
    for weights in (sent, other):
        assert weights.keys() == alone.keys()
        assert all(torch.equal(x, alone[name]) for name, x in weights.items())
    assert row == same and row["sampled_responses"] == 8
    assert said == heard and "there is no answer" in said


def test_weights_through_the_clients_own_transfer(task, tmp_path, policy, monkeypatch):
    """Checks TRL's requests and their order; gloo carries the values instead of NCCL."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Gloo:
        def __init__(self, group, packed):
            assert packed and group == "joined"

        @staticmethod
        def trainer_send_weights(iterator, trainer_args):
            group = meet(store, 0)
            for _, value in iterator:
                group.broadcast(value.contiguous(), 0).wait()

    monkeypatch.setattr(vllm, "is_vllm_available", lambda: True)
    for name in ("NCCLWeightTransferEngine", "NCCLTrainerSendWeightsArgs"):
        monkeypatch.setattr(vllm_client, name, Gloo, raising=False)
    joined = lambda self, device: setattr(self, "communicator", "joined")  # noqa: E731 - one line
    monkeypatch.setattr(vllm.Client, "init_communicator", joined)
    with serving(task / "init", store=store.port) as found:
        how = {"weights": "nccl"}
        ask = engine(task, found.url, policy[1], tmp_path, temperature=1e-6, vllm=how)(policy[0])
        assert ask(PROMPTS, 1) == generate(*policy, PROMPTS, max_new_tokens=5, temperature=0)
        assert [path for path in found.asked() if "weight" in path or "cache" in path] == [
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
        ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "localhost:8000"}, "url='localhost:8000': begin with http"),
        ({"weights": "post"}, "weights='post': use one of disk, nccl"),
        ({"timeout": 0}, "timeout=0.*: use seconds > 0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, {"rollouts": {"engine": "vllm", "vllm": changes}})


def test_the_extra_is_named(monkeypatch, policy, task, tmp_path):
    monkeypatch.delitem(sys.modules, "gac.rollouts.vllm")
    monkeypatch.setitem(sys.modules, "trl.generation.vllm_client", None)
    with pytest.raises(
        MissingExtra, match=r"engine=vllm needs the extra vllm \(trl\): pip install"
    ):
        engine(task, "http://localhost:1", policy[1], tmp_path)


@pytest.mark.skipif(vllm.is_vllm_available(), reason="vllm is installed")
def test_the_transfer_between_gpus_needs_vllm(task, tmp_path):
    with pytest.raises(ConfigError, match="weights=nccl: it needs the package vllm"):
        Trainer(config(task, tmp_path / "run", "http://localhost:1", {"weights": "nccl"}))
