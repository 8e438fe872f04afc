"""What the adapters for other trainers share: demonstrations, steps, checkpoints."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gac import Mixer
from gac.control.signals import ProxySignals
from gac.demo.task import make_tokenizer
from gac.integrations.demonstrations import (
    check_columns,
    demo_norm,
    encode,
    read,
    row_of,
    tokenized,
)
from gac.integrations.hf_trainer import StepMixin
from gac.methods import GAC, METHODS, Constant
from gac.mixer import rollout_moments
from gac.rows import Row
from gac_kernels import LossSpec, TokenMoments
from tests.integrations.test_mixer import moments

PAIR = {"prompt": "1+2=", "completion": "3"}


# --- Mixer


def test_observations_are_copied_and_losses_detached() -> None:
    mixer = Mixer(Constant(mu=0.25), rows=4, batch=6)
    given = moments(0, demo=True)
    kept = given.totals.clone()
    kept[2] = given.totals[2] = math.nan  # the KL of a batch without rollouts
    mixer.observe(given)
    torch.testing.assert_close(given.totals, kept, equal_nan=True)
    for weigh in (mixer.weight_rollout_loss, mixer.weight_demo_loss):
        weigh(torch.ones((), requires_grad=True))
    kept_losses = [*mixer._rollout_losses, *mixer._demo_losses]
    assert [loss.requires_grad for loss in kept_losses] == [False, False]
    mixer.load_state_dict(mixer.state_dict())  # forgets what an interrupted step has observed
    with pytest.raises(RuntimeError, match=r"call observe\(\)"):
        mixer.close()


def test_steps_trim_as_the_method_asks() -> None:
    logged = []
    for trim in (0.1, 0.0):
        mixer = Mixer(GAC(signals=ProxySignals(trim)), rows=9, batch=20)
        mixer.observe(moments(0, demo=True, rows=20))
        logged.append(mixer.close()["sft_variance"])
    signals = moments(0, demo=True, rows=20).signals
    assert logged == [signals(0.1).sft_variance, signals(0.0).sft_variance] != logged[::-1]


def test_alarms_read_the_unweighted_losses_of_the_demonstrations() -> None:
    mixer = Mixer(METHODS["guarded"](), rows=4, batch=6)
    for loss in [0.4, 0.35] * 6 + [4.0] * 2:
        assert mixer.mu == 0.4
        mixer.weight_demo_loss(torch.tensor(0.1))
        seen = moments(0, demo=True)
        mixer.observe(replace(seen, demo_nll=torch.full_like(seen.demo_nll, loss)))
        mixer.observe(moments(0, demo=False, entropy=2.5))
        assert mixer.close()["entropy"] == pytest.approx(2.5)
    assert mixer.mu == 0


def test_a_method_that_mixes_nothing_is_refused() -> None:
    for name, kind in (("sft", "demonstrations"), ("grpo", "rollouts")):
        with pytest.raises(ValueError, match=f"controller={name} trains on only {kind}"):
            Mixer(METHODS[name](), rows=4, batch=6)


# --- demonstrations


def test_a_tool_call_needs_no_content() -> None:
    words = make_tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m.content or m.tool_calls[0] }}{% endfor %}"
        "{{ '=' if add_generation_prompt }}{{ lead }}"
    )
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": ["=23"]},
    ]
    encoded = encode({"messages": turns}, "row", words)
    assert words.decode(encoded["ids"]) == "1=23<eos>"  # the template writes no end
    assert encoded["start"] == 2
    with pytest.raises(ValueError, match=r"row: the completion .* has no tokens; remove"):
        encode({"messages": [*turns[:1], turns[1] | {"tool_calls": ["="]}]}, "row", words)


def test_columns_and_rows_of_a_data_set_are_checked() -> None:
    words = make_tokenizer()
    for columns in (["messages", "id"], ["id", "completion", "prompt"]):
        check_columns("x", columns)
    for columns in (["prompt"], ["completion"], ["message"]):
        with pytest.raises(ValueError, match=r"x has the columns \['[a-z]*'\]: expected prompt"):
            check_columns("x", columns)
    data_set = pytest.importorskip("datasets").Dataset.from_list
    rows = tokenized(data_set([PAIR | {"id": 7}, PAIR]), "x", words)
    assert rows.column_names == ["ids", "start"]
    assert rows[1] == encode(PAIR, "", words)
    for wrong, message in (
        ({"completion": "", "environment": "a"}, "the completion '' is"),
        ({}, "environment=None: use one of \\['a'"),
    ):
        with pytest.raises(ValueError, match=rf"^x\[1\]: {message}"):
            tokenized(
                data_set([PAIR | {"environment": "a"}, PAIR | wrong]),
                "x",
                words,
                env_tools={"a": []},
            )


def test_demonstrations_are_read_from_files_and_folders(tmp_path: Path) -> None:
    data = pytest.importorskip("datasets").Dataset.from_list([PAIR, PAIR | {"prompt": "2+2="}])
    data.to_json(tmp_path / "a.jsonl")
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "a.jsonl.d")
    for name in ("a.jsonl", "a.parquet", "a.jsonl.d"):
        assert read(str(tmp_path / name)).to_list() == data.to_list()
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a.csv': use a .jsonl or .parquet file, or a saved"):
        read(str(tmp_path / "a.csv"))
    with pytest.raises(FileNotFoundError, match=r"demo_path='.*b.jsonl' does not exist"):
        read(str(tmp_path / "b.jsonl"))


def test_rows_and_divisors() -> None:
    rows = [row_of({"ids": [3, 4, 5, 6][:n], "start": 1}) for n in (4, 3, 2, 1, 4)]
    assert rows[1] == Row((3, 4, 5), 1, is_demo=True, advantage=1.0)
    assert demo_norm(rows, LossSpec(demo_reduction="token"), 2) == (3 + 2 + 1 + 0 + 3) / 2
    assert demo_norm(rows, LossSpec(demo_reduction="sequence"), 3) == 4 / 3


# --- statistics of rollouts


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_statistics_of_scored_rollouts(shape: tuple[int, ...]) -> None:
    """Two rollouts of 2 and 1 tokens; masked tokens do not count."""
    logps = torch.tensor([[0.5, 0.25, 0.9], [0.8, 0.1, 0.2]]).log().requires_grad_()
    mask = torch.tensor([[1, 2, 0], [0, 1, 0]])
    advantages = torch.tensor([1.0, -3.0], dtype=torch.float64)
    advantages = (advantages[:, None] if len(shape) == 2 else advantages).expand(shape)
    entropy = torch.tensor([[1.0, 2.0, 50.0], [60.0, 6.0, 70.0]]).requires_grad_()
    ref = logps.detach() - torch.tensor([[0.0, 1.0, 9.0], [9.0, 2.0, 9.0]])
    out = rollout_moments(logps, mask, advantages, entropy=entropy, ref_logps=ref)
    assert not any(x.requires_grad for x in (out.rollouts, out.demo_nll, out.totals))
    phi = torch.tensor([0.25, 0.1875, 0.09])
    mean = (0.21875 + 0.09) / 2
    squares = (((phi - mean) ** 2) * torch.tensor([0.5, 0.5, 1.0])).sum().item()
    count, s, r, ss, rr, _, between = out.rollouts.tolist()
    assert (count, r, rr, between) == (2, -1, 8, 8)
    assert (s, ss) == pytest.approx((mean, squares))
    kl = sum(math.exp(-gap) + gap - 1 for gap in (0, 1, 2))
    assert out.totals[[0, 1, 2, 4]].tolist() == pytest.approx([3, 0, kl, 9])
    assert rollout_moments(logps, mask, advantages).totals[[2, 4]].isnan().all()


# --- a trainer's steps


class Host:
    """The parts of transformers' Trainer that a mixin uses."""

    def __init__(self, rank: int = 0, ranks: int = 1, micro_batches: int = 1) -> None:
        self.accelerator = SimpleNamespace(
            num_processes=ranks, process_index=rank, sync_gradients=False
        )
        self.current_gradient_accumulation_steps = micro_batches
        self.done: list[Any] = []

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.done.append(("saved", trial))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.done.append(("loaded", checkpoint))

    def _get_output_dir(self, trial: Any) -> str:
        return f"out/{trial}"

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        return (*args, keywords)


