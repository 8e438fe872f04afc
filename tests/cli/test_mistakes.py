"""Mistakes and their answers: one line that names the key, the value and what to do.

All run in one process. The checks before a run answer those in `EARLY`, and print nothing else.
"""

import json
import shutil
import subprocess
import sys

import pytest

from gac.demo.project import create_project

PROGRAM = """
import contextlib, io, json, os, shutil, sys, traceback
from gac import cli

def run(arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            code = traceback.format_exc()
    return [code, out.getvalue(), err.getvalue()]

print(json.dumps([run(arguments) for arguments in json.load(sys.stdin)]), file=sys.__stdout__)
"""

ROW = {"prompt": "1+1=", "answer": "2", "solution": "2"}
USER = {"role": "user", "content": "1+1="}


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def reward(body: str) -> str:
    return f"def reward(completion, example):\n    {body}\n"


FILES = {
    "a-file": "x",
    "tab.yaml": "steps: 3\n\tx: 1\n",
    "twice.yaml": "steps: 3\nsteps: 4\n",
    "list.yaml": "- a\n",
    "based.yaml": "base: none.yaml\n",
    "bad.yaml": "optim: {lr: -1}\n",
    "latin.yaml": b"out: caf\xe9\n",
    "torn.jsonl": '{"prompt": "1"\n',
    "empty.jsonl": "",
    "list.jsonl": "[1]\n",
    "deep.yaml": 2000 * "{a: " + 2000 * "}",
    "deep.jsonl": 5000 * '{"a":' + "1" + 5000 * "}" + "\n",
    "half.jsonl": '{"prompt": "\\ud800", "answer": "2", "solution": "2"}\n',
    "named.jsonl": lines({"question": "1", "answer": "2"}),
    "null.jsonl": lines({**ROW, "answer": None}),
    "nan.jsonl": '{"prompt": "1", "answer": NaN}\n',
    "blank.jsonl": lines({**ROW, "prompt": " "}),
    "utf16.jsonl": lines(ROW).encode("utf-16"),
    "image.jsonl": lines({"messages": [{**USER, "content": [{"type": "image"}]}], "answer": "2"}),
    "chat.jsonl": lines({"messages": [USER, {**USER, "role": "assistant"}], "answer": "2"}),
    "short.csv": "prompt,answer\n1\n",
    "twice.csv": "prompt,prompt\n1,2\n",
    "latin.csv": b"prompt,answer\ncaf\xe9,2\n",
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00",
    "sheet.xlsx": b"PK\x03\x04",
    "long.jsonl": lines({**ROW, "prompt": 5000 * "1+"}),
    "exits.py": reward("exit(3)"),
    "interrupts.py": reward("raise KeyboardInterrupt"),
    "closes.py": reward("raise GeneratorExit"),
    "stops.py": "import signal\nsignal.raise_signal(signal.SIGHUP)\n"
    "signal.raise_signal(signal.SIGTERM)\n",
    "quits.py": "exit(4)\n",
    "syntax.py": "def reward(completion, example)\n",
    "imports.py": "import nothing_like_it\n",
    "attributes.py": "import math\nreward = math.nothing\n",
    "nothing.py": reward("pass"),
    "text.py": reward("return 'good'"),
    "nan.py": reward("return float('nan')"),
    "key.py": reward("return example.extra['gold']"),
    "narrow.py": "def reward(completion):\n    return 1\n",
    "methods.py": """
from dataclasses import dataclass
from gac.methods import Mix
from gac.methods.base import Method
@dataclass(frozen=True)
class Own(Method):
    to: str = ""
    def mix(self, state, last):
        return eval(self.to, {"Mix": Mix, "state": state})
""",
    "plays.py": "def exits(prompts, engine):\n    exit(5)\n"
    "def fails(prompts, engine):\n    return prompts[0].extra['gold']\n",
}

