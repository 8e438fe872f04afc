"""Every code block and command in the documentation runs, or states why it does not."""

import doctest
import inspect
import json
import pkgutil
import re
import string
from pathlib import Path
from typing import NamedTuple

import pytest

from gac import cli
from gac.config import dump, load, parse_yaml
from gac.data import DataConfig, load_demos, load_prompts
from gac.demo.task import make_tokenizer
from gac.evaluation.suite import EvalConfig
from gac.train_config import TrainConfig
from tests.tiny import write_tiny
from tools import quickstart

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = {DOCS / "reference" / name for name in ("cli.md", "configuration.md")}
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if p not in GENERATED and "_build" not in p.parts]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    kind: str
    text: str
    reason: str | None


def blocks(page: Path, *kinds: str) -> list[Block]:
    matches = FENCE.finditer(page.read_text())
    return [Block(m["kind"], m["text"], m["reason"]) for m in matches if m["kind"] in kinds]


def pages_with_code(*kinds: str) -> list[Path]:
    return [page for page in PAGES if any(not b.reason for b in blocks(page, *kinds))]


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", pages_with_code("python"), ids=name)
def test_python_runs_as_written(page):
    """The blocks of a page run in order, in one session."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if block.reason:
            continue
        if block.text.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.text, namespace, name(page), None, 0)
            assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0, page
            namespace |= test.globs
        else:
            exec(compile(block.text, name(page), "exec"), namespace)
    if "apply_fused_head" in namespace:  # the tests that follow see TRL as it is
        namespace["apply_fused_head"]().undo()


@pytest.mark.parametrize("page", pages_with_code("sh"), ids=name)
def test_commands_run_as_written(page, tmp_path, monkeypatch):
    """A tiny model and tiny data replace those that `make demo` creates; runs have two steps."""
    monkeypatch.chdir(tmp_path)
    task, model = write_tiny(Path("runs/demo/task")), Path("runs/demo/base-0/model")
    model.parent.mkdir()
    (task / "init").rename(model)
    save_weights(model)
    for block in blocks(page, "yaml"):
        if match := re.fullmatch(r"# (\S+\.yaml)", block.text.splitlines()[0]):
            Path(match[1]).write_text(re.sub(r"\nsteps: \d+", "\nsteps: 2", block.text))
    for block in blocks(page, "sh"):
        for line in [] if block.reason else block.text.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].replace("'", "").split()
            assert words[0] == "gac", f"{line!r}: state why it does not run here"
            assert cli.main(words[1:]) == cli.OK, line


@pytest.mark.parametrize("page", pages_with_code("yaml"), ids=name)
def test_configurations_can_be_read(page):
    """Load each block as a training or an evaluation configuration; their keys differ."""
    for block in blocks(page, "yaml"):
        if not block.reason:
            keys = parse_yaml(block.text)
            kind = EvalConfig if "tasks" in keys else TrainConfig
            config = load(kind, keys)
            assert load(kind, dump(config)) == config


@pytest.mark.parametrize("page", pages_with_code("json"), ids=name)
def test_rows_can_be_read(page, tmp_path):
    """Read the rows of each block as prompts and as demonstrations."""
    tokenizer = make_tokenizer(string.printable[:95])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for number, block in enumerate(blocks(page, "json")):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(block.text)
        config = DataConfig(prompts=str(path), answer_field=None)
        assert len(load_prompts(config, tokenizer)) == len(load_demos(config, tokenizer)) > 0


def save_weights(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_resolve(page):
    text = re.sub(r"`[^`\n]+`(?!\])", "", page.read_text())  # code is not a link, but may name one
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
        path = (page.parent / target).resolve()
        assert path.exists() or path in GENERATED, f"{name(page)} links to {target}"


def documented_objects() -> list[str]:
    """Objects whose docstrings appear in the reference pages."""
    text = "".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    return re.findall(r"^\.\. auto(?:function|class):: (\S+)$", text, re.MULTILINE)


@pytest.mark.parametrize("location", documented_objects())
def test_docstrings_have_one_style(location):
    """Google style: a one-line summary, then sections whose arguments are in the signature."""
    obj = pkgutil.resolve_name(location)
    assert obj.__doc__, location
    members = []
    if inspect.isclass(obj):
        members = [m for n, m in vars(obj).items() if inspect.isfunction(m) and n[0] != "_"]
    for function in [obj, *members]:
        text = inspect.getdoc(function) or ""
        assert not text or text.splitlines()[0].endswith((".", "::")), text
        assert not re.search(r"^(Returns|Raises) |[.] (Returns|Raises) ", text, re.MULTILINE), text
        if arguments := re.search(r"^Args:\n((?:[ ]{4}.*\n|\n)+)", text + "\n", re.MULTILINE):
            named = re.findall(r"^ {4}(\w+): ", arguments[1], re.MULTILINE)
            assert set(named) <= set(inspect.signature(function).parameters), text


@pytest.mark.slow(reason="runs the code of the pages")
def test_the_quickstart_notebook_runs():
    """Its cells match tools.quickstart, which generates it, and run in one session."""
    pytest.importorskip("matplotlib.pyplot").switch_backend("agg")
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    cells = tuple((c["cell_type"], "".join(c["source"])) for c in notebook["cells"])
    assert cells == quickstart.CELLS, "run python -m tools.quickstart"
    namespace: dict[str, object] = {}
    for kind, text in cells:
        if kind == "code":
            exec(compile(text, "quickstart.ipynb", "exec"), namespace)
    history = namespace["history"]
    assert history["demo loss"][-1] < 0.5 * history["demo loss"][0]  # it learns
    assert max(history["mu"]) - min(history["mu"]) > 0.05  # and mu moves
    assert any(
        "image/png" in o.get("data", {}) for c in notebook["cells"] for o in c.get("outputs", ())
    )
