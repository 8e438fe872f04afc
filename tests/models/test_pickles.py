"""Nothing is unpickled from a path that a user or a hub names, except plain values and tensors."""

import ast
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gac.errors import ConfigError, UserError
from gac.faults import checkpoint
from gac.models.causal_lm import load_model
from gac.models.config import ModelConfig
from gac.training.replay import load_skipped
from tests.integrations.tiny import write_model

ROOT = Path(__file__).parents[2]
FILES = {  # the weights of adapters and of their base
    "adapters": ("adapter_model.safetensors", "adapter_model.bin"),
    "base": ("base/model.safetensors", "base/pytorch_model.bin"),
}
# pickles of this process and of the sandbox's
OWN = {"gac/data/stored.py": 2, "gac/sandbox/solver.py": 3}


class Code:
    """Its pickle creates a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


def write_adapters(folder: Path) -> None:
    write_model(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder)


def weights(folder: Path, code: Code, only: bool, kind: str, part: str = "") -> Callable[[], Any]:
    """Adapters in `folder`, with `code` in their weights or those of the base; `part` is loaded."""
    write_adapters(folder)
    safe, pickled = FILES[kind]
    (folder / safe).unlink()
    torch.save({"model.norm.weight": code}, folder / pickled)
    return lambda: load_model(ModelConfig(path=str(folder / part), safetensors_only=only))


def index(folder: Path, code: Code) -> Callable[[], Any]:
    model = torch.nn.Linear(2, 2)
    path = checkpoint.save(folder, 1, model, torch.optim.AdamW(model.parameters()), {})
    (path / checkpoint.INDEX).write_bytes(pickle.dumps(code))
    return lambda: checkpoint.model_tensors(path)


def values(folder: Path, code: Code) -> Callable[[], Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["note"] = code
    path = checkpoint.save(folder, 1, model, optimizer, {})
    optimizer.param_groups[0]["note"] = 0
    return lambda: checkpoint.load(path, model, optimizer)


def replay(folder: Path, code: Code) -> Callable[[], Any]:
    folder.mkdir()
    torch.save(code, folder / "rank-0.pt")
    return lambda: load_skipped(folder)


CASES: dict[str, Callable[[Path, Code], Callable[[], Any]]] = {
    "weights, refused": lambda folder, code: weights(folder, code, True, "base", "base"),
    "weights, read as values": lambda folder, code: weights(folder, code, False, "base", "base"),
    "adapters, refused": lambda folder, code: weights(folder, code, True, "adapters"),
    "adapters, read as values": lambda folder, code: weights(folder, code, False, "adapters"),
    "base of adapters, refused": lambda folder, code: weights(folder, code, True, "base"),
    "index of a checkpoint": index,
    "values in a checkpoint": values,
    "skipped step": replay,
}


@pytest.mark.parametrize("case", CASES)
def test_a_pickle_with_code_is_refused(case: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    load = CASES[case](tmp_path / "files", Code(ran))
    with pytest.raises((UserError, OSError, pickle.UnpicklingError)) as raised:
        load()
    assert not ran.exists()
    assert raised.match(
        "^model.path='.*set model.safetensors_only=false$"
        if "refused" in case
        else "Weights only load failed|do not load it"
    )


@pytest.mark.parametrize(("safe", "pickled"), FILES.values(), ids=FILES)
def test_plain_weights_in_a_pickle_need_the_key(safe: str, pickled: str, tmp_path: Path) -> None:
    write_adapters(tmp_path)
    expected = load_model(ModelConfig(path=str(tmp_path))).state_dict()
    torch.save(load_file(tmp_path / safe), tmp_path / pickled)
    (tmp_path / safe).unlink()
    with pytest.raises(ConfigError, match=f"has no {Path(safe).name}, and model.safetensors_only"):
        load_model(ModelConfig(path=str(tmp_path)))
    loaded = load_model(ModelConfig(path=str(tmp_path), safetensors_only=False)).state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in expected.items())


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "torch:load",
        "torch.hub:load",
        "numpy:float32",
        "gac:PosixPath",
        "torch.distributed.checkpoint.filesystem:os.mkdir",
        "torch.distributed.checkpoint.filesystem:uuid.SafeUUID",
        "gac.train_config:TrainConfig",
    ],
)
def test_an_index_may_refer_to_its_own_classes_only(name: str) -> None:
    module, _, function = name.partition(":")
    text = f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(function))}{function}\x93."
    with pytest.raises(UserError, match="do not load it"):
        checkpoint._Index(io.BytesIO(text.encode("latin1"))).load()


def test_no_other_code_unpickles() -> None:
    found: dict[str, int] = {}
    for path in [*ROOT.glob("gac/**/*.py"), *ROOT.glob("gac_kernels/**/*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            safe = name == "torch.load" and "weights_only=True" in ast.unparse(call)
            if name in ("pickle.load", "pickle.loads", "torch.load") and not safe:
                place = path.relative_to(ROOT).as_posix()
                found[place] = found.get(place, 0) + 1
    assert found == OWN
