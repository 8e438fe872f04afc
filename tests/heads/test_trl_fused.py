"""The fused head and the fused GRPO loss against TRL's own: values, gradients and metrics."""

from typing import Any
from unittest import mock

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.15")

from datasets import Dataset  # noqa: E402 - after the skip
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402 - after the skip
from trl import GRPOConfig, GRPOTrainer  # noqa: E402 - after the skip
from trl.trainer import utils  # noqa: E402 - after the skip

from gac_kernels import LossSpec  # noqa: E402 - after the skip
from gac_kernels.heads.trl import FusedGRPOTrainer, apply_fused_head  # noqa: E402 - after the skip
from gac_kernels.heads.trl.grpo import FusedLoss  # noqa: E402 - after the skip
from gac_kernels.heads.trl.head import HOOK, FusedLogProbs, HeadInputs  # noqa: E402 - after the skip
from tests.integrations import tiny  # noqa: E402 - after the skip

needs_own_head = pytest.mark.skipif(
    trl.__version__.startswith("1.15."), reason="the head of TRL 1.15 needs a GPU"
)
ROWS, PROMPT, LENGTH = 6, 5, 7
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    folder = tmp_path_factory.mktemp("trl")
    tiny.write_model(folder / "model")
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=ROWS,
        num_generations=2,
        max_completion_length=LENGTH,
        temperature=0.7,
        use_cpu=True,
        bf16=False,
        report_to="none",
        beta=0.1,
    )
    model = folder / "model"
    return FusedGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_list([{"prompt": "1+1="}] * ROWS),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def make_inputs(trainer: GRPOTrainer, off_policy: bool) -> dict[str, Any]:
    """Rollouts with padding, an empty completion and a masked tool token."""
    draw = torch.Generator().manual_seed(0)
    vocab = trainer.model.config.vocab_size
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 3, 0, 5, 1, 6])[:, None]).long()
    tool_mask = mask.clone()
    tool_mask[0, 2] = 0
    inputs = {
        "prompt_ids": torch.randint(1, vocab, (ROWS, PROMPT), generator=draw),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(1, vocab, (ROWS, LENGTH), generator=draw),
        "completion_mask": mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 3.0]),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": 0.5 + torch.rand(ROWS, LENGTH, generator=draw),
    }
    with torch.no_grad():
        logps = score(trainer, inputs)
    noise = torch.randn(2, ROWS, LENGTH, generator=draw)
    inputs["ref_per_token_logps"] = logps + 0.3 * noise[0]
    if off_policy:
        inputs["old_per_token_logps"] = logps + 0.4 * noise[1]
    return inputs


def score(trainer: GRPOTrainer, inputs: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, LENGTH)[0]


def step(trainer: GRPOTrainer, kind: type, inputs: dict[str, Any]) -> dict[str, Any]:
    """Loss, metrics and gradients of one micro-batch computed by the class `kind`."""
    trainer.__class__ = kind
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    gradients = {
        n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None
    }
    return {"loss": loss.item(), "metrics": metrics, "gradients": gradients}


def check_equal(trainer: GRPOTrainer, inputs: dict[str, Any]) -> None:
    """Compare with TRL's own step, if TRL's head passes all positions, or, as on a GPU, some."""
    expected = step(trainer, GRPOTrainer, inputs)
    for compact in (False, True):  # TRL 1.15 passes the labeled ones on every device
        on_gpu = {"_use_triton": lambda device, value=compact: value}
        with mock.patch.multiple(utils, create=True, **on_gpu):
            compare(step(trainer, FusedGRPOTrainer, inputs), expected)


def compare(actual: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-4) -> None:
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    assert actual["metrics"].keys() == expected["metrics"].keys()
    for name, values in expected["metrics"].items():
        assert actual["metrics"][name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), (
            name
        )
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert (actual["gradients"][name] - gradient).norm() <= rtol * gradient.norm() + 1e-7, name


