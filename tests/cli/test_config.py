"""Configurations: every field type, every error, the YAML round trip."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from gac.config import choose, describe, dump, load, parse_yaml, read_yaml, save, save_text, to_yaml
from gac.errors import ConfigError
from gac.fields import Choice


class Color(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark-blue"


@dataclass(frozen=True)
class Optimizer:
    """AdamW."""

    lr: float
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0  # decoupled

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr must be >= 0, got {self.lr}")


@dataclass(frozen=True)
class Method:
    """Base of the methods."""


@dataclass(frozen=True)
class Sft(Method):
    """Demonstrations only."""


@dataclass(frozen=True)
class Mixed(Method):
    """Demonstrations and rollouts."""

    ema_decay: float = 0.99
    """Decay of the average."""
    optimizer: Optimizer = Optimizer(lr=0.5)


TABLE = {"sft": Sft, "mixed": Mixed, "its-earlier-name": Mixed}


@dataclass(frozen=True)
class Config:
    """A run."""

    model: str
    """Path of the model,
    or its name on the Hub."""
    steps: int = 100
    """Optimizer steps."""
    resume: bool = True
    kl: float | None = None
    color: Color = Color.RED
    scheduler: Literal["cosine", "off"] = "cosine"
    names: tuple[str, ...] | str = ()
    sizes: tuple[int, ...] = (
        4,
        5,
    )  # of the groups
    reward: str | Mapping[str, Any] = "math"
    optimizer: Optimizer = Optimizer(lr=1e-3, weight_decay=0.1)
    teacher: Optimizer | None = None
    method: Annotated[Method, Choice(lambda: TABLE)] = Sft()
    extra: Mapping[str, float] = field(default_factory=dict)


def build(data: dict | None = None, *overrides: str) -> Config:
    return load(Config, {"model": "m"} | (data or {}), overrides)


def test_absent_keys_keep_the_defaults_and_a_missing_key_is_named():
    assert build() == Config(model="m")
    with pytest.raises(ConfigError, match="model is required"):
        load(Config, {})


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("steps: 7", "steps", 7),
        ("steps: 1e3", "steps", 1000),  # whole numbers may be written in any notation
        ("kl: 1e-4", "kl", 1e-4),  # YAML 1.1 would call this text
        ("kl: 2", "kl", 2.0),
        ("kl: null", "kl", None),
        ("resume: no", "resume", False),
        ("scheduler: off", "scheduler", "off"),  # YAML 1.1 would call this False
        ("color: dark-blue", "color", Color.DARK_BLUE),
        ("color: dark_blue", "color", Color.DARK_BLUE),
        ("names: [a, b]", "names", ("a", "b")),
        ("names: a,b", "names", "a,b"),
        ("sizes: [010, 2]", "sizes", (10, 2)),  # YAML 1.1 would read an octal 8
        ("reward: exact", "reward", "exact"),
        ("reward: {name: format, pattern: x}", "reward", {"name": "format", "pattern": "x"}),
        ("extra: {a: 1, b: 2.5}", "extra", {"a": 1.0, "b": 2.5}),
    ],
)
def test_yaml_value_becomes_the_annotated_type(tmp_path, text, key, expected):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\n{text}\n")
    value = getattr(load(Config, path), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        (" steps = 12 ", "steps", 12),
        ("model=a=b", "model", "a=b"),
        ("model=123", "model", "123"),  # text stays text, even if it looks like a number
        ("kl=1e-2", "kl", 0.01),
        ("kl=none", "kl", None),
        ("kl=NULL", "kl", None),
        ("kl=~", "kl", None),
        ("kl=", "kl", None),
        ("resume=false", "resume", False),
        ("resume=Off", "resume", False),
        ("resume=no", "resume", False),
        ("resume=Yes", "resume", True),
        ("resume=on", "resume", True),
        ("color=DARK_BLUE", "color", Color.DARK_BLUE),
        ("names=a,b", "names", ("a", "b")),
        ("names=a, b", "names", ("a", "b")),
        ("names=[a]", "names", ("a",)),
        ("names=all-linear", "names", "all-linear"),
        ("optimizer={lr: 2}", "optimizer", Optimizer(lr=2.0, weight_decay=0.1)),
        ("sizes=[1, 2]", "sizes", (1, 2)),
        ("scheduler=off", "scheduler", "off"),
        ("reward={name: format}", "reward", {"name": "format"}),
        ("reward=exact", "reward", "exact"),
        ("reward.weight=2", "reward", {"name": "math", "weight": 2}),
        ("method=mixed", "method", Mixed()),
        ("method={name: mixed, ema_decay: 0.5}", "method", Mixed(ema_decay=0.5)),
        ("teacher.lr=1", "teacher", Optimizer(lr=1.0)),
        ("extra.a=3", "extra", {"a": 3.0}),
    ],
)
def test_override_text_becomes_the_annotated_type(override, key, expected):
    config = build({"reward": "math"}, override)
    assert getattr(config, key) == expected
    assert type(getattr(config, key)) is type(expected)


def test_nested_keys_override_the_parents_default_not_the_class_default():
    assert build({"optimizer": {"lr": 2}}).optimizer == Optimizer(lr=2.0, weight_decay=0.1)
    config = build({}, "method.name=mixed", "method.optimizer.betas=0.8,0.9")
    assert config.method == Mixed(optimizer=Optimizer(lr=0.5, betas=(0.8, 0.9)))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones():
    assert build({"steps": 1}, "steps=2", "steps=3").steps == 3
    data = {"model": "m", "optimizer": {"lr": 1}}
    for first in ("optimizer.lr=2", "optimizer={lr: 2}"):
        config = load(Config, data, [first, "optimizer.weight_decay=3"])
        assert config.optimizer == Optimizer(lr=2.0, weight_decay=3.0)
    assert data == {"model": "m", "optimizer": {"lr": 1}}


def test_a_choice_takes_its_fields_next_to_its_name():
    assert build({"method": {"name": "mixed", "ema_decay": 0.95}}).method == Mixed(ema_decay=0.95)
    assert build({"method": "mixed"}, "method.ema_decay=0.5").method == Mixed(ema_decay=0.5)
    default = Mixed(optimizer=Optimizer(lr=9))
    expected = Mixed(ema_decay=0.1, optimizer=Optimizer(lr=9))
    assert choose(TABLE, {"ema_decay": 0.1}, default=default) == expected
    assert choose(TABLE, default, default=Sft()) is default
    with pytest.raises(ConfigError, match=r"^method: `name` is missing; use one of sft, mixed, "):
        choose(TABLE, {"ema_decay": 0.1})


def test_round_trip_through_a_file(tmp_path):
    config = Config(
        model="1e-4",  # text that looks like a number must come back as text
        steps=3,
        kl=float("inf"),
        color=Color.DARK_BLUE,
        scheduler="off",
        names=("yes", "null", "010", "2020-01-01"),
        sizes=(1, 2),
        reward={"sum": [{"reward": "math", "weight": 0.5}]},
        teacher=Optimizer(1.0, betas=(0.1, 1e-8)),
        method=Mixed(ema_decay=0.5),
        extra={"a": 1.5},
    )
    path = tmp_path / "very" / "deep" / "config.yaml"
    for written in (build(), config):
        save(written, path)
        assert load(Config, path) == written
    assert load(Config, dump(config)) == config
    assert list(path.parent.iterdir()) == [path]
    assert dump(config)["method"]["name"] == "mixed"

    class Local(Method):
        """Cannot be imported."""

    for name, module in ((Local.__qualname__, __name__), ("Local", "__main__")):
        Local.__qualname__, Local.__module__ = name, module
        with pytest.raises(ConfigError, match="^Local is not .*, and cannot be imported$"):
            dump(Config("m", method=Local()))


@pytest.mark.parametrize(
    ("data", "overrides", "parts"),
    [
        ({"step": 1}, (), ["step: unknown key 'step'; did you mean 'steps'? Valid", "resume"]),
        ({"qqq": 1}, (), ["qqq: unknown key 'qqq'. Valid keys: "]),
        ({"optimizer": {"lrr": 1}}, (), ["optimizer.lrr", "did you mean 'lr'", "weight_decay"]),
        ({}, ("optimizer.beta=1",), ["optimizer.beta", "did you mean 'betas'"]),
        ({"method": "mixd"}, (), ["method.name", "'mixd'", "did you mean 'mixed'", "sft, mixed"]),
        ({"method": {"name": "sft", "x": 1}}, (), ["keys: none (method has no keys)"]),
        ({"method": {"name": "mixed", "ema": 1}}, (), ["method.ema", "did you mean 'ema_decay'"]),
        ({"method": {"name": "sft", "ema_decay": 1}}, (), ["method.ema_decay", "unknown key"]),
        ({"method": 3}, (), ["method", "a name or a mapping", "3"]),
        ({"steps": "many"}, (), ["steps: expected a whole number, got 'many'"]),
        ({"steps": 1.5}, (), ["steps: expected a whole number, got 1.5"]),
        ({"steps": True}, (), ["steps: expected a whole number, got True"]),
        ({"steps": ".inf"}, (), ["steps: expected a whole number, got '.inf'"]),
        ({"steps": math.inf}, (), ["steps: expected a whole number, got inf"]),
        ({"steps": "[7"}, (), ["steps: expected a whole number, got '[7'"]),
        ({}, ("kl=abc",), ["kl: expected a number, got 'abc'"]),
        ({"kl": True}, (), ["kl: expected a number, got True"]),
        ({"optimizer": {"lr": None}}, (), ["optimizer.lr: null is not allowed: give a number"]),
        ({"resume": 2}, (), ["resume: expected true or false, got 2"]),
        ({"resume": "maybe"}, (), ["resume: expected true or false, got 'maybe'"]),
        ({"resume": "x" * 58}, (), [f"got '{'x' * 58}'"]),
        ({"resume": "x" * 59}, (), [f"got '{'x' * 56}..."]),
        ({"model": 5}, (), ["model: expected text (put it in quotes), got 5"]),
        ({"model": [5]}, (), ["model: expected text, got [5]"]),
        ({"scheduler": "cosin"}, (), ["'cosin' is not one of cosine, off", "mean 'cosine'"]),
        ({"color": "drak_blue"}, (), ["is not one of red, dark_blue; did you mean 'dark_blue'?"]),
        ({"optimizer": {"betas": [1]}}, (), ["optimizer.betas: expected 2 values, got [1]"]),
        ({"sizes": [1, "x"]}, (), ["sizes[1]: expected a whole number, got 'x'"]),
        ({"sizes": "ab"}, (), ["sizes: expected a list", "'ab'"]),
        ({"names": 3}, (), ["names: expected list of text | text, got 3"]),
        ({"extra": {"a": "x"}}, (), ["extra.a: expected a number, got 'x'"]),
        ({"extra": [1]}, (), ["extra: expected a mapping like {key: value}, got [1]"]),
        ({"optimizer": 3}, (), ["optimizer: expected a mapping like {key: value}, got 3"]),
        ({"reward": 3}, (), ["reward: expected text | mapping, got 3"]),
        ({"reward": None}, (), ["reward: expected text | mapping, got None"]),
        ({"optimizer": {"lr": -1}}, (), ["optimizer.lr must be >= 0, got -1.0"]),
        ({}, ("steps",), ["--set steps: use KEY=VALUE"]),
        ({}, (".steps=1",), ["--set .steps=1: use KEY=VALUE"]),
        ({"steps": 4}, ("steps.x=1",), ["--set steps.x=1: steps is 4, which has no keys"]),
        ({}, ("sizes=[1",), ["sizes", "not valid YAML"]),
    ],
)
def test_errors_name_the_key_the_value_and_what_to_do(data, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        build(data, *overrides)
    for part in parts:
        assert part in str(caught.value)


def test_file_errors_name_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=r"^CONFIG\.yaml='.*run\.yaml': no such file: "):
        load(Config, path)
    for text, part in [
        ("a: [1", "not valid YAML"),
        ("- a", "expected `key: value` lines"),
        ("model: m\nsteps: 1\nsteps: 2", "duplicate key 'steps'"),
        ("model: m\nstps: 1", "did you mean 'steps'"),
        ("model: {{NAME}}", "put a key that begins with [ or { in quotes"),
        ("names: &x [*x]", "recursive"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(Config, path)
        assert str(caught.value).startswith(f"{path}: ")
        assert part in str(caught.value)
    path.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not valid YAML: .* can't decode"):
        load(Config, path)


def test_a_file_is_replaced_when_the_new_one_is_complete(tmp_path, monkeypatch):
    path, seen, replace = tmp_path / "a.txt", [], Path.replace

    def record(partial, target):
        seen.append((partial.read_text(encoding="utf-8"), target.read_text()))
        return replace(partial, target)

    path.write_text("old")
    monkeypatch.setattr(Path, "replace", record)
    save_text(path, "new ü")
    assert seen == [("new ü", "old")]
    assert path.read_bytes() == "new ü".encode()


def test_yaml_text_reads_back_what_it_writes():
    texts = ["1e-4", "off", "1:30", "12", ".5", "=", "~", "+1", "1.", "-.inf", ".nan", "TRUE", ""]
    data = {"b": [1e-5, -1, -math.inf, 1.5, True, False, None, "ü\nx"], "a": texts}
    for inline in (False, True):  # 1 and 1.0 are equal
        assert repr(parse_yaml(to_yaml(data, inline))) == repr(data)
    numbers = "[+1, 1., .5, 2E+3, +.inf, 2020-01-01, true, True, TRUE, false, False, FALSE]"
    assert repr(parse_yaml(numbers)) == repr(
        [1, 1.0, 0.5, 2000.0, math.inf, "2020-01-01", *[True] * 3, *[False] * 3]
    )
    assert math.isnan(parse_yaml(to_yaml(math.nan)))


def test_yaml_text_is_wrapped_unless_it_is_inline():
    data = {"ü": [30 * "a", 30 * "b"], "b": f"{97 * 'c'} d {99 * 'e'} f"}
    assert to_yaml(data) == f"ü:\n- {30 * 'a'}\n- {30 * 'b'}\nb: {97 * 'c'} d\n  {99 * 'e'}\n  f\n"
    assert to_yaml(data, inline=True) == f"{{ü: [{30 * 'a'}, {30 * 'b'}], b: {data['b']}}}"


@pytest.mark.parametrize("count", [40, 41])
def test_a_long_list_of_valid_names_is_abbreviated(count):
    names = [f"aa{i * 'b'}" for i in range(1, count + 1)]
    with pytest.raises(ConfigError) as caught:
        choose(dict.fromkeys(names, Sft), "aa")
    shown = names if count == 40 else [*names[:3], f"{names[3]}; `gac methods` lists all 41"]
    start = "method.name: unknown name 'aa'; did you mean 'aab'? Valid names: "
    assert str(caught.value) == start + ", ".join(shown)


EIGHT = {f"kind-{i}": Sft for i in range(8)}
NINE = {82 * "x": Mixed, 50 * "x": Mixed, f"yy-{34 * 'y'}": Mixed} | dict.fromkeys("abcdef", Sft)


@dataclass(frozen=True)
class Wide:
    """Texts that fill a line, or are one too long for it."""

    short: Annotated[Any, Choice(lambda: EIGHT)] = Sft()
    """aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa b
    cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc dddd
    """
    long: Annotated[Any, Choice(lambda: NINE, lambda cls: cls.__name__)] = Mixed()


HELP = """\
model: text  (required)
    Path of the model, or its name on the Hub.
