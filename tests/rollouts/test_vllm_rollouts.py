"""Rollouts from a server with vLLM's HTTP API: a real server process with a tiny model."""

import copy
import importlib
import json
import math
import shutil
import socket
import sys
import threading
import weakref
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
import torch.distributed as dist

from gac.config import load
from gac.errors import ConfigError, MissingExtra, RunError
from gac.rollouts.engines import Engine
from gac.rollouts.generation import generate
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer, train
from tests import ranks
from tests.rollouts.model_server import serving, weight_group
from tests.tiny import metrics, tiny_config

vllm_client = pytest.importorskip("trl.generation.vllm_client", reason="needs the extra `vllm`")
vllm = importlib.import_module("gac.rollouts.vllm")
PROMPTS = [(4, 5, 6), (7,) * 9, (5, 6), (4,) * 7]
ROLLOUTS = {"num_prompts": 4, "num_generations": 2, "max_completion_length": 5, "engine": "vllm"}


def config(task, out, url, vllm=(), **changes):
    rollouts = {**ROLLOUTS, "vllm": {"urls": [url], "timeout": 30, **dict(vllm)}}
    return tiny_config(task, out, **{"eval": {}, "rollouts": rollouts, **changes})


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """A request that fails is sent again immediately."""
    monkeypatch.setattr(vllm.Retry, "get_backoff_time", lambda _: 0)


@pytest.fixture(scope="module")
def server(task):
    with serving(task / "init") as handle:
        yield handle


@pytest.fixture
def policy(task, tmp_path):
    """A model far from uniform, and its tokenizer."""
    trainer = Trainer(tiny_config(task, tmp_path / "local"))
    for p in trainer.model.parameters():
        p.data.mul_(3 if p.dim() > 1 else 1)
    return trainer.model.train(), trainer.tokenizer


def engine(task, url, tokenizer, folder, **changes):
    vllm_settings = {"urls": [url], "timeout": 30, **changes.pop("vllm", {})}
    served = changes.pop("served", str(task / "init"))
    rollouts = {**ROLLOUTS, "vllm": vllm_settings, **changes}
    settings = load(TrainConfig, {"rollouts": rollouts}).rollouts
    if changes.get("temperature") == 1e-6:  # bypass validation: rollouts are never greedy
        object.__setattr__(settings, "temperature", 0.0)
    return Engine(settings, tokenizer, served=served, longest=20, folder=folder)


def test_responses_match_the_weights_last_sent(task, server, policy, tmp_path, monkeypatch):
    """Greedy responses before and after a weight update.

    Afterwards only the weight folders of other runs remain.
    """
    model, tokenizer = policy
    stop = [tokenizer.decode([15])]
    settings = {"vllm": {"folder": str(tmp_path)}, "temperature": 1e-6, "stop": stop}
    sampler, other = (
        engine(task, server.url, tokenizer, tmp_path / run, **settings) for run in ("run", "other")
    )
    without = engine(task, server.url, tokenizer, None)._server
    assert str(without.folder) == vllm.tempfile.gettempdir()
    (tmp_path / f"{sampler._server.prefix}leftover").mkdir()
    (tmp_path / f"{other._server.prefix}of-another").mkdir()
    monkeypatch.setattr(vllm, "MAX_FILE_BYTES", 10_000)  # several files of weights
    responses, files, save = [], [], vllm.save_file
    monkeypatch.setattr(
        vllm, "save_file", lambda part, path: files.append(part) or save(part, path)
    )
    for _ in range(2):
        expected = generate(
            model, tokenizer, PROMPTS, max_completion_length=5, temperature=0, stop=stop
        )
        responses.append(sampler.load(model).generate(PROMPTS))
        assert responses[-1] == expected
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    assert responses[0] != responses[1]
    assert model.training
    sizes = [[x.nbytes for x in part.values()] for part in files]
    assert max(map(len, sizes)) > 1
    assert all(sum(x[:-1]) < 10_000 for x in sizes)
    assert sum(sum(x) < 10_000 for x in sizes) <= 2  # the last of each update
    (left,) = tmp_path.rglob("weights-*")
    assert left.name == f"{other._server.prefix}of-another"