@pytest.fixture
def options(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set trainer attributes, and configuration fields after `args.`, for one test."""

    def set_options(**changes: Any) -> None:
        for name, value in changes.items():
            owner = trainer.args if name.startswith("args_") else trainer
            monkeypatch.setattr(owner, name.removeprefix("args_"), value, raising=False)

    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 3, raising=False)
    yield set_options
    trainer.__class__ = GRPOTrainer


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, option: str) -> None:
        raise AssertionError(f"fell back because of {option}")

    monkeypatch.setattr(FusedGRPOTrainer, "_report", fail)


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("loss_type", "high"), [("cispo", 1.0), ("cispo", 5.0), *((x, 0.28) for x in LOSS_TYPES)]
)
def test_loss_types(trainer, options, no_fallback, loss_type, high, level, off_policy):
    if loss_type == "vespo" and off_policy:
        pytest.skip("falls back: its weights depend on the current log-probs")
    options(
        loss_type=loss_type, importance_sampling_level=level, epsilon_low=0.2, epsilon_high=high
    )
    check_equal(trainer, make_inputs(trainer, off_policy))


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_options_of_the_clipped_losses(
    trainer, options, no_fallback, loss_type, delta, bias_correction
):
    options(loss_type=loss_type, args_delta=delta, args_use_bias_correction_kl=bias_correction)
    check_equal(trainer, make_inputs(trainer, off_policy=True))


def test_old_log_probs_of_masked_tokens_do_not_matter(trainer, options, no_fallback):
    options(loss_type="dapo")
    inputs = make_inputs(trainer, off_policy=True)
    trained = inputs["completion_mask"] * inputs["tool_mask"] == 1
    expected = step(trainer, FusedGRPOTrainer, inputs)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        inputs[name] = inputs[name].where(trained, -200.0)
    # a ratio of e^200 would give nan
    assert step(trainer, FusedGRPOTrainer, inputs)["loss"] == expected["loss"]


VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}
ENTROPY = {"_entropy_bonus_enabled": True, "entropy_coef": 0.05}
NO_TOKENS = torch.zeros(ROWS, LENGTH, dtype=torch.long)


@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        (VLLM, {}),
        (ENTROPY | {"loss_type": "dapo"}, {}),
        (ENTROPY | {"loss_type": "dapo", "beta": 0.0}, {}),
        (ENTROPY | {"loss_type": "dr_grpo", "beta": 0.0, **VLLM}, {}),
        (ENTROPY | {"loss_type": "bnpo"}, {}),
        (ENTROPY | {"loss_type": "dapo", "beta": 0.0}, {"completion_mask": NO_TOKENS}),
        ({}, {"advantages": torch.linspace(-1, 2, ROWS * LENGTH).view(ROWS, LENGTH)}),
        ({}, {"completion_mask": NO_TOKENS}),
        ({}, {"completion_mask": NO_TOKENS.index_fill(0, torch.tensor([1]), 1).tril(-1)}),
    ],
    ids=[
        "weights of vLLM",
        "entropy bonus and KL",
        "entropy bonus",
        "entropy bonus and weights",
        "entropy bonus per token",
        "entropy bonus without a token",
        "token advantages",
        "no token",
        "one token",
    ],
)
def test_further_options_and_inputs(trainer, options, no_fallback, changes, inputs):
    options(**changes)
    check_equal(trainer, make_inputs(trainer, off_policy=True) | inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.5},
        {"args_delta": 1.1, "epsilon_high": 0.28},
        {"loss_type": "vespo"},
    ],
    ids=lambda changes: next(iter(changes)).removeprefix("args_"),
)
def test_other_options_fall_back_and_are_reported_once(trainer, options, caplog, changes):
    options(_reported=(), **changes)
    inputs = make_inputs(trainer, off_policy=True)
    check_equal(trainer, inputs)
    step(trainer, FusedGRPOTrainer, inputs)
    option = next(iter(changes)).removeprefix("args_")
    assert len([r for r in caplog.records if option in r.getMessage()]) == 1


@pytest.mark.parametrize("taught", [False, True])
def test_the_fused_loss_accepts_labeled_tokens_only_or_all_positions(taught: bool):
    """TRL's head gets one or the other, depending on the device; with a teacher's K tokens, too."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 6, 7, generator=draw, requires_grad=True)  # 2 positions of the prompt
    weight, bias = torch.randn(11, 7, generator=draw), torch.linspace(-1, 1, 11)
    scored = torch.arange(4) < torch.tensor([[4], [1], [3]])
    targets = torch.randint(0, 11, (3, 4), generator=draw)
    tool = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]])
    per_token = torch.rand(2, 3, 4, generator=draw)
    keywords = {"advantages": torch.tensor([1.0, -1.0, 0.5]), "old_logps": -per_token[0]}
    keywords["weights"] = per_token[1]
    if taught:
        top = torch.randn(3, 4, 11, generator=draw).log_softmax(-1).topk(2)
        keywords |= {"teacher_logps": top.values, "teacher_ids": top.indices}
        keywords["spec"] = LossSpec(teacher_coef=0.5, teacher_loss="forward_kl")
    results = []
    for flat, labels in ((hidden.flatten(0, 1), None), (hidden[:, -4:][scored], targets[scored])):
        request = FusedLoss(targets, scored.long(), tool, keywords, positions=6)
        out = request(HeadInputs(flat, weight, bias, labels, 1.0, 3.0, 1.3))
        kept = [x if labels is not None else x.view(3, 6)[:, -4:][scored] for x in out[:2]]
        results.append((*kept, request.out.loss, *torch.autograd.grad(kept[0].sum(), hidden)))
        assert (request.out.teacher_loss is not None) == taught
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    truth = (3 * (1.3 * (hidden[:, -4:] @ weight.T + bias) / 3).tanh()).log_softmax(-1)[scored]
    truth = truth.gather(1, targets[scored][:, None])[:, 0] * tool[scored]  # 0: not trained
    torch.testing.assert_close(results[1][0], truth)
    assert results[0][3].norm() > 0