TRAIN = {  # value of --set -> answer
    "stpes=3": "stpes: unknown key 'stpes'; did you mean 'steps'?",
    "lr=1e-5": "lr: unknown key; did you mean 'optim.lr'?",
    "prompts=first/data/train.jsonl": "prompts: unknown key; did you mean 'data.prompts'?",
    "steps": "gac: --set steps: use KEY=VALUE, e.g. --set steps=100",
    "steps=0": "gac: --set steps=0: use an integer from 1 to 1,000,000",
    "steps=1000001": "steps=1000001: use an integer from 1 to 1,000,000",
    "steps=1.5": "steps: expected a whole number, got 1.5",
    "seed=2147483648": "seed=2147483648: use a whole number from 0 to 2**31 - 1",
    "out=": "out='': use the name of a folder",
    "out=a-file/run": "/a-file' cannot be written (File exists): choose another folder",
    "out=first/model": "out='first/model' is the folder of a model: choose another folder",
    "export=maybe": "export: expected true or false, got 'maybe'",
    f"rollouts.paged.block_size=1{400 * '0'}": ": use an integer >= 4",
    "optim=adamw": "optim: expected a mapping like {key: value}, got 'adamw'",
    "optim.lrr=1": "did you mean 'lr'?",
    "optim.lr=0": "gac: --set optim.lr=0.0: use a number in (0, 1]",
    "optim.lr=null": "optim.lr: null is not allowed: give a number",
    "optim.lr=100": "optim.lr=100.0: use a number in (0, 1]",
    "optim.lr=1e-5x": "optim.lr: expected a number, got '1e-5x'",
    "optim.betas=[0.9]": "optim.betas: expected 2 values, got [0.9]",
    "optim.betas=[0.9,1.2]": "betas=(0.9, 1.2): use two numbers in [0, 1)",
    "optim.betas=[-0.1,0.9]": "betas=(-0.1, 0.9): use two numbers in [0, 1)",
    "optim.warmup_steps=-5": "warmup_steps=-5: use an integer >= 0",
    "optim.min_lr_ratio=2": "min_lr_ratio=2.0: use a number in [0, 1]",
    "optim.schedule=cosin": "schedule='cosin': use one of cosine, linear, constant",
    "method=GRPO": "did you mean 'grpo'?",
    "method=null": "method: expected a name or a mapping with `name`",
    "method=json:dumps": "method: a function cannot be a method",
    "method=nowhere:Method": "no module 'nowhere'; give its file",
    "method.mu=2": "gac: --set method.mu=2.0: use a number in [0, 1]",
    "method.nu=1": "method.nu: unknown key 'nu'; did you mean 'mu'?",
    "model.path=null": "gac: --set model.path: null is not allowed: give text",
    "model.path=~": "gac: --set model.path: null is not allowed: give text",
    "model.path=": "model.path is empty: give a folder",
    "model.path=first": "has no tokenizer (tokenizer.json): set model.tokenizer",
    "model.path=./nowhere": "model.path='./nowhere': no such folder",
    "model.path=a/b/c": "model.path='a/b/c': no such folder",
    "model.path=a-file": "model.path='a-file' is a file: give the folder",
    "model.path=bare": "model.path='bare': the folder has no weights (model.safetensors): give",
    "model.path=corrupt": "model.path='corrupt': the weights are corrupt (model.safetensors)",
    "model.path=run": "model.path='run' is a run: give its model, run/model",
    "model.tokenizer=first/data": "model.tokenizer='first/data': the folder has no tokenizer",
    "model.dtype=fp16": "dtype='fp16': use one of float32, bfloat16",
    "model.lora.rank=0": "rank=0: use an integer >= 1",
    "data.prompts=": "data.prompts is not set: give a .jsonl, .json",
    "data.prompts=none.jsonl": "data.prompts='none.jsonl': no such file or folder",
    "data.prompts=s3://a/b.jsonl": "URLs are not read: download the file",
    "data.prompts=torn.jsonl": "torn.jsonl, line 1: not valid",
    "data.prompts=[a, b]": "data.prompts='[a, b]': no such file or folder, and not a dataset of",
    "data.prompts=first/data/train.jsnol": "train.jsnol': no such file or folder, and not",
    "data.prompts=$NOPE/x.jsonl": "data.prompts='$NOPE/x.jsonl': $NOPE is not set: export it, or",
    "data.prompts=half.jsonl": "half.jsonl, line 1, field 'prompt': has half of a surrogate pair",
    "data.prompts=deep.jsonl": "deep.jsonl, line 1: not valid UTF-8 JSON (maximum recursion depth",
    "data.prompts=empty.jsonl": "data.prompts='empty.jsonl': the file has no rows",
    "data.prompts=list.jsonl": "list.jsonl, line 1: expected an object, found list",
    "data.prompts=named.jsonl": "fields are answer, question: set prompt_field",
    "data.prompts=null.jsonl": "field 'answer': is null; ",
    "data.prompts=nan.jsonl": "field 'answer': is nan: use a finite number",
    "data.prompts=blank.jsonl": "field 'prompt': is empty",
    "data.prompts=utf16.jsonl": "utf16.jsonl, line 1: not valid UTF-8",
    "data.prompts=image.jsonl": "message 1 has a part of type 'image': use text only",
    "data.prompts=short.csv": "short.csv, row 2: the number of fields differs from the 2",
    "data.prompts=twice.csv": "twice.csv, line 1: two columns have the same name",
    "data.prompts=latin.csv": "latin.csv: not valid UTF-8",
    "data.prompts=cut.jsonl.gz": "the compressed file is corrupt or truncated",
    "data.prompts=sheet.xlsx": "the format '.xlsx' is not supported: use",
    "data.demos=none.jsonl": "data.demos='none.jsonl': no such file or folder",
    "data.demos=torn.jsonl": "torn.jsonl, line 1: not valid",
    "data.sources=[{path: a.jsonl}]": "give either prompts or sources, not both",
    "data.answer_field=gold": "set answer_field (null: no answers)",
    "data.answer_pattern=((": "answer_pattern='((' is not a valid regular expression",
    "data.answer_pattern=(zzz)": "answer_pattern '(zzz)' does not match",
    "data.template={prompt}{unit}": "field 'unit': is missing, but the template",
    "data.template={prompt}{0}": "the template '{prompt}{0}' cannot be filled",
    "data.where={answer: 99}": "data.where={'answer': 99}: no row of 'first/data/train.jsonl'",
    "data.where={split: train}": "field 'split': is missing; the row's fields are answer, prompt",
    "data.limit=0": "limit=0: use an integer >= 1",
    "data.demo_field=essay": "gac: data.demo_field='essay': method 'constant-alarm' needs "
    "demonstrations, but no row of first/data/train.jsonl has this field: set data.demo_field or "
    "data.demos, or choose grpo",
    "data.demo_field=null": "gac: data.demo_field=null: method 'constant-alarm' needs "
    "demonstrations: set data.demo_field, or choose grpo",
    "data.order=shuffled": "data.order='shuffled': use package.module:name",
    "reward=mth": "unknown reward 'mth'; did you mean 'math'?",
    "reward=reward.py:nothing": "reward.py has no 'nothing'",
    "reward=none.py:reward": "no file 'none.py' in this folder or next to the configuration",
    "reward=reward.py:test_reward": "TypeError: test_reward() takes 0 positional arguments",
    "reward=narrow.py:reward": "reward() takes 1 positional argument but 2 were given",
    "reward=exits.py:reward": "it called sys.exit(3)",
    "reward=quits.py:reward": "it called sys.exit(4)",
    "reward=interrupts.py:reward": "interrupted (",
    "reward=closes.py:reward": "it raised GeneratorExit() (",
    "reward=syntax.py:reward": "SyntaxError: expected ':'",
    "reward=imports.py:reward": "No module named 'nothing_like_it'",
    "reward=imports:reward": "reward 'imports:reward': ModuleNotFoundError: No module named 'noth",
    "reward=attributes:reward": "AttributeError: module 'math' has no attribute 'nothing' (",
    "reward=quits:reward": "it called sys.exit(4) (",
    "reward=nothing.py:reward": "expected a number, got NoneType",
    "reward=text.py:reward": "expected a number, got str 'good'",
    "reward=nan.py:reward": "expected a finite number, got nan",
    "reward=key.py:reward": "KeyError: 'gold'",
    "reward={name: math, timeout: fast}": "reward 'math': timeout: expected a number, got 'fast'",
    "reward={name: format}": "missing a required argument: 'pattern'",
    "reward={name: reward.py:reward, deadline: soon}": "deadline='soon': use a finite number",
    "reward={name: code, memory_mb: x}": "memory_mb: expected a whole number, got 'x'",
    "reward={sum: [{reward: math, weight: a}]}": "weight='a': use a finite number",
    "reward={sum: [{reward: math, weight: .nan}]}": "weight=nan: use a finite number",
    "rollouts.num_generations=1": "a single one has advantage 0 and teaches nothing",
    "rollouts.dynamic_sampling_retries=-1": "dynamic_sampling_retries=-1: use an integer >= 0",
    "rollouts.overlong_penalty=-1": "overlong_penalty=-1.0: use a number >= 0",
    "loss.kl_coef=-1": "loss.kl_coef=-1.0: use a number >= 0",
    "rollouts.temperature=0": "temperature=0.0: use a number > 0",
    "rollouts.log_samples_every=-1": "log_samples_every=-1: use an integer >= 0",
    "rollouts.engine=vlm": "rollouts.engine='vlm': use one of generate, paged, vllm",
    "rollouts.function=none.py:play": "rollouts.function: no file 'none.py'",
    "monitor_kl_every=-1": "monitor_kl_every=-1: use an integer >= 0",
    "eval.every=-1": "eval.every=-1: use an integer >= 0",
    "eval.samples=4": "samples=4 at temperature=0 would all be equal: set temperature > 0",
    "eval.reward=quits.py:reward": "reward 'quits.py': RuntimeError: it called sys.exit(4)",
    "eval.reward=mth": "eval.reward: unknown reward 'mth'",
    "eval.data.prompts=none.jsonl": "eval.data.prompts='none.jsonl': no such file or folder",
    "eval.data.prompts=null": "eval.every=10: there is nothing to evaluate: set eval.data.prompts",
    "eval.tasks={a: {}}": "eval.tasks.a.data.prompts is not set",
    "eval.tasks={a: {data: {prompts: first/data/train.jsonl}, function: none.py:play}}": "eval.tas"
    "ks.a.function: no file 'none.py'",
    "eval.tasks={a/b: {}}": "tasks.'a/b': invalid task name",
}
TRAIN_SETS = {  # several values of --set -> answer
    "micro_batch_size=2 packing=true": "packing=True has no effect with micro_batch_size: remove",
    "micro_batch_size=2 max_tokens_per_micro_batch=9": "max_tokens_per_micro_batch=9 has no effect",
    "eval.data.limit_seed=3": "eval.data.limit_seed=3 has no effect without eval.data.limit",
    "kl_sample_size=2": "kl_sample_size=2 has no effect without monitor_kl_every: remove the key",
    "kl_sample_size=2 loss.kl_coef=0.1": "has no effect if the loss contains the KL: remove",
    "kl_sample_size=2 method=dpo": "has no effect if the loss contains the KL: remove the key",
    "kl_sample_size=2 method=sft monitor_kl_every=1": "kl_sample_size=2 has no effect without",
    "method=dpo rollouts.scale_rewards=batch": "scale_rewards='batch' has no effect on method",
    "method=dpo rollouts.mask_truncated_completions=true": "has no effect on method 'dpo'",
    "method=sft-then-rl steps=401 rollouts.num_generations=1": "num_generations=1: advantages",
    "method=luffy rollouts.dynamic_sampling_retries=2": "dynamic_sampling_retries=2: use 0: ",
    "method=prefix-rft rollouts.function=a:b": "method 'prefix-rft' continue a demonstration: use",
    "rollouts.engine=paged parallel.mode=fsdp": "engine='paged' needs the full model on each rank",
    "eval.max_completion_length=1024 eval.data.prompts=null eval.tasks.a.samples=1": "eval.tasks.a."
    "data.prompts is not set",
    "eval.data.prompts=null eval.every=0": "eval.max_completion_length has no effect without",
    "method=grpo data.where.answer=99": "data.where={'answer': 99}: no row of",
    'data.where.answer="138" data.demo_field=essay': "no row of first/data/train.jsonl has this "
    "field and passes data.where: set",
}
COMMANDS = {
    "": "gac: error: the following arguments are required: COMMAND",
    "rewards": "gac rewards: error: the following arguments are required: COMMAND",
    "init a-file": "DIR='a-file' is not empty: choose a new folder",
    "report run --out /proc": "--out='/proc' cannot be written (",
    "train": "the following arguments are required: CONFIG.yaml",
    "train first": "first is a folder: give a YAML file, e.g. first/run.yaml",
    "train none.yaml": "gac: CONFIG.yaml='none.yaml': no such file: give the path",
    "train based.yaml": "gac: based.yaml: base='none.yaml': no such file",
    "train bad.yaml --set seed=1": "gac: bad.yaml: optim.lr=-1.0: use",
    "train tab.yaml": "tab.yaml: not valid YAML",
    "train twice.yaml": "duplicate key 'steps'",
    "train deep.yaml": "deep.yaml: not valid YAML: maximum recursion depth exceeded",
    "train list.yaml": "list.yaml: expected `key: value` lines, got ['a']",
    "train latin.yaml": "latin.yaml: not valid YAML",
    "train first/run.yaml --set method=grpo loss.demo_weight=p": "demo_weight='p' has no effect",
    "train first/run.yaml --set rollouts.generation_batch_size=4 "
    "rollouts.generation_batch_tokens=100": "generation_batch_size=4 has no effect with",
    "train first/run.yaml steps=3": "unrecognized arguments: steps=3; to override a key",
    "train first/run.yaml --steps 3": "unrecognized arguments: --steps 3; to override a key",
    "check first/run.yaml --set out=/proc/x": "out='/proc/x': folder='/proc' cannot be written (",
    "check first/run.yaml --set method=superrl data.demo_field=x data.demos=named.jsonl": "gac: "
    "data.demo_field='x': method 'superrl' needs demonstrations, but no row of first/data/train.",
    "check first/run.yaml --set method=sft data.demos=named.jsonl": "no row of named.jsonl has",
    "check first/run.yaml --set eval.function=none.py:play": "eval.function: no file 'none.py'",
    "trian": "invalid choice: 'trian'",
    "eval": "model.path is empty",
    "eval --set modle.path=x": "did you mean 'model'?",
    "eval --set model.path=first/model eval.data.chat=true eval.data.prompts=chat.jsonl": "gac: "
    "eval.data.chat=true: the tokenizer has no chat template: set data.chat=false",
    "eval --set model.path=first/model": "eval.data.prompts is not set",
    "eval --set model.path=first/model eval.data.prompts=none.jsonl": "eval.data.prompts='",
    "report nowhere": "nowhere: no runs found",
    "report run --out a-file": "--out='a-file' cannot be written (File exists)",
    "export run out --checkpoint last": "expected a step number or 'best', got 'last'",
    "init first": "DIR='first' is not empty: choose a new folder",
    "init x --model first/data": "--model='first/data': the folder has no model (config.json)",
    "init x --model ./none": "--model='./none': no such folder",
    "init a-file/x": "DIR='a-file/x' cannot be written (Not a directory)",
}
LATE = {  # answered later, most of them before the model is loaded
    "export first out": "RUN='first' is not a run directory: it has no config.yaml",
    "methods ../x": "unknown name '../x'. Valid names: `gac methods` lists all 5",
    "check first/run.yaml --set report_to=[wand]": "report_to='wand': use names from aim, ",
    "eval --against x --set model.path=first/model eval.data.prompts=first/data/eval.jsonl": "gac: "
    "--against='x': no samples.jsonl.gz found: give the output folder",
    "demo --jobs 0": "--jobs=0: use a number >= 1",
    "demo --methods grop": "did you mean 'grpo'?",
    "demo --methods grpo grpo": "--methods: 'grpo' is given twice: give each method once",
    "demo --out a-file/x": "--out='a-file/x' cannot be written",
    "rewards check first/run.yaml --set reward=mth": "unknown reward 'mth'",
    "rewards check first/run.yaml --min-reward nan": "--min-reward=nan: use a finite number",
    "replay run": "run contains no saved step: give a folder in RUN/replay",
    "export run out": "no intact checkpoint",
    "study first/run.yaml": "--methods: missing",
    "study first/run.yaml --methods grop": "grop: method.name: unknown name 'grop'",
    "study first/run.yaml --methods grpo --seeds 0": "--seeds=0: use a number >= 1",
    "study first/run.yaml --methods grpo --jobs 0": "--jobs=0: use a number >= 1",
    "study first/run.yaml --methods grpo --baseline gac": "--baseline='gac': use one of grpo",
    "study first/run.yaml --methods grpo grpo": "two of grpo, grpo have the same label",
    "study first/run.yaml --methods a/b@grpo": "the label 'a/b' is used as a folder name",
    "study first/run.yaml --methods grpo --set method=sft": "method differs between the runs",
    "study first/run.yaml --methods grpo --set seed=5": "seed differs between the runs; "
    "use --seeds",
    "study first/run.yaml --methods grpo --set run_name=x": "run_name differs between the runs; "
    "use --methods",
}
LATE_TRAIN = {
    "data.system=Calculate.": "data.system='Calculate.': a text prompt needs data.chat=true",
    "data.chat=true": "data.chat=true: the tokenizer has no chat template: set data.chat=false",
    "data.prompts=chat.jsonl": "a conversation needs a chat template, which the tokenizer does not",
    "data.max_prompt_tokens=1": "no rows left (dropped: 400 prompt longer than 1 tokens)",
    "data.source_field=set": "field 'set': is missing; the row's fields are",
    "model.attention=nonsense": "model.attention='nonsense' cannot be used (Specified `attn_imp",
    "model.path=nan": "model.path='nan': the weight model.norm.weight contains nan or inf",
    "rollouts.stop=[abc]": "stop='abc' is 3 tokens: use a string",
    "rollouts.engine=vllm": "rollouts.vllm.urls",
    "report_to=[nope]": "report_to='nope': use names from aim, ",
    "eval.split_field=kind": "split_field='kind'",
    "rollouts.function=plays.py:exits": "plays.py:exits': RuntimeError: it called sys.exit(5) (",
    "rollouts.function=plays.py:fails": "KeyError: 'gold'",
    "data.order=json:JSONDecoder": "data.order='json:JSONDecoder': TypeError: ",
    "method={name: 'methods.py:Own', to: '0.5'}": "method 'Own': TypeError: cannot unpack",
    "method={name: 'methods.py:Own', to: '{}, Mix(2.0)'}": "mix=Mix(mu=2.0, scale=1.0, final",
    "method={name: 'methods.py:Own', to: '{}, Mix(-0.5)'}": "mix=Mix(mu=-0.5, scale=1.0, final",
    "method={name: 'methods.py:Own', to: '{}, 0.5'}": "mix=0.5: use Mix(mu) with mu in [0, 1]",
    "method={name: 'methods.py:Own', to: '{1: print}, Mix(0.5)'}": "is not JSON serializable",
    "method={name: 'methods.py:Own', to: 'state[3]'}": "method 'Own': KeyError: 3 (",
    "model.lora={target_modules: '(('}": "model.lora.target_modules='((': missing ), unterminated",
}


