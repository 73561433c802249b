"""Makes docs/benchmarks.md from the seals in benchmarks/: a row for each run, each peer beside it, and what
is not sealed yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.errors import UserError
from common.text import one_line
from tools.seal.bench_check import bench_disagreements
from tools.seal.contents import changed_sections, code_disagreements, read_seal
from tools.seal.recount import disagreements, recount
from training.configuration.keys import ROOT

INTRODUCTION = """Each row is a whole run in one file, which anybody can check and run again
([what a seal is](seal.md)):

```sh
python -m tools.seal --verify benchmarks/{first}
python -m tools.replay benchmarks/{first}
```

- **batch**: sequences in a micro-batch x micro-batches in an iteration x tokens in a sequence, of one GPU.
- **tokens/s** is of all GPUs: the median of the rows after the warm-up, and their 10th and 90th percentile.
- **MFU** is by the formula v3 from that median, and counts attention with the full score matrix;
  **causal MFU** counts the half of it that a causal model needs. Both are of the peak beside them, which is
  of one GPU (for a CPU it was measured).
- The peak is that of bf16 for fp8 runs, too. fp8 matmuls can be twice as fast, so such an MFU is a speed, not
  the share of what the fp8 units can do.
- **clock and power** are medians of the GPU's SM clock and of its power.
- **code** is the commit. "modified": it had changes on top of it, so the commit alone is not what ran; the
  seal has the changes, unless they are unknown."""
RUNS = (
    "seal, model, machine, precision, batch, tokens/s, MFU %, causal MFU %, clock and power, torch, code, "
    "digest"
).split(", ")
PEERS = "seal, our run, peer, its precision, its tokens/s, ours / its tokens/s per GPU".split(", ")
CLOCKS = (("sm_clock_mhz", "MHz"), ("power_w", "W"))
PARAMETERS = {  # of the shipped models, README.md "Models"
    "GPT-2 1.27B": 1_267_322_112,
    "LLaMA 2 1.29B": 1_294_159_104,
    "LLaMA 3 1.5B": 1_544_628_224,
    "LLaMA 3 2.2B": 2_224_154_624,
    "Qwen3 1.8B": 1_830_395_904,
}
# What this page is for: model, GPU, number of GPUs, precision.
WANTED = [
    *((model, "H200", 1, "bf16") for model in PARAMETERS),
    ("Qwen3 1.8B", "H200", 1, "fp8"),
    ("Qwen3 1.8B", "H200", 2, "bf16"),
    ("Qwen3 1.8B", "H100", 1, "bf16"),
    ("Qwen3 1.8B", "H100", 2, "bf16"),
]


def sealed_runs() -> str:
    """The page below its title. Raises UserError if a seal was changed, or does not agree with itself."""
    paths = sorted((ROOT / "benchmarks").glob("*.seal.json"))
    seals = {}
    for path in paths:
        seals[path.name] = seal = read_seal(path)
        wrong = [*changed_sections(seal), *code_disagreements(seal), *disagreements(seal["record"])]
        if wrong := [*wrong, *bench_disagreements(seal["bench"], seal["record"])]:
            raise UserError(f"benchmarks/{path.name} cannot be shown: {wrong[0]}; seal the run anew")
    lines = [INTRODUCTION.format(first=next(iter(seals), "RUN.seal.json")), "", *_head(RUNS)]
    lines += [_row(name, seal) for name, seal in seals.items()]
    peers = [line for name, seal in seals.items() for line in _peers(name, seal["bench"])]
    if peers:
        lines += ["", "## Peers, measured on the same machine by the same command", "", *_head(PEERS), *peers]
    missing = [want for want in WANTED if not any(_is(want, seal) for seal in seals.values())]
    if missing:
        lines += [
            "",
            "## Not sealed yet",
            "",
            "These have figures in [LOG.md](../LOG.md) alone, or none:",
            "",
        ]
        lines += [f"- {model}, {gpus} x {gpu}, {precision}" for model, gpu, gpus, precision in missing]
    return "\n".join(lines)


def _row(name: str, seal: dict[str, Any]) -> str:
    record = seal["record"]
    startup, summary, config = record["startup_info"], record["summary"], record["config"]
    hardware = startup["hardware"]
    v3 = next(one for one in recount(record) if one.formula == "component_summation_v2025")
    peak = (hardware.get("peak") or {}).get("tflops_per_gpu")
    rate = summary["tokens_per_sec"]
    cells = [
        f"[{name.removesuffix('.seal.json')}](../benchmarks/{name})",
        f"{startup['model']['architecture']['arch']}, {startup['model']['total_params'] / 1e6:,.1f} M",
        f"{hardware['num_gpus']} x {hardware['gpu_name']}, {hardware['parallelism']}",
        _precision(config),
        f"{config['batch_size']} x {config['gradient_accumulation_steps']} x {config['block_size']}",
        f"{rate['median']:,.0f} ({rate['p10']:,.0f} to {rate['p90']:,.0f})",
        "no peak" if v3.percent is None else f"{v3.percent:.2f} of {peak:,.4g} TFLOPS",
        "no peak" if v3.causal_percent is None else f"{v3.causal_percent:.2f}",
        _clock_and_power(summary),
        str(startup["software"].get("torch")),
        _code(seal["code"]),
        f"`{seal['digest'][:12]}`",
    ]
    return _line(cells)


def _head(columns: list[str]) -> list[str]:
    return [_line(columns), "|---" * len(columns) + "|"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(one_line(cell).replace('|', '/') for cell in cells)} |"


def _precision(config: dict[str, Any]) -> str:
    recipe = config.get("low_precision") or "none"
    scope = ", head too" if config.get("low_precision_scope") == "layers_and_head" else ""
    return f"{config['dtype']}{'' if recipe == 'none' else f', {recipe}{scope}'}"


def _clock_and_power(summary: dict[str, Any]) -> str:
    pairs = [((summary.get(key) or {}).get("median"), unit) for key, unit in CLOCKS]
    return ", ".join(f"{value:,.0f} {unit}" for value, unit in pairs if value is not None) or "not measured"


def _code(code: dict[str, Any]) -> str:
    if not code["modified"]:
        return str(code["commit"])[:12]
    known = "modified" if code["difference"] else "modified, changes unknown"
    return f"{str(code['commit'])[:12]}, {known}"


def _peers(name: str, bench: dict[str, Any] | None) -> Iterator[str]:
    """A line for each comparison in the table of bench.throughput that was sealed with the run."""
    entries = {entry["name"]: entry for entry in (bench or {}).get("entries", [])}
    for entry in entries.values():
        result = entry.get("result") or {}
        if entry.get("kind") != "variant":
            continue
        for peer, ratio in (result.get("times_peers") or {}).items():
            facts = entries[peer].get("facts") or {}
            rate = entries[peer]["result"]["tokens_per_sec"]["median"]
            cells = [name.removesuffix(".seal.json"), entry["name"], facts.get("peer") or peer]
            cells += [facts.get("precision") or "not recorded", f"{rate:,.0f}", f"{ratio:.3f}"]
            yield _line(cells)


def _is(want: tuple[str, str, int, str], seal: dict[str, Any]) -> bool:
    """Whether the seal is of this model, on this machine, in this precision."""
    model, gpu, gpus, precision = want
    startup, config = seal["record"]["startup_info"], seal["record"]["config"]
    fp8 = (config.get("low_precision") or "none") != "none"
    return (
        startup["model"].get("total_params") == PARAMETERS[model]
        and gpu in str(startup["hardware"].get("gpu_name"))
        and startup["hardware"].get("num_gpus") == gpus
        and fp8 == (precision == "fp8")
    )
