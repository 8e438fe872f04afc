"""Writes a model of transformers as one GGUF file, the format of llama.cpp.

Matrices keep their type (float32, bfloat16 or float16); vectors become float32, as llama.cpp
expects. Its `llama-quantize` makes smaller files from the result.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from gac.errors import ConfigError

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""`model_type` of transformers -> architecture of GGUF."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {WORDS % "": "qwen2", WORDS % "{1,3}": "llama-bpe"}
"""Regular expression that splits a text into words -> its name in llama.cpp."""
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
}
FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
}
INSTEAD = "export without --gguf and convert the folder with llama.cpp's convert_hf_to_gguf.py"


class Weight(NamedTuple):
    """A tensor that is stored in a safetensors file."""

    name: str
    """In the GGUF file."""
    stored: Any
    heads: int | None
    """Number of heads of a matrix whose rows llama.cpp orders differently; None: the same order."""

    @property
    def dtype(self) -> str:
        """Type of the tensor in the GGUF file, in the words of safetensors."""
        return self.stored.get_dtype() if len(self.stored.get_shape()) > 1 else "F32"

    @property
    def nbytes(self) -> int:
        """Its size in the GGUF file."""
        return int(np.prod(self.stored.get_shape())) * (4 if self.dtype == "F32" else 2)

    def read(self) -> np.ndarray:
        """The values; those of a half-precision type as bytes."""
        tensor: Tensor = self.stored[:]
        if self.heads is not None:
            tensor = interleaved(tensor, self.heads)
        if self.dtype == "F32":
            return tensor.float().contiguous().numpy()
        return tensor.contiguous().view(torch.uint8).numpy()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows [H * D, ...] of a query or key projection.

    A rotation pairs two rows of a head. They are D/2 apart in transformers, and neighbors in
    llama.cpp's `llama` architecture.
    """
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def check_convertible(config: Any, tokenizer: Any) -> None:
    """Raise ConfigError unless `write_gguf` can write such a model."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"--gguf: models of type {kind!r} cannot be written, only {', '.join(ARCHITECTURES)}: "
            f"{INSTEAD}"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    unusual = {
        "rope_type": None if rope == "default" else rope,
        "use_sliding_window": getattr(config, "use_sliding_window", None) or None,
        "attention_bias": getattr(config, "attention_bias", None) or None,
        "mlp_bias": getattr(config, "mlp_bias", None) or None,
        "hidden_act": None if config.hidden_act == "silu" else config.hidden_act,
    }
    for name, value in unusual.items():
        if value is not None:
            raise ConfigError(
                f"--gguf: {kind} models with {name}={value!r} cannot be written: {INSTEAD}"
            )
    if word_split(tokenizer) is None:
        raise ConfigError(
            "--gguf: this tokenizer splits texts in a way for which no name in llama.cpp is known "
            f"here: {INSTEAD}"
        )


def word_split(tokenizer: Any) -> str | None:
    """llama.cpp's name for how a byte-level BPE splits a text into words; None: unknown."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = backend["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter])
    if backend["model"]["type"] != "BPE" or [s for s in steps if s.get("add_prefix_space")]:
        return None
    match [(step["type"], step) for step in steps if "type" in step]:
        case [("ByteLevel", last)] if last["use_regex"]:
            return "gpt-2"
        case [("Digits", digits), ("ByteLevel", last)] if last["use_regex"]:
            return "smollm" if digits["individual_digits"] else None
        case [("Split", split), ("ByteLevel", last)] if not last["use_regex"]:
            isolated = split["behavior"] == "Isolated" and not split["invert"]
            return SPLITS.get(split["pattern"].get("Regex", "")) if isolated else None
    return None


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model and the tokenizer in `folder` to the GGUF file `file`.

    One tensor is in memory at a time.

    Args:
        folder: a model of transformers, with weights in safetensors files.
        file: a new file.

    Raises:
        ConfigError: llama.cpp has no such architecture or tokenizer, or it is not known here.
    """
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_convertible(config, tokenizer)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])
    with contextlib.ExitStack() as files, contextlib.closing(writer):
        weights = [*_weights(folder, config, files)]
        matrices = {weight.dtype for weight in weights if len(weight.stored.get_shape()) > 1}
        _add_settings(writer, config, "F32" if "F32" in matrices else max(matrices))
        _add_tokenizer(writer, tokenizer, folder, config.vocab_size)
        for weight in weights:
            shape, kind = weight.stored.get_shape(), TYPES[weight.dtype]
            writer.add_tensor_info(weight.name, shape, np.dtype("f4"), weight.nbytes, kind)
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in weights:
            writer.write_tensor_data(weight.read())


def _weights(folder: Path, config: Any, files: contextlib.ExitStack) -> Iterator[Weight]:
    """The weights in `folder`; `files` keeps their files open."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = files.enter_context(safe_open(path, framework="pt"))
        for name in tensors.keys():  # noqa: SIM118 - a file is no mapping
            written = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if written is None:
                raise ConfigError(f"--gguf: {name} has no place in a GGUF file: {INSTEAD}")
            module = name.split(".")[-2]
            reordered = heads.get(module) if config.model_type == "llama" else None
            yield Weight(written, tensors.get_slice(name), reordered)


def _add_settings(writer: gguf.GGUFWriter, config: Any, dtype: str) -> None:
    """Add the sizes of the model; dtype: that of its matrices."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, folder: Path, size: int) -> None:
    """Add the tokens, padded to the `size` of the head, their merges and the chat template."""
    known = {i: token for token, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for i in range(size):
        kind = gguf.TokenType.NORMAL if i in known else gguf.TokenType.UNUSED
        if i in added:
            special = added[i].special
            kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        tokens.append(known.get(i, f"[PAD{i}]"))
        kinds.append(kind)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    split = word_split(tokenizer)
    assert split is not None  # `check_convertible` refuses it
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)