def test_samples_follow_the_seed_and_the_policy(task, server, policy, tmp_path):
    """Total variation distance between 600 sampled first tokens and the model's softmax."""
    model, tokenizer = policy
    sampler = engine(
        task, server.url, tokenizer, tmp_path / "a" / "b", max_completion_length=1, temperature=0.7
    )
    sample = sampler.load(model).generate

    def sample_with_seed(seed, prompts, samples):
        torch.manual_seed(seed)
        return sample(prompts, samples)

    first = sample_with_seed(0, PROMPTS, 3)
    assert first == sample_with_seed(0, PROMPTS, 3) != sample_with_seed(1, PROMPTS, 3)
    samples = sample_with_seed(0, [PROMPTS[0]] * 2, 300)
    assert samples[:300] != samples[300:]  # each prompt has its own seed, even if it is repeated
    with torch.no_grad():
        p = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([r[0] for r in samples]), minlength=len(p))
    assert float((counts / len(samples) - p).abs().sum()) / 2 < 0.1
    narrow = engine(task, server.url, tokenizer, tmp_path, max_completion_length=1, top_p=1e-6)
    assert set(narrow.load(model).generate([PROMPTS[0]], 20)) == {(int(p.argmax()),)}


def test_adapters_are_added_to_the_weights(task, server, tmp_path):
    """The server gets the weights that peft would merge; the policy's stay bitwise unchanged."""
    pytest.importorskip("peft")
    lora = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}
    model = {"path": str(task / "init"), "random_init": True, "lora": lora}
    trainer = Trainer(config(task, tmp_path / "run", server.url, model=model))
    model = trainer.model
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(2))
    before = copy.deepcopy(model.state_dict())
    trainer.engine.load(model)  # compares the server's log-probs with the adapted model's
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
    model.get_base_model().compute_dtype = torch.bfloat16
    assert {x.dtype for x in dict(vllm.Weights(model)).values()} == {torch.bfloat16}


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_an_adapter_on_a_tied_weight_is_refused_before_training(task, server, tmp_path, module):
    """The server ties the embedding and the LM head, which an adapter makes different."""
    pytest.importorskip("peft")
    lora = {"rank": 2, "target_modules": [module, "q_proj"]}
    model = {"path": str(task / "init"), "random_init": True, "lora": lora}
    with pytest.raises(ConfigError, match=r"^rollouts.engine='vllm': .*engine=generate, or .*lora"):
        Trainer(config(task, tmp_path / "run", server.url, model=model))
    # a method that samples nothing needs no server
    Trainer(config(task, tmp_path / "sft", server.url, model=model, method="sft"))


def test_a_run_is_repeatable_and_on_policy(task, server, tmp_path):
    """Two runs with one seed are identical. Each step sends new weights, so the ratios are 1."""
    request_count = len(server.requests())
    for name in "ab":
        train(config(task, tmp_path / name, server.url, steps=3))
    first, second = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert first == second
    assert len(first) == 3
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["clip_fraction"] == 0
        assert row["sampled_completions"] == 8
        assert 0 < row["sampling_share"] < 1
        assert row["completions_per_second"] > 0
        assert row["rollout_loss"] is not None
    requests = server.requests()[request_count:]
    assert requests.count("/collective_rpc") == requests.count("/reset_prefix_cache") == 6