steps: int = 100
    Optimizer steps.
resume: bool = true
kl: float | null = null
color: red | dark_blue = red
scheduler: cosine | off = cosine
names: list of text | text = []
sizes: list of int = [4, 5]
    of the groups
reward: text | mapping = math
method: sft | mixed | its-earlier-name = sft
extra: mapping = {}

optimizer: Optimizer
optimizer.lr: float = 0.001
    Peak learning rate.
optimizer.betas: [float, float] = [0.9, 0.99]
optimizer.weight_decay: float = 0.1
    decoupled

teacher: Optimizer | null = null
teacher.lr: float  (required)
    Peak learning rate.
teacher.betas: [float, float] = [0.9, 0.99]
teacher.weight_decay: float = 0.0
    decoupled"""  # defaults of nested keys are those of the outer class
HELP_OF_WIDE = f"""\
x.short: kind-0 | kind-1 | kind-2 | kind-3 | kind-4 | kind-5 | kind-6 | kind-7 = kind-0
    {90 * "a"} b
    {88 * "c"}
    dddd
x.long: one of the names below = {82 * "x"}
      Mixed: {82 * "x"},
        {50 * "x"},
        yy-{34 * "y"}
      Sft: a, b, c, d, e, f"""


def test_describe_shows_types_defaults_and_field_docs():
    assert describe(Config) == HELP
    assert describe(Wide, "x") == HELP_OF_WIDE


def half(step: int) -> float:
    return 0.5


@dataclass(frozen=True)
class Third:
    of: float = 1.0

    def __call__(self, step: int) -> float:
        return self.of / 3


def test_a_prior_is_chosen_by_its_name_or_imported():
    """A mapping without `name` changes the method's default prior."""
    from gac.control.schedules import Prior
    from gac.train_config import TrainConfig

    def prior(value, *changes):
        config = load(TrainConfig, {"method": {"name": "gac", "prior": value}}, changes)
        assert load(TrainConfig, dump(config)) == config
        return config.method.prior

    assert prior({"name": "cosine", "hold": 5}) == Prior(hold=5)
    assert prior({"hold": 5}) == Prior(hold=5, decay=None)
    assert prior(f"{__name__}:half") is prior(half) is half
    assert prior(f"{__name__}:Third", "method.prior.of=0.5") == Third(0.5)
    own = f"{__file__}:half"
    assert (
        dump(load(TrainConfig, {"method": {"name": "gac", "prior": own}}))["method"]["prior"] == own
    )
    for value, message in (
        ({"name": "cosin"}, r"method.prior.name: unknown name 'cosin'.*'cosine'"),
        ({"hihg": 0.5}, r"method.prior.hihg: unknown key 'hihg'.*'high'"),
        ({"high": 2}, r"method.prior.high=2"),
        (f"{__name__}:absent", rf"method.prior '{__name__}:absent': .* has no 'absent'"),
        ("absent.py:f", r"method.prior: no file 'absent.py' in this folder"),
        ({"name": f"{__name__}:half", "of": 1}, "is a function, without 'of'; use a dataclass"),
        (f"{__name__}:Path", "is a class; use a dataclass"),
    ):
        with pytest.raises(ConfigError, match=message):
            prior(value)


def test_a_file_overrides_the_values_of_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: [1, 2]}\nb: text\nc: 3\nd: {w: 1}\n")
    (tmp_path / "run.yaml").write_text("base: base.yaml\na: {y: [3]}\nb: {z: 4}\nd: 5\n")
    merged = {"a": {"x": 1, "y": [3]}, "b": {"z": 4}, "c": 3, "d": 5}
    assert read_yaml(tmp_path / "run.yaml") == merged
    for base, message in (
        ("none.yaml", r"other.yaml: base='none.yaml': no such file"),
        ("run.yaml", "base='base.yaml'"),
    ):
        (tmp_path / "other.yaml").write_text(f"base: {base}\n")
        with pytest.raises(ConfigError, match=message):
            read_yaml(tmp_path / "other.yaml")
    (tmp_path / "empty.yaml").touch()
    assert read_yaml(tmp_path / "empty.yaml") == {}
