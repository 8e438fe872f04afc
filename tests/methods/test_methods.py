"""Every method trains, and an interrupted run resumes to the identical trajectory."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch

from gac.config import dump, load
from gac.methods import METHODS
from gac.methods.listing import describe_needs
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer
from tests.methods.published import teacher_of
from tests.tiny import metrics, tiny_config
from tools.methods_table import PAGE, page

ROOT = Path(__file__).parents[2]
# What each method requires from the trainer; every method must be listed.
DEMOS = ("demonstrations",)
ROLLOUTS = ("rollouts",)
BOTH = ("rollouts", "demonstrations")
DEMOS_OF_PROMPTS = ("rollouts", "demonstrations of the sampled prompts")
SEPARATE_GRADIENTS = (*BOTH, "separate gradients")
NEEDS = {
    **dict.fromkeys(["sft", "sft-light", "dft"], DEMOS),
    "sft-best": (*DEMOS, "best weights"),
    "asft": (*DEMOS, "reference", "log-probs"),
    **dict.fromkeys(["grpo", "dr-grpo", "dapo", "gspo"], ROLLOUTS),
    **dict.fromkeys(["dpo", "ipo"], ("rollouts of the reference", "reference", "log-probs")),
    **dict.fromkeys(
        [
            "sft-then-rl",
            "constant",
            "guarded",
            "constant-alarm",
            "hpcd",
            "wcf",
            "chord-mu",
            "chord-phi",
        ],
        BOTH,
    ),
    **dict.fromkeys(["chord", "reward-threshold", "rewvar-ctrl", "uncertainty", "dwa"], BOTH),
    "kl-ctrl": (*BOTH, "reference"),
    **dict.fromkeys(["gradnorm-ctrl", "amft"], SEPARATE_GRADIENTS),
    **dict.fromkeys(
        ["multitask", "luffy", "hpt", "superrl", "routing", "relift"], DEMOS_OF_PROMPTS
    ),
    **dict.fromkeys(["trapo", "uft"], (*DEMOS_OF_PROMPTS, "prefixes")),
    "prefix-rft": (*DEMOS_OF_PROMPTS, "prefixes", "log-probs"),
    "dypo": (*DEMOS_OF_PROMPTS, "reference", "log-probs"),
    "sdar": (*DEMOS_OF_PROMPTS, "teacher", "log-probs"),
    **dict.fromkeys(["opd", "kdrl"], (*ROLLOUTS, "teacher")),
    "sdft": (*DEMOS_OF_PROMPTS, "teacher"),
    "sdpg": (*DEMOS_OF_PROMPTS, "teacher", "reference"),
    "srft": (*DEMOS_OF_PROMPTS, "log-probs"),
    "gta": SEPARATE_GRADIENTS,
    **dict.fromkeys(["mgda", "pcgrad", "cagrad", "nash-mtl", "aligned-mtl"], SEPARATE_GRADIENTS),
    **dict.fromkeys(["sdmgrad", "moco", "gradnorm"], SEPARATE_GRADIENTS),
    "famo": (*BOTH, "losses after the update"),
    **dict.fromkeys(["gac", "gac-paper"], (*BOTH, "reference")),
    "gac-gated": (*SEPARATE_GRADIENTS, "reference"),
}
# Methods with the state of another; test_methods_values.py has their steps.
ALIKE = {
    "dft": "sft",
    **dict.fromkeys(["dr-grpo", "dapo"], "grpo"),
    "ipo": "dpo",
    **dict.fromkeys(["hpcd", "wcf", "chord-phi", "chord"], "chord-mu"),
    "guarded": "constant-alarm",
    "rewvar-ctrl": "kl-ctrl",
    "superrl": "routing",
    **dict.fromkeys(["kdrl", "sdft", "sdpg"], "opd"),  # test_teacher.py resumes them
    **dict.fromkeys(["pcgrad", "cagrad"], "mgda"),
    "gac-paper": "gac",
}
STEPS = 4
# Settings that use every feature of a method within a short run.
SHORT_RUN_FIELDS = {
    "sft-light": {"epochs": 2, "patience": 9},
    "sft-then-rl": {"sft_steps": 2},
    "trapo": {"sizes": [1, 1, 1, 1], "trained": [0, 1, 0, 1], "below": [-1, 2, 2, 2]},
    "hpt": {"correct": 0.4},
    **{key: {"correct": 0.4} for key in ["superrl", "routing"]},
    "uft": {"hint_steps": 3},
    "prefix-rft": {"low": {"peak": 0.95, "valley": 0.05, "decay": 2}},
    "dypo": {"correct": 0.4},
    "relift": {"correct": 0.8, "buffer": 6},
    "srft": {"correct": 0.4},
    "gradnorm-ctrl": {"update_every": 2},
    "amft": {"warmup": 1, "update_every": 2},
    "kl-ctrl": {"calibration": 1},
    "rewvar-ctrl": {"calibration": 1},
    "dwa": {"window": 1},
    "wcf": {"schedule": {"warmup": 2, "peak": 0.5, "valley": 0.1, "decay": 2}},
    **{n: {"update_every": 2} for n in METHODS if n.startswith("gac")},
    "gac-gated": {"update_every": 2, "gradient_parts": 2},
}


def config_of(name: str, task, out, **changes) -> TrainConfig:
    method = {"name": name, **SHORT_RUN_FIELDS.get(name, {})}
    return tiny_config(task, out, method=method, **teacher_of(name, task, out), **changes)


def test_every_method_declares_its_needs_and_is_on_the_page(task, tmp_path):
    assert {name: describe_needs(method()) for name, method in METHODS.items()} == NEEDS
    for name, method in METHODS.items():
        assert name == method.name
        assert method.family, name
        assert method.source, name
        assert method.__doc__, name
        assert load(TrainConfig, dump(config := config_of(name, task, tmp_path))) == config
        assert method().init().keys() == METHODS[ALIKE.get(name, name)]().init().keys()
    text = page()
    assert (ROOT / PAGE).read_text() == text, "run python -m tools.methods_table"
    assert all(f"| `{name}` |" in text for name in METHODS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full(reason=f"{ALIKE[name]} resumes in the same way"))
        if name in ALIKE
        else name
        for name in METHODS
    ],
)
def test_method_trains_and_resumes_to_the_identical_trajectory(name, task, tmp_path):
    config = config_of(
        name, task, tmp_path / "whole", eval={}, steps=STEPS, checkpoint_every=STEPS // 2
    )
    uninterrupted = Trainer(config)
    before = [p.detach().clone() for p in uninterrupted.model.parameters()]
    save = uninterrupted.save
    uninterrupted.save = lambda: save() if uninterrupted.step < STEPS else None
    uninterrupted.run()
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert all(
        math.isfinite(row["grad_norm"]) and (name == "aligned-mtl" or 0 <= row["mu"] <= 1)
        for row in rows
    )
    after = [p.detach() for p in uninterrupted.model.parameters()]
    assert not all(map(torch.equal, before, after))
    assert all(p.isfinite().all() for p in after)

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    resumed = Trainer(dataclasses.replace(config, out=str(tmp_path / "cut")))
    assert resumed.step == STEPS // 2
    resumed.save = lambda: None
    resumed.run()
    assert metrics(tmp_path / "cut") == rows
    assert resumed.state == uninterrupted.state
    assert all(map(torch.equal, after, resumed.model.parameters()))