class Stepper(StepMixin, Host):
    """A trainer on a fake host."""


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "rows", "without"), [(1, 3, 5, 0), (2, 2, 7, 0), (2, 3, 2, 2)]
)
def test_micro_batches_share_the_demonstrations(
    ranks: int, micro_batches: int, rows: int, without: int
) -> None:
    """Every demonstration is in one micro-batch of one rank; all ranks have the same number."""
    logged, shares = [], []
    for rank in range(ranks):
        stepper = Stepper(rank, ranks, micro_batches)
        stepper._metrics = {"train": {"gac/mu": []}}
        draw, close = iter([list(range(rows)), [-1]]), iter([{"mu": 0.5}])
        stepper.mixer = SimpleNamespace(draw=draw.__next__, close=close.__next__, final=rank == 1)
        stepper.control = SimpleNamespace(should_training_stop=False)
        for micro_batch in range(micro_batches):
            stepper.accelerator.sync_gradients = micro_batch == micro_batches - 1
            stepper.begin_step(lambda indices: [f"row {i}" for i in indices])
            shares.append(stepper.local_demos())
            stepper.end_micro_batch()
        logged.append(stepper._metrics["train"]["gac/mu"])
        assert stepper.control.should_training_stop == (rank == 1)
        stepper.begin_step(list)
        assert stepper.local_demos() == ([-1] if rank == 0 else [])  # a new step
    assert logged == [[0.5]] * ranks
    given = [row for share in shares if share is not None for row in share]
    assert sorted(given) == [f"row {i}" for i in range(rows)]
    assert sum(share is None for share in shares) == ranks * without
    by_micro_batch = [shares[i::micro_batches] for i in range(micro_batches)]
    assert all(len({share is None for share in part}) == 1 for part in by_micro_batch)
    assert max(map(len, map(list, filter(None, shares)))) <= -(-rows // (ranks * micro_batches))


def test_only_scores_with_gradients_are_observed() -> None:
    stepper, observed = Stepper(), []
    stepper.mixer = SimpleNamespace(observe=observed.append)
    logps, entropy = torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, 5.0]])
    score = functools.partial(stepper._get_per_token_logps_and_entropies, logps)
    assert score(entropy, "more", a=1) == (logps, entropy, "more", {"a": 1})
    with torch.no_grad():
        score(None)  # of the reference
    mask, advantages = torch.tensor([[1, 0]]), torch.tensor([2.0])
    stepper.observe_rollouts(mask, advantages, logps - 1)
    (out,) = observed
    assert isinstance(out, TokenMoments)
    assert out.rollouts[2] == 2
    assert out.totals[[0, 2, 4]].tolist() == pytest.approx([1, math.exp(-1), 3])
    with pytest.raises(AssertionError):  # scored once, observed once
        stepper.observe_rollouts(mask, advantages, None)


@pytest.mark.parametrize("should_save", [True, False])
def test_checkpoints_include_the_mixer(should_save: bool) -> None:
    stepper = Stepper()
    done = stepper.done
    stepper.args = SimpleNamespace(should_save=should_save)
    stepper.state = SimpleNamespace(global_step=7)
    stepper.mixer = SimpleNamespace(
        save=lambda folder: done.append(("mixer", folder)),
        load=lambda folder: done.append(("mixer", folder)),
    )
    stepper._save_checkpoint(torch.nn.Linear(1, 1), "trial")
    both = [("saved", "trial"), ("mixer", Path("out/trial/checkpoint-7"))]
    assert done == both[: 1 + should_save]
    done.clear()
    stepper._load_optimizer_and_scheduler(None)
    stepper._load_optimizer_and_scheduler("a")
    stepper.args.resume_only_model = True
    stepper._load_optimizer_and_scheduler("b")
    assert done == [("loaded", None), ("loaded", "a"), ("mixer", "a"), ("loaded", "b")]
