"""Small rules of the trainer and the reports, against values computed by hand."""

import contextlib
import io
import json
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from gac.demo.task import make_tokenizer
from gac.faults import checkpoint
from gac.faults.processes import StopRequest
from gac.integrations.demonstrations import encode
from gac.rollouts.config import RolloutConfig
from gac.train_config import OptimConfig
from gac.training.policy import make_optimizer, warn_of_rounding
from gac.training.record import Record, show
from gac.training.trainer import learning_rate
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("schedule", "quarter"), [("linear", 0.775), ("cosine", 0.55 + 0.45 * math.sqrt(0.5))]
)
def test_the_learning_rate_rises_to_lr_and_ends_at_its_final_value(schedule, quarter):
    """Warm-up of 2 steps, the peak at step 2, half-way at step 4, the last step at `final`."""
    config = OptimConfig(lr=1.0, warmup_steps=2, min_lr_ratio=0.1, schedule=schedule)
    assert [learning_rate(config, step, 7) for step in (0, 1, 2, 3, 4, 6, 9)] == pytest.approx(
        [0.5, 1.0, 1.0, quarter, 0.55, 0.1, 0.1]
    )


def test_only_matrices_are_decayed():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2).requires_grad_(False))
    config = OptimConfig(lr=0.3, weight_decay=0.1, betas=(0.8, 0.7), eps=1e-3)
    matrices, vectors = make_optimizer(model, config).param_groups
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.8, 0.7), 1e-3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    # a bias, and a norm's two vectors
    assert [[p.dim() for p in g["params"]] for g in (matrices, vectors)] == [[2], [1, 1, 1]]
    assert len(make_optimizer(nn.Linear(2, 2, bias=False), config).param_groups) == 1


def test_the_share_of_updates_that_rounding_drops(caplog):
    """1 - 0.001 is 1 in bfloat16, 0.001 - 0.001 is not 0.001; other weights do not count."""
    weights = torch.tensor([1.0, 0.001, 1.0, 1.0]).bfloat16()
    model = nn.ParameterList([weights, torch.ones(9), nn.Parameter(weights, requires_grad=False)])
    warn_of_rounding(model, 0.001)
    warn_of_rounding(model[1:], 0.001)
    (message,) = caplog.messages
    assert "at optim.lr=0.001, rounding to bfloat16 drops 75.0% of the updates" in message


@pytest.fixture
def handlers():
    """Handlers of the three signals; background jobs ignore SIGINT."""

    def interrupt(*_):
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    yield lambda: [signal.getsignal(number) is interrupt for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_takes_effect_immediately(number, handlers, monkeypatch):
    """A run whose terminal is closed goes on to its next checkpoint."""
    master, slave = os.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(slave, "w"))
    with StopRequest() as stop:
        assert not stop.requested
        assert handlers() == [False] * 3
        os.close(master)
        signal.raise_signal(number)
        assert stop.requested
        with pytest.raises(OSError) if number != signal.SIGHUP else contextlib.nullcontext():
            os.write(slave, b"x")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert handlers() == [True] * 3


def test_without_a_signal_the_handlers_are_restored(handlers):
    ignored = [signal.SIGINT, signal.SIGHUP]  # as `gac study` and nohup do
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    with StopRequest():
        assert [signal.getsignal(number) for number in ignored] == [signal.SIG_IGN] * 2
    assert handlers() == [False, True, False]


def test_a_run_in_another_thread_handles_no_signals(handlers):
    def run():
        with StopRequest() as stop:
            seen.append((stop.requested, *handlers()))

    seen = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert seen == [(False, True, True, True)]


def test_a_checkpoint_is_flushed_to_the_disk_before_and_after_its_rename(tmp_path, monkeypatch):
    """Without this, a power failure could leave an empty progress file, or no checkpoint at all."""
    events = []
    sync, rename = os.fsync, Path.rename

    def record_sync(file):
        path = Path(f"/proc/self/fd/{file}").resolve()
        assert path.is_dir() or json.loads(path.read_text())  # its buffer is empty
        events.append(path.name)
        sync(file)

    def record_rename(*paths):
        events.append("rename")
        return rename(*paths)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    (tmp_path / ".writing").mkdir()
    files = set(Path("/proc/self/fd").iterdir())
    checkpoint._publish(tmp_path / ".writing", tmp_path / "step-00000001", {"step": 1})
    assert set(Path("/proc/self/fd").iterdir()) <= files  # other threads may close some
    assert events == [checkpoint.PROGRESS, "rename", tmp_path.name]


CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>.{% endif %}"
    "{% endfor %}"
)


def test_a_demonstration_of_several_turns_ends_at_its_last_eos():
    """Text after the last EOS, such as the line break of a template, is cut."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    encoded = encode(
        {
            "prompt": [{"role": "user", "content": "0"}],
            "completion": [
                {"role": role, "content": str(10 * i)}
                for i, role in enumerate(("assistant", "user", "assistant"), 1)
            ],
        },
        "",
        tokenizer,
    )
    assert tokenizer.decode(encoded["ids"]) == "010<eos>.2030<eos>"
    assert tokenizer.decode(encoded["ids"][encoded["start"] :]) == "30<eos>"


def test_what_a_run_tells_without_a_terminal(tmp_path, caplog):
    caplog.set_level(logging.INFO, "gac")
    record = Record(tmp_path, Accelerator(cpu=True))
    completions = [{"text": text, "reward": int(text) / 2} for text in "12"]
    prompts, printed = [{"prompt": "1+1=", "completions": completions}], {"print_samples": True}
    for step, shown, options in (
        (1, prompts, {}),
        (2, prompts, printed),
        (3, [], printed),
        (4, prompts, {"log_samples_every": 0}),
    ):
        record.samples(step, shown, RolloutConfig(**options))
    assert record.texts.read() == [{"step": step, "prompts": prompts} for step in (1, 2)]
    for row in ({"accuracy": 0.25, "ci95": [0.2, 0.3], "prompts": 50}, {"accuracy": 0.5}, {}):
        record.evaluation({"step": 5, **row})
    record.evals.append({"step": 0})
    assert len(record.evals.read()) == 4
    record.truncate(None)
    assert record.evals.read() == record.texts.read() == []
    for total, step in ((110, 10), (110, 11), (5, 1)):  # ten lines at most, or one per step
        row = {"step": step, "reward_mean": None, "demo_loss": 1.5, "kl": 0.0, "mu": 0.3}
        show(tqdm(total=total, disable=True), row)
    assert caplog.messages == [
        "step 2: 1+1=\n  [0.5] 1\n  [1.0] 2",
        "step 5: accuracy 25.0% [20.0, 30.0], 50 prompts",
        "step 5: accuracy 50.0%, 0 prompts",
        *[f"step {step}: demo=1.5, KL=0, mu=0.3" for step in ("11 of 110", "1 of 5")],
    ]


def test_only_the_main_process_writes_logs(tmp_path, monkeypatch):
    """Every process calls the trackers."""
    calls = []
    monkeypatch.setattr(Accelerator, "is_main_process", False)
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *arguments: calls.append(arguments[3]))
    monkeypatch.setattr(Accelerator, "log", lambda _, values, step: calls.append((values, step)))
    record = Record(tmp_path, Accelerator(cpu=True))
    record.start_trackers(tiny_config(tmp_path, tmp_path, report_to=["wandb"]), new=True)
    record.samples(1, [{"prompt": "1+1=", "completions": []}], RolloutConfig())
    record.step({"step": 3, "mu": 0.5, "kl": None})
    assert calls == [{}, ({"mu": 0.5}, 3)]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("columns", "count"), [(60, 4), (59, 3), (49, 3), (48, 2), (9, 1)])
def test_the_progress_line_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, count: int
) -> None:
    """Next to "1/100 |##########|  "; the last texts are the least important."""
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = tqdm(total=100, file=io.StringIO(), mininterval=0)
    show(bar, {"step": 1, "reward_mean": 0.25, "demo_loss": 1.5, "kl": math.nan, "mu": 0.3})
    assert bar.desc == ", ".join(["reward=0.25", "demo=1.5", "mu=0.3", "ETA 00:00"][:count])
    assert "mu" not in bar.fp.getvalue()  # it is drawn once per step, with the next one
