"""Adapters, the weights that they change, and modules that share such a weight.

In a tied model the embedding and the LM head share one weight. An adapter on one of them belongs to
that module alone, so the two then compute with different matrices: `untie_adapted` gives the head
its own copy and records this in the configuration. Exports, servers and peft's own merge then see
two plain weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from gac.errors import ConfigError

BASE_LAYER = ".base_layer"
Copy = Callable[[nn.Parameter], nn.Parameter]


def copy_weight(param: nn.Parameter) -> nn.Parameter:
    """A parameter with its own copy of the values."""
    return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


def base_name(name: str) -> str:
    """Map peft's name of a weight to the base model's; adapters on one module may be nested."""
    return name.removeprefix("base_model.model.").replace(BASE_LAYER, "")


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield the name and the layer of peft for each set of adapters, and the weight it adds to."""
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            yield name, layer, getattr(layer.get_base_layer(), _parameter_name(layer))


def may_be_adapted(name: str, module: nn.Module) -> bool:
    """Whether an adapter on a module changes its output as a change of its weight would."""
    # linear layers whose output is not x W^T: routers, and one matrix per group of features
    if any(word in type(module).__name__ for word in ("Router", "GroupedLinear")):
        return False
    if isinstance(module, nn.Embedding):  # peft knows of embeddings that are scaled
        plain = type(module).forward is nn.Embedding.forward
        return plain or hasattr(module, "embed_scale")
    return name.rpartition(".")[2] != "dt_proj"  # Mamba reads its weight without calling it


def check_adapted(model: Any) -> None:
    """Raise ConfigError if a module that must not have adapters was named."""
    for name, layer, _ in adapter_layers(model):
        if not may_be_adapted(name, layer.get_base_layer()):
            raise ConfigError(
                f"model.lora.target_modules: {name} ({type(layer.get_base_layer()).__name__}) "
                "computes something other than a product with its weight, so an adapter cannot be "
                "merged into it: name other modules"
            )


def untie_adapted(model: Any, copy: Copy = copy_weight) -> None:
    """Give the LM head its own weight if the head or the embedding of a tied model has adapters.

    Args:
        model: a PreTrainedModel with adapters, whose configuration is updated.
        copy: copies a parameter, which may be a placeholder without values.

    Raises:
        ConfigError: modules other than the embedding and the head share a weight with adapters.
    """
    adapted = {id(weight): name for name, _, weight in adapter_layers(model)}
    embedding, head = (_base_layer(module) for module in _ends(model))
    for weight, owners in _owners(model).items():
        if weight not in adapted or len(owners) == 1:
            continue
        if len(owners) > 2 or head is None or {*owners} != {embedding, head}:
            name = base_name(adapted[weight])
            other = next(n for n in map(base_name, owners.values()) if n != name)
            raise ConfigError(
                f"model.lora.target_modules: {name} shares its weight with {other}, which an "
                "adapter would not change: name other modules"
            )
        untie(model, copy)


def untie(model: Any, copy: Copy = copy_weight) -> None:
    """Give the LM head a copy of the embedding's weight, and set `tie_word_embeddings` to false.

    Raises:
        ConfigError: in this family the key also ties other weights, which have to stay tied.
    """
    embedding, head = (_base_layer(module) for module in _ends(model))
    names = {base_name(name) for name, module in model.named_modules() if module is head}
    others = [n for n in model.all_tied_weights_keys if n.removesuffix(".weight") not in names]
    if others:
        raise ConfigError(
            f"model.lora.target_modules: the LM head and the embedding of "
            f"{type(model).__name__} cannot have different weights, because tie_word_embeddings "
            f"also ties {others[0]}: name other modules"
        )
    if head.weight is embedding.weight:
        head.weight = copy(embedding.weight)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.__dict__["was_tied"] = True
    for part in model.modules():  # transformers ties these again when it loads or saves
        tied = getattr(part, "all_tied_weights_keys", None) or {}
        for name in [n for n in tied if n.removesuffix(".weight") in names]:
            del tied[name]


def untie_if_different(model: Any) -> None:
    """Correct the configuration of a model that declares its weights tied although they differ.

    transformers loads the embedding and the head separately if a checkpoint has both.
    """
    _, head = _ends(model)
    name = next((name for name, module in model.named_modules() if module is head), "")
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)  # as the family would
    if f"{name}.weight" in tied and is_untied(model):
        untie(model)


def check_server(model: Any) -> None:
    """Raise ConfigError if a server started with the original model cannot load these weights."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    saved = next((n for n, m in model.named_modules() if hasattr(m, "original_module")), None)
    if inner.__dict__.get("was_tied") or saved is not None:
        reason = (
            "the embedding and the LM head have different weights here, but the configuration of "
            "the served model ties them"
            if saved is None
            else f"the adapters in model.path replace a module ({saved})"
        )
        raise ConfigError(
            f"rollouts.engine='vllm': {reason}, so the server would sample from another model: set "
            "rollouts.engine=generate, or name other modules in model.lora.target_modules"
        )


def is_untied(model: Any) -> bool:
    """Whether the embedding and the LM head of `model` have different weights."""
    embedding, head = (_base_layer(module) for module in _ends(model))
    return head is None or getattr(head, "weight", None) is not embedding.weight


def _ends(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _base_layer(module: Any) -> Any:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _owners(model: nn.Module) -> dict[int, dict[nn.Module, str]]:
    """The modules that hold each parameter, with their names, by the id of the parameter."""
    owners: dict[int, dict[nn.Module, str]] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), {})[module] = name
    return owners


def _parameter_name(layer: Any) -> str:
    """Adapters on a stack of experts name its parameter."""
    return getattr(layer, "parameter_name", "weight")
