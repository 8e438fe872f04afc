"""Every recipe trains: at its own optimizer settings, the weights move and accuracy rises."""

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gac import cli
from gac.config import load
from gac.demo.task import make_tokenizer, model_config
from gac.train_config import TrainConfig
from gac.training.record import Logbook
from gac.training.trainer import Trainer
from tests.tiny import metrics

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    f"{page}-{i}": text
    for page in ("train", "start")
    for i, text in enumerate(BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text()))
}
RECIPES = [*sorted(p.name for p in (ROOT / "examples").glob("*.yaml")), *PAGES]
TEXT = string.digits + "+= "


def write_rows(path: Path, data: Any) -> Path:
    """Sums, with the fields that the configuration `data` names."""
    named = {
        part[1]
        for t in (data.template, data.demo_template)
        if t
        for part in string.Formatter().parse(t)
        if part[1]
    }
    rows = []
    for a in range(64):
        row = dict.fromkeys(named, "0")
        row |= {data.prompt_field: f"{a}+1=", data.answer_field: f"{a + 1}"}
        row |= {"chosen": f"{a + 1}", "rejected": f"{a}"}  # of fixed pairs
        row |= {data.demo_field: f"{a}+1={a + 1}"} if data.demo_field else {}
        row |= {
            key: value if isinstance(value, str) else value[0] for key, value in data.where.items()
        }
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_the_weights_move(name: str, tmp_path: Path) -> None:
    """Three steps change nearly every weight of a tiny model; the KL of its first rollouts is 0."""
    file = tmp_path / "recipe.yaml"
    file.write_text(PAGES.get(name, ""))
    file = file if name in PAGES else ROOT / "examples" / name
    recipe = load(TrainConfig, file, [])
    tokenizer = make_tokenizer(
        TEXT
        + "".join({*(recipe.data.template or ""), *(recipe.data.demo_template or "")} - {*TEXT})
    )
    if recipe.data.chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tiny = model_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    tiny.hidden_size, tiny.intermediate_size, tiny.num_hidden_layers = 32, 48, 2
    tiny.layer_types, tiny.max_position_embeddings = None, 512
    tiny.save_pretrained(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", recipe.data)
    config = load(
        TrainConfig,
        file,
        [
            f"out={tmp_path / 'run'}",
            f"model.path={tmp_path / 'model'}",
            "model.random_init=true",
            f"data.prompts={rows}",
            "data.demos=null",
            "eval={}",
            "reward=tests.tiny:digit_reward",
            "steps=3",
            "rollouts.num_prompts=4",
            "rollouts.max_completion_length=4",
            "monitor_kl_every=3",
        ],
    )
    trainer = Trainer(config)
    before = {n: p.detach().clone() for n, p in trainer.policy.named_parameters() if p.dim() > 1}
    trainer.run()
    kl = 0 if config.method.needs(0).rollouts else None  # nothing is sampled
    assert metrics(tmp_path / "run")[0]["kl"] == kl
    after = dict(trainer.policy.named_parameters())
    assert (
        torch.cat([(after[name] != p).flatten() for name, p in before.items()]).float().mean() > 0.9
    )
    assert {
        x.dtype for x in load_file(tmp_path / "run" / "model" / "model.safetensors").values()
    } == {getattr(torch, config.model.dtype)}


@pytest.mark.full(reason="trains both runs of the tutorial")
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/start.md, as written: from an accuracy below 0.1 to above 0.4."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "start.md").read_text().replace("\\\n", "")
    for command, arguments in re.findall(
        r"^gac (init|train|report|export) (.*)$", page, re.MULTILINE
    ):
        assert cli.main([command, *arguments.split()]) == cli.OK, arguments
    first, second = (
        [row["accuracy"] for row in Logbook(Path(f"first/{name}/eval.jsonl")).read()]
        for name in ("run", "grpo")
    )
    assert first[0] < 0.1
    assert first[-1] > 0.4
    assert second[-1] > first[-1]
    samples = json.loads(Path("first/run/samples.jsonl").read_text().splitlines()[0])["prompts"]
    page = Path("first/run/report.html").read_text()
    assert len(samples[0]["completions"]) == 8
    assert samples[0]["prompt"] in page
    assert Path("first/best/model.safetensors").exists()
