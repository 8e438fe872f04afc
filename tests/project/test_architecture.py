"""Architecture rules: layered imports, no machine-specific paths."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("gac_kernels", "gac", "tools", "bench", "tests")  # each may import those before it
# The floors of gac, lowest first. A room (a package or a module) may import the rooms of lower
# floors, and those before it on its own floor.
FLOORS = {
    "words": (
        *("errors", "commands", "types", "order", "fields", "collectives", "imports", "config"),
        "rows",
    ),
    "mixing": ("control", "methods", "step_end", "mixer"),
    "machines and models": ("parallel", "faults", "models", "sandbox"),
    "data, rewards and rollouts": ("data", "integrations", "rewards", "rollouts", "evaluation"),
    "trainer": ("train_config", "training"),
    "commands": ("report", "study", "demo", "cli"),
}
ROOMS = [room for floor in FLOORS.values() for room in floor]
METHODS_SEE = {"errors", "fields", "types", "control", "methods"}
EXTERNAL = {"torch", "triton"}  # third-party imports of the kernels, which serve any trainer


def tracked(*suffixes: str) -> list[Path]:
    """The repository's files with one of the suffixes, without those that git ignores."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.splitlines()]
    return [p for p in paths if p.suffix in suffixes and p.exists()]


@functools.cache
def imports(path: Path) -> set[str]:
    """Fully qualified modules and names that a file imports.

    Includes imports in functions and for type checking.
    """
    package = path.relative_to(ROOT).parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def graph(*roots: str) -> dict[str, set[str]]:
    """Module -> the modules under `roots` that it imports or imports names from."""
    files = {module_of(p): p for root in roots for p in sorted((ROOT / root).rglob("*.py"))}
    edges = {}
    for module, path in files.items():
        names = imports(path)
        # `from package import name`: the name is a submodule or an attribute of the package
        targets = {n if n in files else n.rpartition(".")[0] for n in names}
        edges[module] = (targets & files.keys()) - {module}
    return edges


def test_imports_flow_one_way():
    wrong = [
        f"{path.relative_to(ROOT)} imports {top}"
        for number, layer in enumerate(LAYERS[:-1], 1)
        for path in (ROOT / layer).rglob("*.py")
        for top in {name.split(".")[0] for name in imports(path)} & {*LAYERS[number:]}
    ]
    assert not wrong


def rooms() -> dict[str, set[str]]:
    """Room -> the other rooms that it imports."""
    doors: dict[str, set[str]] = {}
    for module, others in graph("gac").items():
        room, *_ = module.split(".")[1:] or [""]
        doors.setdefault(room, set()).update(
            other.split(".")[1] for other in others if other != "gac"
        )
        doors[room].discard(room)
    doors.pop("")  # gac/__init__.py imports lazily
    return doors


def longest_chain(doors: dict[str, set[str]]) -> list[str]:
    """The longest chain of rooms, each of which imports the next."""

    @functools.cache
    def chain(room: str) -> tuple[str, ...]:
        return (room, *max((chain(other) for other in sorted(doors[room])), key=len, default=()))

    return list(max(map(chain, sorted(doors)), key=len))


def test_the_floors_of_gac_import_one_way():
    doors = rooms()
    for number, (name, floor) in enumerate(FLOORS.items(), 1):
        print(f"floor {number}, {name}: {', '.join(floor)}")  # pytest -s
    print(f"longest chain: {' <- '.join(reversed(longest_chain(doors)))}")
    assert len(FLOORS) <= 6
    assert doors.keys() == {*ROOMS}
    wrong = [
        f"{room} imports {other}"
        for room, others in doors.items()
        for other in others
        if ROOMS.index(other) > ROOMS.index(room)
    ]
    assert not wrong


@pytest.mark.parametrize("room", ["methods", "control"])
def test_methods_and_controller_see_only_the_words_of_a_step(room: str):
    assert rooms()[room] <= METHODS_SEE


WITHOUT_A_TRAINER = {*FLOORS["words"], *FLOORS["mixing"], "data", "models", "integrations"}


