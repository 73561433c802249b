"""Seals a run record: one file with the record, the code that made it, and digests of both.

    python -m tools.seal out-quickstart/run_20260101_120000.json
    python -m tools.seal --verify seal_20260101_120000.json

--verify says whether a seal is as it was made, and counts its figures again from its settings and times.
Exit status 1: something does not agree. A digest is the SHA-256 of the JSON text with sorted keys and no
spaces. docs/seal.md says what it does not prove.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from common.arguments import user_folder
from common.command import FAILED, run_command
from common.durable_file import write_json
from common.errors import UserError
from common.run_records import load_record
from common.text import one_line, shown
from common.time_to_loss import describe_targets
from training.configuration.keys import KEYS, TrainConfig
from training.hardware.peaks import FORMATS, Peak, table_peak
from training.process.redaction import redact_all
from training.process.work_timer import UNMEASURED_ITERS
from training.records.rows import row_facts
from training.records.startup_info import code_text
from training.records.utilization import FORMULAS, document_flops, recomputed_flops, summarize, utilization

VERSIONS = (1, 2)  # 1 has digests of parts of the record, too
PARTS = ("record", "code", "bench")  # which have digests; earlier seals may have results of peers
ROUNDING = 1e-9  # relative: what adding and dividing in another order changes
MOST_SHOWN = 5  # figures that do not agree


def main(argv: list[str]) -> int:
    title = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tools.seal", description=title, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", type=user_folder, help="a run record; with --verify, a seal")
    parser.add_argument("--verify", action="store_true", help="check a seal instead of making one")
    options = parser.parse_args(argv)
    return verify(options.file) if options.verify else seal(options.file)


def seal(path: Path) -> int:
    with readable(path):
        record = load_record(path)
        if "seal" in record:
            raise UserError(f"{path} is a seal already; to check it: python -m tools.seal --verify {path}")
        content = make_seal(record)
        if wrong := faults(content):
            raise UserError(f"{path} is not sealed: {one_line(wrong[0], 300)}")
    out = path.with_name(f"seal_{path.stem.removeprefix('run_')}.json")
    if out.exists():
        raise UserError(f"{out} exists; a seal is never written over: remove it, or give it another name")
    write_json(out, content)
    code = one_line(code_text(content["code"]), 500)
    print(f"Sealed in {out}\nCode:   {code}\nDigest: {content['digest']}")
    return 0


def verify(path: Path) -> int:
    with readable(path):
        seal = read_seal(path)
        if wrong := faults(seal):
            print(*(one_line(line, 1000) for line in wrong[:MOST_SHOWN]), sep="\n")
            return FAILED  # its figures are those of whoever changed it
        startup, rate = seal["record"]["startup_info"], seal["record"]["summary"]["tokens_per_sec"]
        peak = _peak(startup["hardware"]).flops
        share = rate is not None and peak and 100 * rate["median"] / (peak * startup["hardware"]["num_gpus"])
        counts = {**startup["flops"]["totals"], "causal": startup["flops"]["flops_per_token_causal"]}
        for formula, flops in counts.items():
            mfu = f"{share * flops:.2f} % MFU" if share else "no peak"
            print(f"{formula}: {flops:,} FLOPs/token, {mfu}")
    print(f"Digest: {seal['digest']}")
    print("Nothing was changed after sealing, and every figure follows from the record.")
    return 0


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around all that is done with a file that anybody may have written: what is wrong is one UserError."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        why = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{path} is no record or seal, damaged, or of another version: {why}") from None


def read_seal(path: Path) -> dict[str, Any]:
    """A seal whose faults() are still to be found."""
    seal = load_record(path)
    if seal.get("seal") not in VERSIONS:
        found, fix = shown(seal.get("seal")), f"of a run record, `python -m tools.seal {path}` makes one"
        raise UserError(f"{path} is no seal of version 1 or 2: its 'seal' is {found}; {fix}")
    return seal


def make_seal(record: dict[str, Any]) -> dict[str, Any]:
    content = {
        "seal": VERSIONS[-1],
        "sealed": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "record": redact_all(record),
        "code": redact_all(record["startup_info"].get("git") or {"commit": None, "modified": None}),
    }
    digests = digests_of(content)
    return {**content, "digests": digests, "digest": sha256(digests)}


def digests_of(seal: dict[str, Any]) -> dict[str, str]:
    return {name: sha256(seal.get(name)) for name in PARTS}


def sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def faults(seal: dict[str, Any]) -> list[str]:
    """A line for what was changed after sealing; if nothing was, for each figure that does not follow."""
    changed = [name for name, digest in digests_of(seal).items() if digest != seal["digests"].get(name)]
    if changed or sha256(seal["digests"]) != seal["digest"]:
        return [f"CHANGED after sealing: {', '.join(changed or ['digests'])}"]
    record = seal["record"]
    if record["status"] != "completed" or not record["training_iterations"]:
        return [f"The run did not reach its last iteration: its status is {shown(record['status'])}"]
    git = record["startup_info"].get("git") or {}
    made = {"record": recount(record), "code": {name: git.get(name) for name in ("commit", "modified")}}
    return [f"DOES NOT AGREE: {line}" for line in _differences("seal", seal, made)]


# --- a record counted again, from its settings and times alone ---


def recount(record: dict[str, Any]) -> dict[str, Any]:
    """Every field of the record that follows from others."""
    startup, rows = record["startup_info"], record["training_iterations"]
    config = TrainConfig(**{name: value for name, value in record["config"].items() if name in KEYS})
    model, hardware, peak = config.model_config(), startup["hardware"], startup["hardware"]["peak"]
    counts = {each.CALCULATION_METHOD: each.count_flops(model, model.block_size) for each in FORMULAS}
    flops = counts[startup["flops"]["calculation_method"]]
    known = table_peak(str(hardware["gpu_name"]), hardware["precision"], bool(peak["sparse"]))
    of_table = known.tflops and (config.peak_tflops is None or peak["source"] == known.source)
    if of_table and peak["tflops_per_gpu"] is not None:  # unequal GPUs have none
        peak = {"tflops_per_gpu": known.tflops}
    # a target that is stated has no other fields, and no other one is stated
    stated = record["summary"].get("loss_targets") or []
    targets: Any = zip_longest(stated, describe_targets(record), fillvalue={})
    return {
        "startup_info": {
            "model": {"architecture": model.to_dict()},
            "flops": {**flops, "totals": {name: each["flops_per_token"] for name, each in counts.items()}},
            "tokens_per_iter": config.samples_per_iter(hardware["num_gpus"]) * config.block_size,
            "hardware": {"peak": peak},
        },
        "training_iterations": list(_rows(record, config)),
        "summary": {
            "final_iter": rows[-1]["iter"],
            "final_loss": rows[-1]["loss"],
            **summarize([row for row in rows if row["attempt"] == record["attempt"]]),
            "loss_targets": [dict.fromkeys(told) | found for told, found in targets] or None,
        },
    }


def _rows(record: dict[str, Any], config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Each row. Of an earlier attempt, whose hardware may have been another, only that it is there."""
    startup, interval = record["startup_info"], config.log_interval
    flops, gpus, tokens = startup["flops"], startup["hardware"]["num_gpus"], startup["tokens_per_iter"]
    peak, facts, recomputed = _peak(startup["hardware"]), row_facts(startup), recomputed_flops(flops, config)
    begin, start, seen = record["attempts"][-1]["start_iter"], record["attempts"][0]["start_iter"], 0
    for row in record["training_iterations"]:
        is_last = row["attempt"] == record["attempt"]
        start = max(start, begin) if is_last else start
        due = -(-start // interval) * interval
        made = {"iter": min(max(row["iter"], start), due)}
        if is_last:
            rate = 1e3 * tokens / row["time_ms"]
            made |= {"tokens_per_sec": rate, "tokens_per_sec_per_gpu": rate / gpus, "mfu": None}
            made["warmup"] = start < begin + UNMEASURED_ITERS
            if "tokens_seen" in row and (begin == 0 or start > begin):  # not after an earlier attempt
                made["tokens_seen"] = seen + (row["iter"] + 1 - start) * tokens
            if config.doc_masking:
                attended = (row["mfu"] or {}).get("document_length_per_token", 0)
                causal = document_flops(startup["flops"], attended, config.block_size)
                flops = {**startup["flops"], "flops_per_token_causal": causal}
            if peak.flops and start > begin:  # the first row includes compilation, and has no MFU
                with contextlib.suppress(ValueError):  # above the peak
                    made["mfu"] = utilization(rate, gpus, flops, peak, facts, recomputed)
        start, seen = row["iter"] + 1, row.get("tokens_seen")
        yield made


def _peak(hardware: dict[str, Any], name: str = "peak") -> Peak:
    """Of one GPU, as the record states it."""
    formats = {one: _peak(hardware, f"{name}_{one}") for one in FORMATS if f"{name}_{one}" in hardware}
    tflops, source, sparse = (hardware[name][field] for field in ("tflops_per_gpu", "source", "sparse"))
    return Peak(tflops, source, sparse=sparse, of_formats=formats)


def _differences(name: str, stated: Any, made: Any) -> Iterator[str]:
    """Where what is stated is not what the rest makes, beyond rounding. Older records do not state all that
    is made. nan, the loss of a run that diverged, equals itself."""
    if isinstance(made, dict) and isinstance(stated, dict):
        for part in filter(stated.__contains__, made):
            yield from _differences(f"{name}.{part}", stated[part], made[part])
    elif isinstance(made, list) and isinstance(stated, list) and len(made) == len(stated):
        for number, value in enumerate(made):
            yield from _differences(f"{name}[{number}]", stated[number], value)
    else:
        numbers = all(isinstance(each, int | float) for each in (stated, made))
        if not (numbers and math.isclose(stated, made, rel_tol=ROUNDING) or repr(stated) == repr(made)):
            yield f"{name} is {shown(stated)}, and the rest makes {shown(made)}"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
