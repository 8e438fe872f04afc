"""Checks `model.path` before transformers loads it: a local folder, or a model on the Hub.

transformers reports every problem as an OSError of several paragraphs; here each gets one line that
names the key and says what to do. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from gac.errors import ConfigError, UserError
from gac.models.config import ModelConfig

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHTS = ("model.safetensors", "model*.safetensors*", "pytorch_model*.bin*", "adapter_model*")
ATTENTION = re.compile("(?i)attn_implementation|attention implementation|flash.?attention|kernels")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TOKENIZERS = ("tokenizer.json", "*token*", "*vocab*", "*.model", "*.spm", "tekken.json")


def check_source(key: str, name: str, *, ask_hub: bool = True) -> None:
    """Raise ConfigError unless `name` is a folder or an accessible model on the Hub.

    ask_hub: if False, only the form of a name on the Hub is checked.
    """
    if not name:
        raise ConfigError(
            f"{key} is empty: give a folder with a transformers model, or the name of one on the "
            f"Hub, e.g. {key}=./base"
        )
    path = Path(name)
    if (path / "metrics.jsonl").is_file():
        raise ConfigError(f"{key}={name!r} is a run: give its model, {path / 'model'}")
    if path.is_dir():
        return
    if path.exists():
        raise ConfigError(f"{key}={name!r} is a file: give the folder of a transformers model")
    if name.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{key}={name!r}: no such folder")
    if ask_hub:
        _check_hub(key, name)


def check_tokenizer(config: ModelConfig, *, ask_hub: bool = True) -> tuple[str, str]:
    """Check the source of the tokenizer; returns its key and name."""
    key = "model.tokenizer" if config.tokenizer else config.key
    name = config.tokenizer or config.path
    check_source(key, name, ask_hub=ask_hub)
    remedy = "set model.tokenizer to a folder with one, or its name on the Hub"
    check_files(key, name, "tokenizer", remedy, *TOKENIZERS)
    return key, name


def check_vocabulary(teacher: str, own: Mapping[str, int], policy: Mapping[str, int]) -> None:
    """Raise ConfigError unless the teacher's tokenizer has the policy's tokens.

    teacher: its path. own, policy: text of each token -> id, of the teacher and of the policy.
    """
    if own == policy:
        return
    texts, expected = ({i: text for text, i in tokens.items()} for tokens in (own, policy))
    token = next(i for i in sorted({*texts, *expected}) if texts.get(i) != expected.get(i))
    shown = repr(texts[token]) if token in texts else "missing"
    wanted = repr(expected[token]) if token in expected else "missing"
    raise ConfigError(
        f"teacher.path={teacher!r}: its tokenizer is not the policy's: token {token} is {shown}, "
        f"and {wanted} in the policy's: give a teacher with the same tokenizer"
    )


def saved_vocabulary(config: ModelConfig) -> Mapping[str, int] | None:
    """Text of each token -> id, of the tokenizer.json in a local folder; None without one."""
    from tokenizers import Tokenizer

    path = Path(config.tokenizer or config.path) / "tokenizer.json"
    if not path.is_file():
        return None
    with one_line_errors(config.key, config.path):
        try:
            vocabulary: Mapping[str, int] = Tokenizer.from_file(str(path)).get_vocab()
        except Exception as error:  # the library raises no class of its own
            raise ValueError(f"{path}: {error}") from error
        return vocabulary


def has_chat_template(config: ModelConfig) -> bool | None:
    """Whether the tokenizer has a chat template; None if it is not in a local folder."""
    folder = Path(config.tokenizer or config.path)
    if not folder.is_dir():
        return None
    if any((folder / name).exists() for name in TEMPLATES):
        return True
    try:
        saved = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(saved, dict) and bool(saved.get("chat_template"))


def check_model(config: ModelConfig, *, ask_hub: bool = True) -> None:
    """Check the source of the model and, unless `random_init`, of its weights."""
    check_source(config.key, config.path, ask_hub=ask_hub)
    remedy = "give a folder written by transformers' save_pretrained"
    check_files(config.key, config.path, "model", remedy, "config.json", "adapter_config.json")
    if config.lora is not None and (Path(config.path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.lora: {config.key}={config.path!r} already contains adapters, which are "
            "trained: remove model.lora, or merge the adapters into a model with peft's "
            "merge_and_unload"
        )
    _check_adapters(Path(config.path))
    if not config.random_init:
        remedy = "give a folder with weights, or set model.random_init=true"
        check_files(config.key, config.path, "weights", remedy, *WEIGHTS)


def _check_adapters(folder: Path) -> None:
    """Raise ConfigError if a local folder has adapters of a kind that cannot be loaded."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(settings, dict) and settings.get("use_dora"):
        raise ConfigError(
            f"model.path={str(folder)!r} contains DoRA adapters (use_dora=true), which are not "
            "supported: merge them into a model with peft's merge_and_unload, and give its folder"
        )


def _check_hub(key: str, name: str) -> None:
    from huggingface_hub import auth_check, constants, errors, try_to_load_from_cache

    missing = f"{key}={name!r}: no such local folder, and"
    try:
        cached = [
            try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")
        ]
    except errors.HFValidationError:
        raise ConfigError(f"{missing} {name!r} is not a valid Hub name") from None
    if any(isinstance(file, str) for file in cached):
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{missing} HF_HUB_OFFLINE forbids access to the Hub: give a folder, or unset "
            "HF_HUB_OFFLINE"
        )
    try:
        auth_check(name)
    except errors.GatedRepoError:
        raise ConfigError(
            f"{key}={name!r} is a gated model: accept its terms at {constants.ENDPOINT}/{name}, "
            "then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{missing} no model of that name on the Hub; if it is private, log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.HfHubHTTPError:
        pass  # a mirror that does not support auth_check; loading reports any problem
    except Exception as error:  # the Hub's HTTP client decides which, if there is no network
        raise ConfigError(
            f"{missing} {constants.ENDPOINT} cannot be reached ({_first_sentence(error)}): give "
            "the folder of a model that is already on this machine"
        ) from error


def check_files(key: str, name: str, kind: str, remedy: str, *files: str) -> None:
    """Raise ConfigError if `name` is a folder in which no file matches `files`.

    kind: what the files contain, for the message. remedy: what to do, for the message.
    """
    path = Path(name)
    if path.is_dir() and not any(any(path.glob(file)) for file in files):
        raise ConfigError(f"{key}={name!r}: the folder has no {kind} ({files[0]}): {remedy}")


@contextlib.contextmanager
def one_line_errors(key: str, name: str, attention: str | None = None) -> Iterator[None]:
    """Turn transformers' loading errors into a one-line ConfigError that names the key.

    attention: the value of model.attention, which may be the cause.
    """
    try:
        yield
    except UserError:  # already a one-line error
        raise
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        text = _first_sentence(error)
        if attention and ATTENTION.search(text):
            raise ConfigError(
                f"model.attention={attention!r} cannot be used ({text.rstrip('.')}): use sdpa, "
                "eager, flash_attention_2, paged|sdpa, ... or null"
            ) from error
        raise ConfigError(f"{key}={name!r} cannot be loaded: {text}") from error
    except Exception as error:  # SafetensorError; safetensors is imported only with the weights
        if type(error).__name__ != "SafetensorError":
            raise
        raise ConfigError(
            f"{key}={name!r}: the weights are corrupt ({error}): copy or download them again"
        ) from error


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    sentence, end, _ = text.partition(". ")
    return (sentence + end.strip())[:300]