@pytest.mark.parametrize("name", ["trl", "verl", "trinity", "swift"])
def test_an_adapter_reaches_no_trainer(name: str):
    """Also where the other trainer is not installed."""
    edges = graph("gac")
    reached: set[str] = set()
    new = {f"gac.integrations.{name}"}
    while new:
        reached |= new
        # importing a module imports its packages first
        packages = {module.rpartition(".")[0] for module in new} - {""}
        new = (packages | set().union(*(edges.get(module, set()) for module in new))) - reached
    assert {module.split(".")[1] for module in reached - {"gac"}} <= WITHOUT_A_TRAINER


def test_no_circular_imports():
    edges = graph("gac_kernels", "gac", "tools", "bench")
    done: set[str] = set()

    def find_cycle(module: str, path: tuple[str, ...]) -> tuple[str, ...] | None:
        if module in path:
            return (*path[path.index(module) :], module)
        if module in done:
            return None
        cycles = (find_cycle(other, (*path, module)) for other in sorted(edges[module]))
        first = next(filter(None, cycles), None)
        done.add(module)
        return first

    assert not [cycle for module in edges if (cycle := find_cycle(module, ()))]


def test_import_graph_covers_every_kind_of_import(tmp_path, monkeypatch):
    """Relative and absolute imports, of modules and of names, also inside functions."""
    monkeypatch.setattr("tests.project.test_architecture.ROOT", tmp_path)
    files = {
        "a/__init__.py": "",
        "a/one.py": "from .b import two\nimport a.b.three",
        "a/b/__init__.py": "from .two import f",
        "a/b/two.py": "def f():\n from .. import one",
        "a/b/three.py": "from . import f\nfrom ..one import g",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert graph("a") == {
        "a": set(),
        "a.one": {"a.b.two", "a.b.three"},
        "a.b": {"a.b.two"},
        "a.b.two": {"a.one"},
        "a.b.three": {"a.b", "a.one"},
    }


def test_kernels_need_only_torch_and_triton():
    """A head may also import its own trainer, whose name is that of its file or folder."""
    allowed = {*sys.stdlib_module_names, "gac_kernels", *EXTERNAL}
    heads = ROOT / "gac_kernels" / "heads"
    wrong = [
        f"{path.relative_to(ROOT)} imports {top}"
        for path in (ROOT / "gac_kernels").rglob("*.py")
        for top in {name.split(".")[0] for name in imports(path)} - allowed
        if not (path.is_relative_to(heads) and top in path.relative_to(heads).with_suffix("").parts)
    ]
    assert not wrong


def test_the_trainer_never_names_a_method():
    from gac.methods import METHODS
    from gac_kernels.contract import REDUCTIONS

    folders = [ROOT / "gac" / name for name in ("data", "rollouts", "training")]
    allowed = set(REDUCTIONS)  # "constant" is also the name of a reduction
    for path in [p for folder in folders for p in folder.glob("*.py")]:
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & set(METHODS) - allowed, path


def test_noqa_and_type_ignore_have_a_reason():
    """The reason follows the marker or is a comment on the line above.

    The tools themselves report unused markers.
    """
    mark = re.compile(r"# (?:noqa|type: ignore)\b(?:: ?[A-Z0-9, ]+|\[[a-z, -]+\])(.*)")
    without_reason = []
    for path in tracked(".py"):
        if path.relative_to(ROOT).parts[0] not in LAYERS or path == Path(__file__):
            continue
        above = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = mark.search(line)
            if match and not match[1].strip() and not above.lstrip().startswith("#"):
                without_reason.append(f"{path.relative_to(ROOT)}:{number}")
            above = line
    assert not without_reason


def test_a_broad_except_says_why():
    broad = re.compile(r"except (Base)?Exception( as \w+)?:(?!  # )|except:")
    layers = {*LAYERS, "research", "setup.py"} - {"tests"}
    paths = [p for p in tracked(".py") if p.relative_to(ROOT).parts[0] in layers]
    assert [str(p) for p in paths if broad.search(p.read_text())] == []


def test_no_machine_paths():
    folders = ["/" + name + "/" for name in ("work", "farm", "root")]
    wrong = [
        f"{p.relative_to(ROOT)}: {folder}"
        for p in tracked(".py", ".md", ".toml", ".yaml", ".yml", ".cpp", ".h", ".cu", ".html", "")
        for folder in folders
        if folder in p.read_text(errors="replace")
    ]
    assert not wrong
