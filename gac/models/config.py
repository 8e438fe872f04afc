"""The keys of `model`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from gac.errors import require
from gac.fields import Checked, Count, Decay, expand_paths, one_of, setting

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig(Checked):
    """Low-rank adapters through peft (needs the extra `lora`)."""

    rank: Count = 16
    """Rank of the adapters."""
    alpha: Count = 32
    """LoRA alpha; the adapters are scaled by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout on the adapters' input."""
    target_modules: tuple[str, ...] | str | None = ALL_LINEAR
    """Modules that get adapters, as in peft: all-linear (without the LM head), a list of names, or
    a regular expression; null: peft's choice for the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.target_modules is None or len(self.target_modules) > 0
        require(named, "target_modules", self.target_modules, f"{ALL_LINEAR}, or name some modules")


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The model to train, and how to load it."""

    key: ClassVar[str] = "model.path"
    """The configuration's key of `path`, for errors."""
    path: str = ""
    """A folder with a transformers model, or the name of one on the Hub."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer; null: the model's."""
    dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    """Dtype of the computation and of the exported model: float32 or bfloat16."""
    master_weights: bool = setting(True, only_with="dtype=bfloat16")
    """Keep the trained weights and the optimizer's state in float32, whatever `dtype` is. false:
    in `dtype`, which takes less memory but rounds most small updates away."""
    safetensors_only: bool = True
    """Refuse weights in pickle files (.bin). false: they are read with torch's `weights_only`."""
    random_init: bool = False
    """Take only the configuration from `path` and initialize the weights randomly."""
    attention: str | None = None
    """transformers' attn_implementation, e.g. sdpa or flash_attention_2; null: its default."""
    gradient_checkpointing: bool = setting(False, may_change=True)
    """Recompute each layer in the backward: less memory, more time."""
    keep_dropout: bool = False
    """Keep the dropout and the router noise of the model's configuration in training. The sampled
    responses have none, so the importance ratio and the KL then contain noise."""
    lora: LoraConfig | None = None
    """Train adapters only; null: all weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expand_paths(self, "path", "tokenizer")


class TeacherModel(ModelConfig):
    """A teacher's own model, and how to load it."""

    key: ClassVar[str] = "teacher.path"


def teacher_model(policy: ModelConfig, path: str) -> TeacherModel:
    """The teacher at `path`, which is loaded like the policy, without its adapters."""
    own = {
        "path": path,
        "tokenizer": None,
        "random_init": False,
        "gradient_checkpointing": False,
        "lora": None,
    }
    return TeacherModel(**{**{f.name: getattr(policy, f.name) for f in fields(policy)}, **own})
