"""Sampling with vLLM servers, which get the trainer's weights through TRL's client."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl.generation.vllm_client import VLLMClient
from trl.import_utils import is_vllm_available
from urllib3.util.retry import Retry

from gac.collectives import gather, rank, run_on_all_ranks
from gac.errors import ConfigError, RunError
from gac.models.adapters import adapter_layers, base_name
from gac.models.sampling_mode import sampling_mode

from .config import VLLMConfig
from .generation import (
    Completion,
    SamplingParams,
    head_size,
    lacking_ids,
    stop_tokens,
    truncate_at_stop,
)

MAX_CONCURRENT = 64  # concurrent requests per rank and server, which batches them
MAX_FILE_BYTES = 2**30  # bytes per file of weights
PROBE = 8  # length in tokens of the prompt and of the completion with which each update is checked
NEVER = -100.0  # the lowest bias of a logit in vLLM; the reported log-probs do not include it
LOGPROB_TOLERANCE = 0.5  # nats per token; tolerates a server that rounds to bfloat16


class Servers:
    """Connections to one or more running `vllm serve`. Call every method on every rank.

    Each rank requests the completions of its own prompts, from the servers in turn; rank 0 sends
    the weights. An error names its server; one on one rank is raised on all. Each prompt has its
    own seed, drawn from torch's generator, so a resumed run is as reproducible as the servers. The
    trainer computes all log-probs with its own weights; the servers' are used to check each update
    and for `rollouts.correction`.

    Tested on CPUs with `weights="disk"`, on one and two processes, against one and two mock HTTP
    servers that answer these requests with the trainer's model. Not tested: vLLM itself (the
    requests follow 0.31.0), anything on a GPU, and `weights="nccl"` beyond the requests that TRL's
    client sends.

    Args:
        config: the servers' settings.
        tokenizer: the trainer's tokenizer.
        model: the model that the servers must serve.
        longest: maximum length of prompt plus completion.
        folder: folder for the weights unless `config` sets one.

    Raises:
        RunError: a server does not respond.
        ConfigError: a server has another model or too short a maximum length.
    """

    def __init__(
        self,
        config: VLLMConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        longest: int,
        folder: Path | None,
    ) -> None:
        if config.weights == "nccl" and not is_vllm_available():
            raise ConfigError(
                "rollouts.vllm.weights=nccl requires the vllm package in the trainer's "
                "environment: install it, or set rollouts.vllm.weights=disk"
            )
        self.config, self.tokenizer = config, tokenizer
        run = Path(folder or tempfile.gettempdir()).absolute()
        self.folder = Path(config.folder or run).absolute()
        self.prefix = f"weights-{zlib.crc32(str(run).encode()):08x}-"  # unique to this run
        self.lacking: tuple[int, ...] = ()  # of the tokenizer, in the head of the model last loaded
        self.clients = [Client(url, config.timeout) for url in config.urls]

        def check() -> None:
            for client in self.clients:
                self._check(client, config.model or model, longest)

        run_on_all_ranks(check)

    def load(self, model: Any) -> None:
        """Send the weights of `model` to the servers, and check that they use them."""
        weights = Weights(model)
        iterator = iter(weights)
        send = self._send_by_disk if self.config.weights == "disk" else self._send_by_nccl

        def send_weights() -> None:
            try:
                if rank() == 0:
                    send(weights, iterator)
            finally:
                # iterating gathers sharded weights, so every rank must reach the end
                deque(iterator, 0)

        run_on_all_ranks(send_weights)
        clients = self.clients if rank() == 0 else []
        probes = run_on_all_ranks(lambda: [self._probe(client) for client in clients])
        for client, probe in zip(self.clients, gather(probes)[0], strict=True):
            self._compare(client, model, *probe)

    def generate(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams
    ) -> list[Completion]:
        """Sample completions of this rank's prompts, in order."""
        return run_on_all_ranks(lambda: self._sample(prompts, params))

    def _check(self, client: Client, name: str, longest: int) -> None:
        with client.named():
            served = client.served()
        names = [served["id"], served.get("root")]
        if name not in names and Path(name).absolute() not in [Path(n) for n in names if n]:
            raise ConfigError(
                f"{client.name}: the server serves {names[0]!r}, but the "
                f"run trains {name!r}: start the server with that model, or set "
                "rollouts.vllm.model to the name it reports"
            )
        max_length = served.get("max_model_len")
        if max_length is not None and max_length < longest:
            raise ConfigError(
                f"{client.name}: the server accepts {max_length} tokens, "
                f"but a prompt with its completion may have {longest}: start it with "
                f"--max-model-len {longest}, or lower max_completion_length of rollouts or eval"
            )
        self._probe(client)  # fails if a token of the tokenizer is not in its vocabulary

    def _probe(self, client: Client) -> tuple[list[int], list[float]]:
        """Sample from a prompt that spans the vocabulary; return all ids and the sampled logps."""
        last = len(self.tokenizer) - 1
        prompt = [last * (i + 1) // PROBE for i in range(PROBE)]
        options = {"seed": 0, "ignore_eos": True}
        with client.named():
            output: dict[str, Any] = client.generate(
                [prompt], max_tokens=PROBE, logprobs=0, generation_kwargs=options
            )
        response = output["completion_ids"][0]
        ids, logps = output["logprob_token_ids"][0], output["logprobs"][0]
        return prompt + response, _sampled(response, ids, logps)

    def _compare(
        self, client: Client, model: Any, ids: list[int], server_logps: list[float]
    ) -> None:
        """Compare a server's log-probs with those of `model`.

        Call it on every rank: the forward may gather weights.
        """
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self.lacking = lacking_ids(self.tokenizer, head_size(model))
        self._check_vocabulary(client, ids)
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        with torch.no_grad(), sampling_mode(model):
            logits = model(input_ids=tokens).logits[:, PROBE - 1 : -1]
        response = tokens[:, PROBE:, None]
        logps = logits.float().log_softmax(-1).gather(-1, response).flatten().cpu()
        gap = float((logps - torch.tensor(server_logps)).abs().mean())
        if not gap < LOGPROB_TOLERANCE:
            raise RunError(
                f"{client.name}: after the update the server's log-probs "
                f"differ from the trainer's by {gap:.2g} nats per token: the server must run the "
                "trained model without quantization and load each weight update; fix this and "
                "rerun the command to resume"
            )

    def _check_vocabulary(self, client: Client, tokens: Sequence[int]) -> None:
        if max(tokens) >= self.vocab_size:
            raise RunError(
                f"{client.name}: the server sampled token {max(tokens)}, "
                f"but the model's vocabulary has {self.vocab_size} tokens: the server runs another "
                "model; fix this and rerun the command to resume"
            )

    def _check_lacking(self, client: Client, completion: Sequence[int]) -> None:
        if lacking := {*completion} & {*self.lacking}:
            raise RunError(
                f"{client.name}: the server sampled token {min(lacking)}, which the tokenizer "
                "lacks, against the request's logit_bias: use a server that supports logit_bias, "
                "or resize the model with model.resize_token_embeddings(len(tokenizer))"
            )

    def _sample(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams
    ) -> list[Completion]:
        stops = stop_tokens(self.tokenizer, params.stop)
        seeds = torch.randint(2**31, (len(prompts),)).tolist()

        def sample_prompt(number: int, prompt: tuple[int, ...], seed: int) -> list[Completion]:
            # use the run's stop tokens and ignore the server's own EOS tokens
            options: dict[str, Any] = {"seed": seed, "stop_token_ids": stops, "ignore_eos": True}
            if self.lacking:
                options["logit_bias"] = dict.fromkeys(map(str, self.lacking), NEVER)
            client = self.clients[(rank() + number) % len(self.clients)]
            with client.named():
                output: dict[str, Any] = client.generate(
                    [list(prompt)],
                    n=params.num_generations,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    max_tokens=params.max_completion_length,
                    logprobs=0,
                    generation_kwargs=options,
                )
                completions = output["completion_ids"]
                if len(completions) != params.num_generations or not all(completions):
                    count = sum(map(bool, completions))
                    raise ValueError(
                        f"received only {count} of {params.num_generations} completions to a prompt"
                    )
            for completion in completions:
                self._check_vocabulary(client, completion)
                self._check_lacking(client, completion)
            return [
                Completion.of(truncate_at_stop(completion, stops), _sampled(completion, ids, logps))
                for completion, ids, logps in zip(
                    completions, output["logprob_token_ids"], output["logprobs"], strict=True
                )
            ]

        # after an error, `map` cancels the rest
        with ThreadPoolExecutor(MAX_CONCURRENT * len(self.clients)) as pool:
            groups = list(pool.map(sample_prompt, range(len(prompts)), prompts, seeds))
        return [completion for group in groups for completion in group]

    def _send_by_disk(self, weights: Weights, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{self.prefix}*"):  # from a killed run
            shutil.rmtree(leftover, ignore_errors=True)
        # a new name each time, because the server may cache by path
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=self.prefix))
        payload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

        def reload(client: Client) -> None:
            with client.named():
                client.post("collective_rpc", payload)
                client.clear_prefix_cache()

        try:
            folder.chmod(0o755)  # the servers may run as another user
            for i, part in enumerate(_files(iterator)):
                save_file(part, folder / f"model-{i:05}.safetensors")
            with ThreadPoolExecutor(len(self.clients)) as pool:
                list(pool.map(reload, self.clients))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _send_by_nccl(self, weights: Weights, iterator: Iterator[tuple[str, Tensor]]) -> None:
        (client,) = self.clients
        with client.named():
            if client.communicator is None:
                client.init_communicator(weights.device)
            client.update_named_params(weights.metadata, iterator)
            client.clear_prefix_cache()