@needs_own_head
def test_fused_head_is_installed_once_and_removed():
    own = getattr(utils, HOOK)
    with apply_fused_head() as first:
        second = apply_fused_head()
        assert getattr(utils, HOOK) is FusedLogProbs
        second.undo()
        assert getattr(utils, HOOK) is own
        first.undo()
    assert getattr(utils, HOOK) is own


OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@needs_own_head
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_head_outputs_equal_those_of_trl(softcap, bias):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=draw) / 2 for n in (9, 33))
    hidden.requires_grad_()
    weight.requires_grad_()
    offset = torch.randn(33, generator=draw, requires_grad=True) if bias else None
    targets = torch.randint(0, 33, (9,), generator=draw)
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    results = []
    for function in (getattr(utils, HOOK), FusedLogProbs):
        out = function.apply(hidden, weight, offset, targets, 0.7, 32768, softcap, 1.3, OUTPUTS)
        upstream = torch.linspace(-1, 1, 9)
        gradients = torch.autograd.grad((out[0] + 0.3 * out[1]) @ upstream, leaves)
        results.append((out, gradients))
    (expected, expected_gradients), (actual, gradients) = results
    for name, a, b in zip(OUTPUTS, actual, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(gradients, expected_gradients)
    assert (
        FusedLogProbs.apply(hidden, weight, offset, targets, 1.0, 1, None, 1.0, ("log_probs",))[1:]
        == (None,) * 4
    )


@pytest.mark.parametrize("name", [HOOK, "add_fused_lm_head"])
def test_a_trl_without_the_hook_is_refused(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.delattr(utils, name)
    with pytest.raises(ImportError, match=r"trl==.*1\.15 or later"):
        apply_fused_head()
