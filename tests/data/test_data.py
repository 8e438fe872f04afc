"""The data layer: sources, templates, length filters, error messages, row order."""

import copy
import errno
import gzip
import json
import logging
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gac.data import DataConfig, DataError, load_demos, load_prompts, read_rows
from gac.data.config import Source
from gac.data.source import _enumerate, _hub, data_files
from gac.data.stored import Example, store
from gac.errors import RunError
from gac.order import Order

CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with one token per byte and a leading BOS: tokens can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def chat_tokenizer(tokenizer):
    """The same with a chat template."""
    fast = copy.copy(tokenizer)
    fast.chat_template = CHAT
    return fast


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def addition_row(i=0, **more):
    return {"id": f"r{i}", "prompt": f"{i}+1", "answer": str(i + 1), "solution": f"is {i + 1}"}


# --- loaded examples


def test_a_row_becomes_tokens_text_answer_demo_and_extra(tmp_path, tokenizer):
    row = {**addition_row(3), "level": 2}
    path = write(tmp_path / "a.jsonl", row)
    [example] = load_prompts(DataConfig(prompts=path, template="Q: {prompt}"), tokenizer)
    # all fields, including the prompt without the template
    assert example.id == "r3"
    assert example.answer == "4"
    assert example.extra == row
    assert example.prompt_text == "Q: 3+1"
    assert tokenizer.decode(example.prompt) == "<s>Q: 3+1"
    assert tokenizer.decode(example.demo) == "is 4</s>"  # no BOS inside a sequence


def test_rows_stay_on_the_disk(tmp_path, tokenizer):
    """In memory are one chunk of rows while loading, and eight bytes per row afterwards."""
    size = 6000
    rows = [{**addition_row(i), "notes": f"{i}" * (size // len(f"{i}"))} for i in range(1000)]
    path = write(tmp_path / "a.jsonl", *rows)
    tracemalloc.start()
    with patch("gac.data.examples.CHUNK", 33):
        examples = load_prompts(DataConfig(prompts=path), tokenizer)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 0.05 * len(rows) * size
    assert peak < 0.3 * len(rows) * size
    assert [e.extra for e in examples] == rows
    assert [e.index for e in examples[-3:]] == [997, 998, 999]
    position = examples._file.tell()  # shared with forked processes
    assert examples[-1] == examples[999]
    assert examples[0].index == 0
    assert examples._file.tell() == position


def test_plain_and_gzipped_files_and_saved_datasets_give_the_same_rows(tmp_path, tokenizer):
    rows = [addition_row(i) for i in range(5)]
    plain = write(tmp_path / "a.jsonl", *rows)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    datasets = pytest.importorskip("datasets", reason="the hub extra is not installed")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "splits"))
    expected = list(load_prompts(DataConfig(prompts=plain), tokenizer))
    for source in ("a.jsonl.gz", "saved", "splits:train"):
        assert list(load_prompts(DataConfig(prompts=str(tmp_path / source)), tokenizer)) == expected
    with pytest.raises(ValueError, match=r"split 'test' is not one of train"):
        list(read_rows(f"{tmp_path / 'splits'}:test"))


def test_hub_datasets_are_read_with_split_and_configuration(tmp_path, monkeypatch):
    """The loader for the Hub, applied to a folder instead of a name on the Hub."""
    datasets = pytest.importorskip("datasets", reason="the hub extra is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", addition_row(1), addition_row(2))
    for source in (f"{tmp_path / 'set'}:train", f"{tmp_path / 'set'}:default:train"):
        rows = list(_enumerate(_hub(source, "source"), source))
        assert [row.fields["id"] for row in rows] == ["r1", "r2"]
        assert rows[1].location == f"{source}, row 2"
    calls: list = []
    found = SimpleNamespace(cache_files=[{"filename": "f"}])
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, split: calls.append((*a, split)) or found
    )
    for source in ("a/b", "a/b:test", "a/b:c:test"):
        assert data_files(source) == [Path("f")]
    assert calls == [("a/b", "train"), ("a/b", "test"), ("a/b", "c", "test")]


def test_template_shows_the_prompt_choices_with_letters_and_other_fields(tmp_path, tokenizer):
    row = {**addition_row(), "choices": ["one", "two"], "tests": ["t1", "t2"], "unit": "cm"}
    path = write(tmp_path / "a.jsonl", row)
    template = "Q: {prompt} in {unit}\n{choices}\n{tests}\n\\boxed{{}}"
    config = DataConfig(prompts=path, template=template, demo_template=" {demo}!")
    [example] = load_prompts(config, tokenizer)
    assert example.prompt_text == "Q: 0+1 in cm\n(A) one\n(B) two\nt1\nt2\n\\boxed{}"
    assert tokenizer.decode(example.demo) == " is 1!</s>"