class Weights:
    """The full weights of a policy, under their checkpoint names and with adapters merged.

    Iterating gathers one sharded weight at a time, so every rank must do it, and none holds the
    whole model on its device; the model is not modified.
    """

    def __init__(self, model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.adapters: dict[int, list[tuple[Any, str]]] = {}  # by the id of the parameter
        for _, layer, weight in adapter_layers(inner):
            active = () if layer.disable_adapters else layer.active_adapters
            self.adapters.setdefault(id(weight), []).extend((layer, name) for name in active)
        self.parameters = [(n, p) for n, p in inner.named_parameters() if "lora_" not in n]
        self.device, dtype = self.parameters[0][1].device, inner.__dict__.get("compute_dtype")
        self.dtypes = [dtype or p.dtype for _, p in self.parameters]

    @property
    def metadata(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each weight, in order."""
        return [
            (base_name(name), str(dtype).removeprefix("torch."), list(p.shape))
            for (name, p), dtype in zip(self.parameters, self.dtypes, strict=True)
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for (name, p), dtype in zip(self.parameters, self.dtypes, strict=True):
            value = _full(p.detach())
            for layer, adapter in self.adapters.get(id(p), ()):
                value = value + _full(layer.get_delta_weight(adapter)).to(value.dtype)
            yield base_name(name), value.to(dtype)
            del value  # before the next one is gathered


class Client(VLLMClient):
    """TRL's client with a timeout for every request; works without vllm installed.

    TRL's constructor requires vllm, although only the transfer between GPUs needs it.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.session = requests.Session()
        retries = Retry(
            3, read=1, backoff_factor=0.5, status_forcelist=[502, 503], allowed_methods=None
        )
        adapter = _TimeoutAdapter(timeout, max_retries=retries, pool_maxsize=MAX_CONCURRENT)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, adapter)
        self.base_url, self.name = url.rstrip("/"), f"rollouts.vllm.urls: {url}"
        self.group_port, self.communicator, self._updating_weights = 51216, None, False

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors in the block become RunErrors that name the server."""
        try:
            yield
        except Exception as error:  # requests, urllib3 and TRL's client raise their own
            raise RunError(
                f"{self.name}: {_short(error)}: check that the server is running and serves this "
                "model (VLLM_SERVER_DEV_MODE=1 vllm serve ...), then rerun the command"
            ) from error

    def served(self) -> dict[str, Any]:
        """The server's description of its first model, which is the base of any others."""
        card = self._get(f"{self.base_url}/v1/models")["data"][0]
        self.model = card["id"]
        return card

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST a command and return its JSON response, {} if empty."""
        reply = self.session.post(f"{self.base_url}/{path}", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"/{path} failed with status {reply.status_code}: {reply.text}")
        return reply.json() if reply.content else {}

    def clear_prefix_cache(self) -> None:
        """Reset the server's prefix cache, which holds values of the previous weights."""
        if self.post("reset_prefix_cache").get("success") is False:
            raise RuntimeError("/reset_prefix_cache failed; another client may be using the server")


class _TimeoutAdapter(HTTPAdapter):
    """An HTTP adapter with the same timeout for all requests."""

    def __init__(self, timeout: float, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.timeout = timeout

    def send(self, *request: Any, **keywords: Any) -> Any:
        """Send a request with this timeout."""
        return super().send(*request, **keywords | {"timeout": self.timeout})


def _sampled(
    completion: Sequence[int], ids: Sequence[list[int]], logps: Sequence[list[float]]
) -> list[float]:
    """Select each sampled token's log-prob; `logps[i]` are the log-probs of tokens `ids[i]`.

    TRL's client reports a nan of the server as None.
    """
    steps = zip(completion, ids, logps, strict=True)
    sampled = [values[own.index(token)] for token, own, values in steps]
    return [math.nan if logp is None else logp for logp in sampled]


def _files(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group the weights into dicts of about `MAX_FILE_BYTES`, on the CPU."""
    part: dict[str, Tensor] = {}
    for name, value in weights:
        part[name] = value.cpu().contiguous()
        del value
        if sum(x.nbytes for x in part.values()) >= MAX_FILE_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _short(error: Exception) -> str:
    """A one-line description of `error`, cut after 300 characters."""
    if isinstance(error, requests.ConnectionError | requests.Timeout):
        return "the server does not respond"
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
