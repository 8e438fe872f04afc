"""Sampling with a vLLM server through TRL's client, after sending it the trainer's weights."""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
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

from gac.errors import ConfigError, RunError, UserError
from gac.models.causal_lm import stop_tokens
from gac.parallel.collectives import gather, rank

from .generation import Draws, Responses, VLLMConfig, sampling_mode, until

AT_ONCE = 64  # concurrent requests per rank; the server batches them
FILE = 2**30  # bytes per file of weights
PROBE = 8  # length in tokens of the prompt and of the response with which each update is checked
FAR = 0.5  # nats per token; tolerates a server that rounds to bfloat16


class Server:
    """Connection to a running `vllm serve`. Call every method on every rank.

    Each rank requests the responses to its own prompts; rank 0 sends the weights. An error on one
    rank is raised on all. Each prompt has its own seed, drawn from torch's generator, so a resumed
    run is as reproducible as the server. The trainer computes all log-probs with its own weights;
    the server's are used only to check each update.

    Tested on CPUs with `weights="disk"`, on one and two processes, against a mock HTTP server that
    answers these requests with the trainer's model. Not tested: vLLM itself (the requests follow
    0.31.0), anything on a GPU, and `weights="nccl"` beyond the requests that TRL's client sends.

    Args:
        model: the model it must serve. longest: maximum length of prompt plus response. folder:
            where weights are written unless `config` sets one.

    Raises RunError if there is no response, ConfigError for a wrong model or too short a maximum
    length.
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
                "rollouts.vllm.weights=nccl: requires the vllm package in the trainer's environment: install it, or use disk"
            )
        self.config, self.tokenizer = config, tokenizer
        run = Path(folder or tempfile.gettempdir()).absolute()
        self.folder = Path(config.folder or run).absolute()
        self.prefix = f"weights-{zlib.crc32(str(run).encode()):08x}-"  # unique to this run
        self.vocabulary = len(tokenizer)  # until the first `load`; the model may have more
        self.client = Client(config.url, config.timeout)
        self._together(lambda: self._check(config.model or model, longest))

    def load(self, model: Any, draws: Draws) -> Callable[..., Responses]:
        """Send the weights of `model` to the server; returns the `Policy` that samples from it."""
        weights = Weights(model)
        walk = iter(weights)
        send = self._by_disk if self.config.weights == "disk" else self._by_nccl

        def give() -> None:
            try:
                if rank() == 0:
                    send(weights, walk)
            finally:
                for (
                    _
                ) in walk:  # iterating gathers sharded weights, so every rank must finish the loop
                    pass

        self._together(give)
        probe = self._together(lambda: self._probe() if rank() == 0 else None)
        self._compare(model, *gather(probe)[0])

        def policy(prompts: Sequence[tuple[int, ...]], samples: int) -> Responses:
            return self._together(lambda: self._draw(prompts, draws._replace(samples=samples)))

        return policy

    def _check(self, name: str, longest: int) -> None:
        served = self.client.served()
        names = [served["id"], served.get("root")]
        if name not in names and Path(name).absolute() not in [Path(n) for n in names if n]:
            raise ConfigError(
                f"rollouts.vllm.url={self.config.url!r}: the server has the model {names[0]!r}, "
                f"and the run trains {name!r}: start it with that one, or name what it reports in "
                "rollouts.vllm.model"
            )
        most = served.get("max_model_len")
        if most is not None and most < longest:
            raise ConfigError(
                f"rollouts.vllm.url={self.config.url!r}: the server takes {most} tokens, and a "
                f"prompt with its response can have {longest}: start it with --max-model-len "
                f"{longest}, or lower rollouts.max_new_tokens"
            )
        self._probe()  # fails if one of our tokens is not in the server's vocabulary

    def _probe(self) -> tuple[list[int], list[float]]:
        """Tokens spread over the vocabulary plus the server's response, and the response's
        log-probs.
        """
        last = len(self.tokenizer) - 1
        prompt = [last * (i + 1) // PROBE for i in range(PROBE)]
        found: dict[str, Any] = self.client.generate(
            [prompt],
            max_tokens=PROBE,
            logprobs=0,
            generation_kwargs={"seed": 0, "ignore_eos": True},
        )
        drawn = found["completion_ids"][0]
        places = zip(drawn, found["logprob_token_ids"][0], found["logprobs"][0], strict=True)
        return prompt + drawn, [values[ids.index(token)] for token, ids, values in places]

    def _compare(self, model: Any, ids: list[int], theirs: list[float]) -> None:
        """Compare the server's log-probs with those of `model`. Call it on all ranks: the forward
        may gather weights.
        """
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self._known(ids)
        place = next(model.parameters()).device
        with torch.no_grad(), sampling_mode(model):
            logits = model(input_ids=torch.tensor([ids], device=place)).logits[0, PROBE - 1 : -1]
        picked = torch.tensor(ids[PROBE:], device=place)[:, None]
        mine = logits.float().log_softmax(-1).gather(1, picked)[:, 0].cpu()
        gap = float((mine - torch.tensor(theirs)).abs().mean())
        if not gap < FAR:
            raise RunError(
                f"rollouts.vllm.url={self.config.url!r}: after the update the server's log-probs "
                f"differ from the trainer's by {gap:.2g} per token: it must serve the model that "
                "is trained, unquantised, and take its weights; the run goes on from its last "
                "checkpoint"
            )

    def _known(self, tokens: Sequence[int]) -> None:
        if max(tokens) >= self.vocabulary:
            raise RunError(
                f"rollouts.vllm.url={self.config.url!r}: the server drew token {max(tokens)}, and "
                f"the model has {self.vocabulary}: it serves another model; the run goes on from "
                "its last checkpoint"
            )

    def _draw(self, prompts: Sequence[tuple[int, ...]], draws: Draws) -> Responses:
        stops = stop_tokens(self.tokenizer, draws.stop)
        seeds = torch.randint(2**31, (len(prompts),)).tolist()

        def one(prompt: tuple[int, ...], seed: int) -> list[list[int]]:
            # pass the run's stop tokens and ignore the server's own EOS tokens
            given = {"seed": seed, "stop_token_ids": stops, "ignore_eos": True}
            found = self.client.generate(
                [list(prompt)],
                n=draws.samples,
                temperature=draws.temperature,
                top_p=draws.top_p,
                max_tokens=draws.max_new_tokens,
                logprobs=None,
                generation_kwargs=given,
            )["completion_ids"]
            if len(found) != draws.samples or not all(found):
                full = sum(map(bool, found))
                raise ValueError(f"received only {full} of {draws.samples} responses to a prompt")
            for response in found:
                self._known(response)
            return found

        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            found = list(pool.map(one, prompts, seeds))
        finally:
            pool.shutdown(cancel_futures=True)
        return [until(response, stops) for drawn in found for response in drawn]

    def _by_disk(self, weights: Weights, walk: Iterator[tuple[str, Tensor]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{self.prefix}*"):  # left over from a killed run
            shutil.rmtree(left, ignore_errors=True)
        # a new name each time, because the server may cache by path
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=self.prefix))
        try:
            folder.chmod(0o755)  # the server may run as another user
            for i, part in enumerate(_files(walk)):
                save_file(part, folder / f"model-{i:05}.safetensors")
            told = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self.client.tell("collective_rpc", told)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.client.forget()

    def _by_nccl(self, weights: Weights, walk: Iterator[tuple[str, Tensor]]) -> None:
        if self.client.communicator is None:
            self.client.init_communicator(weights.device)
        self.client.update_named_params(weights.described, walk)
        self.client.forget()

    def _together(self, work: Callable[[], Any]) -> Any:
        """Run `work` and return its result; if it fails on any rank, raise the same error on all."""
        found = fault = cause = None
        try:
            found = work()
        except UserError as error:
            fault = error
        except (
            Exception
        ) as error:  # catch everything, because the other ranks are waiting for this one
            cause = error
            fault = RunError(
                f"rollouts.vllm.url={self.config.url!r}: {_short(error)}: check that the server is running and serves this model (VLLM_SERVER_DEV_MODE=1 vllm serve ...), then rerun the command to resume from the last checkpoint"
            )
        for said in gather(fault):
            if said is not None:
                raise said from cause
        return found


class Weights:
    """The full weights of a policy, under their checkpoint names and with adapters merged.

    Iterating gathers sharded weights, so every rank must do it; the model is not modified.
    """

    def __init__(self, model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.adapters = {
            f"{name}.base_layer.weight": [(layer, adapter) for adapter in layer.active_adapters]
            for name, layer in inner.named_modules()
            if hasattr(layer, "get_delta_weight") and not layer.disable_adapters
        }
        self.named = [(n, p) for n, p in inner.named_parameters() if "lora_" not in n]
        self.device = self.named[0][1].device

    @property
    def described(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each, in order."""
        return [
            (_plain(name), str(p.dtype).removeprefix("torch."), list(p.shape))
            for name, p in self.named
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.named:
            value = _whole(p.detach())
            for layer, adapter in self.adapters.get(name, ()):
                value = value + _whole(layer.get_delta_weight(adapter)).to(value.dtype)
            yield _plain(name), value


class Client(VLLMClient):
    """TRL's client with a timeout for every request; works without vllm installed.

    TRL's constructor requires vllm, although only the transfer between GPUs needs it.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.session = requests.Session()
        again = Retry(
            3, read=1, backoff_factor=0.5, status_forcelist=[502, 503], allowed_methods=None
        )
        patient = _Patient(timeout, max_retries=again, pool_maxsize=AT_ONCE)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, patient)
        self.base_url = url.rstrip("/")
        self.group_port, self.communicator, self._updating_weights = 51216, None, False

    def served(self) -> dict[str, Any]:
        """The server's description of its first model, on which any others are based."""
        card = self._get(f"{self.base_url}/v1/models")["data"][0]
        self.model = card["id"]
        return card

    def tell(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST a command and return its JSON response, {} if empty."""
        answer = self.session.post(f"{self.base_url}/{path}", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"/{path} failed with status {answer.status_code}: {answer.text}")
        return answer.json() if answer.content else {}

    def forget(self) -> None:
        """Reset the server's prefix cache, which holds values of the previous weights."""
        if self.tell("reset_prefix_cache").get("success") is False:
            raise RuntimeError("/reset_prefix_cache failed; another client may be using the server")


class _Patient(HTTPAdapter):
    def __init__(self, timeout: float, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.timeout = timeout

    def send(self, *request: Any, **keywords: Any) -> Any:
        """Send with the default timeout if the caller gave none."""
        keywords["timeout"] = keywords.get("timeout") or self.timeout
        return super().send(*request, **keywords)


def _files(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group the weights into dicts of about `FILE` bytes, on the CPU."""
    part: dict[str, Tensor] = {}
    for name, value in weights:
        part[name] = value.cpu().contiguous()
        if sum(x.nbytes for x in part.values()) >= FILE:
            yield part
            part = {}
    if part:
        yield part


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _short(error: Exception) -> str:
    """A short message, without the nested objects of requests."""
    if isinstance(error, requests.ConnectionError | requests.Timeout):
        return "the server does not respond"
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
