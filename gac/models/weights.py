"""Reads weights from safetensors files into a transformers model, one tensor at a time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from gac.errors import ConfigError

FIND: dict[str, Any] = {  # return None instead of raising; `from_pretrained` reports the error
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def on_adapters(path: str) -> bool:
    """Whether `path` holds adapters, whose base model may be elsewhere."""
    return cached_file(path, "adapter_config.json", **FIND) is not None


def empty_model(path: str, **keywords: Any) -> Any:
    """The model configured by `path`, entirely on the meta device.

    keywords: passed to transformers' `from_config`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **keywords)
    return named(model, path)


def named(model: Any, path: str) -> Any:
    """Give a model built from a configuration the other attributes that `from_pretrained` reads
    from `path`.
    """
    model.config.name_or_path = path
    with contextlib.suppress(
        OSError
    ):  # without that file, the model keeps the one made from its configuration
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def read_model(key: str, path: str, one_by_one: bool, **keywords: Any) -> Any:
    """transformers' `from_pretrained`, but a missing weight or a wrong shape is an error.

    one_by_one: read each tensor only when it is set in the model; ignored if there are no
        safetensors files. keywords: passed to `from_pretrained`.
    """
    tensors = stored(key, path) if one_by_one else None
    # report a wrong shape in the loading info instead of a long error message
    keywords |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if tensors is None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **keywords)
    else:
        config = AutoConfig.from_pretrained(path)
        kind = type(empty_model(path))
        loaded = kind.from_pretrained(None, config=config, state_dict=tensors, **keywords)
        named(loaded[0], path)
    model, found = loaded
    _check(key, path, found)
    return model


def _check(key: str, path: str, found: dict[str, Any]) -> None:
    """Raise ConfigError for missing or mismatched weights."""
    wrong = sorted(found["mismatched_keys"])
    if wrong:
        name, there, wanted = wrong[0]
        raise ConfigError(
            f"{key}={path!r}: {name} is {list(there)} in the weights, and the model that "
            f"config.json describes has {list(wanted)}: give weights and config.json of one model"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(
            f"{key}={path!r}: the weights do not contain {missing[0]}{more}: copy or download them again, "
            "or give a causal language model"
        )


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, read when indexed, which is all that transformers' loader needs.

    The file is mapped separately for each tensor, so its pages are released with the tensor.
    """

    file: str
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.name)[index]


def stored(key: str, path: str) -> dict[str, Stored] | None:
    """All tensors in a model's safetensors files, by name; None if there are no such files.

    Raises ConfigError if a file listed in the index is missing.
    """
    from safetensors import safe_open

    files = _files(path)
    if files is None:
        return None
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(
                f"{key}={path!r}: the weights lack {Path(file).name}, which their index names: "
                "copy or download it again"
            )
    found = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            found.update({tensor: Stored(name, tensor) for tensor in file.keys()})  # noqa: SIM118 - no mapping
    return found


def _files(path: str) -> list[str] | None:
    if on_adapters(path):
        return None
    if single := cached_file(path, SAFE_WEIGHTS_NAME, **FIND):
        return [single]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **FIND)
    return get_checkpoint_shard_files(path, index)[0] if index else None
