"""Configs and options that are wrong, each with a part of the line that refuses it.

They are a row of `make faults`, run as commands with an exit code. `tests/bad_input` has mistakes for `make test`, in
process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.own_folder import CONFIG

INFINITE, NAN = float("inf"), float("nan")
OWN = yaml.safe_dump(CONFIG)
ACTOR, REWARD = "module.init_args.actor", "module.init_args.reward"


@dataclass(frozen=True)
class Wrong:
    """A mistake.

    Attributes:
        name: Name of the case.
        line: Text that the refusal contains.
        changes: Changes of the config at dotted keys.
        content: Content of the file, in place of a config.
        options: Options after the config.
    """

    name: str
    line: str
    changes: dict[str, Any] = field(default_factory=dict)
    content: str | bytes | None = None
    options: tuple[str, ...] = ()


NO_KEY = "is not plain YAML (while constructing a mapping, found unhashable key, line {})"
NO_TAG = "is not plain YAML (could not determine a constructor for the tag '{}', line 1)"
NO_NAME = "is {!r}, and no class is known by that name. Write module.Class, such as "


def _of(key: str, *pairs: tuple[Any, str]) -> list[Wrong]:
    """Values of one key."""
    return [
        Wrong(f"{key.rpartition('init_args.')[2]} = {str(value)[:40]!r}", line, {key: value}) for value, line in pairs
    ]


def _function(path: Any, line: str) -> Wrong:
    reward = {"class_path": "rlflow.rewards.CallableReward", "init_args": {"function": path}}
    return Wrong(f"reward function {path!r}", line, {REWARD: reward})


FILES = [
    Wrong("deep lists", "is nested too deeply; correct it", content="seed: 0\nx: " + "[" * 5_000 + "]" * 5_000),
    Wrong("deep lists without an end", "is nested too deeply; correct it", content="[" * 50_000),
    Wrong("an unknown alias", "is not plain YAML (found undefined alias 'b', line 1)", content="trainer: *b\n"),
    Wrong("a section twice", "has `trainer` twice, in lines", content=OWN + "trainer: {max_steps: 5}\n"),
    Wrong(
        "a key twice",
        "has `trainer.max_steps` twice, in lines",
        content=OWN.replace("  max_steps: 2", "  max_steps: 2\n  max_steps: 3"),
    ),
    Wrong("a key in quotes again", "has `seed` twice", content=OWN + "'seed': 1\n"),
    Wrong("a key twice in a list", "has `callbacks.0.a` twice", content=OWN + "callbacks: [{a: 1, a: 2}]\n"),
    Wrong("a merge twice", "has `<<` twice", content=OWN + "<<: {seed: 3}\n<<: {seed: 4}\n"),
    Wrong("a list for a key", NO_KEY.format(2), content="seed: 0\n? [a, b]\n: 1\n"),
    Wrong("a template's braces", NO_KEY.format(1), content="seed: {{ seed }}\n"),
    Wrong("null for a key", "`None` (1) is not a known key. Known here:", content="~: 1\n" + OWN),
    Wrong("null for a key in a section", "`trainer.None` (1) is not a known key.", content="trainer: {null: 1}\n"),
    Wrong("a number for a key", "`3` (1) is not a known key. Known here:", content=OWN + "3: 1\n"),
    Wrong(
        "a call of Python",
        NO_TAG.format("tag:yaml.org,2002:python/object/apply:os.system"),
        content="seed: !!python/object/apply:os.system [ls]\n",
    ),
    Wrong(
        "a name of Python",
        NO_TAG.format("tag:yaml.org,2002:python/name:os.system"),
        content="seed: !!python/name:os.system\n",
    ),
    Wrong("a tag of one's own", NO_TAG.format("!foo"), content="seed: !foo 3\n"),
    Wrong("bytes", "`seed` is b'hello'; give", content=OWN.replace("seed: 0", "seed: !!binary aGVsbG8=")),
    Wrong("a set", "`seed` is {", content=OWN.replace("seed: 0", "seed: !!set {a, b}")),
    Wrong("a word as an integer", "int() with base 10: 'hello'", content="trainer: {max_steps: !!int hello}\n"),
    Wrong("a word as a truth", "is not plain YAML ('hello')", content="trainer:\n  save_last: !!bool hello\n"),
    Wrong("a date", "`seed` is '2001-01-01'; give an integer", content=OWN.replace("seed: 0", "seed: 2001-01-01")),
    Wrong("minutes", "`seed` is '1:30'; give an integer", content=OWN.replace("seed: 0", "seed: 1:30")),
    Wrong("an octal number", "`seed` is '010'; give an integer", content=OWN.replace("seed: 0", "seed: 010")),
    Wrong("a word of 200,000 letters", "`seed` is 'yyy", content=OWN.replace("seed: 0", "seed: " + "y" * 200_000)),
    Wrong("1e400", "`seed` is inf; give an integer", content=OWN.replace("seed: 0", "seed: 1e400")),
    Wrong("two documents", "expected a single document", content=OWN + "---\nseed: 1\n"),
    Wrong("another version of YAML", "incompatible YAML document", content="%YAML 9.9\n---\n" + OWN),
    Wrong("Latin-1", "is not UTF-8 at byte 13", content=b"seed: 0 # caf\xe9\n"),
    Wrong("UTF-16", "is not UTF-8 at byte 0", content=OWN.encode("utf-16")),
    Wrong("UTF-16 without a mark", "unacceptable character #x0000", content=OWN.encode("utf-16-le")),
    Wrong(
        "a mark of UTF-8", "`trainer.max_steps` is 'x'", content="\ufeff" + OWN.replace("max_steps: 2", "max_steps: x")
    ),
    Wrong(
        "CRLF",
        "`trainer.max_steps` is 'x'; give",
        content=OWN.replace("max_steps: 2", "max_steps: x").replace("\n", "\r\n"),
    ),
    Wrong("tabs", "found character '\\t'", content="trainer:\n\tmax_steps: 2\n"),
    Wrong("null bytes", "unacceptable character #x0000", content=OWN.encode() + bytes(9)),
    Wrong("a terminal's codes", "unacceptable character #x001b", content="seed: \x1b[2J\n"),
    Wrong(
        "codes in a value",
        r"`seed` is '\x1b[2Jrlflow: error: x\n'",
        content=OWN.replace("seed: 0", 'seed: "\\e[2Jrlflow: error: x\\n"'),
    ),
    Wrong(
        "a forged line in a key",
        r"`\x1b[2J\nrlflow: error: forged` (1)",
        content=OWN + '"\\e[2J\\nrlflow: error: forged": 1\n',
    ),
    Wrong("half a character", r"`\ud800` (1) is not a known key", content=OWN + '"\\ud800": 1\n'),
    Wrong("nothing", "`module` is missing; set it", content=""),
    Wrong("a text", "holds no `key: value` lines but 'hello'", content="hello\n"),
    Wrong("a list", "holds no `key: value` lines but ['a']", content="- a\n"),
    Wrong("an image", "is not UTF-8 at byte 0", content=b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    Wrong("an open quote", "while scanning a quoted scalar", content="seed: '0\n"),
    Wrong("a conflict of git", "is not plain YAML", content="<<<<<<< HEAD\nseed: 0\n=======\nseed: 1\n>>>>>>> b\n"),
    Wrong("a merge of a number", "for merging, but found scalar", content="<<: 3\nseed: 1\n"),
    Wrong("200,000 letters", f"`seed` is '{'y' * 79}; give", content=OWN.replace("seed: 0", "seed: " + "y" * 200_000)),
    Wrong("a key of 5,000 letters", "could not find expected ':'", content=OWN + "k" * 5_000 + ": 1\n"),
]

NUMBERS = [
    *_of(
        "seed",
        (-1, "`seed` is -1; give a number from 0 to 4,294,967,295"),
        (2**40, "is 1099511627776; give a number from 0"),
    ),
    *_of(
        "seed",
        (INFINITE, "is inf; give an integer"),
        (True, "`seed` is True; give an integer"),
        (None, "`seed` is null; give"),
    ),
    *_of(
        f"{ACTOR}.temperature",
        *((value, f".temperature` is {value}; it divides") for value in (INFINITE, NAN, -1.0, 1e308, 1e-9)),
    ),
    *_of(f"{ACTOR}.optimizer.lr", (INFINITE, "lr` is inf; give at most 1000"), (NAN, "lr` is nan; give 0 or more")),
    *_of(f"{ACTOR}.optimizer.lr", (1e38, "lr` is 1e+38; give at most 1000"), ([1e-3], "lr` is [0.001]; give a number")),
    *_of(
        f"{ACTOR}.optimizer.eps",
        (0.0, "eps` is 0.0, and where a gradient is 0 the step is 0 / eps; give 1e-30 or more"),
    ),
    *_of(
        f"{ACTOR}.optimizer.betas",
        ([0.9, 2.0], "betas` is (0.9, 2.0); give two numbers"),
        (0.9, "betas` is 0.9; give a list of 2, each a number"),
    ),
    *_of(
        f"{ACTOR}.optimizer",
        ([1], "optimizer` is [1]; give a mapping of arguments or null"),
        ("adam", "is 'adam'; give a mapping"),
    ),
    *_of(f"{ACTOR}.epochs", (10**30, "give at most 9,223,372,036,854,775,807"), (0, "epochs` is 0; give 1 or more")),
    *_of("module.init_args.group_size", (10**30, "give at most 9,223"), (2.5, "group_size` is 2.5; give an integer")),
    *_of(
        "module.init_args.max_response_length",
        (
            2049,
            "takes 2048 (`max_position_embeddings` of its config.json);"
            " lower `module.init_args.max_response_length` to at most 2044,",
        ),
        (INFINITE, "is inf; give an integer"),
    ),
    *_of("module.init_args.clip.low", (NAN, "clip.low` is nan and"), ("x", "clip.low` is 'x'; give a number")),
    *_of("module.init_args.clip", ([1], "clip` is [1]; give a mapping of arguments")),
    *_of(
        "module.init_args.kl.coef",
        (INFINITE, "kl.coef` is inf; give 0 or more"),
        (NAN, "kl.coef` is nan; give 0 or more"),
    ),
    *_of(
        "data.max_prompt_length",
        (10**30, "give at most 9,223"),
        (3, ". To keep all, raise `data.max_prompt_length` to at least 4"),
    ),
    *_of("data.prompts_per_step", (9, "rows.jsonl has 8 rows, fewer than"), (NAN, "is nan; give an integer")),
    *_of("trainer.max_steps", (10**30, "give at most 9,223"), ([2], "max_steps` is [2]; give an integer or null")),
    *_of("trainer.max_steps", (None, "neither `trainer.max_steps` nor `trainer.max_epochs` is set")),
    *_of(
        "trainer.max_seconds",
        (NAN, "max_seconds` is nan; give more than 0"),
        (-1.0, "max_seconds` is -1.0; give more than 0"),
    ),
    *_of("trainer.devices", (0, "devices` is 0; give 1 or more"), (10**6, "devices` is 1000000; give at most 1,024")),
    *_of("trainer.num_nodes", (2, "`trainer.num_nodes` is 2; SingleProcess runs on 1")),
    *_of(
        "trainer.balance",
        ({"quadratic": NAN}, "quadratic` is nan; give 0 or more"),
        ("of", "is 'of'; give one of 'auto', 'off'"),
    ),
]

PATHS = [
    *_of(
        "trainer.run_dir",
        *((value, f"run_dir` is {value!r}; name a folder") for value in ("", ".", "..", "/", "a\x00b")),
    ),
    *_of(
        "trainer.run_dir", ("rows.jsonl", "which is a file"), ("a" * 300, "which cannot be made (File name too long)")
    ),
    *_of("trainer.run_dir", ("/proc/nope", "which cannot be made"), ("~/runs", "means a home in a shell alone")),
    *_of("trainer.run_dir", (["a", "b"], "run_dir` is ['a', 'b']; give a text"), (3, "run_dir` is 3; give a text")),
    *_of(
        "trainer.ckpt_path",
        ("nowhere", "`trainer.ckpt_path` is 'nowhere'"),
        (3, "ckpt_path` is 3; give a text or null"),
    ),
    *_of(
        "trainer",
        ("fifo", "`trainer` is 'fifo'; give a mapping of keys"),
        ([1], "`trainer` is [1]; give a mapping of keys"),
    ),
    *_of("data", ("/dev/zero", "`data` is '/dev/zero'; give a mapping of keys")),
    *_of(
        f"{ACTOR}.model",
        ("", "which has no config.json"),
        ("a" * 5_000, "which is neither a folder nor a Hugging Face name"),
    ),
    *_of(f"{ACTOR}.model", ("nobody/nothing", "whose configuration cannot be loaded"), (3, "model` is 3; give a text")),
    *_of(
        "data.train.init_args.path",
        ("", "path` is '', which names nothing; give a JSON Lines file"),
        ("empty", "path` is 'empty', which is a folder without a .jsonl file; give a JSON Lines file"),
        ("/dev/zero", "path` is '/dev/zero', which is a device or a pipe; give a JSON Lines file"),
        ("fifo", "path` is 'fifo', which is a device or a pipe; give a JSON Lines file"),
    ),
]

CLASSES = [
    *_of(
        "module",
        ("os.system", "which is not a subclass of RLModule; name one that is, such as "),
        ("builtins.exec", "which is not a subclass of RLModule"),
        ([1], "`module` is [1]; give a RLModule, by its name or as `class_path` and"),
    ),
    *_of(
        "rollout",
        ("os.system", "which is not a subclass of RolloutEngine"),
        (3, "`rollout` is 3; give a RolloutEngine, by its name or as `class_path` and `init_args` or null"),
    ),
    *_of(
        "strategy",
        ("fspd", 'Did you mean "fsdp"?'),
        ("subprocess.Popen", "which is not a subclass of TrainingStrategy"),
    ),
    *_of(
        "data.train",
        ("nowhere.jsonl", "`data.train` is 'nowhere.jsonl', and there is no such file in "),
        ("./my/rows.parquet", "`data.train` is './my/rows.parquet', and there is no such file in "),
        ("nobody/nothing", "nobody/nothing[train] with subset None cannot be loaded ("),
        (
            "/dev/zero",
            "`data.train` is '/dev/zero', which is a device or a pipe; give a JSON Lines or Parquet file, a",
        ),
        ("my/rows.csv", "`data.train` is 'my/rows.csv', and there is no such file in "),
        (None, "`data.train` is null; give "),
    ),
    *_of(
        "logger",
        (3, "`logger` is 3; give a Logger, by its name or as"),
        ([{"class_path": "os.system"}], "which is not a subclass of Logger"),
    ),
    *_of(
        REWARD,
        ({"class_path": "rlflow.rewards.Reward"}, "which is abstract; name a class made of it, such as "),
        ({"class_path": 3}, "is 3; give the name or the path"),
    ),
    *_of(
        REWARD,
        ({"class_path": "a..b"}, f"reward.class_path` {NO_NAME.format('a..b')}"),
        ("a..b", "init_args.reward` is 'a..b', which is not a path of a module and a name in it; write module.name"),
        (
            {"class_path": "os.sep"},
            "reward.class_path` names the class os.sep, which is not a subclass of Reward; name one that is,",
        ),
    ),
    *(
        _function(path, f"function` is '{path}', a function of")
        for path in (
            "os.system",
            "builtins.exec",
            "builtins.eval",
            "os._exit",
            "subprocess.run",
            "shutil.rmtree",
            "sys.exit",
        )
    ),
    *(
        _function(path, f"function` is '{path}', a function of")
        for path in ("pickle.loads", "torch.load", "my_rewards.os.system")
    ),
    _function("os.sep", "which is '/' and no function"),
    _function(["a.b"], "function` is ['a.b']; give a text"),
    *_of("modle", (3, 'Did you mean "module"?')),
    *_of("trainer.max_step", (3, 'Did you mean "max_steps"?')),
    *_of("module.init_args.group_sise", (3, 'Did you mean "group_size"?')),
    *_of("nothing_like_it", (1, "`nothing_like_it` (1) is not a known key. Known here:")),
    *_of("models", ([1], "`models` is [1]; give a mapping, each value a ModelHandle")),
    *_of("engines", ([1], "`engines` is [1]; give a mapping, each value a mapping of arguments or a RolloutEngine")),
    *_of("placement", ({0: [0]}, '`placement.0` ([0]) has the key 0, and a key must be text; write "0", in quotes')),
    *_of("placement", ({"nobody": [0]}, "names no role of GRPO"), ({"actor": [7]}, "names the ranks 7")),
    *_of("nodes", ({"a": 1}, "`nodes.a` is 1; give a mapping of arguments or a text or null")),
    *_of("trainer.monitor", ("val/reward", "`trainer.save_top_k`")),
    Wrong(
        "a monitor of no validation",
        "`callbacks.0.init_args.monitor` of EarlyStopping is 'val/reward', and `data.validation` is not set",
        {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/reward", "patience": 1}}]},
    ),
    Wrong(
        "a cache of no size",
        "`rollout.init_args.kv_cache_gib` is nan; give a number",
        {"rollout": {"class_path": "VLLMEngine", "init_args": {"kv_cache_gib": NAN}}},
    ),
    Wrong(
        "a hub name without a network",
        "cannot be loaded",
        {"data.train": {"class_path": "HuggingFace", "init_args": {"path": "nobody/nothing"}}},
    ),
]

OPTIONS = [
    Wrong(f"option {' '.join(options)[:40]!r}", line, options=options)
    for options, line in [
        (("--seed", "-1"), "`seed` is -1; give a number from 0"),
        (("--seed",), "`--seed` has no value"),
        (("--seed", "9" * 5_000), "give an integer"),
        (("--seed", "!!python/name:os.system"), "is '!!python/name:os.system'; give an integer"),
        (("--trainer.max_stepz", "f" * 100_000), 'is not a known key. Did you mean "max_steps"?'),
        (("--trainer", "3"), "`trainer` is 3; give a mapping of keys"),
        (("--trainer.max_steps", "[" * 5_000), "give an integer or null"),
        (("--nodes+", "x"), "`nodes` is ['x']; give a mapping, each value a mapping of arguments or a text or null"),
        (("--module.clip.low", "nan"), "`module.clip.low` is"),
        (("--config", "nowhere.yaml"), "and there is no such file"),
        (("--config", ""), "`--config` is '', which names nothing; give a YAML file"),
        (("--config", "."), "`--config` is '.', which is a folder; give a YAML file, such as list.yaml"),
        (("--config", "/dev/zero"), "`--config` is '/dev/zero', which is a device or a pipe; give a YAML file"),
        (("--config", "fifo"), "`--config` is 'fifo', which is a device or a pipe; give a YAML file"),
        (("--config", "a" * 5_000), "and there is no such file in"),
        (("--config", "second.yaml"), "`trainer.max_steps` is 'late'; give an integer or null"),
        (("f" * 100_000,), f"`{'f' * 80}` is neither an option nor a value"),
        (("stray",), "`stray` is neither an option nor a value"),
    ]
]

ALL = [*FILES, *NUMBERS, *PATHS, *CLASSES, *OPTIONS]
