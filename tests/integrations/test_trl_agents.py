"""TRL's tools, environments, rollout functions and vLLM server, with our loss in its trainers."""

import itertools
import queue
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gac_kernels.heads.trl.head import missing_hook

if missing_hook():
    pytest.skip("this TRL has no fused head", allow_module_level=True)

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, __version__
from trl.generation import vllm_client, vllm_generation

from gac.integrations.trl import GACTrainer
from gac.methods import Constant
from gac_kernels.heads.trl import FusedGRPOTrainer
from tests.heads import trl_hub
from tests.integrations.plain import relative_error
from tests.integrations.recording import GradientRecorder
from tests.rollouts.model_server import serving

PROMPT = [{"role": "user", "content": "Simple is better"}]
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"step": {}}}}}\n</tool_call>'
TIMES = {"step_time", "train_runtime", "num_tokens"}
# first completions of each group of three: a call, a call of an unknown tool, an answer
FIRST = (CALL.format("increment", 2), CALL.format("decrement", 1), "better than complex")


def increment(step: int) -> int:
    """Adds one.

    Args:
        step: A number.

    Returns:
        The number plus one.
    """
    return step + 1


class Counter:
    """An environment whose state is changed by the model's calls."""

    def reset(self, **_: Any) -> None:
        self.count = 0

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        self.count += step
        return self.count


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Random completions; every third token comes from the environment."""
    rng, tokenizer = random.Random(0), trainer.processing_class
    ids = [
        tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts
    ]
    completions = [[rng.randrange(5, 200) for _ in range(rng.randint(3, 9))] for _ in prompts]
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(x) for x in completions],
        "env_mask": [[int(i % 3 != 2) for i in range(len(x))] for x in completions],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose chat template can render tool calls."""
    path, tokenizer = tmp_path_factory.mktemp("model"), trl_hub.make_tokenizer("qwen3")
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(
        "qwen3",
        **trl_hub.SIZES,
        vocab_size=len(tokenizer),
        final_logit_softcapping=0.5,  # read by TRL's head, as is the next one
        logit_scale=1.3,
        **tokens,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def speak(tokenizer: Any) -> Callable[..., Tensor]:
    """A `generate` that says FIRST in the first turn and "Done" in the next one."""
    spoken: list[int] = []

    def generate(input_ids: Tensor, **_: Any) -> Tensor:
        texts = ["Done"] * len(input_ids) if spoken else [*FIRST] * (len(input_ids) // len(FIRST))
        spoken.append(len(texts))
        ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        width = max(map(len, ids))
        padded = [x + [tokenizer.pad_token_id] * (width - len(x)) for x in ids]
        return torch.cat([input_ids, torch.tensor(padded)], 1)

    return generate


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real HTTP server; only vLLM's transport of weights, NCCL, is replaced by a file."""
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    client: Any = vllm_client.VLLMClient

    def send(self: Any, metadata: Any, parameters: Iterator[tuple[str, Tensor]]) -> None:
        weights = {name: x.detach().clone() for name, x in parameters}
        update_folder = tmp_path / f"weights-{len(list(tmp_path.glob('weights-*')))}"
        update_folder.mkdir()
        update_folder.chmod(0o755)
        save_file(weights, update_folder / "model.safetensors")
        update = {"method": "reload_weights", "kwargs": {"weights_path": str(update_folder)}}
        self._post(f"{self.base_url}/collective_rpc", json=update)

    monkeypatch.setattr(client, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(client, "update_named_params", send)
    monkeypatch.setattr(client, "reset_prefix_cache", lambda self: None)
    with serving(folder) as handle:
        yield handle


MODES: dict[str, dict[str, Any]] = {
    "tools": {"tools": [increment]},
    "environment_factory": {"environment_factory": Counter},
    "rollout_func": {"rollout_func": rollout},
    "vLLM server": {},
}
if not __version__.startswith("1.15."):
    silent = type("Silent", (), {"reset": lambda self, **_: None})  # without tools
    MODES["environment_factory, two"] = {"environment_factory": {"a": Counter, "b": silent}}


def step(kind: type[GRPOTrainer], folder: Path, out: Path, mode: str, url: str = "") -> Any:
    """One optimizer step; returns the trainer and its gradient."""
    options: dict[str, Any] = {"max_completion_length": 8}
    keywords = dict(MODES[mode])
    if mode == "vLLM server":
        fixed = {"seed": 3, "ignore_eos": True}
        options |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        options |= {"generation_kwargs": fixed, "vllm_importance_sampling_correction": True}
    if mode.startswith(("tools", "environment")):
        options["max_completion_length"] = 200
    if issubclass(kind, GACTrainer):
        answer = [{"role": "assistant", "content": "than complex"}]
        row = {"prompt": PROMPT, "completion": answer, "environment": "b"}
        demos = Dataset.from_list([row] * 2)
        keywords |= {"demo_dataset": demos, "demo_batch": 2, "controller": Constant(mu=0.0)}
    recorder, tokenizer = GradientRecorder(), AutoTokenizer.from_pretrained(folder)
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [float(i % 3 == 0) for i in range(len(completions))],
        args=GRPOConfig(
            str(out),
            per_device_train_batch_size=6,
            num_generations=3,
            max_steps=1,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "environment": "a"}] * 6),
        processing_class=tokenizer,
        callbacks=[recorder],
        **keywords,
    )
    if mode.startswith(("tools", "environment")):
        trainer.model.generate = speak(tokenizer)
    trainer.train()
    return trainer, recorder.gradients[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:You are using:UserWarning")
def test_the_step_is_that_of_trl(
    mode: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Gradient and metrics equal GRPOTrainer's; tokens of tools and environments have no loss."""
    url = request.getfixturevalue("server").url if mode == "vLLM server" else ""
    own, expected = step(GRPOTrainer, folder, tmp_path, mode, url)
    logged = own.state.log_history[0]
    if mode.startswith(("tools", "environment")):
        assert logged["tools/call_frequency"] == pytest.approx(2 / 3)
        assert logged["tools/failure_frequency"] == pytest.approx(1 / 2)
    for kind in (FusedGRPOTrainer, GACTrainer):
        trainer, gradient = step(kind, folder, tmp_path, mode, url)
        assert trainer.rollout_out is not None  # one pass, no fallback
        if kind is GACTrainer and mode in ("tools", "environment_factory, two"):
            tools = [increment] if mode == "tools" else None
            prompt = trainer.processing_class.apply_chat_template(
                PROMPT, tools, chat_template=trainer.chat_template, add_generation_prompt=True
            )["input_ids"]
            assert trainer._demos[0]["ids"][: len(prompt)] == prompt
        assert relative_error(gradient, expected) < 3e-6, kind
        found = trainer.state.log_history[0]
        for name in logged.keys() - TIMES:
            assert found[name] == pytest.approx(logged[name], rel=1e-5, abs=1e-6), name
    if mode == "vLLM server":
        paths = request.getfixturevalue("server").requests()
        assert paths.count("/v1/completions") == paths.count("/collective_rpc") == 3


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **row: Any) -> Any:
    """TRL's attention of a packed row, in which every segment sees its path, on the CPU."""
    offsets = [row[f"tree_cu_seqlens_{name}"].tolist() for name in "qk"]
    mask = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)
    for (q, q_end), (k, k_end) in zip(*map(itertools.pairwise, offsets), strict=True):
        mask[q:q_end, row["tree_kv_index"][k:k_end]] = True
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, mask.tril(), scale=row["scaling"], enable_gqa=True)
    return out.transpose(1, 2), None


