"""What a run reads, checks, logs and exports, with fake parts, by hand."""

from __future__ import annotations

import logging
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from gac.config import ConfigError, load, save
from gac.control.term_pair import TermPair
from gac.data import Example
from gac.data.rows import Counts, Row
from gac.errors import CheckpointNotFound, RunError
from gac.methods.base import Loss, Mix, StepNeeds
from gac.models.config import LoraConfig, ModelConfig
from gac.parallel import run_lock
from gac.training import export, fingerprint, input_checks, policy, replay, skipped
from gac.training.export import export_checkpoint, export_run
from gac.training.record import Logbook, Record
from gac.training.run_config import TrainConfig
from gac.training.step import Rewards, Step

# ---- export


@pytest.fixture
def exports(monkeypatch):
    """The arguments of `export_checkpoint`, of a run with checkpoints of the steps 3, 7 and 9."""
    calls: list = []
    steps = SimpleNamespace(
        find=lambda folder, step: folder / str(step),
        newest=lambda folder: folder / "9",
        read_progress=lambda path: {"best": {"step": 7}} if path.name == "9" else {},
    )
    monkeypatch.setattr(export, "checkpoint", steps)

    def record(config, path, out):
        assert (path.parents[1] / run_lock.LOCK_FILE).exists()  # while the run is locked
        calls.append((config, path, out))

    monkeypatch.setattr(export, "export_checkpoint", record)
    return calls, steps


def make_run(folder: Path) -> Path:
    folder.mkdir()
    save(load(TrainConfig, {"model": {"path": "the-model"}}), folder / "config.yaml")
    return folder


def test_the_exported_step(tmp_path, exports) -> None:
    calls, steps = exports
    folder = make_run(tmp_path / "run")
    for step, name in ((3, "3"), (0, "0"), (None, "9"), ("best", "7")):
        out = tmp_path / f"out-{name}"
        if step == 3:
            out.mkdir()  # an empty folder is as good as a new one
        path = export_run(folder, out, step)
        assert path == folder / "checkpoints" / name
        assert calls.pop() == (ModelConfig(path="the-model"), path, out) and out.is_dir()
    steps.read_progress = lambda path: {"best": {}}
    with pytest.raises(CheckpointNotFound, match="step='best': no checkpoint in .* was evaluated"):
        export_run(folder, tmp_path / "new", "best")
    steps.newest = lambda folder: None
    for step in (None, "best"):
        with pytest.raises(CheckpointNotFound, match="no intact checkpoint in"):
            export_run(folder, tmp_path / "new", step)
    assert not calls


