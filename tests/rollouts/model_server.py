"""An HTTP server with the API of `vllm serve` and a tiny model, in its own process.

Paths, response bodies and errors follow vLLM 0.31.0.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import ranks

DEADLINE = 60.0


@dataclass(frozen=True)
class Serving:
    """Server options; each flag injects one fault."""

    folder: str
    """Folder with the model's configuration. The server's random weights differ from the trainer's.
    """
    name: str | None = None
    """Name of the served model, whose maximum length is then unknown; None: the folder."""
    max_model_len: int = 64
    """Maximum number of tokens in a prompt plus its response."""
    vocab_size: int | None = None
    """Vocabulary size, if it should differ from the model's."""
    ignores_updates: bool = False
    """Confirm weight updates but keep the old weights."""
    fault: str = ""
    """"reset": the prefix cache cannot be reset; "nan": log-probs are nan; "empty": the first
    response is; "few": all others are missing; "token": tokens are beyond the vocabulary; "late":
    likewise, but only after the first update."""
    exits_after: int | None = None
    """Exit at the next completion request after this many have been answered."""
    store: int | None = None
    """Port of the TCPStore for the process group that broadcasts weights."""


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Any]:
    """Run a server for the duration of the block.

    Yields a handle: `.url`, `.requests()` (their paths so far), `.kill()`.
    """
    ranks.start_server()
    parent_pipe, child_pipe = ranks.CONTEXT.Pipe()
    arguments = (Serving(str(folder), **options), child_pipe)
    process = ranks.CONTEXT.Process(target=_serve, args=arguments)
    process.start()
    child_pipe.close()
    if not parent_pipe.poll(DEADLINE):
        process.kill()
        raise TimeoutError(f"the server did not start within {DEADLINE} s")
    port = parent_pipe.recv()

    class Handle:
        url = f"http://127.0.0.1:{port}"

        def requests(self) -> list[str]:
            parent_pipe.send("requests")
            if not parent_pipe.poll(DEADLINE):
                raise TimeoutError("the server did not return its list of requests")
            return parent_pipe.recv()

        def kill(self) -> None:
            process.kill()
            process.join(DEADLINE)

    try:
        yield Handle()
    finally:
        process.kill()
        process.join(DEADLINE)


