"""docs/benchmarks.md has a row for each seal in seals/, and one for each peer in it."""

import json
import re

from support.documents import TEXTS
from support.helpers import ROOT

ABSOLUTE_PATH = re.compile(r"""["' =:]/(?:home|root|tmp|mnt|opt|work|Users)/[^"]*""")
SEALS = {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "seals").glob("*.json"))}


def row(name: str, seal: dict) -> str:
    record = seal["record"]
    startup, summary, config = record["startup_info"], record["summary"], record["config"]
    hardware, rate = startup["hardware"], summary["tokens_per_sec"]
    flops = startup["flops"]  # whose figures tests/runs/test_seal.py counts again
    counts = (flops["totals"]["component_summation_v2025"], flops["flops_per_token_causal"])
    peak = 1e12 * hardware["peak"]["tflops_per_gpu"] * hardware["num_gpus"]
    mfu, causal_mfu = (100 * rate["median"] * count / peak for count in counts)
    low = {"none": "", "fp8_tensorwise": ", fp8_tensorwise"}[config["low_precision"]]
    head = ", head too" if config["low_precision_scope"] == "layers_and_head" else ""
    clock, power = ((summary[key] or {}).get("median") for key in ("sm_clock_mhz", "power_w"))
    code, modified = seal["code"], seal["code"]["modified"]
    known = "" if not modified else ", modified" if code["difference"] else ", modified, changes unknown"
    cells = [
        f"[{name.removesuffix('.seal.json')}](../seals/{name})",
        f"{startup['model']['architecture']['arch']}, {startup['model']['total_params'] / 1e6:,.1f} M",
        f"{hardware['num_gpus']} x {hardware['gpu_name']}, {hardware['parallelism']}",
        f"{config['dtype']}{low}{head}",
        f"{config['batch_size']} x {config['gradient_accumulation_steps']} x {config['block_size']}",
        f"{rate['median']:,.0f} ({rate['p10']:,.0f} to {rate['p90']:,.0f})",
        f"{mfu:.2f} of {hardware['peak']['tflops_per_gpu']:,.4g} TFLOPS",
        f"{causal_mfu:.2f}",
        f"{clock:,.0f} MHz, {power:,.0f} W" if clock else "not measured",
        startup["software"]["torch"],
        f"{code['commit'][:12]}{known}",
        f"`{seal['digest'][:12]}`",
    ]
    return f"| {' | '.join(cells)} |"


def peer_rows(name: str, seal: dict) -> list[str]:
    entries = {entry["name"]: entry for entry in (seal.get("bench") or {"entries": []})["entries"]}
    lines = []
    for entry in entries.values():
        for peer, ratio in ((entry["result"] or {}).get("times_peers") or {}).items():
            facts, result = entries[peer]["facts"], entries[peer]["result"]
            cells = [name.removesuffix(".seal.json"), entry["name"], facts["peer"], facts["precision"]]
            cells += [f"{result['tokens_per_sec']['median']:,.0f}", f"{ratio:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_page_on_sealed_runs_has_what_the_seals_say():
    expected = [row(name, seal) for name, seal in SEALS.items()]
    expected += [line for name, seal in SEALS.items() for line in peer_rows(name, seal)]
    sealed = TEXTS["docs/benchmarks.md"].partition("\n## Eight B200s")[0]
    rows = [line for line in sealed.splitlines() if line.startswith("| ")]
    assert [line for line in rows if not line.startswith(("| seal |", "| run |"))] == expected


def test_published_seals_name_no_folder_of_the_machine():
    texts = {name: json.dumps([seal["record"], seal.get("bench")]) for name, seal in SEALS.items()}
    assert {name: found for name, text in texts.items() if (found := ABSOLUTE_PATH.findall(text))} == {}