def test_the_log_probs_of_the_server_reach_the_loss(task, server, tmp_path, monkeypatch):
    """Correct log-probs equal the trainer's and change nothing; wrong ones mask long rollouts."""
    trainer = Trainer(config(task, tmp_path / "run", server.url, steps=1))
    trainer.run()
    [row] = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < row["sampling/mismatch_kl"] < 1e-5
    assert row["sampling/frac_corrected"] == 0
    assert 0 < row["sampling/sampling_logp_difference/max"] < 1e-3
    spec = trainer.gradients.loss.spec
    assert (spec.correction, spec.correction_max) == ("sequence_mask", 3.0)
    assert trainer.engine._server.folder == tmp_path / "run"
    assert not trainer.gathers
    rows = trainer.sampler(trainer.policy, trainer.feed.examples(trainer.step), 0).rows
    expected = trainer.gradients.forward.row_logprobs(rows)
    for row, logps in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.tensor(row.engine_logps), logps, atol=1e-3, rtol=1e-3)
    rollouts = {**ROLLOUTS, "vllm": {"urls": [server.url]}, "correction": "none"}
    plain = Trainer(config(task, tmp_path / "none", server.url, rollouts=rollouts))
    assert plain.gradients.loss.spec.correction == "none"
    sampled = vllm._sampled
    monkeypatch.setattr(vllm, "_sampled", lambda *x: [logp - 0.4 for logp in sampled(*x)])
    wrong = Trainer(config(task, tmp_path / "wrong", server.url, steps=1))
    row = wrong._train_step()
    lengths = [row.loss_tokens for row in wrong.rollouts.rows]
    masked = sum(n for n in lengths if n > 2)  # exp(0.4 * 3) > correction_max
    assert masked > 0
    assert row["sampling/frac_corrected"] == masked / sum(lengths)
    assert row["sampling/sampling_logp_difference/max"] == pytest.approx(0.4, abs=1e-3)
    assert row["sampling/mismatch_kl"] == pytest.approx(math.exp(0.4) - 1.4, abs=1e-3)


def test_run_resumes_exactly_with_a_new_server(task, tmp_path):
    """The run ends with a one-line error, and resuming it matches an uninterrupted run."""
    changes = {"steps": 3, "checkpoint_every": 1}
    # one vocabulary check, then per step one weight check and 4 prompts
    expected_error = pytest.raises(RunError, match="not respond.*rerun the command")
    with serving(task / "init", exits_after=1 + 5 * 2 + 2) as server, expected_error:
        train(config(task, tmp_path / "run", server.url, **changes))
    assert len(metrics(tmp_path / "run")) == 2
    with serving(task / "init") as server:
        train(config(task, tmp_path / "run", server.url, **changes))
        train(config(task, tmp_path / "uninterrupted", server.url, **changes))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "uninterrupted")


MISMATCHES = [
    ({"folder": "elsewhere"}, ConfigError, "serves '.*elsewhere'.*trains '.*init'.*vllm.model"),
    ({"max_model_len": 12}, ConfigError, "accepts 12 tokens.* --max-model-len 1[3-9]"),
    ({"max_model_len": 20}, ConfigError, "accepts 20 tokens.* --max-model-len 3[0-9],.*or eval"),
    ({"vocab_size": 17}, RunError, "Token id 17 is out of vocabulary"),
]


@pytest.mark.parametrize(("options", "error", "message"), MISMATCHES)
def test_mismatched_server_is_rejected_before_training(task, tmp_path, options, error, message):
    options = dict(options)
    folder = tmp_path / options.pop("folder", "init")
    shutil.copytree(task / "init", folder)
    with serving(folder, **options) as server, pytest.raises(error, match=message):
        served = {} if folder.name == "elsewhere" else {"model": str(folder)}
        evaluated = {"data": {"prompts": str(task / "eval.jsonl")}, "max_completion_length": 22}
        changes = {"eval": evaluated} if options.get("max_model_len") == 20 else {}
        Trainer(config(task, tmp_path / "run", server.url, served, **changes))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_two_servers_share_the_prompts(task, server, tmp_path, policy):
    """One of them serves the model under another name, and dies."""
    with serving(task / "init", name="policy") as other:
        servers, urls = [server, other], {"urls": [server.url, other.url]}
        two = engine(task, server.url, policy[1], tmp_path, temperature=1e-6, vllm=urls)
        two.load(policy[0])
        before = [len(s.requests()) for s in servers]
        expected = generate(*policy, PROMPTS, max_completion_length=5, temperature=0)
        assert two.generate(PROMPTS) == expected
        assert [len(s.requests()) - n for s, n in zip(servers, before, strict=True)] == [2, 2]
        other.kill()
        for call in (lambda: two.generate(PROMPTS), lambda: two.load(policy[0])):
            with pytest.raises(RunError, match=f"^rollouts.vllm.urls: {other.url}: .*not respond"):
                call()
    assert not list(tmp_path.glob("weights-*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignores_updates": True}, r"log-probs differ .* by \d.* per token.*rerun.*resume"),
        ({"vocab_size": 60}, "/collective_rpc failed with status 500.*must match the size"),
        ({"fault": "reset"}, "/reset_prefix_cache failed"),
        ({"fault": "nan"}, "log-probs differ from the trainer's by nan"),
        ({"fault": "token"}, r"sampled token \d+, but the model's vocabulary has \d+ tokens"),
        ({"fault": "late"}, r"sampled token \d+, but the model's vocabulary has \d+ tokens"),
    ],
)
def test_failed_weight_update_is_an_error(task, tmp_path, policy, options, message):
    with serving(task / "init", **options) as server, pytest.raises(RunError, match=message):
        engine(task, server.url, policy[1], tmp_path).load(policy[0]).generate(PROMPTS)
    assert not list(tmp_path.glob("weights-*"))


