"""Weights in safetensors files, read one tensor at a time into a model of transformers."""

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

FIND: dict[str, Any] = {  # None instead of an error, where `from_pretrained` will say it
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def on_adapters(path: str) -> bool:
    """Whether `path` holds adapters, on a model that may be elsewhere."""
    return cached_file(path, "adapter_config.json", **FIND) is not None


def empty_model(path: str, **keywords: Any) -> Any:
    """The model that `path` configures, without memory for its weights: all on the meta device.

    keywords: of transformers' `from_config`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **keywords)
    return named(model, path)


def named(model: Any, path: str) -> Any:
    """A model made from a configuration, with what else `from_pretrained` takes from `path`."""
    model.config.name_or_path = path
    with contextlib.suppress(OSError):  # without a file of its own, the model's has made one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def read_model(key: str, path: str, one_by_one: bool, **keywords: Any) -> Any:
    """transformers' `from_pretrained`; a weight that is missing or of a wrong shape is an error.

    one_by_one: read each tensor when it is set in the model, not before; where there are no
    safetensors files, it is as without. keywords: of `from_pretrained`.
    """
    tensors = stored(key, path) if one_by_one else None
    # told, a wrong shape is in the report instead of an error of many lines
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
    """found: transformers' report of what it loaded."""
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
            f"{key}={path!r}: the weights lack {missing[0]}{more}: copy or download them again, "
            "or give a causal language model"
        )


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `stored[...]` reads it, which is all that transformers' loader does.

    The file is mapped for this tensor alone, so its pages leave the process with it.
    """

    file: str
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.name)[index]


def stored(key: str, path: str) -> dict[str, Stored] | None:
    """Every tensor of a model's safetensors files; None where it has none of these.

    Raises ConfigError if a file that their index names is not there.
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
