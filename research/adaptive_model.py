"""Makes the runs of the study of adaptive mu affordable: few tokens, and frozen layers once.

Only the last layers have adapters. The layers before them compute the same for a row in every step
and in every run, and the arms of a seed read mostly the same rows, so their output is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gac.data import Example
from gac.models.head import run_head
from gac.models.sampling_mode import sampling_mode
from gac.rollouts.engines import Engine
from gac.rows import Row, collate
from gac.types import Rollout


def reduce_vocabulary(source: str, folder: Path, texts: Iterable[str]) -> None:
    """Write the model in `source` to `folder`, with no tokens but those of `texts` and EOS.

    What the model computes for these tokens does not change, except that the others have no
    probability. Of the words with several tokens, only those are read that consist of letters.

    Raises:
        ValueError: a text would be read as other tokens than by the model's own tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = list(texts)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    kept = sorted({tokenizer.eos_token_id, *(token for row in rows for token in row)})
    names = tokenizer.convert_ids_to_tokens(kept)
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    words.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([name for name in names if name in tokenizer.all_special_tokens])
    words.add_tokens([name for name in names if name.isalpha() and name.isascii()])
    end = tokenizer.eos_token
    reduced = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end)
    for text, row in zip(texts, rows, strict=True):
        if [kept[i] for i in reduced.encode(text, add_special_tokens=False)] != row:
            raise ValueError(f"text={text!r}: its tokens change")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weight = model.get_input_embeddings().weight.detach()[kept].clone()
    model.resize_token_embeddings(len(kept), mean_resizing=False)
    model.get_input_embeddings().weight.data = weight
    model.tie_weights()
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = reduced.eos_token_id
        config.bos_token_id = None
    model.save_pretrained(folder)
    reduced.save_pretrained(folder)


class Frozen(nn.Module):
    """Consecutive layers without trainable weights, in place of one layer; no cache of keys."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.known: dict[bytes, Tensor] = {}
        """Embeddings of a row -> its output, [T, H]."""
        self.continued: set[tuple[int, ...]] = set()
        """Prompts whose continuations with one digit are known."""
        self.needs_last = False
        """Whether the output at the last token of a row is used. In training it predicts nothing,
        so a row without its last token is enough; the missing output is 0."""

    def forward(self, hidden: Tensor, attention_mask: Any = None, **keywords: Any) -> Tensor:
        """Embeddings [B, T, H] of rows of equal length to the output of the last layer."""
        assert attention_mask is None, "rows of one batch must have the same length"
        keys = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in hidden.detach()]
        found = [self._find(key, row) for key, row in zip(keys, hidden, strict=True)]
        new = {key: i for i, key in enumerate(keys) if found[i] is None}
        if new:
            out = self._compute(hidden[list(new.values())], attention_mask=None, **keywords)
            self.known |= zip(new, out, strict=True)
        pairs = zip(keys, found, strict=True)
        return torch.stack([self.known[key] if out is None else out for key, out in pairs])

    def _find(self, key: bytes, row: Tensor) -> Tensor | None:
        """The known output of a row, if there is one."""
        if key in self.known or self.needs_last:
            return self.known.get(key)
        start = self.known.get(key[: len(key) // len(row) * (len(row) - 1)])
        return None if start is None else nn.functional.pad(start, (0, 0, 0, 1))

    @torch.no_grad()
    def _compute(self, hidden: Tensor, **keywords: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **keywords)
        return hidden


def share_frozen(model: Any, first: int) -> Frozen:
    """Put the layers before layer `first` of a model like Llama into a `Frozen`."""
    inner = (model.get_base_model() if hasattr(model, "get_base_model") else model).model
    frozen = Frozen(inner.layers[:first])
    inner.layers = nn.ModuleList([frozen, *inner.layers[first:]])
    inner.config.num_hidden_layers = len(inner.layers)
    return frozen


def frozen_of(model: nn.Module) -> Frozen:
    """The `Frozen` of a model after `share_frozen`."""
    return next(module for module in model.modules() if isinstance(module, Frozen))


@contextlib.contextmanager
def inference(model: Any) -> Iterator[None]:
    """Context for forwards in which the last token of a row predicts the next one."""
    frozen = frozen_of(model)
    frozen.needs_last = True
    try:
        with torch.no_grad(), sampling_mode(model):
            yield
    finally:
        frozen.needs_last = False


def next_logits(model: Any, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """[B, V] float32 logits of the token after each row; the rows have the same length."""
    batch = collate([Row(ids, 1, False) for ids in rows], 0)
    head = run_head(model, **batch.model_inputs)
    assert head.hidden is not None
    assert head.weight is not None
    return (head.hidden[:, -1].to(head.weight.dtype) @ head.weight.T).float()


def sample(examples: Sequence[Example], engine: Engine) -> list[Rollout]:
    """`rollouts.function`: completions of the full length, without a cache of keys.

    Each distinct row is read once. The rows that continue a new prompt with any digit are read
    together, so that the frozen layers know them in all later runs. The prompts must have the same
    number of tokens.
    """
    digits = engine.tokenizer.convert_tokens_to_ids(list("0123456789"))
    frozen = frozen_of(engine.model)
    written = [tuple(example.prompt) for example in examples]
    new = [prompt for prompt in dict.fromkeys(written) if prompt not in frozen.continued]
    with inference(engine.model):
        for step in range(engine.params.max_completion_length):
            more = [(*prompt, digit) for prompt in new for digit in digits] if step == 1 else []
            distinct = {row: i for i, row in enumerate(dict.fromkeys((*written, *more)))}
            logits = next_logits(engine.model, list(distinct))[[distinct[row] for row in written]]
            chosen = torch.multinomial((logits / engine.params.temperature).softmax(-1), 1)
            written = [(*r, token) for r, token in zip(written, chosen[:, 0].tolist(), strict=True)]
    frozen.continued.update(new)
    pairs = zip(examples, written, strict=True)
    return [Rollout(e.prompt, done := row[len(e.prompt) :], [1] * len(done)) for e, row in pairs]


def answer_logits(model: Any, rows: Sequence[Row], length: int) -> Tensor:
    """Logits [S, length, V] at the first `length` tokens of each row's answer, given its start."""
    batch = collate(rows, 0)
    index = torch.arange(len(rows))[:, None]
    with inference(model):
        head = run_head(model, **batch.model_inputs)
        assert head.hidden is not None
        assert head.weight is not None
        at = answer_positions(rows, length)
        return head.hidden[index, at - 1].to(head.weight.dtype) @ head.weight.T


def answer_positions(rows: Sequence[Row], length: int) -> Tensor:
    """The indices [S, length] of the first `length` tokens of each row's answer."""
    return torch.tensor([row.start for row in rows])[:, None] + torch.arange(length)


def greedy_matches(model: Any, rows: Sequence[Row], length: int) -> list[bool]:
    """Whether greedy decoding of `length` tokens after each prompt writes the row's own tokens.

    It does exactly if each of them is the most likely one after those before it: one forward tells.
    """
    chosen = answer_logits(model, rows, length).argmax(-1)
    return is_answer(chosen, rows).tolist()


def is_answer(tokens: Tensor, rows: Sequence[Row]) -> Tensor:
    """Whether the tokens [S, length] are the first ones of each row's own answer, bool [S]."""
    at = answer_positions(rows, tokens.shape[1]).tolist()
    own = [[row.ids[i] for i in positions] for row, positions in zip(rows, at, strict=True)]
    return (tokens == torch.tensor(own)).all(1)
