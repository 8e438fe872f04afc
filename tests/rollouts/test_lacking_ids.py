"""Ids that the tokenizer lacks are never sampled."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gac.config import load
from gac.demo.task import make_tokenizer
from gac.errors import RunError
from gac.rollouts.engines import Engine
from gac.rollouts.generation import generate, lacking_ids
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer
from tests.tiny import tiny_config

PROMPTS = [(4, 5, 6), (7,) * 9, (5, 6)]
PAGES = {"max_batch_tokens": 32, "num_blocks": 64, "block_size": 8}
HEAD, KNOWN = 64, 18  # ids of the head and of the tokenizer


@pytest.fixture(scope="module")
def model(two_layers: Path) -> Any:
    """A model whose head has more ids than the tokenizer, and likes those best."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(two_layers / "init")
    config.vocab_size, config.tie_word_embeddings = HEAD, False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return model.eval()


def engine(tokenizer: Any, **rollouts: Any) -> Engine:
    settings = {"num_generations": 2, "max_completion_length": 8, **rollouts}
    return Engine(load(TrainConfig, {"rollouts": settings}).rollouts, tokenizer)


def tokenizer_with_gap() -> PreTrainedTokenizerFast:
    """A tokenizer whose last token has the id 40; the ids 18 to 39 have none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = make_tokenizer()
    vocabulary = {**known.get_vocab(), "z": 40}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


@pytest.mark.parametrize("rollouts", [{}, {"engine": "paged", "paged": PAGES}])
@pytest.mark.parametrize("gap", [False, True])
def test_no_engine_samples_them(model: Any, rollouts: dict[str, Any], gap: bool) -> None:
    tokenizer = tokenizer_with_gap() if gap else make_tokenizer()
    known = {*tokenizer.get_vocab().values()}
    assert known == {*range(KNOWN)} | ({40} if gap else set())
    sampler = engine(tokenizer, **rollouts).load(model)
    torch.manual_seed(0)
    for temperature in (1.0, 5.0):
        completions = sampler.generate(PROMPTS, 20, temperature=temperature)
        sampled = {token for completion in completions for token in completion}
        assert sampled <= known
        assert sampled > known - {tokenizer.pad_token_id} or len(sampled) > 15


def test_greedy_evaluation_does_not_choose_them(model: Any) -> None:
    tokenizer = make_tokenizer()
    liked = copy.deepcopy(model)
    with torch.no_grad():  # the head's largest rows are those of ids without a token
        liked.get_output_embeddings().weight[KNOWN:] *= 30
    (completion,) = generate(
        liked, tokenizer, PROMPTS[:1], max_completion_length=8, temperature=0.0
    )
    assert max(completion) < KNOWN
    # the best of the tokens
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert completion[0] == int(logits[:KNOWN].argmax())


def test_samples_follow_the_remaining_probabilities(model: Any) -> None:
    """Total variation distance between 2000 first tokens and the softmax over the tokens."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    options = {"max_completion_length": 1, "temperature": 0.5, "num_generations": 2000}
    first = [x[0] for x in generate(model, tokenizer, PROMPTS[:1], **options)]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    expected = (logits[:KNOWN] / 0.5).softmax(-1)
    counts = torch.bincount(torch.tensor(first), minlength=KNOWN) / len(first)
    assert float((counts - expected).abs().sum()) / 2 < 0.05


def test_a_head_of_the_tokenizers_size_is_not_masked(model: Any) -> None:
    tokenizer = make_tokenizer()
    assert lacking_ids(tokenizer, KNOWN) == ()
    assert lacking_ids(tokenizer, KNOWN + 2) == (KNOWN, KNOWN + 1)
    tokenizer.add_tokens(["new"])
    assert lacking_ids(tokenizer, KNOWN + 2) == (KNOWN + 1,)


def test_a_large_probability_is_a_warning(model: Any, caplog: Any) -> None:
    settings = {"max_completion_length": 2, "temperature": 1.0}
    for scale, warned in ((1e-3, True), (1.0, False)):
        caplog.clear()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_output_embeddings().weight *= scale
            if not warned:  # one token has nearly all of the probability
                hidden = other.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
                other.get_output_embeddings().weight[5] = 1e3 * hidden / hidden.norm()
        with caplog.at_level(logging.WARNING, logger="gac"):
            for prompt in PROMPTS[:2]:  # once, although their probabilities differ
                generate(other, make_tokenizer(), [prompt], **settings)
        texts = [r.message for r in caplog.records if "lacks" in r.message]
        assert len(texts) == warned
        if warned:
            assert (
                "46 ids that the tokenizer lacks, with a total probability of up to 0.72"
                in texts[0]
            )


def test_a_run_counts_only_tokens(two_layers: Path, tmp_path: Path) -> None:
    """Training of a model with such a head: the log-probs are those of the whole head."""
    from transformers import AutoConfig

    folder = tmp_path / "init"
    make_tokenizer().save_pretrained(folder)
    config = AutoConfig.from_pretrained(two_layers / "init")
    config.vocab_size = HEAD
    config.save_pretrained(folder)
    model = {"path": str(folder), "random_init": True}
    trainer = Trainer(
        tiny_config(two_layers, tmp_path / "run", steps=1, method="grpo", model=model)
    )
    trainer.run()
    rows = trainer.rollouts.rows
    assert {token for row in rows for token in row.ids} <= {*range(KNOWN)}
    logps = trainer.gradients.forward.row_logprobs(rows[:1])[0]
    with torch.no_grad():
        logits = trainer.model(torch.tensor([rows[0].ids])).logits[0, rows[0].start - 1 : -1]
    whole = logits.log_softmax(-1).gather(-1, torch.tensor(rows[0].ids[rows[0].start :])[:, None])
    assert logits.shape[-1] == HEAD
    assert torch.allclose(logps, whole[:, 0], atol=1e-5)


def test_a_server_is_asked_not_to_sample_them(tmp_path: Path, model: Any) -> None:
    pytest.importorskip("trl.generation.vllm_client", reason="needs the extra `vllm`")
    from tests.rollouts.model_server import serving

    model.config.save_pretrained(tmp_path / "init")
    with serving(tmp_path / "init") as server:
        rollouts = {"engine": "vllm", "vllm": {"urls": [server.url], "timeout": 30}}
        settings = {"num_generations": 2, "max_completion_length": 5, **rollouts}
        config = load(TrainConfig, {"rollouts": settings}).rollouts
        served = str(tmp_path / "init")
        sampler = Engine(config, make_tokenizer(), served=served, longest=20, folder=tmp_path)
        sampler.load(model)
        torch.manual_seed(0)
        completions = sampler.generate(PROMPTS, 8)
        assert {token for completion in completions for token in completion} <= {*range(KNOWN)}
        # the server's log-probs are the trainer's: those of the whole head
        completion = completions[0]
        with torch.no_grad():
            logps = model(torch.tensor([(*PROMPTS[0], *completion)])).logits.log_softmax(-1)
        expected = [float(logps[0, 2 + i, token]) for i, token in enumerate(completion)]
        assert completion.logps == pytest.approx(expected, abs=1e-4)
        # an equal bias of all ids excludes none, as a server that ignores it
        sampler._server.lacking = tuple(range(HEAD))
        with pytest.raises(RunError, match=r"sampled token \d+, which the tokenizer lacks"):
            sampler.generate(PROMPTS)