def test_exports_to_a_used_or_unwritable_folder(tmp_path, exports) -> None:
    folder = make_run(tmp_path / "run")
    used, file = tmp_path / "used", tmp_path / "file"
    used.mkdir()
    (used / "a").touch()
    file.touch()
    for out in (used, file):
        with pytest.raises(FileExistsError, match=f"OUT='{out}' is not empty"):
            export_run(folder, out)
    with pytest.raises(ConfigError, match="OUT=.* cannot be written"):
        export_run(folder, file / "out")
    with pytest.raises(CheckpointNotFound, match="RUN='.*used' is not a run directory"):
        export_run(used, tmp_path / "out")
    assert not exports[0]


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("error", [None, OSError(28, "No space left"), OSError("broken")])
def test_an_export_replaces_the_last_one_at_once(tmp_path, monkeypatch, adapters, error) -> None:
    """An interrupted export left its temporary folder, and the last complete one elsewhere."""
    out, config = tmp_path / "model", ModelConfig(path="the-model")
    for name, file in ((".model.previous", "last"), (".model.writing", "junk")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    verified: list = []

    def write(*arguments: Any) -> None:
        assert arguments[:3] == (config, "path", tmp_path / ".model.writing")
        assert arguments[3:] == (() if adapters else (export.FILE_SIZE,)) and verified == ["path"]
        assert [p.name for p in out.iterdir()] == ["last"]
        arguments[2].mkdir()  # without what an earlier export has left
        (arguments[2] / "new").touch()
        if error:
            raise error

    monkeypatch.setattr(export.checkpoint, "verify", verified.append)
    monkeypatch.setattr(export, "has_adapters", lambda path: path == "the-model" and adapters)
    monkeypatch.setattr(export, "_save_adapters" if adapters else "_save_weights", write)
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer").touch())
    monkeypatch.setattr(export, "load_tokenizer", lambda own: tokenizer if own is config else None)
    if error:
        reason = error.strerror or "broken"
        with pytest.raises(RunError, match=rf"to {out} \({reason}\): .* path is complete"):
            export_checkpoint(config, "path", out)
        assert [p.name for p in out.iterdir()] == ["last"]
    else:
        export_checkpoint(config, "path", out)
        assert {p.name for p in out.iterdir()} == {"new", "tokenizer"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_chunks_of_weights_have_the_given_size(monkeypatch) -> None:
    """Units of 8, 8, 4 and 8 bytes in chunks of at least 16 bytes, but for the last."""
    names = [["a"], ["b"], ["c"], ["d", "e"]]
    bytes_of = {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1}
    monkeypatch.setattr(export, "load_meta_model", lambda config: nn.Identity())
    monkeypatch.setattr(export, "apply_training_options", lambda model, config: model)
    monkeypatch.setattr(export, "_units", lambda model: names)
    tensors = SimpleNamespace(
        model_tensors=lambda path: bytes_of,
        read_tensors=lambda path, meta: {n: torch.zeros(size) for n, size in meta.items()},
    )
    monkeypatch.setattr(export, "checkpoint", tensors)
    for size, expected in ((16, ["ab", "cde"]), (17, ["abc", "de"]), (1, ["a", "b", "c", "de"])):
        chunks = list(export._chunks(ModelConfig(), Path(), size))
        assert ["".join(chunk) for chunk in chunks] == expected


# ---- the fingerprint and the checks of the data


def test_a_fingerprint_covers_all_inputs(tmp_path, monkeypatch) -> None:
    tokenizer = SimpleNamespace(chat_template=None, vocabulary={"a": 0, "b": 1})
    tokenizer.get_vocab = lambda: tokenizer.vocabulary
    first, second = (Example(n, (1,), n, "x", (2,), {}) for n in "ab")
    monkeypatch.setattr(fingerprint, "_files", lambda reward: iter([reward]))
    config = ModelConfig(path=str(tmp_path))

    def prints(*sources: Any, reward: bytes = b"1") -> dict[str, str]:
        return fingerprint.fingerprint(config, tokenizer, sources or ([first], [second]), reward)

    start = prints()
    assert start.keys() == {"data", "tokenizer", "model", "reward"}
    assert {len(text) for text in start.values()} == {16}
    changed = []

    def differs(name: str, now: dict[str, str]) -> None:
        assert {key for key in start if now[key] != start[key]} == {name}
        changed.append(now[name])

    differs("reward", prints(reward=b"2"))
    differs("data", prints([first]))
    for fields in ({"prompt": (3,)}, {"demo": (3,)}, {"demo": None}, {"answer": "y"}):
        differs("data", prints([first], [Example(**{**vars(second), **fields})]))
    # a token that moves from the prompt to the demonstration
    differs("data", prints([first], [Example("b", (), "b", "x", (1, 2), {})]))
    tokenizer.vocabulary = {"b": 1, "a": 0}
    assert prints() == start
    tokenizer.vocabulary = {"a": 0, "c": 1}
    differs("tokenizer", prints())
    tokenizer.vocabulary, tokenizer.chat_template = {"a": 0, "b": 1}, "{{ messages }}"
    differs("tokenizer", prints())
    tokenizer.chat_template = None
    (tmp_path / "config.json").write_text("{}")
    differs("model", prints())
    assert len(set(changed)) == len(changed)
    assert fingerprint._hash([b"a", b"b"]) != fingerprint._hash([b"ab"])
    assert list(fingerprint._model(tmp_path / "a-name-on-the-hub")) == []


def test_weights_are_read_in_the_order_of_their_names(tmp_path) -> None:
    for name in ("b.bin", "a.bin", "c.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    parts = list(fingerprint._model(tmp_path))
    names = ("a.bin", "b.bin", "c.safetensors")
    assert parts == [x for n in names for x in (f"{n} {len(n)}{n}".encode(), n.encode())]


@pytest.mark.parametrize("tokenizer_path", [None, "its-tokenizer"])
@pytest.mark.parametrize("where", ["prompt", "demo", "eos", "pad", None])
def test_tokens_must_be_in_the_vocabulary(monkeypatch, tokenizer_path, where) -> None:
    monkeypatch.setattr(input_checks, "_text_config", lambda config: SimpleNamespace(vocab_size=8))
    tokenizer = SimpleNamespace(
        eos_token_id=8 if where == "eos" else 2,
        pad_token_id=8 if where == "pad" else 1,
        convert_ids_to_tokens=lambda i: f"token-{i}",
    )
    row = Example("", (3, 8 if where == "prompt" else 7, 4), "", "", None, {})
    rows = [row, Example("", (3,), "", "", (5, 8 if where == "demo" else 7, 6), {}), row]
    config = ModelConfig(path="a-model", tokenizer=tokenizer_path)
    if where is None:
        input_checks.check_tokens(config, tokenizer, rows)
        return
    key = "model.tokenizer='its-tokenizer'" if tokenizer_path else "model.path='a-model'"
    message = f"^{key}: .* encodes 'token-8' as 8, .* model.path='a-model' has only 8 rows"
    with pytest.raises(ConfigError, match=message):
        input_checks.check_tokens(config, tokenizer, rows)


@pytest.mark.parametrize(
    ("fields", "longest", "result"),
    [
        ({"max_position_embeddings": 8}, 8, None),
        ({"max_position_embeddings": 8}, 9, "error"),
        ({"max_position_embeddings": 1}, 2, "error"),
        ({"max_position_embeddings": 8, "alibi": True}, 9, None),
        ({"max_position_embeddings": 8, "alibi": False}, 9, "error"),
        ({"max_position_embeddings": 8, "rope_parameters": {}}, 9, "warning"),
        ({"max_position_embeddings": -1}, 9, None),
        ({"max_position_embeddings": 0}, 9, None),
        ({"max_position_embeddings": None}, 9, None),
        ({}, 9, None),
    ],
)
def test_rows_must_fit_into_learned_positions(monkeypatch, caplog, fields, longest, result) -> None:
    monkeypatch.setattr(input_checks, "_text_config", lambda config: SimpleNamespace(**fields))
    config = ModelConfig(path="a-model")
    message = f"model.path='a-model' has {fields.get('max_position_embeddings')} positions, but .*"
    if result == "error":
        with pytest.raises(ConfigError, match=f"^{message} {longest} tokens: lower rollouts.max"):
            input_checks.check_positions(config, longest)
    else:
        input_checks.check_positions(config, longest)
    assert len(caplog.messages) == (result == "warning")
    assert result != "warning" or "unless the model supports more than 8" in caplog.text


# ---- logs


def test_a_log_keeps_what_json_can_hold(tmp_path, monkeypatch) -> None:
    book = Logbook(tmp_path / "rows.jsonl")
    book.append({"step": 1, "a": math.nan, "b": -math.inf, "c": 0.5, "d": None, "e": "x", "f": 3})
    line = '{"step": 1, "a": null, "b": null, "c": 0.5, "d": null, "e": "x", "f": 3}\n'
    assert book.path.read_text() == line
    with pytest.raises(ValueError, match="not JSON compliant"):
        book.append({"step": 2, "nested": [math.nan]})
    with book.path.open("ab") as file:
        file.write(b'[1]\n3\n{"a": 1}\n\xff\n"step"\n{"step": 2}\n')
    assert [row["step"] for row in book.read()] == [1, 2]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="a full disk"):
        patch.setattr(Path, "rename", Mock(side_effect=OSError("a full disk")))
        book.truncate(0)
    assert len(book.read()) == 2  # replaced as a whole
    book.truncate(0)
    assert book.path.read_text() == "" and [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    missing = Logbook(tmp_path / "missing.jsonl")
    missing.truncate(3)
    assert missing.read() == [] and not missing.path.exists()


@pytest.mark.parametrize("main", [True, False])
def test_the_files_of_a_run(tmp_path, main: bool) -> None:
    """Only the main process writes them."""
    logged: list = []
    accelerator = SimpleNamespace(is_main_process=main, log=lambda *a, **k: logged.append(k))
    record = Record(tmp_path, accelerator)
    config = SimpleNamespace(log_samples_every=1, print_samples=False)
    for step in (1, 2):
        record.step({"step": step, "kl": 0.5})
        record.evaluation({"step": step, "accuracy": 0.25})
        record.samples(step, [{"prompt": "p"}], config)
    names = ("eval.jsonl", "metrics.jsonl", "samples.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == (list(names) if main else [])
    assert logged == [{"step": 1}, {"step": 2}]
    for name in names:
        if not main:  # as written by another process
            (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n')
    record.truncate(1)
    lengths = {len((tmp_path / name).read_text().splitlines()) for name in names}
    assert lengths == ({1} if main else {2})


def test_printed_samples(caplog) -> None:
    texts: list = []
    record = SimpleNamespace(texts=texts, accelerator=SimpleNamespace(is_main_process=True))
    responses = [{"text": "2", "reward": 1.0}, {"text": "3", "reward": None}]
    with caplog.at_level(logging.INFO, "gac"):
        for shown in (True, False):
            config = SimpleNamespace(log_samples_every=2, print_samples=shown)
            Record.samples(record, 7, [{"prompt": "1+1", "responses": responses}], config)
    assert caplog.messages == ["step 7: 1+1\n  [1.0] 2\n  [None] 3"] and len(texts) == 2


# ---- the models and the configuration of a run


@pytest.mark.parametrize("kl", [True, False])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("in_loss", [True, False])
def test_a_reference_is_loaded_only_if_it_is_used(monkeypatch, kl, sampled, in_loss) -> None:
    plan = SimpleNamespace(from_reference=sampled)
    method = SimpleNamespace(sampling=lambda completions: plan if completions == 5 else None)
    method.loss = lambda base: Loss(base, reference=in_loss)
    full = load(TrainConfig, {"rollouts": {"num_generations": 5}})
    monkeypatch.setattr(policy, "_build_model", lambda *arguments: arguments)
    monkeypatch.setattr(policy, "loss_of", lambda own: method.loss(own.loss))
    for lora in (None, LoraConfig()):
        model = ModelConfig(lora=lora)
        config = SimpleNamespace(**{**vars(full), "method": method, "model": model})
        loaded = policy.load_reference(config, "accelerator", kl)
        needed = (kl or sampled or in_loss) and lora is None
        own = config, "accelerator"
        assert loaded == ((policy.setup.prepare_frozen, *own) if needed else None)
    assert policy.load_policy(*own) == (policy.setup.prepare, *own)


@pytest.mark.parametrize(
    ("changes", "rows", "ranks", "own_rows"),
    [
        ({}, None, 2, None),
        ({"kl_sample_size": 5}, 5, 1, 5),
        ({"kl_sample_size": 5}, 5, 2, 3),
        ({"kl_sample_size": 4}, 4, 2, 2),
        ({"kl_sample_size": 4, "loss": {"kl_coef": 0.1}}, 4, 2, None),
    ],
)
def test_the_parts_of_the_gradient(monkeypatch, changes, rows, ranks, own_rows) -> None:
    """The rows for the KL are divided among the ranks; a KL in the loss needs all."""
    config = load(TrainConfig, {"method": "dpo", "rollouts": {"temperature": 0.7}, **changes})
    model, resharded = nn.Linear(2, 1), []
    accelerator = SimpleNamespace(num_processes=ranks, unwrap_model=lambda m: m)
    monkeypatch.setattr(policy, "reshard", resharded.append)
    tokenizer = SimpleNamespace(pad_token_id=9)
    for needs, names in (
        (StepNeeds(), []),
        (StepNeeds(average=0.5), ["0.weight", "0.bias", "1.weight", "1.bias"]),
    ):
        made = policy.make_gradients(config, accelerator, tokenizer, model, None, needs)
        assert made.kl_sample_size == own_rows and list(made.tracked) == names
        assert all(not x.any() and not x.requires_grad for x in made.tracked.values())
        parts = made.forward
        assert (parts.model, parts.reference, parts.temperature) == (model, None, 0.7)
        assert parts.pad_token == 9 and parts.accelerator is accelerator
        assert parts.micro == policy.MicroBatches(None, None, False, 2)
    assert resharded == [model] * 2


@pytest.mark.parametrize(
    ("works", "enabled", "packed"),
    [
        ([True], True, True),
        ([False, True], True, True),  # after PyTorch's own attention was restored
        ([False, False], True, False),
        ([False], False, False),
    ],
)
def test_a_model_that_cannot_pack_is_tried_without_attention_by_row(
    monkeypatch, works, enabled, packed
) -> None:
    answers = iter(works)
    monkeypatch.setattr(policy, "supports_packing", lambda model: next(answers))
    monkeypatch.setattr(policy.row_attention, "disable", lambda model: enabled)
    assert policy._supports_packing(object()) is packed and list(answers) == []


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("changes", "device", "by_row"),
    [
        ({}, "cpu", True),
        ({"max_tokens_per_micro_batch": 64}, "cpu", True),
        ({"micro_batch_size": 4}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_a_model_is_built_in_order(monkeypatch, sharded, changes, device, by_row) -> None:
    """The head of a sharded model is checked when the weights of all ranks are in place."""
    events: list = []
    config = load(TrainConfig, {"seed": 7, "mixed_precision": "bf16", **changes})
    loading = "loading" if sharded else None
    accelerator = SimpleNamespace(device=torch.device(device))

    def record(name: str, result: Any = None) -> Any:
        return lambda *arguments: events.append((name, *arguments)) or result

    def prepare(*arguments: Any) -> str:
        assert arguments == ("model", accelerator, config.parallel, "bf16", loading)
        events.append(("prepare",))
        return "prepared"

    parallel = SimpleNamespace(sharded_loading=record("load", loading))
    monkeypatch.setattr(policy, "setup", parallel)
    monkeypatch.setattr(policy, "run_on_all_ranks", lambda work: (events.append("all"), work())[1])
    for name, result in (("make_model", "model"), ("check_head", True), ("reshard", None)):
        monkeypatch.setattr(policy, name, record(name, result))
    monkeypatch.setattr(policy, "row_attention", SimpleNamespace(enable=record("enable")))
    assert policy._build_model(prepare, config, accelerator) == "prepared"
    expected = [("load", accelerator, config.parallel), "all"]
    expected += [("make_model", config.model, 7, loading), *[("enable", "model")] * by_row]
    if sharded:
        expected += [("prepare",), ("check_head", "prepared"), ("reshard", "prepared")]
    else:
        expected += [("check_head", "model"), ("prepare",)]
    assert events == expected


# ---- skipped steps


def make_step(sequence: int, seed: int = 1) -> Step:
    rows = (Row((1, 2, seed), 1, False, 0.5, sequence),)
    old = tuple(torch.full((2,), float(10 * seed + i)) for i in range(sequence + 1))
    counts = Counts(1, 2, 0, 0, 1, 3)
    return Step(5, rows, Mix(0.3), counts, Rewards(1, 2, 3), StepNeeds(), old, seed)


@pytest.mark.parametrize("weights", [None, TermPair(0.25, 4.0)])
def test_a_skipped_step_by_hand(tmp_path, monkeypatch, weights) -> None:
    """Ranks 2 and 10: in numerical order. The second step shares the weights of the first."""
    written: list = []
    monkeypatch.setattr(skipped.checkpoint, "write_weights", lambda *a: written.append(a))
    tracked = {"0.w": torch.ones(1)}
    losses, first = TermPair(demo=1.5, rollout=2.5), None
    for number in (5, 6):
        for rank in (10, 2):
            monkeypatch.setattr(skipped, "rank", lambda rank=rank: rank)
            step = make_step(rank % 3, rank)
            step = Step(**{**vars(step), "number": number})
            broken = skipped.SkippedStep(step, weights, "a fault", 7.5, losses)
            path = broken.save(tmp_path, "model", tracked, first)
        loaded, folder = skipped.load(path)
        assert path == tmp_path / f"step-0000000{number}"
        assert folder == tmp_path / "step-00000005" / "weights"
        assert (loaded.weights, loaded.fault, loaded.norm, loaded.losses) == (
            weights,
            "a fault",
            7.5,
            losses,
        )
        step = loaded.step
        merged = [(row.ids[-1], step.old_logps[row.sequence][0].item()) for row in step.rows]
        assert merged == [(2, 22.0), (10, 101.0)]
        assert (step.number, step.seed) == (number, 2)
        first = path
    assert written == [(tmp_path / "step-00000005" / "weights", "model", tracked)] * 2
    with pytest.raises(ConfigError, match="step-00000007 contains no saved step: give a folder in"):
        skipped.load(tmp_path / "step-00000007")
    torch.save({"format": skipped.FORMAT, "step": Path()}, path / "rank-0.pt")
    with pytest.raises(pickle.UnpicklingError):  # only tensors and plain types
        skipped.load(path)


def test_a_replayed_step_names_its_culprits(tmp_path, monkeypatch) -> None:
    """Each row is recomputed by itself."""
    rows = (Row((1,), 0, True, 0.5), Row((2, 3), 0, False, -2.0), Row((4,), 0, False, 1.0))
    step = Step(**{**vars(make_step(0)), "rows": rows})
    saved = skipped.SkippedStep(step, None, "a fault", 7.0, TermPair(demo=1.0, rollout=2.0))
    values = {1: {"norm": 1.0, "loss": 2.0}, 2: {"norm": math.inf, "loss": 2.0}}
    values |= {4: {"norm": 1.0, "loss": math.nan}}
    path = tmp_path / "replay" / "step-00000005"
    save(load(TrainConfig, {"steps": 17}), tmp_path / "config.yaml")
    monkeypatch.setattr(skipped, "load", lambda own: (saved, "weights") if own == path else None)

    def recomputation(config: TrainConfig, own: Any, weights: str) -> Any:
        assert (config.steps, own, weights) == (17, saved, "weights")

        class Compute:
            tokenizer = SimpleNamespace(decode=lambda ids: f"text {ids}")

            def __call__(self, recomputed: Step) -> dict[str, float]:
                assert recomputed.number == 5
                return values[recomputed.rows[0].ids[0]] if len(recomputed.rows) == 1 else {"a": 1}

        return Compute()

    monkeypatch.setattr(replay, "Recomputation", recomputation)
    culprit = {"row": 1, "demonstration": False, "advantage": -2.0, "norm": math.inf, "loss": 2.0}
    other = {"row": 2, "demonstration": False, "advantage": 1.0, "norm": 1.0, "loss": math.nan}
    result = replay.replay(path)
    assert repr(result["culprits"]) == repr(
        [{**culprit, "text": "text [2, 3]"}, {**other, "text": "text [4]"}]
    )
    recorded = {"step": 5, "fault": "a fault", "grad_norm": 7.0}
    assert result["recorded"] == {**recorded, "rollout_loss": 2.0, "demo_loss": 1.0}
    assert result["recomputed"] == {"a": 1}
