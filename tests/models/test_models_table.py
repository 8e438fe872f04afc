"""The program that writes docs/models.md."""

import re
from pathlib import Path

import pytest

from tools import models_table
from tools.tiny_models import families, tiny_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("family", "mode"), [("llama4_text", "packed"), ("deepseek_v4", "LoRA")])
def test_a_family_is_trained(family, mode, monkeypatch):
    modes = {name: models_table.MODES[name] for name in ("padded", mode)}
    monkeypatch.setattr(models_table, "MODES", modes)
    assert models_table.try_family(family, debug=True) == dict.fromkeys(modes, "yes")


def test_a_family_that_is_refused():
    (reason,) = models_table.try_family("bert", debug=True).values()
    assert reason.startswith("model type 'bert' is an encoder")


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma2", "fused"), ("bert", "fused"), ("bart", "exact fallback"), ("git", "does not run")],
)
def test_what_fuse_does_with_a_family(family, kind):
    assert models_table.try_fuse(family).startswith(kind)


def test_a_difference_between_modes_is_a_failure():
    expected = {"demo_loss": 1.0, "grad_norm": 2.0}
    assert models_table._compare("packed", {**expected, "grad_norm": 2.001}, expected) == "yes"
    assert "FAILED: demo_loss is 1.1" in models_table._compare(
        "packed", {**expected, "demo_loss": 1.1}, expected
    )
    assert models_table._compare("LoRA", {**expected, "grad_norm": 9.0}, expected) == "yes"


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "deepseek_v3", "gpt2"])
def test_tiny_configurations_are_tiny(family):
    assert family in families()
    text = tiny_config(family).get_text_config()
    assert text.vocab_size <= 64
    assert text.num_hidden_layers <= 2


def test_the_page_lists_what_the_run_measured():
    modes = dict.fromkeys(models_table.MODES, "yes") | {"fuse": "fused"}
    text = models_table.page(
        {
            "a": modes,
            "b": {**modes, "FSDP2": "no | way", "packed": "padded"},
            "c": {"model": "model type 'c' is an encoder", "fuse": "exact fallback"},
            "d": {"model": "FAILED: no config", "fuse": "does not run: why"},
            "e": {**modes, "packed": "padded"},
        }
    )
    assert "3 of 5 families train." in text
    assert "3 fused, 1 exact fallback, 1 does not run." in text
    sections = dict(part.split("\n\n", 1) for part in text.split("## ")[1:])
    assert [re.findall("`(.)`", text) for text in sections.values()] == [[x] for x in "aebcd"]
    assert "way; rows are padded" in sections["Exceptions"]