def test_choices_have_one_letter_each(tmp_path, tokenizer):
    rows = [{**addition_row(), "choices": ["x"] * n} for n in (26, 27)]
    config = DataConfig(prompts=write(tmp_path / "a.jsonl", *rows), template="{prompt}{choices}")
    with pytest.raises(DataError, match="line 2, .*'choices': has 27 choices, but only 26"):
        load_prompts(config, tokenizer)
    write(tmp_path / "a.jsonl", rows[0])
    (example,) = load_prompts(config, tokenizer)
    assert example.prompt_text.endswith("(Z) x")


def test_chat_uses_the_tokenizers_template_and_adds_no_second_bos(tmp_path, chat_tokenizer):
    path = write(tmp_path / "a.jsonl", addition_row())
    config = DataConfig(prompts=path, chat=True, system="Be brief.", template="{prompt}=?")
    [example] = load_prompts(config, chat_tokenizer)
    assert example.prompt_text == "[system]Be brief.[user]0+1=?[assistant]"
    assert chat_tokenizer.decode(example.prompt) == example.prompt_text
    bare = PreTrainedTokenizerFast(
        tokenizer_object=chat_tokenizer.backend_tokenizer, eos_token="</s>"
    )
    with pytest.raises(ValueError, match="the tokenizer has no chat template: set data.chat=false"):
        load_prompts(config, bare)
    with pytest.raises(ValueError, match="data.system=.Be brief.*needs data.chat=true"):
        load_prompts(replace(config, chat=False), chat_tokenizer)


def test_only_prompts_that_are_text_begin_with_bos(tmp_path, chat_tokenizer):
    turns = [{"role": "user", "content": "b"}]
    path = write(tmp_path / "a.jsonl", *({"id": 7, "prompt": x} for x in ("a", turns, "c")))
    config = DataConfig(prompts=path, answer_field=None, source_field="id", chat=False)
    examples = load_prompts(config, chat_tokenizer)
    assert len({part.digest for part in (examples, *map(examples.subset, ([], [0])))}) == 3
    last = examples.subset([0, 2]).subset([1])
    texts = [chat_tokenizer.decode(example.prompt) for example in (*examples, *last)]
    assert texts == ["<s>a", "[user]b[assistant]", "<s>c", "<s>c"]
    assert last[0].index == 0
    assert {(example.id, example.source) for example in examples} == {("7", "7")}
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>")
    message = "line 1, field 'prompt': the tokenizer produces no tokens for 'a'"
    with pytest.raises(DataError, match=message):
        load_prompts(replace(config, where={"prompt": "a"}), bare)


def test_answer_pattern_takes_the_last_match(tmp_path, tokenizer):
    path = write(
        tmp_path / "a.jsonl", {"prompt": "p", "answer": "#### 0\n#### 1 no\n#### 1,234 \n"}
    )
    config = DataConfig(prompts=path, answer_pattern=r"####(.+)")
    assert load_prompts(config, tokenizer)[0].answer == "1,234"


