"""Packed rows give the same losses, gradients, log-probs and statistics as padded rows."""

from __future__ import annotations

import itertools
import logging
import random

import pytest
import torch
from accelerate import Accelerator
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from gac.config import ConfigError, load
from gac.data.micro import MicroBatches
from gac.data.rows import Row, collate, count
from gac.methods.base import Loss, Mix, Needs
from gac.models import row_attention
from gac.models.causal_lm import attach_head
from gac.training.gradients import Gradients
from gac.training.policy import _micro_batches
from gac.training.rows_apart import keeps_rows_apart
from gac.training.run_config import TrainConfig
from gac.training.step import Rewards, Step
from gac.training.trainer import Trainer, train
from gac_kernels import LossSpec

from .test_model import SMALL
from .tiny import metrics, tiny_config

# sliding windows much shorter than the longest rows
MODELS = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "gemma": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 4},
}


def make(kind: str, attention: str | None = None, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **MODELS.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for (
        p
    ) in model.parameters():  # scale up: freshly initialized weights give near-uniform attention
        p.data.mul_(4 if p.dim() > 1 else 1)
    attach_head(model)
    return model


def some_rows(number: int = 9, mixed: bool = False, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for i in range(number):
        ids = tuple(rng.randrange(3, 61) for _ in range(rng.choice([2, 3, 5, 9, 17])))
        start = rng.randrange(0, len(ids))
        demo = i % 3 == 2
        switch = rng.randrange(start, len(ids)) if mixed and not demo else -1
        rows.append(Row(ids, start, demo, rng.choice([-1.0, 0.0, 0.5, 2.0]), i, switch=switch))
    return rows


def measure(model, rows: list[Row], micro: MicroBatches, loss: Loss):
    """Run one step on `rows`; return its measurements, the old log-probs and the gradients by name."""
    gradients = Gradients(
        Accelerator(cpu=True),
        model,
        None,
        loss,
        temperature=0.7,
        micro=micro,
        pad_token=0,
        averages=False,
    )
    gradients.reference = model  # the model is its own reference: the KL is 0 unless a log-prob is read from the wrong place
    old = [x - 0.1 * torch.arange(len(x)) for x in gradients.row_logprobs(rows)]
    rewards = Rewards.of([r.advantage for r in rows])
    step = Step(0, tuple(rows), Mix(0.3), count(rows), rewards, Needs(kl=True), tuple(old), 1)
    model.zero_grad()
    found = gradients(step)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found, old, grads


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_equals_padded(kind, mixed):
    model, rows = make(kind), some_rows(mixed=mixed)
    assert keeps_rows_apart(model)
    loss = Loss(LossSpec(kl_coef=0.1, entropy_coef=0.01))
    one = measure(model, rows, MicroBatches(rows=4), loss)
    other = measure(model, rows, MicroBatches(tokens=24, packed=True), loss)
    close(one, other)
    close(one, measure(model, rows, MicroBatches(tokens=24), loss))


def close(one, other):
    (found, old, grads), (found2, old2, grads2) = one, other
    for a, b in zip(old, old2, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(tuple(found.losses), tuple(found2.losses), rtol=1e-5, atol=1e-5)
    for a, b in zip(found.moments.signals(), found2.moments.signals(), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for name in ("kl", "entropy", "clip_fraction"):
        a, b = (float(getattr(f.moments, name)) for f in (found, found2))
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6), name
    assert grads.keys() == grads2.keys()
    for name, grad in grads.items():
        atol = 1e-5 * float(grad.abs().max())
        torch.testing.assert_close(grads2[name], grad, rtol=1e-3, atol=atol, msg=name)


def test_packed_through_eager_attention():
    loss, rows = Loss(LossSpec()), some_rows()
    one = measure(make("qwen3"), rows, MicroBatches(), loss)
    close(one, measure(make("qwen3", "eager"), rows, MicroBatches(tokens=30, packed=True), loss))


def each_row_by_itself(module, q, k, v, mask, scaling, cu_seq_lens_q=None, max_length_q=None, **_):
    """Attention as in flash attention's varlen kernels: row boundaries from `cu_seq_lens_q`, no
    mask.
    """
    if cu_seq_lens_q is None:  # the probe of the LM head, which has a single row
        cu_seq_lens_q, max_length_q = torch.tensor([0, q.shape[2]]), q.shape[2]
    assert mask is None and max_length_q == int(cu_seq_lens_q.diff().max())
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (q, k, v)), is_causal=True, scale=scaling
        )
        for a, b in itertools.pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def test_packed_through_attention_that_takes_bounds():
    AttentionInterface.register("each_row_by_itself", each_row_by_itself)
    AttentionMaskInterface.register("each_row_by_itself", flash_attention_mask)
    loss, rows = Loss(LossSpec()), some_rows(mixed=True)
    one = measure(make("qwen2"), rows, MicroBatches(), loss)
    packed = MicroBatches(tokens=30, packed=True)
    close(one, measure(make("qwen2", "each_row_by_itself"), rows, packed, loss))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_row_by_row_equals_padded(kind, recomputed, monkeypatch):
    """Also checks that no attention call spans more than one row."""
    seen, rows = [], some_rows(mixed=True)
    one = measure(make(kind), rows, MicroBatches(), Loss(LossSpec(kl_coef=0.1)))
    model = make(kind)
    attend = row_attention.sdpa_attention_forward

    def watched(module, query, *rest, **keywords):
        seen.append(query.shape[2])
        return attend(module, query, *rest, **keywords)

    monkeypatch.setattr(row_attention, "sdpa_attention_forward", watched)
    if not row_attention.enable(model):
        assert (
            kind == "gemma2"
        )  # it soft-caps attention scores, which only eager attention supports
        return
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert keeps_rows_apart(model)
    seen.clear()
    packed = MicroBatches(tokens=30, packed=True)
    close(one, measure(model.train(), rows, packed, Loss(LossSpec(kl_coef=0.1))))
    assert max(seen) == max(len(r.ids) for r in rows) and len(seen) >= 2 * len(rows)


def test_a_row_alone_comes_out_as_among_others():
    model, rows = make("qwen2").eval(), some_rows()
    batch = collate(rows, 0, packed=True)
    logps = model(**batch.model_inputs, request=lambda h: h.logprobs(batch.targets)[0]).flatten()
    for at, row in zip(batch.starts, rows, strict=True):
        alone = collate([row], 0)
        targets = alone.targets
        one = model(**alone.model_inputs, request=lambda h, t=targets: h.logprobs(t)[0])
        got = logps[row.scored(at)]
        torch.testing.assert_close(got, one[0][row.scored(0)], rtol=1e-5, atol=1e-5)
        assert torch.equal(
            batch.targets[0][row.scored(at)], torch.tensor(row.ids[max(row.start, 1) :])
        )


def test_a_model_whose_rows_touch_is_padded_with_a_warning(caplog):
    """A recurrent model has no attention mask to separate rows: its state carries over from one row
    to the next.
    """
    config = AutoConfig.for_model(
        "mamba",
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=1,
        state_size=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    attach_head(model)
    assert not keeps_rows_apart(model)
    with caplog.at_level(logging.WARNING):
        micro = _micro_batches(load(TrainConfig, {"micro_tokens": 64}), model)
    assert micro == MicroBatches(tokens=64, packed=False)
    assert caplog.text.count("does not stay within packed rows") == 1


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("unit", [1, 2])
def test_micro_batches_hold_every_row_once_within_the_budget(packed, unit):
    rows = some_rows(40, seed=3)
    budget = 40
    parts = MicroBatches(tokens=budget, packed=packed, unit=unit).split(rows)
    assert sorted(r.sequence for part in parts for r in part) == list(range(40))
    for part in parts:
        lengths = [len(r.ids) for r in part]
        assert (sum(lengths) if packed else len(lengths) * max(lengths)) <= budget
        if unit == 2:
            assert all(
                b.sequence == a.sequence + 1 for a, b in zip(part[::2], part[1::2], strict=True)
            )
    if packed and unit == 1:
        loads = [sum(len(r.ids) for r in part) for part in parts]
        assert len(parts) == -(-sum(loads) // budget) and max(loads) - min(loads) <= 3
    assert MicroBatches(tokens=budget, packed=packed, unit=unit).split([]) == []


def test_a_row_beyond_the_budget():
    with pytest.raises(
        ValueError,
        match="micro_tokens=8: a row of this step needs 17 tokens (grammar; fix the library's message too)",
    ):
        MicroBatches(tokens=8, packed=True).split(some_rows())


def test_the_budget_is_checked_before_any_work(task, tmp_path):
    with pytest.raises(ConfigError, match="micro_tokens=9: the longest row.*use .. or more"):
        Trainer(tiny_config(task, tmp_path / "run", micro_tokens=9))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("method", ["gac", "luffy", "dpo", "asft"])
def test_a_packed_run_is_the_padded_run(task, tmp_path, method):
    """Compare every metric over two training steps."""
    changes = {"method": method, "steps": 2, "eval": {}, "demo_batch": 6}
    train(tiny_config(task, tmp_path / "padded", **changes))
    packed = Trainer(tiny_config(task, tmp_path / "packed", **changes, micro_tokens=80))
    assert packed.gradients.micro.packed
    packed.run()
    one, two = metrics(tmp_path / "padded"), metrics(tmp_path / "packed")
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, float):
                assert b[key] == pytest.approx(value, rel=2e-4, abs=1e-5), key
            else:
                assert b[key] == value, key


@pytest.mark.parametrize("tokens", [None, 80])
def test_kl_of_all_rows_as_a_sample_is_that_of_the_moments(task, tmp_path, tokens):
    """A smaller sample averages over its own rows, which change from step to step."""
    found = {}
    for kl_rows in (None, 16, 3):
        out = tmp_path / str(kl_rows)
        changes = {
            "monitor_kl_every": 1,
            "kl_rows": kl_rows,
            "steps": 3,
            "eval": {},
            "optim": {"lr": 0.05, "warmup": 1, "clip": 0},
        }
        train(tiny_config(task, out, micro_tokens=tokens, **changes))
        found[kl_rows] = metrics(out)
    for row, whole, sample in zip(*found.values(), strict=True):
        assert whole["kl"] == pytest.approx(row["kl"], rel=1e-4, abs=1e-7)
        for key in ("grad_norm", "rollout_loss", "sft_variance", "entropy"):
            assert sample[key] == pytest.approx(row[key], rel=1e-3, abs=1e-6), key
    assert found[None][2]["kl"] > 1e-3
    assert found[3][2]["kl"] != found[None][2]["kl"] and found[3][2]["kl"] > 0