@pytest.mark.parametrize("fault", ["empty", "few"])
def test_missing_responses_are_an_error(task, tmp_path, policy, monkeypatch, fault):
    """From a server with the longest possible length, of a model whose path is relative."""
    monkeypatch.chdir(task)
    with (
        serving(task / "init", fault=fault, max_model_len=20) as server,
        pytest.raises(RunError, match="received only 1 of 2 completions"),
    ):
        engine(task, server.url, policy[1], tmp_path, served="init").generate(PROMPTS, 2)


def test_unreachable_server(task, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(RunError, match=f"vllm.urls: {url}: .*not respond.*vllm serve") as error:
        Trainer(config(task, tmp_path / "run", url))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("then rerun the command")
    # SFT samples nothing, so it needs no server
    Trainer(config(task, tmp_path / "sft", url, method="sft"))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_does_not_answer_in_time(task, tmp_path, scheme):
    """The port is open but nothing answers: two attempts, then the error."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match="does not respond"):
            Trainer(config(task, tmp_path / "run", url, {"timeout": 0.2}))
        silent.setblocking(False)
        for _ in range(2):
            silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def two_steps(run_config):
    """What a rank sends, its peak in bytes of gathered weights, an evaluation, a step, an error."""
    vllm.Retry.get_backoff_time = lambda _: 0  # runs in its own process
    trainer = Trainer(run_config)
    sent = {name: x.clone() for name, x in vllm.Weights(trainer.model)}
    live, full, vllm.MAX_FILE_BYTES = [0, 0], vllm._full, 1

    def counted(x):
        value = full(x)
        live[0] += value.nbytes
        live[1] = max(live)
        weakref.finalize(value, lambda size: live.__setitem__(0, live[0] - size), value.nbytes)
        return value

    vllm._full = counted
    evaluation = trainer.evaluator(trainer.engine.load(trainer.policy))
    row = trainer._train_step()
    with pytest.raises(RunError) as error:
        trainer._train_step()
    return sent, live[1], evaluation | {"seconds": 0}, row, str(error.value)


@pytest.mark.dist
def test_two_processes_with_sharded_weights(two_layers, tmp_path):
    """The ranks send weights, evaluate and sample; all report a server that exits meanwhile."""
    settings = {
        "data": {"prompts": str(two_layers / "eval.jsonl"), "limit": 4},
        "batch": 1,
        "max_completion_length": 5,
    }
    single = Trainer(tiny_config(two_layers, tmp_path / "one", eval=settings))
    single_process = dict(vllm.Weights(single.model))
    # 2 vocabulary checks (one per rank), twice 1 weight check (rank 0) and 4 prompts; then 1 weight
    # check and 2 of the next 4 prompts
    parallel = {"mode": "fsdp"}
    with serving(two_layers / "init", exits_after=2 + 5 + 5 + 1 + 2) as server:
        run_config = config(
            two_layers, tmp_path / "two", server.url, parallel=parallel, eval=settings
        )
        results = ranks.run(two_steps, run_config, ranks=2)
    for sent, *_ in results:
        assert sent.keys() == single_process.keys()
        assert all(torch.equal(x, single_process[name]) for name, x in sent.items())
    sizes = sorted(x.nbytes for x in single_process.values())
    for _, peak, *_ in results:  # one that is sent, and the next one
        assert sizes[-1] <= peak <= sizes[-1] + sizes[-2] < sum(sizes) / 4
    (_, _, *first), (_, _, *second) = results
    assert first == second
    evaluation, row, error = first
    expected = single.evaluator(single.engine.load(single.policy))
    assert evaluation == expected | {"seconds": 0}
    assert row["sampled_completions"] == 8
    assert "does not respond" in error


def test_nccl_weight_transfer_uses_trls_requests(task, tmp_path, policy, monkeypatch):
    """Checks TRL's requests and their order; gloo carries the values instead of NCCL."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Gloo:
        def __init__(self, group, packed):
            assert packed
            assert group == "joined"

        @staticmethod
        def trainer_send_weights(iterator, trainer_args):
            group = weight_group(store, 0)
            for _, value in iterator:
                group.broadcast(value.contiguous(), 0).wait()

    monkeypatch.setattr(vllm, "is_vllm_available", lambda: True)
    for name in ("NCCLWeightTransferEngine", "NCCLTrainerSendWeightsArgs"):
        monkeypatch.setattr(vllm_client, name, Gloo, raising=False)
    joined = lambda self, device: setattr(self, "communicator", "joined")  # noqa: E731 - one line
    monkeypatch.setattr(vllm.Client, "init_communicator", joined)
    with serving(task / "init", store=store.port) as server:
        nccl = {"weights": "nccl"}
        sampler = engine(task, server.url, policy[1], tmp_path, temperature=1e-6, vllm=nccl)
        responses = sampler.load(policy[0]).generate(PROMPTS)
        assert responses == generate(*policy, PROMPTS, max_completion_length=5, temperature=0)
        update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        requests = [path for path in server.requests() if "weight" in path or "cache" in path]
        assert requests == [*update, "/reset_prefix_cache"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"urls": ["localhost:8000"]}, "urls=.'localhost:8000'.*http://"),
        ({"urls": []}, "urls=.*http://"),
        ({"urls": ["http://a", "http://b"], "weights": "nccl"}, "weights='nccl': use disk"),
        ({"weights": "post"}, "weights='post': use one of disk, nccl"),
        ({"timeout": 0}, "timeout=0.*> 0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, {"rollouts": {"engine": "vllm", "vllm": changes}})


def test_missing_extra_is_named(monkeypatch, policy, task, tmp_path):
    monkeypatch.delitem(sys.modules, "gac.rollouts.vllm")
    monkeypatch.setitem(sys.modules, "trl.generation.vllm_client", None)
    with pytest.raises(MissingExtra, match=r"engine=vllm.*extra vllm \(trl\): pip install"):
        engine(task, "http://localhost:1", policy[1], tmp_path)


@pytest.mark.skipif(vllm.is_vllm_available(), reason="vllm is installed")
def test_nccl_weights_need_vllm(task, tmp_path):
    with pytest.raises(ConfigError, match="weights=nccl.*vllm package.*disk"):
        Trainer(config(task, tmp_path / "run", "http://localhost:1", {"weights": "nccl"}))


def replies(*texts: str):
    """The URL of a server in this process that sends these replies, and the requests it got."""
    received, remaining = [], list(texts)

    class Handler(BaseHTTPRequestHandler):
        timeout = 200

        def do_GET(self):
            # a socket that is closed with unread data resets the connection and loses the reply
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            received.append(self.requestline)
            status, _, body = remaining.pop(0).partition(" ")
            if status:
                self.send_response(int(status))
                self.end_headers()
                self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.timeout = 200

    def serve() -> None:
        with server:
            for _ in texts:
                server.handle_request()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{server.server_port}", received, thread


MODELS = '{"data": [{"id": "first"}, {"id": "second"}]}'


@pytest.mark.parametrize("failure", ["502 ", "503 ", ""])
def test_a_failed_request_is_sent_again(failure) -> None:
    """An empty reply closes the connection without an answer."""
    url, received, thread = replies(failure, f"200 {MODELS}", failure, "200 ", f"500 {'x ' * 400}")
    client = vllm.Client(f"{url}/", 200)
    assert client.served() == {"id": "first"}
    assert client.model == "first"
    assert client.post("sleep", {"level": 1}) == {}
    cut = r"/: /sleep failed with status 500: (x ){134}x\.\.\.: check that the server"
    with pytest.raises(RunError, match=cut), client.named():
        client.post("sleep")
    thread.join(200)
    assert received == ["GET /v1/models HTTP/1.1"] * 2 + ["POST /sleep HTTP/1.1"] * 3