class Worker:
    """TRL's interface of a rollout worker and of a weight transfer, with fixed rollouts."""

    def __init__(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        rng = random.Random(0)
        for i in range(24):  # groups of 4 share the prompt and the first two tokens
            own = [rng.randrange(5, 200) for _ in range(rng.randrange(6))]
            ids = np.array([*range(5 + i // 4, 13 + i // 4), *own])
            mask = np.array([0] * 6 + [1, 1] + [int(t % 3 > 0) for t in own])
            logps = np.array([-5.0 - rng.random() for _ in ids], dtype=np.float32)
            reward = float(i % 3 - 1)  # 0: no gradient
            self.rollout_buffer.put(
                RolloutSample(PROMPT, [], ids, mask, logps, reward, 0, i // 4, {"reward": reward})
            )

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.filterwarnings("ignore::trl.experimental.TRLExperimentalWarning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_asynchronous_step_is_that_of_trl(
    ranks: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient and metrics equal AsyncGRPOTrainer's, in one pass; FlashAttention is replaced.

    In a single process, whose loss is also computed as that of one of two ranks.
    """
    pytest.importorskip("trl.experimental.async_grpo.packing", reason="no packing by prefix")
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from gac_kernels.heads.trl import FusedAsyncGRPOTrainer

    package = "trl.experimental.async_grpo"
    monkeypatch.setattr(f"{package}.packing.tree_attention", attention)
    monkeypatch.setattr(f"{package}.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None)
    results = []
    for kind in (FusedAsyncGRPOTrainer.__base__, FusedAsyncGRPOTrainer):
        of_ranks = mock.patch("accelerate.Accelerator.num_processes", ranks)
        monkeypatch.setattr(kind, "compute_loss", of_ranks(kind.compute_loss))
        recorder = GradientRecorder()
        config = AsyncGRPOConfig(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=1,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=2,
            token_budget=0,
            temperature=0.7,
            epsilon=0.1,
            epsilon_high=0.15,
            model_init_kwargs={"dtype": torch.float32},
        )
        trainer = kind(
            str(folder),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": PROMPT}]),
            callbacks=[recorder],
            rollout_worker=Worker(),
            weight_transfer=Worker(),
        )
        trainer.train()
        results.append((recorder.gradients[0], trainer.state.log_history[0]))
    (expected, logged), (gradient, found) = results
    assert relative_error(gradient, expected) < 3e-6
    assert 0 < logged["clip_ratio/region_mean"] < 1
    for name in logged:
        if not name.startswith(("perf/", "sample/time")) and name not in TIMES:
            assert found[name] == pytest.approx(logged[name], rel=1e-5, abs=1e-6), name
    assert trainer.rollout_out is not None
