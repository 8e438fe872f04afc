"""The client of a vLLM server, without a server process: requests, weights on disk, retries."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from torch import nn

from gac.config import ConfigError
from gac.demo.task import make_tokenizer
from gac.errors import RunError
from gac.rollouts.config import VLLMConfig
from gac.rollouts.generation import SamplingParams

pytest.importorskip("trl.generation.vllm_client", reason="needs the extra `vllm`")
vllm = importlib.import_module("gac.rollouts.vllm")
WORDS = make_tokenizer()  # 18 tokens
ROOT = Path("folder").absolute()
REPLY = {
    "completion_ids": [[3, 1]],
    "logprob_token_ids": [[[4, 3], [1]]],
    "logprobs": [[[-3.0, -1.0], [-2.0]]],
}


class Client:
    """Records requests; `fail` is the path of a command that fails."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.calls, self.communicator = arguments, [], None
        self.card: dict[str, Any] = {"id": "name", "root": f"{ROOT}/model", "max_model_len": 9}
        self.reply, self.fail = REPLY, ""

    def served(self) -> dict[str, Any]:
        return self.card

    def generate(self, prompts: Any, **options: Any) -> Any:
        self.calls.append((prompts, options))
        return self.reply

    def post(self, path: str, body: Any) -> None:
        folder = Path(body["kwargs"]["weights_path"])
        files = {file.name: load_file(file) for file in sorted(folder.iterdir())}
        self.calls.append((path, body["method"], folder, folder.stat().st_mode & 0o777, files))
        if self.fail == path:
            shutil.rmtree(folder)
            raise RuntimeError("full")

    def clear_prefix_cache(self) -> None:
        self.calls.append("clear")

    def init_communicator(self, device: Any) -> None:
        self.calls.append(device)
        self.communicator = "joined"

    def update_named_params(self, metadata: Any, iterator: Any) -> None:
        self.calls.append((metadata, [name for name, _ in iterator]))


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(vllm, "Client", Client)

    def create(run=None, longest=9, model="name", **config: Any):
        return vllm.Server(VLLMConfig(**config), WORDS, model, longest, run)

    return create


def tiny() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    model[1].to(torch.bfloat16)
    return model


def test_the_server_must_have_the_model_and_accept_its_longest_row(make, monkeypatch) -> None:
    server = make(url="http://one/", timeout=7)
    assert server.client.arguments == ("http://one/", 7) and server.vocab_size == 18
    options = {"max_tokens": 8, "logprobs": 0}
    options["generation_kwargs"] = {"seed": 0, "ignore_eos": True}
    assert server.client.calls == [([[2, 4, 6, 8, 10, 12, 14, 17]], options)]
    assert server._probe() == ([2, 4, 6, 8, 10, 12, 14, 17, 3, 1], [-1.0, -2.0])
    for name in ("folder/model", str(ROOT / "model")):
        make(model=name)
    with pytest.raises(ConfigError, match="serves 'name', but the run trains 'other'"):
        make(model="other")
    with pytest.raises(ConfigError, match="accepts 9 tokens, .* have 10: .* --max-model-len 10"):
        make(longest=10)
    for card in ({"id": "name"}, {"id": "name", "root": None, "max_model_len": None}):
        monkeypatch.setattr(Client, "served", lambda self, card=card: card)
        make(longest=10)


def test_the_name_in_the_configuration_comes_first(monkeypatch) -> None:
    monkeypatch.setattr(vllm, "Client", Client)
    vllm.Server(VLLMConfig(model="name"), WORDS, "other", 9, None)


def test_runs_that_share_a_folder_keep_their_weights_apart(make, tmp_path) -> None:
    shared = str(tmp_path / "shared")
    first, second = (make(tmp_path / name, folder=shared) for name in ("a", "b"))
    assert first.folder == second.folder == tmp_path / "shared"
    assert first.prefix != second.prefix and first.prefix == make(tmp_path / "a").prefix
    assert make(tmp_path / "a").folder == tmp_path / "a" and make().folder.is_dir()
    relative = Path("x").absolute()
    assert make(Path("x")).folder == make(folder="x").folder == relative
    assert make(Path("x")).prefix == make(relative).prefix


