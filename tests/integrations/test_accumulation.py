"""Micro-batches and ranks do not change the gradient of a step, in each trainer and adapter.

Two bugs of published trainers (arXiv 2604.23747) are applied on purpose and must be noticed.
Trainers that are not installed are stood in for by a loop over micro-batches that sums their
gradients and averages them over the ranks, or by transformers' Trainer where they extend it; the
tests that `tools.environments` runs check the same with the trainers themselves.
"""

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

pytest.importorskip("trl")

import gac.models.head
import gac_kernels.heads.transformers
import gac_kernels.heads.trl.grpo
from gac.demo.task import make_tokenizer
from gac.integrations.trl import GACTrainer
from gac.rollouts import engines
from gac.training.trainer import Trainer
from gac_kernels.heads import openrlhf, prime_rl, skyrl
from gac_kernels.heads import verl as verl_head
from gac_kernels.heads.trl import FusedGRPOTrainer
from tests import ranks as processes
from tests.heads import test_transformers as fused
from tests.integrations import plain, recording, stand_ins, tiny, trl_task
from tests.integrations import test_adapters_swift as swift_parts
from tests.integrations import test_adapters_trinity as trinity_parts
from tests.integrations import test_adapters_verl as verl_parts
from tests.parallel.test_distributed import fixed_responses, record_gradients
from tests.tiny import tiny_config, write_tiny

ROWS = 16
Gradient = dict[str, Tensor]


class Run(NamedTuple):
    """One optimizer step of a trainer."""

    trainer: Any  # or whatever has the attribute `model`
    train: Callable[[], object]
    gradients: list[Gradient]  # one, after `train`
    adapter: ModuleType = gac.models.head  # calls a loss of gac_kernels


def own_trainer(folder: Path, micro_batches: int, ranks: int, **budget: Any) -> Run:
    """`gac train`, with as many demonstrations as rollouts.

    budget: of tokens, for two micro-batches or more.
    """
    size = {"micro_batch_size": 2 * ROWS // (micro_batches * ranks)}
    if budget and micro_batches > 1:  # 40 tokens, or 10: less than most rows have
        size = {"max_tokens_per_micro_batch": 70 - 15 * micro_batches, **budget}
    changes = {**size, "demo_batch_size": ROWS, "loss": {"rollout_reduction": "token"}}
    trainer = Trainer(tiny_config(folder, folder / f"{ranks}-{micro_batches}-{size}", **changes))
    assert trainer.gradients.forward.micro.packed == (size.get("packing") is True)

    def train() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "generate", fixed_responses)
            trainer._train_step()

    return Run(trainer, train, record_gradients(trainer))


def transformers_trainer(kind: Any, folder: Path, micro_batches: int, ranks: int) -> Run:
    """A trainer of transformers with rows that have different numbers of labels."""
    options = {"gradient_accumulation_steps": micro_batches, "max_steps": 1, "max_grad_norm": 0.0}
    options |= {"rows": ROWS, "per_device_train_batch_size": ROWS // (micro_batches * ranks)}
    trainer = fused.make_trainer(fused.make("gemma2"), folder, kind, **options)
    trainer.add_callback(recorder := recording.GradientRecorder())
    return Run(trainer, trainer.train, recorder.gradients)


def axolotl(*arguments: Any) -> Run:
    """Axolotl trains with transformers' Trainer, on the model that the plugin has changed."""
    base = {"axolotl.integrations.base": {"BasePlugin": object}}
    with stand_ins.modules(base, "gac_kernels.heads.axolotl") as adapter:
        run = transformers_trainer(transformers.Trainer, *arguments)
        adapter.GACPlugin().post_model_load(None, run.trainer.model)
    return run


class SwiftHost(transformers.Trainer):
    """Stand-in for swift's GRPOTrainer, whose loss is a mean over sequences."""

    is_multimodal = overlong_filter = False
    template = swift_parts.TEMPLATE

    def train(self) -> None:
        self._metrics = {"train": defaultdict(list)}
        self.model_accepts_loss_kwargs = False  # as TRL sets it
        super().train()

    @property
    def chord_sft_dataset(self) -> list[dict[str, list[int]]]:
        return [{name: x.tolist() for name, x in row.items()} for row in self.train_dataset]

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        batch = SimpleNamespace(
            completion_mask=inputs["labels"][:, 1:] != -100,
            advantages=inputs["input_ids"].float().std(1) / 20 - 1,
            ref_per_token_logps=None,
        )
        return self._compute_loss_and_metrics(model, inputs, batch)[0]

    def _compute_loss_and_metrics(self, model: Any, inputs: Any, batch: Any) -> Any:
        logps, _ = self._get_per_token_logps_and_entropies(model, inputs["input_ids"])
        sums = (batch.advantages[:, None] * logps * batch.completion_mask).sum(1)
        return -(sums / batch.completion_mask.sum(1)).mean(), {}

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Tensor) -> Any:
        return plain.logprobs(model, ids, torch.ones_like(ids)), None


