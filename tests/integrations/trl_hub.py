"""A pytest plugin that runs TRL's own tests offline, with its head, ours, or a wrong one.

`tests.integrations.trl_suite` loads it. Names of the hub become tiny local models and data sets:
the models are written in the layout of the hub's cache, `datasets.load_dataset` is replaced. The
first micro-steps of every training (up to the first optimizer step) are recorded: there, everything
is a function of the same weights, seeds and batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = Path(os.environ["GAC_TRL_HOME"])
MODE = os.environ.get("GAC_TRL_MODE", "own")  # own, head, loss or wrong
os.environ |= {"HF_HOME": str(HOME), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import datasets  # noqa: E402 - after the environment
import pytest  # noqa: E402 - after the environment
import torch  # noqa: E402 - after the environment
import transformers  # noqa: E402 - after the environment

ORGANIZATION = "trl-internal-testing"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "CausalLM"),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "CausalLM"),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "CausalLM"),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "CausalLM"),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "CausalLM"),
    "tiny-CohereForCausalLM": ("Cohere", "CausalLM"),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoX", "CausalLM"),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "SequenceClassification"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "SequenceClassification"),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "SequenceClassification"),
}
TEXTS = (
    "Beautiful is better than ugly.",
    "Explicit is better than implicit.",
    "Simple is better than complex.",
    "Flat is better than nested.",
    "Readability counts.",
    "Errors should never pass silently.",
    "Now is better than never.",
)


def write_models() -> None:
    """Write every model of `MODELS` and its tokenizer into the hub's cache, once."""
    if (HOME / "done").exists():
        return
    tokenizer = make_tokenizer()
    for name, (family, head) in MODELS.items():
        folder = HOME / "hub" / f"models--{ORGANIZATION}--{name}"
        snapshot = folder / "snapshots" / "0"
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text("0")
        config = getattr(transformers, f"{family}Config")(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=2,
            num_labels=1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        getattr(transformers, f"{family}For{head}")(config).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
    (HOME / "done").touch()


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator([*TEXTS, "user assistant system"], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def rows(kind: str, number: int) -> Iterator[dict[str, Any]]:
    """Rows of one configuration of TRL's test data, e.g. "standard_preference"."""
    style, _, task = kind.partition("_")

    def message(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if style == "conversational" else text

    for i in range(number):
        words = TEXTS[i % len(TEXTS)].split()
        prompt = message("user", " ".join(words[:2]))
        good = message("assistant", " " + " ".join(words[2:]))
        bad = message("assistant", " " + " ".join(reversed(words)))
        yield {
            "language_modeling": {"messages": prompt + good}
            if style == "conversational"
            else {"text": prompt + good},
            "prompt_only": {"prompt": prompt},
            "prompt_completion": {"prompt": prompt, "completion": good},
            "preference": {"prompt": prompt, "chosen": good, "rejected": bad},
            "implicit_prompt_preference": {"chosen": prompt + good, "rejected": prompt + bad},
            "unpaired_preference": {"prompt": prompt, "completion": good, "label": i % 2 == 0},
        }[task]


def load_dataset(
    name: str, kind: str | None = None, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    """Stand in for `datasets.load_dataset`."""
    if name != f"{ORGANIZATION}/zen" or kind is None:
        pytest.skip(f"the data set {name} is not available offline")
    tables = datasets.DatasetDict(
        {
            part: datasets.Dataset.from_list(list(rows(kind, number)))
            for part, number in (("train", 17), ("test", 2))
        }
    )
    if split is None:
        return tables
    part, _, limit = split.partition("[:")
    table = tables[part]
    if limit:
        table = table.select(range(int(limit.rstrip("]"))))
    return table.to_iterable_dataset() if streaming else table


class Recorder:
    """Loss and gradient norm of each micro-step before a test's first optimizer step."""

    def __init__(self) -> None:
        self.test = ""
        self.steps: dict[str, list[list[float]]] = {}

    def install(self) -> None:
        own = transformers.Trainer.training_step

        def training_step(trainer: Any, model: Any, *args: Any, **keywords: Any) -> Any:
            loss = own(trainer, model, *args, **keywords)
            if trainer.state.global_step == 0:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.stack([g.float().norm() for g in gradients]).norm().item()
                self.steps.setdefault(self.test, []).append([float(loss), norm])
            return loss

        transformers.Trainer.training_step = training_step


def absent_package(name: str) -> Any:
    """Stand in for `is_NAME_available` functions that this TRL version lacks."""
    if name.startswith("is_") and name.endswith("_available"):
        return lambda *_: False
    raise AttributeError(name)


RECORDER = Recorder()
OUTCOMES: dict[str, str] = {}


def pytest_configure() -> None:
    write_models()
    datasets.load_dataset = load_dataset
    RECORDER.install()
    from trl import import_utils
    from trl.trainer import base_config

    # names of other TRL versions, which the tests only use to skip
    import_utils.__getattr__ = absent_package  # type: ignore[attr-defined] # PEP 562
    own = base_config._BaseConfig.__post_init__

    def in_float32(config: Any) -> None:
        if config.use_liger_kernel:  # it replaces transformers' classes for the whole process
            pytest.skip("Liger's layers need a GPU")
        if os.environ.get("GAC_TRL_FLOAT32") == "1":
            config.bf16 = False
        own(config)

    base_config._BaseConfig.__post_init__ = in_float32
    if MODE == "own":
        return
    import trl

    from gac.integrations import trl_head
    from gac.integrations.trl import FusedGRPOTrainer, apply_fused_head

    apply_fused_head()
    if MODE == "loss":
        trl.GRPOTrainer = FusedGRPOTrainer
    if MODE == "wrong":
        right = trl_head._log_probs

        def wrong(*args: Any) -> Any:
            out = right(*args)
            return out._replace(log_probs=out.log_probs * 1.01)

        trl_head._log_probs = wrong


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    RECORDER.test = item.nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    out = {"outcomes": OUTCOMES, "steps": RECORDER.steps}
    Path(os.environ["GAC_TRL_OUT"]).write_text(json.dumps(out))