@pytest.mark.parametrize("fail", ["", "collective_rpc"])
def test_weights_on_disk(make, tmp_path, monkeypatch, fail) -> None:
    """Two files of at most 40 bytes; they are readable by other users, and removed in any case."""
    monkeypatch.setattr(vllm, "MAX_FILE_BYTES", 36)
    server, model = make(tmp_path / "new" / "run"), tiny()
    server.client.fail = fail
    weights = vllm.Weights(model)
    try:
        server._send_by_disk(weights, iter(weights))
    except RuntimeError:
        assert fail  # and not that the folder is gone
    (path, method, folder, mode, files), *clear = server.client.calls[1:]
    assert (path, method, mode) == ("collective_rpc", "reload_weights", 0o755)
    assert folder.parent == tmp_path / "new" / "run" and folder.name.startswith(server.prefix)
    assert {name: list(part) for name, part in files.items()} == {
        "model-00000.safetensors": ["0.bias", "0.weight"],
        "model-00001.safetensors": ["1.weight"],
    }
    sent = {name: x for part in files.values() for name, x in part.items()}
    assert all(torch.equal(x, model.get_parameter(name)) for name, x in sent.items())
    assert clear == ([] if fail else ["clear"]) and not list(folder.parent.iterdir())
    server.client.fail = ""
    leftover, file = (folder.parent / f"{server.prefix}{name}" for name in ("old", "file"))
    leftover.mkdir()
    file.touch()  # cannot be removed as a folder
    server._send_by_disk(weights, iter(weights))
    assert list(folder.parent.iterdir()) == [file]
    assert server.client.calls[-2][2] != folder  # the server may cache by path


def test_weights_by_nccl(make, monkeypatch) -> None:
    monkeypatch.setattr(vllm, "is_vllm_available", lambda: True)
    server, model = make(weights="nccl"), tiny()
    server.client.calls.clear()
    weights = vllm.Weights(model)
    for _ in range(2):
        server._send_by_nccl(weights, iter(weights))
    names = ["0.weight", "0.bias", "1.weight"]
    kinds, shapes = ["float32", "float32", "bfloat16"], [[3, 2], [3], [1, 3]]
    metadata = list(zip(names, kinds, shapes, strict=True))
    update = [(metadata, names), "clear"]
    assert server.client.calls == [torch.device("cpu"), *update, *update]


def test_files_of_weights() -> None:
    square = torch.arange(4.0).view(2, 2).T
    limit, vllm.MAX_FILE_BYTES = vllm.MAX_FILE_BYTES, 32
    try:
        parts = list(vllm._files(iter([("a", square), ("b", square), ("c", square)])))
    finally:
        vllm.MAX_FILE_BYTES = limit
    assert [list(part) for part in parts] == [["a", "b"], ["c"]]
    assert all(x.is_contiguous() and torch.equal(x, square) for x in parts[0].values())