def train(change: str) -> list[str]:
    return ["train", "first/run.yaml", "--set", "steps=1", "out=o", change]


COMMANDS |= {f"train first/run.yaml --set {keys}": text for keys, text in TRAIN_SETS.items()}
EARLY = [*map(train, TRAIN), *map(str.split, COMMANDS)]
ARGUMENTS = [*EARLY, *map(train, LATE_TRAIN), *map(str.split, LATE)]
ANSWERS = [answer for part in (TRAIN, COMMANDS, LATE_TRAIN, LATE) for answer in part.values()]


def run(folder, *commands: list[str]) -> list[list]:
    """[exit code, stdout, stderr] of each command, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        create_project(folder.relative_to(folder) / "first")
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    model = folder / "first" / "model"
    for name in ("bare", "corrupt", "nan"):
        shutil.copytree(model, folder / name)
    (folder / "bare" / "model.safetensors").unlink()
    (folder / "corrupt" / "model.safetensors").write_bytes(b"not a header")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "nan" / "model.safetensors", {"format": "pt"})
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "run" / "config.yaml").write_text("steps: 1\n")
    return folder


@pytest.fixture(scope="module")
def results(project) -> list[list]:
    return run(project, *ARGUMENTS)


@pytest.mark.slow(reason="one process runs all commands before the first answer is read")
@pytest.mark.parametrize("number", range(len(ARGUMENTS)), ids=lambda n: " ".join(ARGUMENTS[n][-2:]))
def test_a_mistake_has_a_one_line_answer(results, number):
    code, out, err = results[number]
    assert code in (1, 2, 130), code
    *rest, last = err.splitlines()
    assert ANSWERS[number] in last, err
    assert last.startswith("gac"), err
    assert "Traceback" not in err
    if number < len(EARLY):
        assert out == ""
        assert not rest or rest[0].startswith("usage: ")


@pytest.mark.parametrize(("prefix", "line"), [(["env", "--default-signal=HUP"], 2), (["nohup"], 3)])
def test_a_signal_before_the_first_step(project, prefix, line):
    """SIGHUP, unless `nohup` ignores it, or SIGTERM."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "gac.cli", *train("reward=stops.py:reward")],
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130
    assert done.stderr.startswith("gac: interrupted (")
    assert f"stops.py, line {line});" in done.stderr


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (["eval.data.prompts=first/data/train.jsonl"], "train.jsonl' is also trained on"),
        (["data.demos=first/data/eval.jsonl"], "eval.jsonl' is also trained on"),
        (["method=sft-best", "eval={}"], "method 'sft-best' keeps the last weights: set eval.data"),
    ],
)
def test_check_trains_nothing(project, changes, warning):
    changes = ["optim.warmup_steps=31", *changes]
    ((code, out, err),) = run(project, ["check", "first/run.yaml", "--set", *changes])
    assert code == 0
    assert out.endswith("\nAll checks passed.\n")
    assert "optim.warmup_steps=31: the learning rate never reaches" in err
    for line in (
        "model.path: 0.315 million parameters; training takes 0.005 GB",
        "data.prompts: 400 rows\n",
        "reward: 1.0 for the demonstration of the first row\n",
        "steps: 30, each with 128 responses (at most 1,024 tokens) and 32 demonstrations",
    ):
        assert line in out
        assert warning in err