def swift(*arguments: Any) -> Run:
    host = swift_parts.CONTENTS | {"swift.rlhf_trainers": {"GRPOTrainer": SwiftHost}}
    with stand_ins.modules(host, "gac.integrations.swift") as adapter:
        run = transformers_trainer(adapter.GACGRPOTrainer, *arguments)
        size = run.trainer.args.per_device_train_batch_size
        run.trainer.args.chord_sft_per_device_train_batch_size = size
        run.trainer._prepare_chord_dataset()
    return run


def rollouts(rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's part of a step's rollouts, as GRPOTrainer prepares them."""
    draw = torch.Generator().manual_seed(0)
    prompts, completions = (torch.randint(3, 9, (ROWS, n), generator=draw) for n in (5, 6))
    mask = (torch.arange(6) < torch.randint(1, 7, (ROWS, 1), generator=draw)).long()
    tensors = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=draw),
        "is_expert": torch.arange(ROWS) % 3 == 0,
    }
    own = {name: x[rank::ranks] for name, x in tensors.items()}
    return own | {"num_items_in_batch": mask.sum()}


def trl(kind: Any, folder: Path, micro_batches: int, ranks: int) -> Run:
    """TRL's training loop, with given rollouts."""

    class GivenRollouts(kind):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            assert len(inputs) == ROWS // ranks
            return rollouts(self.accelerator.process_index, ranks)

    options = {
        "per_device_train_batch_size": ROWS // (micro_batches * ranks),
        "gradient_accumulation_steps": micro_batches,
        "num_generations": 2,
    }
    trainer, recorder = trl_task.make_trainer(folder / "model", folder, GivenRollouts, **options)
    return Run(trainer, trainer.train, recorder.gradients)


def summed(
    model: nn.Module, parts: Sequence[Any], loss: Callable[[Any], Tensor], ranks: int
) -> Run:
    """The loop of verl, Trinity and others: sums micro-batches and averages over the ranks."""
    gradients: list[Gradient] = []

    def train() -> None:
        for part in parts:
            loss(part).backward()
        gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        for x in gradient.values() if ranks > 1 else ():
            dist.all_reduce(x)
            x /= ranks
        gradients.append(gradient)

    return Run(SimpleNamespace(model=model), train, gradients)


def own_rows(micro_batches: int, ranks: int) -> tuple[dict[str, Tensor], list[slice]]:
    """This rank's rollouts, and its micro-batches."""
    rows = rollouts(int(os.environ.get("RANK", 0)), ranks)
    rows["ids"] = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    size = ROWS // (micro_batches * ranks)
    return rows, [slice(i, i + size) for i in range(0, ROWS // ranks, size)]


def trinity(folder: Path, micro_batches: int, ranks: int) -> Run:
    with stand_ins.modules(trinity_parts.CONTENTS, "gac.integrations.trinity") as adapter:
        loss = adapter.GACPolicyLoss(state_dir=str(folder), method="constant")
    rows, parts = own_rows(micro_batches, ranks)
    everyone = rollouts(0, 1)
    step = [
        SimpleNamespace(info={"is_expert": expert}, action_mask=mask, custom_fields=[])
        for expert, mask in zip(everyone["is_expert"], everyone["completion_mask"], strict=True)
    ]
    adapter.count_rows(step)
    model = fused.make("gemma2")

    def micro_batch(part: slice) -> Tensor:
        ids = rows["ids"][part]
        logps = plain.logprobs(model, ids, torch.ones_like(ids))[:, -6:]
        counts = {f"gac_{n}": torch.full((len(ids),), int(x)) for n, x in step[0].info.items()}
        return loss(
            logprob=logps,
            old_logprob=logps.detach(),
            ref_logprob=logps.detach(),
            action_mask=rows["completion_mask"][part],
            advantages=rows["advantages"][part, None].expand(-1, 6),
            expert_mask=rows["is_expert"][part],
            step=torch.ones(len(ids)),
            **counts,
        )[0]

    return summed(model, parts, micro_batch, ranks)._replace(adapter=adapter)


def verl(folder: Path, micro_batches: int, ranks: int) -> Run:
    """The pass over the demonstrations, 11 of different lengths."""
    with stand_ins.modules(verl_parts.CONTENTS, "gac.integrations.verl") as adapter:
        options = adapter.GACPolicyLoss(demo_path=str(folder / "adapter.jsonl"), demo_batch=11)
        engine = verl_parts.Engine(int(os.environ.get("RANK", 0)), ranks)
        mixture = adapter.TwoPassStep(engine, make_tokenizer(), options, None)
        size = -(-11 // (micro_batches * ranks))
        data = mixture.demo_data(verl_parts.Batch(micro_batch_size_per_gpu=size))
    names = ("input_ids", "loss_mask")
    rows = list(zip(*(data[name].unbind() for name in names), strict=True))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    model = fused.make("gemma2")

    def jagged(columns: Sequence[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(list(columns), layout=torch.jagged)

    def micro_batch(part: Any) -> Tensor:
        logps = [plain.logprobs(model, ids[None], torch.ones_like(ids[None])) for ids, _ in part]
        output = {"log_probs": jagged([nn.functional.pad(x[0], (0, 1)) for x in logps])}
        batch = dict(zip(names, map(jagged, zip(*part, strict=True)), strict=True))
        return mixture.demo_loss(output, batch)[0]

    return summed(model, parts, micro_batch, ranks)._replace(adapter=adapter)


HEADS: dict[str, Callable[..., Tensor]] = {
    "OpenRLHF": lambda x, head, y: openrlhf._log_probs(lazy(x, head), y, 0.7),
    "SkyRL": lambda x, head, y: skyrl._log_probs(lazy(x, head), y),
    "prime-rl": lambda x, head, y: prime_rl.FusedLogProbs.apply(
        x.flatten(0, 1), head.weight, y.flatten(), torch.full((y.numel(),), 0.7), 4
    )[0].view_as(y),
    "verl's head": lambda x, head, y: verl_head._linear_forward(head, x, head.weight, y, 0.7)[0],
}
"""Log-probs of labels y from hidden states x; the trainer divides by its own count of tokens."""


def lazy(hidden: Tensor, head: nn.Linear) -> Tensor:
    record = gac_kernels.heads.transformers.Record(((hidden, head, 1.0),), None)
    return gac_kernels.heads.transformers.LazyLogits(record)


def fused_head(head: Callable[..., Tensor], _: Path, micro_batches: int, ranks: int) -> Run:
    rows, parts = own_rows(micro_batches, ranks)
    model, weights = fused.make("llama"), rows["advantages"][:, None] * rows["completion_mask"]

    def micro_batch(part: slice) -> Tensor:
        hidden = model.model(rows["ids"][part]).last_hidden_state[:, 4:-1]
        logps = head(hidden, model.lm_head, rows["completion_ids"][part])
        return (weights[part] * logps).sum() * ranks / rows["num_items_in_batch"]

    return summed(model, parts, micro_batch, ranks)


TRAINERS: dict[str, Callable[..., Run]] = {
    "gac train": own_trainer,
    "gac train, padded": functools.partial(own_trainer, packing=False),
    "gac train, packed": functools.partial(own_trainer, packing=True),
    "FusedGRPOTrainer": functools.partial(trl, FusedGRPOTrainer),
    "GACTrainer": functools.partial(trl, GACTrainer),
    "Axolotl": axolotl,
    "ms-swift": swift,
    "Trinity-RFT": trinity,
    "verl": verl,
    **{name: functools.partial(fused_head, head) for name, head in HEADS.items()},
}


@contextlib.contextmanager
def only_the_last_micro_batch(run: Run, micro_batches: int) -> Iterator[None]:
    """DeepSpeed's optimizer with CPU offload: the other micro-batches' gradients are lost."""
    own = Tensor.backward

    def backward(self: Tensor, *arguments: Any, **keywords: Any) -> None:
        run.trainer.model.zero_grad()
        own(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", backward)
        yield


@contextlib.contextmanager
def mean_of_means(run: Run, micro_batches: int) -> Iterator[None]:
    """OpenRLHF: each micro-batch, or rank, is divided by its own count; results are averaged."""

    def own_counts(own: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*arguments: Any, **keywords: Any) -> Any:
            out = own(*arguments, **keywords | {"rollout_norm": None, "demo_norm": None})
            return out._replace(loss=out.loss / micro_batches)

        return loss

    with pytest.MonkeyPatch.context() as patch:
        for module in (gac_kernels.heads.transformers, gac_kernels.heads.trl.grpo, run.adapter):
            for name in {"fused_linear_gac_loss", "loss_from_logprobs"} & set(vars(module)):
                patch.setattr(module, name, own_counts(getattr(module, name)))
        yield


def gradients(names: Sequence[str], folder: Path, ranks: int) -> dict[Any, Gradient]:
    """This rank's gradients by trainer, bug ("" for none) and number of micro-batches."""
    if ranks > 1:
        dist.init_process_group("gloo")
    found = {}
    for name in names:
        bugs: list[Any] = [
            (None, 1),
            (None, 2),
            *[(None, 4)] * ("gac train" in name or "GAC" in name),
        ]
        bugs += [(only_the_last_micro_batch, 2)] * (ranks == 1)
        bugs += [(mean_of_means, 3 - ranks)] * (
            # heads do not divide by a count; with an old TRL, FusedGRPOTrainer has TRL's own loss
            name not in HEADS
            and not (name == "FusedGRPOTrainer" and gac_kernels.heads.trl.grpo.missing_hook())
        )
        for bug, count in bugs:
            run = TRAINERS[name](folder, count, ranks)
            with bug(run, count) if bug else contextlib.nullcontext():
                run.train()
            (found[name, bug.__name__ if bug else "", count],) = run.gradients
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("step"), demos=ROWS)
    tiny.write_model(folder / "model")
    tiny.write_demonstrations(folder / "adapter.jsonl")
    return folder


@pytest.fixture(scope="module")
def of_two_ranks(folder: Path) -> list[dict[Any, Gradient]]:
    return processes.run(gradients, [*TRAINERS], folder, 2, ranks=2)


@pytest.mark.parametrize("name", TRAINERS)
def test_micro_batches_and_ranks_do_not_change_the_gradient(
    name: str, folder: Path, of_two_ranks: list[dict[Any, Gradient]]
) -> None:
    alone = gradients([name], folder, 1)
    for found in (alone, *of_two_ranks):
        for (trainer, bug, count), gradient in found.items():
            if trainer == name:
                error = plain.relative_error(gradient, alone[name, "", 1])
                assert error > 0.01 if bug else error < 1e-5, (bug, count, error)
