"""Reads the weights of a model from safetensors files, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from gac.errors import ConfigError

SAFE_ADAPTERS = "adapter_model.safetensors"
# makes `cached_file` return None instead of raising; `from_pretrained` reports the error
RETURN_NONE: dict[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def has_adapters(path: str) -> bool:
    """Whether `path` contains adapters, whose base model may be elsewhere."""
    return cached_file(path, "adapter_config.json", **RETURN_NONE) is not None


def base_folder(path: str) -> str:
    """The folder or name of the full model: `path`, or the base model of the adapters in it."""
    adapters = cached_file(path, "adapter_config.json", **RETURN_NONE)
    if adapters is None:
        return path
    return json.loads(Path(adapters).read_text())["base_model_name_or_path"] or path


def check_safetensors(key: str, path: str) -> None:
    """Raise ConfigError if a model, or the base of its adapters, has no safetensors files."""
    adapters = has_adapters(path)
    names = (SAFE_ADAPTERS,) if adapters else (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    if all(cached_file(path, name, **RETURN_NONE) is None for name in names):
        raise ConfigError(
            f"{key}={path!r} has no {names[0]}, and model.safetensors_only=true refuses pickled "
            "weights: convert them to safetensors, or set model.safetensors_only=false"
        )
    if adapters:
        check_safetensors(key, base_folder(path))


def meta_model(path: str, **keywords: Any) -> Any:
    """The model configured by `path`, entirely on the meta device.

    keywords: passed to transformers' `from_config`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **keywords)
    return add_pretrained_metadata(model, path)


def add_pretrained_metadata(model: Any, path: str) -> Any:
    """Set the attributes that `from_pretrained` reads from `path` in addition to the weights."""
    model.config.name_or_path = path
    with contextlib.suppress(OSError):  # without the file, keep the defaults of the configuration
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def read_model(key: str, path: str, lazily: bool, **keywords: Any) -> Any:
    """transformers' `from_pretrained`, but a missing weight or a wrong shape is an error.

    lazily: read each tensor only when it is set in the model; ignored if there are no
        safetensors files. keywords: passed to `from_pretrained`.
    """
    tensors = lazy_tensors(key, path) if lazily else None
    # report a wrong shape in the loading info instead of a long error message
    keywords |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if tensors is None:
        pickled = has_adapters(path) and cached_file(path, SAFE_ADAPTERS, **RETURN_NONE) is None
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base_folder(path) if pickled else path, **keywords
        )
        if pickled:  # transformers itself expects safetensors in a local folder
            _check_loaded(key, path, loaded[0].load_adapter(path, use_safetensors=False).to_dict())
    else:
        keywords.setdefault("config", AutoConfig.from_pretrained(path))
        meta = meta_model(path)
        _resolve_ties(meta, tensors, keywords["config"])
        model_class = type(meta)
        loaded = model_class.from_pretrained(None, state_dict=tensors, **keywords)
        add_pretrained_metadata(loaded[0], path)
    model, loading_info = loaded
    _check_loaded(key, path, loading_info)
    return model


def _resolve_ties(meta: Any, tensors: dict[str, LazyTensor], config: Any) -> None:
    """Decide whether a checkpoint that has both the embedding and the LM head ties them.

    transformers compares the two after loading; the values of a sharded model are gone by then.
    """
    embedding, head = meta.get_input_embeddings(), meta.get_output_embeddings()
    names = {module: f"{name}.weight" for name, module in meta.named_modules()}
    both = [tensors.get(names.get(module, "")) for module in (embedding, head)]
    if None in both or head.weight is not embedding.weight:
        return
    if torch.equal(*(tensor[:] for tensor in both if tensor is not None)):
        del tensors[names[head]]
    else:
        for part in (config, config.get_text_config(decoder=True)):
            part.tie_word_embeddings = False


def _check_loaded(key: str, path: str, loading_info: dict[str, Any]) -> None:
    """Raise ConfigError for missing or mismatched weights."""
    mismatched = sorted(loading_info["mismatched_keys"])
    if mismatched:
        name, shape, expected = mismatched[0]
        raise ConfigError(
            f"{key}={path!r}: {name} has shape {list(shape)} in the weights, but config.json "
            f"implies {list(expected)}: use the weights and the config.json of the same model"
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(
            f"{key}={path!r}: the weights do not contain {missing[0]}{more}: copy or download them "
            "again, or give a causal language model"
        )


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read from its file when it is indexed.

    Indexing is the only operation that transformers' loader needs.

    The file is memory-mapped separately for each tensor, so its pages are released with the tensor.
    """

    file: str
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.name)[index]


def lazy_tensors(config_key: str, path: str) -> dict[str, LazyTensor] | None:
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
                f"{config_key}={path!r}: {Path(file).name} is listed in the weights' index but "
                "missing: copy or download it again"
            )
    tensors = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            names = file.keys()  # not a mapping: iterating over `file` itself is not supported
            tensors.update({tensor: LazyTensor(name, tensor) for tensor in names})
    return tensors


def _files(path: str) -> list[str] | None:
    if has_adapters(path):
        return None
    if single := cached_file(path, SAFE_WEIGHTS_NAME, **RETURN_NONE):
        return [single]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **RETURN_NONE)
    return get_checkpoint_shard_files(path, index)[0] if index else None
