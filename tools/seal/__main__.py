"""Seals a run record: one file with the record, the code, the data's hashes, and digests of all of it.

    python -m tools.seal out-quickstart/run_20260101_120000.json
    python -m tools.seal --verify seal_20260101_120000.json

--verify says whether a seal is as it was made, and counts its MFU again from the record alone, by all three
formulas, with the full score matrix and its causal half. Exit status 1: something does not agree.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.arguments import target_losses, user_folder
from common.command import FAILED, run_command
from common.durable_file import write_json
from common.errors import UserError
from common.text import one_line
from common.time_to_loss import targets_reached
from tools.seal.contents import changed_parts, code_text, make_seal, read_record, read_seal, readable
from tools.seal.recount import disagreements, recount


def main(argv: list[str]) -> int:
    options = parse(argv)
    with readable(options.file):
        return verify(options.file) if options.verify else seal(options.file)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.seal", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=user_folder, help="a run record; with --verify, a seal")
    add("--verify", action="store_true", help="check a seal instead of making one")
    return parser.parse_args(argv)


def seal(path: Path) -> int:
    content = make_seal(read_record(path))
    if wrong := disagreements(content):
        raise UserError(f"{path} does not agree with itself, so it is not sealed: {one_line(wrong[0], 300)}")
    out = path.with_name(f"seal_{path.stem.removeprefix('run_')}.json")
    if out.exists():
        raise UserError(f"{out} exists; a seal is never written over: remove it, or give it another name")
    write_json(out, content)
    code = one_line(code_text(content["code"]), 500)
    print(f"Sealed in {out}\nCode:   {code}\nDigest: {content['digest']}")
    return 0


def verify(path: Path) -> int:
    content = read_seal(path)
    if changed := changed_parts(content):
        print(f"CHANGED after sealing: {', '.join(changed)}")
        return FAILED  # its figures are those of whoever changed it
    for formula, flops, causal_flops, *percents in recount(content["record"]):
        mfu, causal_mfu = ("no peak" if each is None else f"{each:.2f} % MFU" for each in percents)
        print(f"{formula}: {flops:,} FLOPs/token, {mfu}; causal: {causal_flops:,}, {causal_mfu}")
    record = content["record"]
    for loss, reached in targets_reached(record, target_losses(record["config"].get("loss_targets") or "")):
        print(f"Val loss {loss:g}: {f'reached at {reached}' if reached else 'not reached'}")
    print(f"Digest: {content['digest']}")
    wrong = disagreements(content)
    for line in wrong:
        print(f"DOES NOT AGREE: {one_line(line, 1000)}")
    if not wrong:
        print("Nothing was changed after sealing, and every figure follows from the record.")
    return FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
