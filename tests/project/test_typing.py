"""Users' type checkers read the annotations of the installed packages (py.typed)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).resolve().parents[2]
CONSUMER = """
from typing import assert_type

import torch
from gac import ControllerConfig, GuidedController, mu_star
from gac_kernels import (
    LossOutput, LossSpec, Signals, TokenMoments, fused_gac_loss, fused_linear_gac_loss,
    linear_token_logprobs, loss_from_logprobs, token_logprobs,
)

x = torch.zeros(2, 3)
spec = LossSpec(clip_low=None, kl_coef=0.1)
out = fused_linear_gac_loss(x, x, x, x, x, bias=None, mu=0.3, ref_logps=x, spec=spec)
assert_type(out, LossOutput)
assert_type(fused_gac_loss(x, x, x, x, mu=x, overwrite=True), LossOutput)
options = LossSpec(policy_loss="sapo", sapo_tau=(1.0, 2.0), correction="token_mask")
out = loss_from_logprobs(x, x, x, x, weights=x, rollout_logps=x, spec=options)
out = fused_gac_loss(x, x, x, x, logit_scale=0.5, softcap=30.0)
moments = out.moments
assert_type(moments, TokenMoments | None)
if moments is not None:
    signals = (moments + moments).signals(trim=0.1)
    assert_type(signals, Signals)
    mu = GuidedController(ControllerConfig(update_every=5)).update(signals, kl=0.1)
    assert_type(mu, float)
logps, entropy = linear_token_logprobs(x, x, x, temperature=2.0)
assert_type(mu_star(0.5, 0.1, 0.2, 0.3), float)

fused_gac_loss(x)  # type: ignore[call-arg]  # targets are missing
token_logprobs(x, x, logit_scale="hot")  # type: ignore[arg-type]  # text
fused_gac_loss(x, x, x, x, softcap="30")  # type: ignore[arg-type]  # text
LossSpec(kl_coef=None)  # type: ignore[arg-type]  # None
"""
SETTINGS = """
[mypy]
strict = true
[mypy-torch.*,triton.*,numpy.*,transformers.*,accelerate.*,datasets.*]
follow_imports = skip
"""


def test_a_users_file_type_checks(tmp_path):
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    site = tmp_path / "env" / "site-packages"
    site.mkdir(parents=True)
    for name in ("gac", "gac_kernels"):  # as installed: without py.typed, mypy ignores them
        assert (ROOT / name / "py.typed").is_file()
        (site / name).symlink_to(ROOT / name)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "consumer.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
