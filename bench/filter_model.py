"""A realistic distribution over a large vocabulary: a small model of Python's standard library.

Only the recipe is stored. A byte-pair tokenizer with 32,000 tokens and a transformer with 256
hidden units are trained in less than three minutes on one core. What the benchmarks need of them is
kept in a cache folder.
"""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from .settings import tiny

VOCAB, HIDDEN, LAYERS, LENGTH = tiny(32_000, 600), tiny(256, 16), tiny(3, 1), tiny(128, 8)
STEPS, SEQUENCES, NEGATIVES = tiny(100, 2), 16, tiny(2048, 64)
# the texts are few enough to be seen about three times, so that the model is sure of some tokens
TOKENS = tiny(60_000, 2_000)
ROWS = tiny(4096, 64)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gac-bench"


class Text(NamedTuple):
    """The head's input and weight; the logits are hidden @ weight.T."""

    hidden: Tensor  # [ROWS, HIDDEN + 1]
    weight: Tensor  # [VOCAB, HIDDEN + 1]
    targets: Tensor  # [ROWS], the next token of the text


def text() -> Text:
    """A part of the training text, from the cache folder if it is there."""
    path = CACHE / f"filter-{VOCAB}-{HIDDEN}.pt"
    if not path.exists():
        ids = tokenize(sources())
        model, weight = train(ids)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(tuple(rows(model, weight, ids)), partial)
        partial.replace(path)
    return Text(*torch.load(path))


def sources() -> list[str]:
    """Half of the standard library's modules, without tests."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    skipped = {"site-packages", "test", "tests", "lib2to3"}
    kept = [x for x in files if not skipped & set(x.parts)]
    return [x.read_text("utf-8", errors="replace") for x in kept[::2]]


def tokenize(texts: list[str]) -> Tensor:
    """The token ids of the first texts, with a vocabulary trained on all of them."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text).ids
        if len(ids) > TOKENS:
            break
    return torch.tensor(ids[:TOKENS])


def train(ids: Tensor) -> tuple[transformers.LlamaModel, Tensor]:
    """Train with a sampled softmax: returns the model and the weight [V, H + 1] of its head.

    The last column is the prior, the log frequency of each token; its hidden entry is 1.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    model = transformers.LlamaModel(config)
    weight = torch.nn.Parameter(0.02 * torch.randn(VOCAB, HIDDEN))
    prior = (ids.bincount(minlength=VOCAB) + 0.1).div(len(ids)).log()
    parameters = [*model.parameters(), weight]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH, (SEQUENCES, 1))
        batch = ids[starts + torch.arange(LENGTH + 1)]
        rows = model(batch[:, :-1]).last_hidden_state.flatten(0, 1)
        # the sum over the vocabulary: the batch's targets exactly, the others from a sample
        seen, targets = batch[:, 1:].unique(return_inverse=True)
        others = torch.ones(VOCAB).index_fill_(0, seen, 0).nonzero()[:, 0]
        sample = others[torch.randint(len(others), (NEGATIVES,))]
        columns = torch.cat([seen, sample])
        logits = F.linear(rows, weight[columns], prior[columns])
        logits[:, len(seen) :] += math.log(len(others) / NEGATIVES)
        loss = F.cross_entropy(logits, targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, torch.cat([weight.detach(), prior[:, None]], 1)


@torch.no_grad()
def rows(model: transformers.LlamaModel, weight: Tensor, ids: Tensor) -> Text:
    """The last rows of the text."""
    ids = ids[-ROWS - 1 :]
    hidden = model(ids[:-1].view(-1, LENGTH)).last_hidden_state.flatten(0, 1)
    return Text(torch.cat([hidden, torch.ones(ROWS, 1)], 1), weight, ids[1:])
