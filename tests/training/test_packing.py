"""Packed rows give the same losses, gradients, log-probs and statistics as padded rows."""

import contextlib
import itertools
import logging
import math
import operator
import random

import pytest
import torch
from accelerate import Accelerator
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from gac.config import load
from gac.data.micro_batches import MicroBatches
from gac.methods.base import Loss
from gac.models import row_attention
from gac.models.head import attach_head, run_head
from gac.rows import Row, collate, count
from gac.train_config import TrainConfig
from gac.training.gradients import Forward, Gradients
from gac.training.policy import _micro_batches, supports_packing
from gac.training.step import Rewards, Step
from gac.training.trainer import Trainer, train
from gac.types import Mix, StepNeeds
from gac_kernels import LossSpec
from tests.models.test_model import SMALL
from tests.tiny import metrics, tiny_config

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
PACKED = MicroBatches(tokens=30, packed=True)


def make(kind: str, attention: str | None = None, **changes):
    """A small random model of the given kind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SMALL, **MODELS.get(kind, {}), **changes}),
        attn_implementation=attention,
    )
    for p in model.parameters():  # freshly initialized weights give near-uniform attention
        p.data.mul_(4 if p.dim() > 1 else 1)
    attach_head(model)
    return model


def random_rows(number: int = 9, mixed: bool = False, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for i in range(number):
        ids = tuple(rng.randrange(3, 61) for _ in range(rng.choice([2, 3, 5, 9, 17])))
        start = rng.randrange(0, len(ids))
        demo = i % 3 == 2
        switch = rng.randrange(start, len(ids)) if mixed and not demo else -1
        rows.append(Row(ids, start, demo, rng.choice([-1.0, 0.0, 0.5, 2.0]), i, switch=switch))
    return rows


def run_step(model, rows: list[Row], micro: MicroBatches, loss: Loss):
    """Run a step on `rows`; return its measurements, the old log-probs and the gradients by name.

    The model is its own reference: the KL is 0 unless a log-prob is read from the wrong place.
    """
    forward = Forward(Accelerator(cpu=True), model, model, 0.7, micro, pad_token=0)
    gradients = Gradients(forward, loss)
    old = [
        x - 0.1 * torch.arange(len(x))
        for x in forward.row_logprobs(sorted(rows, key=operator.attrgetter("sequence")))
    ]
    rewards = Rewards.of([r.advantage for r in rows])
    assert rewards.variance == pytest.approx(
        torch.tensor([r.advantage for r in rows]).double().var(correction=0).item(), abs=1e-9
    )
    step = Step(0, tuple(rows), Mix(0.3), count(rows), rewards, StepNeeds(kl=True), tuple(old), 1)
    model.zero_grad()
    measured = gradients(step)
    assert float(measured.moments.kl) == pytest.approx(0, abs=1e-6)
    return (
        measured,
        old,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_equals_padded(kind, mixed):
    model, rows = make(kind), random_rows(mixed=mixed)
    assert supports_packing(model)
    loss = Loss(LossSpec(kl_coef=0.1, entropy_coef=0.01))
    padded = run_step(model, rows, MicroBatches(rows=4), loss)
    assert_close(padded, run_step(model, rows, MicroBatches(tokens=24, packed=True), loss))
    assert_close(padded, run_step(model, rows, MicroBatches(tokens=24), loss))


def assert_close(padded, packed):
    """Compare two results of `run_step`."""
    (expected, expected_old, expected_grads), (measured, old, grads) = padded, packed
    for a, b in zip(expected_old, old, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(tuple(expected.losses), tuple(measured.losses), rtol=1e-5, atol=1e-5)
    for a, b in zip(expected.moments.signals(), measured.moments.signals(), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for name in ("kl", "entropy", "clip_fraction"):
        a, b = (float(getattr(m.moments, name)) for m in (expected, measured))
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6), name
    assert expected_grads.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in expected_grads.values())
    for name, grad in expected_grads.items():
        # that of queries over a single token is 0 but for rounding: it has no scale of its own
        atol = max(1e-5 * float(grad.abs().max()), 1e-7 * largest)
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=atol, msg=name)


def test_packed_through_eager_attention():
    loss, rows = Loss(LossSpec()), random_rows()
    assert_close(
        run_step(make("qwen3"), rows, MicroBatches(), loss),
        run_step(make("qwen3", "eager"), rows, PACKED, loss),
    )


def varlen_attention(module, q, k, v, mask, scaling, cu_seq_lens_q=None, max_length_q=None, **_):
    """Attention like flash attention's varlen kernels: row bounds in `cu_seq_lens_q`, no mask."""
    if cu_seq_lens_q is None:  # the check of the LM head, which has a single row
        cu_seq_lens_q, max_length_q = torch.tensor([0, q.shape[2]]), q.shape[2]
    assert mask is None
    assert max_length_q == int(cu_seq_lens_q.diff().max())
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (q, k, v)), is_causal=True, scale=scaling
        )
        for a, b in itertools.pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def test_packed_through_varlen_attention():
    AttentionInterface.register("varlen_attention", varlen_attention)
    AttentionMaskInterface.register("varlen_attention", flash_attention_mask)
    loss, rows = Loss(LossSpec()), random_rows(mixed=True)
    assert_close(
        run_step(make("qwen2"), rows, MicroBatches(), loss),
        run_step(make("qwen2", "varlen_attention"), rows, PACKED, loss),
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_row_by_row_equals_padded(kind, checkpointing, monkeypatch):
    """No attention call spans more than one row."""
    lengths, rows = [], random_rows(mixed=True)
    padded = run_step(make(kind), rows, MicroBatches(), Loss(LossSpec(kl_coef=0.1)))
    model = make(kind)
    attend = row_attention.sdpa_attention_forward

    def recording_attention(module, query, *rest, **keywords):
        lengths.append(query.shape[2])
        return attend(module, query, *rest, **keywords)

    monkeypatch.setattr(row_attention, "sdpa_attention_forward", recording_attention)
    if not row_attention.enable_row_attention(model):
        assert kind == "gemma2"  # only eager attention supports its soft-capped scores
        return
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert supports_packing(model)
    lengths.clear()
    assert_close(
        padded,
        run_step(model.train(), rows, PACKED, Loss(LossSpec(kl_coef=0.1))),
    )
    assert max(lengths) == max(len(r.ids) for r in rows)
    assert len(lengths) >= 2 * len(rows)
    for packing in (None, False):
        assert _micro_batches(
            load(TrainConfig, {"max_tokens_per_micro_batch": 24, "packing": packing}), model
        ).packed is (packing is None)


def test_masks_are_back_after_a_packed_forward():
    model, rows = make("mistral").eval(), random_rows()
    padded, packed = collate(rows, 0), collate(rows, 0, packed=True)
    inputs = {k: padded.model_inputs[k] for k in ("input_ids", "attention_mask")}
    expected = model(**inputs).logits
    assert row_attention.enable_row_attention(model)
    assert torch.equal(model(**inputs).logits, expected)
    run_head(model, **packed.model_inputs).logprobs(packed.targets)
    assert torch.equal(model(**inputs).logits, expected)


def test_models_with_a_convolution_are_packed_only_in_float32():
    """In lower precision, rounding could hide what a convolution leaks. Dropout is switched off."""
    model = make("qwen2", attention_dropout=0.5)
    model.train().model.norm.eval()
    assert supports_packing(model)
    assert supports_packing(model.bfloat16())
    modes = [module.training for module in model.modules()]
    model.unused = torch.nn.Conv1d(1, 1, 1)
    assert not supports_packing(model)
    assert supports_packing(model.float())
    model.autocast = torch.bfloat16
    assert not supports_packing(model)
    assert modes == [module.training for module in model.modules()][:-1]
    assert model.model.training
    assert not model.model.norm.training


class Leaky(torch.nn.Module):
    """Its logits are sums over all earlier tokens, also those of other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 8)

    def forward(self, input_ids, until_head, **_):
        return 0.05 * self.embedding(input_ids).cumsum(1), None, None


def test_small_leaks_between_rows_are_noticed_in_any_precision():
    assert not supports_packing(Leaky())
    assert not supports_packing(Leaky().bfloat16())


@pytest.mark.parametrize("micro", [MicroBatches(), PACKED])
def test_log_probs_of_another_engine_reach_the_loss(micro):
    """Equal log-probs change nothing; too different ones mask every rollout."""
    model, rows = make("qwen2"), random_rows()
    assert any(row.start == 0 and not row.is_demo for row in rows)
    expected, old, grads = run_step(model, rows, micro, Loss(LossSpec()))
    loss, losses = Loss(LossSpec(correction="sequence_mask", correction_max=3.0)), []
    for gap in (0.0, 5.0):
        result = run_step(
            model,
            [
                row if row.is_demo else row._replace(engine_logps=logps(row, x - gap))
                for row, x in zip(rows, old, strict=True)
            ],
            micro,
            loss,
        )
        losses.append(result[0].losses)
        if gap == 0:
            assert_close((expected, old, grads), result)
    assert losses[1].rollout == 0
    assert losses[1].demo == losses[0].demo


def logps(row: Row, values: torch.Tensor) -> tuple[float, ...]:
    """Log-probs of all response tokens, unknown for a row's first token."""
    return (math.nan,) * (row.loss_tokens - len(values)) + tuple(values.tolist())


@pytest.mark.parametrize("kind", ["mamba", "roberta"])
def test_model_that_cannot_separate_rows_is_padded_with_a_warning(kind, caplog):
    """The state of the first carries over from row to row; the second numbers positions from 2."""
    model = make(kind, is_decoder=True)
    row_attention.enable_row_attention(model)
    assert not supports_packing(model)
    with caplog.at_level(logging.WARNING):
        assert _micro_batches(
            load(TrainConfig, {"max_tokens_per_micro_batch": 64, "packing": True}), model
        ) == MicroBatches(tokens=64, packed=False)
    assert caplog.text.count("packing=true: this model does not keep packed rows separate") == 1


def test_a_model_that_drops_row_bounds_packs_with_the_mask_of_sdpa():
    model = make("qwen2")
    for layer in model.model.layers:

        def attend(*args, cu_seq_lens_q=None, attend=layer.self_attn.forward, **keywords):
            return attend(*args, **keywords)

        layer.self_attn.forward = attend
    assert row_attention.enable_row_attention(model)
    assert not supports_packing(model)
    assert _micro_batches(
        load(TrainConfig, {"max_tokens_per_micro_batch": 64, "packing": True}), model
    ).packed
    assert supports_packing(model)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("unit", [1, 2])
def test_micro_batches_hold_every_row_once_within_the_budget(packed, unit):
    rows = random_rows(40, seed=3)
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
        assert len(parts) == -(-sum(loads) // budget)
        assert max(loads) - min(loads) <= 3
    assert MicroBatches(tokens=budget, packed=packed, unit=unit).split([]) == []


@pytest.mark.parametrize("method", ["gac", "luffy", "dpo", "asft"])
def test_packed_run_matches_padded_run(task, tmp_path, method):
    """Compare every metric over two training steps."""
    changes = {"method": method, "steps": 2, "eval": {}, "demo_batch_size": 6}
    train(tiny_config(task, tmp_path / "padded", **changes))
    packed = Trainer(
        tiny_config(task, tmp_path / "packed", **changes, max_tokens_per_micro_batch=80)
    )
    assert packed.gradients.forward.micro.packed
    packed.run()
    rows = list(zip(metrics(tmp_path / "padded"), metrics(tmp_path / "packed"), strict=True))
    assert len(rows) == 2
    for expected, row in rows:
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=2e-4, abs=1e-5)
            assert row[key] == value, key


@pytest.mark.parametrize("tokens", [None, 80])
def test_kl_sample_of_all_rows_matches_the_moments(task, tmp_path, tokens):
    """A smaller sample averages over its own rows, which change from step to step."""
    runs = []
    for kl_sample_size in (None, 16, 3):  # None: all, with the forward passes of the loss
        out = tmp_path / str(kl_sample_size)
        train(
            tiny_config(
                task,
                out,
                max_tokens_per_micro_batch=tokens,
                monitor_kl_every=1,
                kl_sample_size=kl_sample_size,
                steps=3,
                eval={},
                optim={"lr": 0.05, "warmup_steps": 1, "max_grad_norm": 0},
            )
        )
        runs.append(metrics(out))
    for moments, all_rows, sample in zip(*runs, strict=True):
        assert all_rows["kl"] == pytest.approx(moments["kl"], rel=1e-4, abs=1e-7)
        for key in ("grad_norm", "rollout_loss", "sft_variance", "entropy"):
            assert sample[key] == pytest.approx(moments[key], rel=1e-3, abs=1e-6), key
    assert moments["kl"] > 1e-3
    assert sample["kl"] > 0
    assert sample["kl"] != moments["kl"]


@pytest.mark.parametrize("error", [TypeError, ValueError, NotImplementedError, KeyError])
def test_a_forward_without_row_bounds_is_not_packed(error):
    class Refuses(Leaky):
        def forward(self, **_):
            raise error

    model = Refuses()
    with pytest.raises(KeyError) if error is KeyError else contextlib.nullcontext():
        assert not supports_packing(model)
    assert model.training
