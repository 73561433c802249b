"""Lists every key of train.py, the environment variables that are read or set, and the exit statuses."""

from __future__ import annotations

import re

from common.command import FAILED, OUTPUT_NOT_READ, USER_ERROR
from training.configuration.help import sections, type_names, values
from training.configuration.keys import KEYS
from training.configuration.other_names import ALIASES
from training.process.exit_status import STOP_SIGNALS

INTRODUCTION = """\
`python train.py --help` prints the same keys; `| grep -A1 WORD` shows those about WORD. A flag is
`--key=value` or `--key value`; `--key` alone sets a boolean to True.

A config file is Python that train.py executes: it may import, compute, use `_private` names, and set
os.environ. Every public name that it leaves must be a key. A path may begin with `~`. A resume
refuses another value of a guarded key, unless `--allow_changes` names it. Below is each key with its
default, and the values that it takes."""
ENVIRONMENT = """\
torchrun sets `RANK`, `LOCAL_RANK`, `WORLD_SIZE` (which a dry run takes without torchrun),
`LOCAL_WORLD_SIZE`, `GROUP_RANK`, `GROUP_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`,
`TORCHELASTIC_USE_AGENT_STORE`, `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT`,
`TORCHELASTIC_MAX_RESTARTS` and `TORCHELASTIC_ERROR_FILE` ([their
meaning](https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)).

train.py sets these, unless you do:

- `PYTORCH_ALLOC_CONF`: expandable_segments:True, against fragmented memory
- `NCCL_GRAPH_REGISTER`: 0, because NCCL must not register such memory
- `TORCH_FR_BUFFER_SIZE` (earlier `TORCH_NCCL_TRACE_BUFFER_SIZE`): 2000 collectives in NCCL's flight recorder
- `TORCH_FR_DUMP_TEMP_FILE` (earlier `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`): where the flight recorder is written
- `TORCH_NCCL_DUMP_ON_TIMEOUT`: 1, so that it is written

Other variables:

- `CUDA_VISIBLE_DEVICES`: the GPUs that torch uses; empty: none
- `TIKTOKEN_CACHE_DIR`: where tiktoken looks before it downloads
- `HF_HUB_OFFLINE`: if not 0, a download that fails is not tried again
- `TOKENIZERS_PARALLELISM`, `RAYON_NUM_THREADS`, `FASTOKENS_BPE_THREADS`: data preparation sets false, 1, 1
- `PYTHONUNBUFFERED`: bench/ sets 1 for its runs
- `TORCHINDUCTOR_CACHE_DIR`, `TRITON_CACHE_DIR`: new folders for each run of bench/ without `--keep_cache`
- `PYTHON`: the interpreter, for make and scripts/slurm_train.sh
- `VENV`, `OUT`: for make, the folder of the environment (.venv), and the out_dir of `make train`
- `GPUS_PER_NODE`: for scripts/slurm_train.sh, processes on each node (default: as many as torch sees GPUs)
- `MAX_REQUEUES`: for the same, how often a job is queued again (1000)
- `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`: for the same, seconds until torchrun kills (270)

[Secrets](security.md) are removed from all output."""
VARIABLES = re.findall(r"`([A-Z_]+)`", ENVIRONMENT)
STATUSES = f"""\
- **0**: completed
- **{FAILED}**: failed: an exception, out of memory, NaN, a checkpoint that could not be written, a rank that
  failed or hung; of bench/, also one of its runs
- **{USER_ERROR}**: an error that you can fix, as one message without a traceback
- {{stops}}: stopped by this signal (SIGINT: Ctrl-C); train.py has saved
- **{OUTPUT_NOT_READ:d}**: the reader of the output has ended (`... | head`); a run of train.py continues then

torchrun itself ends with 1 in all cases but the first."""


def reference() -> str:
    lists = {**_keys(), "Other names of keys": _aliases()}
    lists |= {"Environment variables": ENVIRONMENT, "Exit statuses": _statuses()}
    contents = " ·\n".join(f"[{title}](#{_anchor(title)})" for title in lists)
    parts = [f"## {title}\n\n{text}" for title, text in lists.items()]
    return "\n\n".join([INTRODUCTION, contents, *parts])


def _keys() -> dict[str, str]:
    """{section: the list of its keys}."""
    lists = {}
    for section, names in sections().items():
        title, _, note = section.partition("; ")
        lines = [
            _line(f"{name}={KEYS[name].default!r}", values(KEYS[name]), KEYS[name].help) for name in names
        ]
        lists[title.capitalize()] = "\n".join([f"{note}\n", *lines] if note else lines)
    return lists


def _line(name: str, taken: str, meaning: str) -> str:
    return f"- `{name}` ({taken.replace(' | ', '|')}): {meaning}"


def _aliases() -> str:
    return "\n".join(_line(name, type_names(alias.types), alias.help) for name, alias in ALIASES.items())


def _statuses() -> str:
    stops = ", ".join(f"**{128 + number}** {number.name}" for number in sorted(STOP_SIGNALS))
    return STATUSES.format(stops=stops)


def _anchor(title: str) -> str:
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