@pytest.mark.parametrize(("rank", "way"), [(0, "disk"), (1, "disk"), (0, "nccl")])
def test_only_rank_0_sends_and_probes(make, monkeypatch, rank, way) -> None:
    """The other ranks iterate over the weights, and compare with the probe of rank 0."""
    monkeypatch.setattr(vllm, "is_vllm_available", lambda: True)
    server, sent, compared, read = make(weights=way), [], [], []
    probe = server._probe()
    monkeypatch.setattr(vllm, "rank", lambda: rank)
    monkeypatch.setattr(vllm, "gather", lambda own: [probe, None] if rank else [own, None])
    reading = map(read.append, range(3))
    monkeypatch.setattr(vllm, "Weights", lambda model: "weights")
    monkeypatch.setattr(vllm, "iter", lambda weights: reading, raising=False)
    monkeypatch.setattr(server, f"_send_by_{way}", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(server, "_compare", lambda *arguments: compared.append(arguments))
    monkeypatch.setattr(server, "_sample", lambda *arguments: arguments)
    server.client.calls.clear()
    server.load("model")
    assert sent == [("weights", reading)] * (1 - rank) and read == [0, 1, 2]
    assert len(server.client.calls) == 1 - rank
    assert compared == [("model", *probe)]
    assert server.generate([(4,)], "params") == ([(4,)], "params")
    reading = map(read.append, range(3, 6))
    monkeypatch.setattr(server, f"_send_by_{way}", lambda *arguments: [][0])
    with pytest.raises(RunError) if rank == 0 else contextlib.nullcontext():
        server.load("model")
    assert read == [0, 1, 2, 3, 4, 5]  # also after an error


def test_each_prompt_has_a_seed(make) -> None:
    server = make()
    server.client.calls.clear()
    torch.manual_seed(1)
    assert server._sample([(4,), (5,), (6,)], SamplingParams(4, 0.7)) == [(3, 1)] * 3
    seeds = {p[0][0]: options["generation_kwargs"]["seed"] for p, options in server.client.calls}
    assert seeds == {4: 2135392491, 5: 1857819720, 6: 550290313}


def test_missing_responses_are_an_error(make) -> None:
    server = make()
    params = SamplingParams(4, 0.7, num_generations=2)
    for ids, count in (([[3]], 1), ([[3], []], 1), ([[3]] * 3, 3)):
        server.client.reply = REPLY | {"completion_ids": ids}
        with pytest.raises(ValueError, match=f"received only {count} of 2 completions"):
            server._sample([(4,)], params)
    two = {"completion_ids": [[3, 1]] * 2}
    for incomplete in (two, {**two, "logprobs": [[[-1.0]]] * 2, "logprob_token_ids": [[[3]]] * 2}):
        server.client.reply = REPLY | incomplete
        with pytest.raises(ValueError, match="zip"):
            server._sample([(4,)], params)
    server.client.reply = REPLY | {"completion_ids": [[3, 18], [1]]}
    with pytest.raises(RunError, match="sampled token 18, but .* has 18 tokens"):
        server._sample([(4,)], params)


@pytest.mark.parametrize("offset", [0.4, -0.4, 0.6, -0.6])
def test_the_servers_log_probs_may_differ_by_half_a_nat_on_average(make, offset) -> None:
    """Of a model whose log-probs are all -log 18; dropout would change them."""
    server = make()

    class Uniform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.dropout = nn.Embedding(18, 2), nn.Dropout(0.9)
            self.config = SimpleNamespace(_attn_implementation="eager")
            self.generation_config = None

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def forward(self, input_ids) -> Any:
            logits = self.dropout(torch.ones(1, input_ids.shape[1], 18))
            assert input_ids.tolist() == [ids] and not logits.requires_grad
            return SimpleNamespace(logits=logits)

    ids = [*range(8), *range(8, 16)]
    logps = [-math.log(18)] * 7 + [-math.log(18) + 8 * offset]
    if abs(offset) < 0.5:
        server._compare(Uniform(), ids, logps)
        return
    with pytest.raises(RunError, match=r"differ from the trainer's by 0\.6 nats"):
        server._compare(Uniform(), ids, logps)


def test_errors_in_one_line(make) -> None:
    def fail() -> None:
        raise ValueError("a\n b")

    server = make(url="http://there")
    with pytest.raises(RunError, match=re.escape("rollouts.vllm.url='http://there': a b: check")):
        server._on_all_ranks(fail)
    assert server._on_all_ranks(lambda: 5) == 5
    for error in (requests.Timeout("x"), requests.ConnectionError("y")):
        assert vllm._short(error) == "the server does not respond"


def replies(*texts: str):
    """The URL of a server in this process that sends these replies, and the requests it got."""
    listener, received = socket.create_server(("127.0.0.1", 0)), []
    listener.settimeout(20)

    def serve() -> None:
        with listener:
            for text in texts:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(20)
                    received.append(connection.recv(4096).decode().split("\r\n")[0])
                    status, _, body = text.partition(" ")
                    if status:
                        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n"
                        connection.sendall((head + body).encode())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", received, thread


MODELS = '{"data": [{"id": "first"}, {"id": "second"}]}'


@pytest.mark.parametrize("failure", ["502 ", "503 ", ""])
def test_a_failed_request_is_sent_again(failure) -> None:
    """An empty reply closes the connection without an answer."""
    url, received, thread = replies(failure, f"200 {MODELS}", failure, "200 ", "500 broken")
    client = vllm.Client(f"{url}/", 20)
    assert client.served() == {"id": "first"} and client.model == "first"
    assert client.post("sleep", {"level": 1}) == {}
    with pytest.raises(RuntimeError, match="/sleep failed with status 500: broken"):
        client.post("sleep")
    thread.join(20)
    assert received == ["GET /v1/models HTTP/1.1"] * 2 + ["POST /sleep HTTP/1.1"] * 3
    retries = client.session.get_adapter("https://x").max_retries
    assert (retries.total, retries.read, retries.backoff_factor) == (3, 1, 0.5)
    assert client.session.get_adapter("https://x")._pool_maxsize == vllm.MAX_CONCURRENT
    assert client.communicator is None and client._updating_weights is False
    defaults = inspect.signature(vllm.VLLMClient.__init__).parameters
    assert client.group_port == defaults["group_port"].default


def test_commands_have_a_body(monkeypatch) -> None:
    sent = []
    client = vllm.Client("http://x/", 7)
    reply = SimpleNamespace(status_code=200, content=b"{}", json=lambda: {"a": 1})
    monkeypatch.setattr(client.session, "post", lambda *a, **k: sent.append((a, k)) or reply)
    assert client.post("sleep", {"level": 2}) == {"a": 1}
    assert sent == [(("http://x/sleep",), {"json": {"level": 2}})]


class Adapted(nn.Module):
    """A layer with two adapters, as in peft."""

    def __init__(self, disabled: bool) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(2, 3), nn.Linear(2, 1)
        self.base_layer.to(torch.bfloat16)
        self.disable_adapters, self.active_adapters = disabled, ["one", "two"]

    def get_delta_weight(self, adapter: str) -> Any:
        return torch.full((3, 2), {"one": 0.5, "two": 0.25}[adapter])


@pytest.mark.parametrize("disabled", [False, True])
def test_adapters_are_added_to_their_layer(disabled) -> None:
    inner = nn.Sequential(Adapted(disabled), nn.Linear(3, 1))
    model = SimpleNamespace(get_base_model=lambda: inner)
    layer, last = inner[0].base_layer, inner[1]
    base = layer.weight.clone()
    expected = {"0.weight": base if disabled else base + 0.5 + 0.25, "0.bias": layer.bias}
    expected |= {"1.weight": last.weight, "1.bias": last.bias}
    weights = dict(vllm.Weights(model))
    assert list(weights) == list(expected)
    for name, x in weights.items():
        assert torch.equal(x, expected[name]) and x.dtype == expected[name].dtype
    assert torch.equal(layer.weight, base)


def test_requests_have_a_timeout(monkeypatch) -> None:
    sent = []
    monkeypatch.setattr(vllm.HTTPAdapter, "send", lambda self, *_, **k: sent.append(k["timeout"]))
    adapter = vllm.Client("http://x", 7).session.get_adapter("http://x")
    for timeout in ({}, {"timeout": None}, {"timeout": 3}):
        adapter.send(None, **timeout)
    assert sent == [7, 7, 3]
