"""A pytest plugin that runs TRL's own tests offline, with its head, ours, or a wrong one.

`tests.heads.trl_suite` loads it. It records what each test's trainings compute before their
first optimizer step: there, everything is a function of the same weights, seeds and batch.
"""

import gc
import json
import os
from pathlib import Path
from typing import Any

HOME = Path(os.environ["GAC_TRL_HOME"])
MODE = os.environ["GAC_TRL_MODE"]  # own, head, loss or wrong
FLOAT32 = os.environ["GAC_TRL_FLOAT32"] == "1"  # instead of autocast; stop after one step
os.environ |= {"HF_HOME": str(HOME), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import datasets  # noqa: E402 - after the environment
import pytest  # noqa: E402 - after the environment
import torch  # noqa: E402 - after the environment
import transformers  # noqa: E402 - after the environment
import trl_hub  # noqa: E402 - after the environment
from trl.trainer import utils  # noqa: E402 - after the environment

from gac_kernels.heads.trl import head as trl_head  # noqa: E402 - after the environment

ROLLOUT_STEPS = 11  # not about 50, for trainers that sample: one log (step 10) and the last step
IMAGES = ("vlm", "vision", "image", "multimodal")
NO_HUB = ("offline", "LocalEntryNotFound", "couldn't connect", "Offline mode", "cached files")


class Recorder:
    """Records what a test's trainings compute in each micro-step before an optimizer step."""

    def __init__(self) -> None:
        self.test = ""
        self.steps: dict[str, list[dict[str, float]]] = {}
        self.heads: dict[str, set[str]] = {}
        self.fell_back: set[str] = set()

    def install(self) -> None:
        own_step = transformers.Trainer.training_step
        own_head = utils._ChunkedLogProbFunction

        def training_step(trainer: Any, model: Any, *args: Any, **keywords: Any) -> Any:
            loss = own_step(trainer, model, *args, **keywords)
            if trainer.state.global_step == 0:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.stack([g.float().norm() for g in gradients]).norm().item()
                logged = getattr(trainer, "_metrics", {}).get("train", {}).items()
                metrics = {name: values[-1] for name, values in logged if "time" not in name}
                step = {"loss": float(loss), "gradient norm": norm, **metrics}
                self.steps.setdefault(self.test, []).append(step)
                if getattr(trainer, "rollout_out", 0) is None:
                    self.fell_back.add(self.test)
            return loss

        class Head:
            """TRL's hook, which also records the dtype of each call with gradients."""

            @staticmethod
            def apply(hidden: Any, *args: Any) -> Any:
                if torch.is_grad_enabled():
                    autocast = torch.is_autocast_enabled("cpu")
                    dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
                    self.heads.setdefault(self.test, set()).add(str(dtype))
                return (own_head if MODE == "own" else right_head).apply(hidden, *args)

        transformers.Trainer.training_step = training_step
        right_head = trl_head.FusedLogProbs
        utils._ChunkedLogProbFunction = Head
        trl_head.FusedLogProbs = Head  # the loss finds it installed


RECORDER = Recorder()
OUTCOMES: dict[str, tuple[str, str]] = {}


def pytest_configure() -> None:
    trl_hub.write_models(HOME)
    datasets.load_dataset = trl_hub.load_dataset
    RECORDER.install()
    from trl import import_utils
    from trl.trainer import base_config, sft_trainer

    # names of other TRL versions: is_PACKAGE_available, private functions
    import_utils.__getattr__ = lambda name: lambda *_: False  # type: ignore[attr-defined] # PEP 562
    sft_trainer.__getattr__ = absent_function  # type: ignore[attr-defined] # PEP 562
    utils.__getattr__ = absent_function  # type: ignore[attr-defined] # PEP 562
    own = base_config._BaseConfig.__post_init__

    def post_init(config: Any) -> None:
        if config.use_liger_kernel:  # it replaces transformers' classes for the whole process
            pytest.skip("Liger's layers need a GPU")
        if FLOAT32:
            config.bf16, config.max_steps, config.save_strategy = False, 1, "no"
        elif hasattr(config, "num_generations") and config.max_steps < 0:
            config.max_steps = ROLLOUT_STEPS
        own(config)

    base_config._BaseConfig.__post_init__ = post_init
    if MODE != "own":
        trl_head.apply_fused_head()
    if MODE == "loss":
        import trl

        from gac_kernels.heads.trl import FusedGRPOTrainer

        trl.GRPOTrainer = FusedGRPOTrainer
    if MODE == "wrong":
        right = trl_head._log_probs

        def wrong(*args: Any) -> Any:
            out = right(*args)
            return out._replace(log_probs=out.log_probs * 1.01)

        trl_head._log_probs = wrong


def absent_function(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: pytest.skip("a private function that this TRL version lacks")


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """Stand in for the fixture of pytest-datadir."""
    return request.path.parent / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.freeze()  # TRL's tests collect garbage after each test: skip what the imports created
    for item in items:
        if any(word in item.nodeid.lower() for word in IMAGES):
            item.add_marker(pytest.mark.skip(reason="images"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    RECORDER.test = item.nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    outcome, reason = report.outcome, ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif hasattr(report, "wasxfail"):
        reason = "expected to fail"
    elif report.failed:
        reason = report.longreprtext.splitlines()[-1] if report.longreprtext else ""
        if any(word in report.longreprtext for word in NO_HUB):
            outcome, reason = "skipped", "a model that is on the hub only"
    OUTCOMES[report.nodeid] = outcome, reason


def pytest_sessionfinish() -> None:
    out = {
        "outcomes": OUTCOMES,
        "steps": RECORDER.steps,
        "heads": {test: sorted(dtypes) for test, dtypes in RECORDER.heads.items()},
        "fell_back": sorted(RECORDER.fell_back),
    }
    Path(os.environ["GAC_TRL_OUT"]).write_text(json.dumps(out))
