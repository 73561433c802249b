"""Lists every key of train.py, the environment variables that are read or set, and the exit statuses."""

from __future__ import annotations

import re
import signal

from common.command import FAILED, INTERRUPTED, OUTPUT_NOT_READ, USER_ERROR
from training.configuration.help import sections, type_names, values
from training.configuration.keys import KEYS
from training.configuration.other_names import ALIASES
from training.process.exit_status import STOP_SIGNALS

INTRODUCTION = """\
`python train.py --help` prints the same keys; `| grep -A1 WORD` shows those about WORD. A flag is
`--key=value` or `--key value`; `--key` alone sets a boolean to True.

A config file is Python that train.py executes: it may import, compute, use `_private` names, and set
os.environ. Every public name that it leaves must be a key. A path may begin with `~`. A resume
refuses another value of a guarded key, unless `--allow_changes` names it."""
FAILURES = (
    "failed: an exception, out of memory, NaN, a checkpoint that could not be written, "
    "a rank that failed or hung"
)
AFTER_STATUSES = """\
torchrun itself ends with 1 in all cases but the first. A run continues when the reader
of its console ends."""
BY_TORCHRUN = "by torchrun: "
UNLESS = "by train.py, unless you set it: "
VARIABLES = {
    "RANK": BY_TORCHRUN + "the number of this process",
    "LOCAL_RANK": BY_TORCHRUN + "its number on this machine, and so its GPU",
    "WORLD_SIZE": BY_TORCHRUN + "the number of processes; a dry run takes it without torchrun",
    "LOCAL_WORLD_SIZE": "the same, of this machine",
    "GROUP_RANK": BY_TORCHRUN + "the number of this machine",
    "GROUP_WORLD_SIZE": BY_TORCHRUN + "how many torchruns the run has",
    "TORCHELASTIC_USE_AGENT_STORE": BY_TORCHRUN + "whether it hosts the store where processes meet",
    "TORCHELASTIC_RUN_ID": BY_TORCHRUN + "its name",
    "TORCHELASTIC_RESTART_COUNT": BY_TORCHRUN + "how often it has restarted the processes",
    "TORCHELASTIC_MAX_RESTARTS": BY_TORCHRUN + "how often it may",
    "TORCHELASTIC_ERROR_FILE": BY_TORCHRUN + "where the message of a failed rank goes",
    "MASTER_ADDR": BY_TORCHRUN + "where the processes meet",
    "MASTER_PORT": "the same",
    "PYTORCH_ALLOC_CONF": UNLESS + "expandable_segments:True, against fragmented memory",
    "NCCL_GRAPH_REGISTER": UNLESS + "0; NCCL must not register such memory",
    "TORCH_FR_BUFFER_SIZE": UNLESS + "2000 collectives in NCCL's flight recorder",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "its earlier name",
    "TORCH_FR_DUMP_TEMP_FILE": UNLESS + "where the flight recorder goes",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "its earlier name",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": UNLESS + "1; writes the flight recorder",
    "TIKTOKEN_CACHE_DIR": "where tiktoken looks before it downloads",
    "HF_HUB_OFFLINE": "not 0: a download that fails is not tried again",
    "TOKENIZERS_PARALLELISM": "data preparation sets false",
    "PYTHONUNBUFFERED": "bench/ sets 1 for its runs",
    "TORCHINDUCTOR_CACHE_DIR": "bench/ sets a new folder for each run, unless `--keep_cache` is given",
    "TRITON_CACHE_DIR": "the same",
    "PYTHON": "Makefile, scripts/slurm_train.sh: the interpreter",
    "VENV": "Makefile: the folder of the environment (.venv)",
    "OUT": "Makefile: the out_dir of `make train`",
    "CUDA_VISIBLE_DEVICES": "the GPUs that torch uses; empty: none",
    "GPUS_PER_NODE": "scripts/slurm_train.sh: processes on each node (as many as torch sees GPUs)",
    "MAX_REQUEUES": "scripts/slurm_train.sh: how often a job is queued again (1000)",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "scripts/slurm_train.sh: seconds until torchrun kills (270)",
}


def reference() -> str:
    tables = {**_keys(), "Other names of keys": _aliases()}
    tables |= {"Environment variables": _variables(), "Exit statuses": _statuses()}
    contents = " ·\n".join(f"[{title}](#{_anchor(title)})" for title in tables)
    parts = [f"## {title}\n\n{text}" for title, text in tables.items()]
    return "\n\n".join([INTRODUCTION, contents, *parts])


def _table(*rows: tuple[str, ...]) -> str:
    """The first row is the heading."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def _keys() -> dict[str, str]:
    """{section: the table of its keys}."""
    tables = {}
    for section, names in sections().items():
        title, _, note = section.partition("; ")
        rows = [
            (f"`{name}`", values(KEYS[name]), f"`{KEYS[name].default!r}`", KEYS[name].help) for name in names
        ]
        table = _table(("key", "values", "default", "meaning"), *rows)
        tables[f"Keys: {title}"] = f"{note}\n\n{table}" if note else table
    return tables


def _aliases() -> str:
    rows = [(f"`{name}`", type_names(alias.types), alias.help) for name, alias in ALIASES.items()]
    return _table(("name", "values", "meaning"), *rows)


def _variables() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()]
    return _table(("variable", "meaning"), *rows) + "\n\n[Secrets](security.md) are removed from all output."


def _statuses() -> str:
    fixable = "an error that you can fix, as one message without a traceback"
    rows = {
        0: ("completed", "done"),
        int(FAILED): (FAILURES, "failed; for bench/, also if one of its runs failed"),
        int(USER_ERROR): (fixable, "the same"),
        **{128 + int(number): (_stopped(number), "") for number in STOP_SIGNALS},
        int(OUTPUT_NOT_READ): ("the same, of `--help`", "the reader of its output has ended (`... | head`)"),
    }
    rows[int(INTERRUPTED)] = (_stopped(signal.SIGINT), "Ctrl-C")
    lines = [(f"**{status}**", *rows[status]) for status in sorted(rows)]
    table = _table(("status", "train.py", "every other command"), *lines)
    return f"{table}\n\n{AFTER_STATUSES}"


def _stopped(number: signal.Signals) -> str:
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else number.name
    return f"stopped by {name}, after saving"


def _anchor(title: str) -> str:
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