def test_where_matches_a_value_or_a_list_and_limit_samples_kept_rows(tmp_path, tokenizer):
    rows = [
        {**addition_row(i), "split": ["train", "test", "dev"][i % 3], "odd": i % 2}
        for i in range(9)
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    for splits in (["train", "dev"], ("train", "dev")):
        config = DataConfig(prompts=path, where={"split": splits, "odd": 0}, limit=3)
        examples = load_prompts(config, tokenizer)
        assert {e.id for e in examples} < {"r0", "r2", "r6", "r8"}
        assert examples.dropped == {"excluded by where": 5, "not in the sample of limit=3": 1}
    single = load_prompts(DataConfig(prompts=path, where={"split": "test"}), tokenizer)
    assert [e.id for e in single] == ["r1", "r4", "r7"]


# --- demonstrations


def test_demos_come_from_their_own_file_without_needing_answers(tmp_path, tokenizer):
    prompts = write(tmp_path / "p.jsonl", {"prompt": "1+1", "answer": "2"})
    demos = write(tmp_path / "d.jsonl", {"prompt": "7-2", "solution": "5"})
    config = DataConfig(prompts=prompts, demos=demos, answer_pattern="(.)")
    [demo] = load_demos(config, tokenizer)
    assert (demo.prompt_text, demo.answer) == ("7-2", None)
    assert demo.id == f"{demos}, line 1"
    assert tokenizer.decode(demo.demo) == "5</s>"
    assert load_prompts(config, tokenizer)[0].demo is None


def test_without_a_demo_file_demos_come_from_the_prompt_rows(tmp_path, tokenizer):
    bare = {"id": "bare", "prompt": "9+9", "answer": "18"}
    path = write(tmp_path / "a.jsonl", addition_row(1), bare, addition_row(2))
    config = DataConfig(prompts=path)
    assert [(e.id, e.answer) for e in load_demos(config, tokenizer)] == [("r1", "2"), ("r2", "3")]
    subset = load_prompts(config, tokenizer).subset
    assert subset([0, 1]).digest != subset([0, 2]).digest
    config = replace(config, max_demo_tokens=99, demo_template="{demo}")
    texts = [e.demo and tokenizer.decode(e.demo) for e in load_prompts(config, tokenizer)]
    assert texts == ["is 2</s>", None, "is 3</s>"]
    with pytest.raises(ValueError, match="3 without the field data.demo_field='expert'"):
        load_demos(DataConfig(prompts=path, demo_field="expert"), tokenizer)
    for none in (DataConfig(prompts=path, demo_field=None), DataConfig()):
        with pytest.raises(ValueError, match="no demonstrations are configured"):
            load_demos(none, tokenizer)


def test_a_row_of_the_demo_file_without_demonstration_is_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", addition_row(1), {"prompt": "9+9"})
    with pytest.raises(
        DataError, match=r"d\.jsonl, line 2, .*'solution': is missing.*: set demo_f"
    ):
        load_demos(DataConfig(demos=path), tokenizer)


def test_canary_rows_are_allowed_in_evaluation_but_not_in_training(tmp_path, tokenizer):
    config = DataConfig(prompts=write(tmp_path / "a.jsonl", {**addition_row(), "canary": "GUID"}))
    assert load_prompts(config, tokenizer)[0].extra["canary"] == "GUID"
    for load in (load_demos, lambda *a: load_prompts(*a, training=True)):
        with pytest.raises(DataError, match=r"line 1, field 'canary': .*training"):
            load(config, tokenizer)


def test_demonstrations_need_an_eos_token(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", addition_row())
    no_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no EOS token"):
        load_demos(DataConfig(prompts=path), no_eos)
    assert load_prompts(DataConfig(prompts=path, demo_field=None), no_eos)[0].demo is None


# --- length filters


def test_long_rows_are_dropped_counted_and_logged_once(tmp_path, tokenizer, caplog):
    rows = [{"prompt": "p" * n, "answer": "1", "solution": "s" * (10 - n)} for n in range(1, 10)]
    path = write(tmp_path / "a.jsonl", *rows)
    config = DataConfig(prompts=path, max_prompt_tokens=7, max_demo_tokens=8)
    with caplog.at_level(logging.INFO, logger="gac.data"):
        prompts = load_prompts(config, tokenizer)
    # BOS + n <= 7 keeps n = 1..6; 10 - n + EOS <= 8 keeps the demonstrations of n = 3..6
    assert [len(e.prompt) for e in prompts] == [2, 3, 4, 5, 6, 7]
    assert [e.demo is not None for e in prompts] == [False, False, True, True, True, True]
    assert prompts.dropped == {
        "prompt longer than 7 tokens": 3,
        "demonstration longer than 8 tokens": 2,
    }
    [record] = caplog.records
    assert ": 6 prompts; dropped" in record.message
    assert "3 prompt longer than 7" in record.message
    assert [len(e.demo) for e in load_demos(config, tokenizer)] == [8, 7, 6, 5]


def test_filtering_out_every_row_is_an_error_with_the_reason(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", addition_row())
    for limit, reasons in ((2, "1 prompt longer than 2 tokens"), (None, "nothing")):
        with pytest.raises(ValueError, match=rf"a.jsonl: no rows left \(dropped: {reasons}\)"):
            load_prompts(DataConfig(prompts=path, max_prompt_tokens=limit), tokenizer)
        write(tmp_path / "a.jsonl")


# --- bad rows and bad settings

BAD_LINES = {
    "not JSON": ('{"prompt": ', "line 2: not valid .*JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "line 2: not valid UTF-8"),
    "not an object": ("[1]", "line 2: expected an object, found list"),
    "a missing prompt": (
        '{"answer": "1"}',
        "line 2, field 'prompt': is missing; .*fields are answer",
    ),
    "a null prompt": ('{"prompt": null}', "line 2, field 'prompt': is null"),
    "a blank prompt": ('{"prompt": " ", "answer": "1"}', "line 2, field 'prompt': is empty"),
    "a list as prompt": (
        '{"prompt": [1], "answer": "1"}',
        "line 2, field 'prompt': message 1 needs a `role` and `content`: 1",
    ),
    "a boolean as answer": (
        '{"prompt": "p", "answer": true}',
        "line 2, field 'answer': expected text, found bool True",
    ),
    "a missing answer": ('{"prompt": "p"}', "line 2, .*'answer': is missing.*: set answer_field"),
    "a blank demonstration": (
        '{"prompt": "p", "answer": "1", "solution": ""}',
        "line 2, field 'solution': is empty",
    ),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_row_names_file_line_and_field(tmp_path, tokenizer, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(addition_row()).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl, {message}"):
        load_prompts(DataConfig(prompts=str(path)), tokenizer)


def test_settings_that_a_row_cannot_satisfy_name_row_and_field(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", addition_row())
    for setting, message in (
        ({"template": "{prompt} {unit}"}, "line 1, field 'unit': is missing.*template"),
        ({"demo_template": "{demo} {unit}"}, "line 1, field 'unit': is missing.*template"),
        ({"where": {"split": "x"}}, "line 1, field 'split': is missing.*: set where"),
        ({"source_field": "set"}, "line 1, field 'set': is missing.*: set source_field"),
        ({"answer_pattern": r"#### (.+)"}, "line 1, field 'answer': answer_pattern .*not match"),
    ):
        with pytest.raises(DataError, match=message):
            load_prompts(DataConfig(prompts=path, **setting), tokenizer)


BAD_SETTINGS = {
    "a limit of zero": ({"limit": 0}, "limit=0: use an integer >= 1"),
    "prompts of 0 tokens": ({"max_prompt_tokens": 0}, "max_prompt_tokens=0: use an integer >= 1"),
    "demos of 0 tokens": ({"max_demo_tokens": 0}, "max_demo_tokens=0: use an integer >= 1"),
    "no {demo}": ({"demo_template": "{prompt}"}, r"demo_template must contain \{demo\}"),
    "no {prompt}": ({"template": "Q:"}, r"template must contain \{prompt\}, got 'Q:'"),
    "a lone brace": ({"template": "{prompt} {"}, r"template: .* write \{\{ for a literal brace"),
    "one name for two": (
        {"sources": (Source("a"), Source("b", name="a"))},
        r"sources: the names \['a', 'a'\] are not distinct",
    ),
    "two names of sources": (
        {"sources": (Source("a"),), "source_field": "set"},
        "source_field='set': give either source_field or sources, not both",
    ),
    "no group": ({"answer_pattern": "####"}, "answer_pattern .*exactly one group.*'####'"),
    "two groups": ({"answer_pattern": "(#)(1)"}, "answer_pattern must have exactly one group"),
}


@pytest.mark.parametrize(("setting", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_a_bad_setting_is_rejected_immediately(setting, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**setting)


def test_sources_that_do_not_exist(tmp_path, tokenizer, monkeypatch):
    for load, key in ((load_prompts, "prompts"), (load_demos, "demos")):
        with pytest.raises(FileNotFoundError, match=rf"^data\.{key}='.*nowhere\.jsonl'"):
            load(DataConfig(**{key: str(tmp_path / "nowhere.jsonl")}), tokenizer)
    with pytest.raises(ValueError, match="data.sources='gsm8k': no such file.*owner/name:split"):
        load_prompts(DataConfig(sources=(Source("gsm8k"),)), tokenizer)
    with pytest.raises(ValueError, match="prompts is not set"):
        load_prompts(DataConfig(), tokenizer)
    monkeypatch.setitem(sys.modules, "datasets", None)  # simulate a missing package
    with pytest.raises(ImportError, match=r"gac-kernels\[hub\]"):
        load_prompts(DataConfig(prompts="owner/name:train"), tokenizer)


def test_environment_variables_in_a_source_are_expanded(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "a.jsonl", addition_row())
    monkeypatch.setenv("ROWS", str(tmp_path))
    assert len(load_prompts(DataConfig(prompts="$ROWS/a.jsonl"), tokenizer)) == 1
    monkeypatch.delenv("ROWS")
    with pytest.raises(FileNotFoundError, match=r"prompts='\$ROWS/a.jsonl': \$ROWS is not set"):
        load_prompts(DataConfig(prompts="$ROWS/a.jsonl"), tokenizer)


# --- order


@given(n=st.integers(1, 20), seed=st.integers(), sizes=st.lists(st.integers(0, 25), max_size=6))
def test_every_epoch_visits_every_row_once_for_any_batch_sizes(n, seed, sizes):
    order = Order(n, seed)
    rows = [row for size in sizes for row in order.take(size)]
    assert rows == Order(n, seed).take(sum(sizes))
    for start in range(0, len(rows) - n + 1, n):
        assert sorted(rows[start : start + n]) == list(range(n))
    assert order.position == sum(sizes)
    assert order.epoch == sum(sizes) // n


@given(n=st.integers(1, 12), seed=st.integers(), before=st.integers(0, 40))
def test_resuming_continues_the_same_order(n, seed, before):
    order = Order(n, seed)
    order.take(before)
    saved = json.loads(json.dumps(order.state_dict()))
    resumed = Order(n, seed)
    resumed.load_state_dict(saved)
    assert resumed.take(3 * n) == order.take(3 * n)


def test_order_depends_on_seed_and_epoch_not_on_the_process_or_the_version():
    order = Order(50, seed=1)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert Order(50, seed=2).take(50) != first
    assert Order(5, seed=1).take(10) == [2, 1, 0, 4, 3, 1, 4, 2, 0, 3]


def test_order_rejects_the_state_of_other_data_and_an_empty_dataset():
    saved = Order(5, seed=1).state_dict()
    with pytest.raises(ValueError, match="number of rows is 6, but .* saved with 5: resume with"):
        Order(6, seed=1).load_state_dict(saved)
    with pytest.raises(ValueError, match="seed is 2, but .* saved with 1"):
        Order(5, seed=2).load_state_dict(saved)
    with pytest.raises(ValueError, match="the dataset is empty"):
        Order(0, seed=1)
    with pytest.raises(ValueError, match="k must not be negative, got -1"):
        Order(5, seed=1).take(-1)


# --- real files, by configuration only

CODE = "{prompt}\nIt must pass:\n{tests}\n"
CHOICES = "{prompt}\n{choices}\nAnswer:"
REAL = {  # file -> (settings, number of rows kept, number of demonstrations among them)
    "gsm8k_train": ({}, 5978, 5978),
    "gsm8k_test": ({"limit": 100}, 100, 100),
    "mbpp": ({"where": {"split": "train"}, "template": CODE, "demo_field": "answer"}, 376, 376),
    "humaneval": ({"demo_field": None}, 131, 0),
    "mmlu_pro": ({"template": CHOICES}, 2400, 0),
    "bbh_logic": ({}, 1400, 0),
    "traces_mmlu_pro_cot": ({"template": CHOICES}, 480, 480),
}


@pytest.mark.parametrize("name", REAL)
def test_every_real_file_loads_by_configuration(name, tokenizer, data_dir):
    settings, rows, demos = REAL[name]
    config = DataConfig(prompts=str(data_dir / f"{name}.jsonl.gz"), **settings)
    examples = load_prompts(config, tokenizer)
    assert len(examples) == rows
    assert len({e.id for e in examples}) == rows
    assert sum(e.demo is not None for e in examples) == demos
    assert all(e.answer and e.demo != (tokenizer.eos_token_id,) for e in examples)
    if "choices" in (config.template or ""):
        assert all("(A) " in e.prompt_text and "(B) " in e.prompt_text for e in examples)


def test_marked_benchmark_rows_cannot_be_trained_on(tokenizer, data_dir):
    config = DataConfig(prompts=str(data_dir / "bbh_logic.jsonl.gz"))
    with pytest.raises(DataError, match=r"bbh_logic\.jsonl\.gz, line 1, field 'canary'"):
        load_prompts(config, tokenizer, training=True)


def test_rows_in_the_layout_of_math_with_the_answer_inside_the_solution(tmp_path, tokenizer):
    row = {"problem": "1/2?", "level": "Level 1", "solution": r"It is $\boxed{\frac{1}{2}}$."}
    path = write(tmp_path / "math.jsonl", row)
    config = DataConfig(prompts=path, prompt_field="problem", answer_field="solution")
    [example] = load_prompts(config, tokenizer)
    assert example.answer == row["solution"]
    assert example.demo is not None


def test_other_errors_of_the_temporary_file_are_not_about_space(monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: SimpleNamespace(write=fail))
    with pytest.raises(OSError, match="the disk is broken"):
        store(None, [Example("1", (1,), "a", None, None, {})], {})


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's device that is full")
def test_a_full_temporary_folder_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: FULL.open("w+b", buffering=0))
    with pytest.raises(RunError, match=f"no space left in {tempfile.gettempdir()} .* set TMPDIR"):
        store(None, [Example("1", (1,), "a", None, None, {})], {})