def _serve(options: Serving, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = State(options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # send the response in one write, so that Nagle's algorithm cannot delay it

        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.answer(json.loads(self.rfile.read(length) or "null"))

        def answer(self, body: Any) -> None:
            code, reply = state.answer(self.path, body)
            text = json.dumps(reply).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    try:
        while pipe.recv() == "requests":
            pipe.send(list(state.requests))
    except EOFError:
        os._exit(0)  # the test is over


class State:
    """Holds the model and answers requests, one at a time."""

    def __init__(self, options: Serving) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.options, self.requests, self.lock, self.completions = options, [], threading.Lock(), 0
        config = AutoConfig.from_pretrained(options.folder)
        config.vocab_size = options.vocab_size or config.vocab_size
        torch.manual_seed(99)
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.updating, self.folders = False, set()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Return (HTTP status, JSON body)."""
        with self.lock:
            self.requests.append(path)
            handlers = {
                "/health": lambda _: {},
                "/server_info?config_format=json": self.info,
                "/v1/models": self.models,
                "/v1/completions": self.completion,
                "/collective_rpc": self.reload,
                "/reset_prefix_cache": self.reset,
                "/start_weight_update": self.start,
                "/update_weights": self.receive,
                "/finish_weight_update": self.finish,
            }
            if path not in handlers:
                return 404, {"detail": "Not Found"}
            try:
                return 200, handlers[path](body)
            except ValueError as error:
                return 400, {"error": {"message": str(error)}}
            except Exception as error:  # as a server does
                return 500, {"error": {"message": repr(error)}}

    def models(self, _: Any) -> Any:
        name = self.options.name or self.options.folder
        length = None if self.options.name else self.options.max_model_len
        card = {"id": name, "root": self.options.folder, "max_model_len": length}
        return {"object": "list", "data": [card]}

    def info(self, _: Any) -> Any:
        return {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}

    def reset(self, _: Any) -> Any:
        return {"success": self.options.fault != "reset"}

    def reload(self, body: Any) -> Any:
        from safetensors.torch import load_file

        if body["method"] != "reload_weights":
            raise AttributeError(body["method"])
        folder = Path(body["kwargs"]["weights_path"])
        # a server may run as another user; the name is that of leftovers
        assert folder.stat().st_mode & 0o777 == 0o755
        assert folder.name.startswith("weights-")
        assert folder not in self.folders  # vLLM may cache by path
        self.folders.add(folder)
        weights: dict[str, torch.Tensor] = {}
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            weights |= load_file(file)
        self.load(weights)
        return {"results": [None]}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Load all of the model's weights, by name."""
        parameters = dict(self.model.named_parameters())
        if weights.keys() != parameters.keys():
            raise KeyError(sorted(weights.keys() ^ parameters.keys()))
        if self.options.ignores_updates:
            return
        for name, value in weights.items():
            parameters[name].data.copy_(value)

    def start(self, _: Any) -> Any:
        self.updating = True
        return {"message": "Weight update started"}

    def receive(self, body: Any) -> Any:
        """Receive weights as vLLM does over NCCL, but with gloo.

        The request lists the names; the tensors are broadcast in that order.
        """
        assert self.updating
        info = body["update_info"]
        group = weight_group(dist.TCPStore("127.0.0.1", self.options.store, is_master=False), 1)
        weights = {}
        described = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        for name, dtype, shape in described:
            weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(weights[name], 0).wait()
        self.load(weights)
        return {"message": "Weights updated"}

    def finish(self, _: Any) -> Any:
        self.updating = False
        return {"message": "Weight update finished"}

    def completion(self, body: Any) -> Any:
        self.completions += 1
        if self.options.exits_after is not None and self.completions > self.options.exits_after:
            os._exit(1)
        if body["model"] != (self.options.name or self.options.folder):
            raise ValueError(f"The model `{body['model']}` does not exist.")
        choices = [choice for prompt in body["prompt"] for choice in self.responses(prompt, body)]
        return {"choices": choices[: 1 if self.options.fault == "few" else None]}

    @torch.no_grad()
    def responses(self, prompt: list[int], body: Any) -> list[Any]:
        """`n` responses to one prompt; response i uses seed + i."""
        size = self.model.config.vocab_size
        if max(prompt) >= size:
            raise ValueError(f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) + body["max_tokens"] > self.options.max_model_len:
            raise ValueError(
                f"This model's maximum context length is {self.options.max_model_len} tokens."
            )
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        choices = []
        for i in range(body["n"]):
            rng = torch.Generator().manual_seed(body["seed"] + i)
            ids, logps = list(prompt), []
            while len(ids) < len(prompt) + body["max_tokens"]:
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
                bias = torch.zeros(size)
                for token, value in body.get("logit_bias", {}).items():
                    bias[int(token)] = value
                token = _pick(logits + bias, body["temperature"], body["top_p"], rng)
                logp = float(logits.log_softmax(-1)[token])  # raw: without the bias
                ids.append(token)
                logps.append(logp)
                if token in body.get("stop_token_ids", []):
                    break
            response = ids[len(prompt) :]
            if self.options.fault == "empty" and i == 0:
                response, logps = [], []
            late = self.completions > 2  # after the checks of the vocabulary and of an update
            if self.options.fault == "token" or (self.options.fault == "late" and late):
                response[0] = size
            if self.options.fault == "nan":
                logps[0] = math.nan
            choice = {"token_ids": response, "prompt_token_ids": prompt, "logprobs": None}
            if body["logprobs"] is not None:
                names = [f"token_id:{t}" for t in response]
                top = [{n: p} for n, p in zip(names, logps, strict=True)]
                choice["logprobs"] = {"tokens": names, "token_logprobs": logps, "top_logprobs": top}
            choices.append(choice)
        return choices


def weight_group(store: dist.Store, rank: int) -> dist.ProcessGroup:
    """Process group of the weight sender (rank 0) and receiver (rank 1)."""
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=DEADLINE))


def _pick(logits: torch.Tensor, temperature: float, top_p: float, rng: torch.Generator) -> int:
    """Sample a token."""
    if temperature == 0:
        return int(logits.argmax())
    p, order = (logits / temperature).softmax(-1).sort(descending=True)
    p = torch.where(p.cumsum(0) - p < top_p, p, 0)
    return int(order[torch.multinomial(p, 1, generator=rng)])
