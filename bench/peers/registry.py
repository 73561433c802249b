"""The peers by their names, and what each of them needs, said before any run starts."""

from __future__ import annotations

from pathlib import Path

from bench.peers.hugging_face import Transformers
from bench.peers.liger import Liger
from bench.peers.nanogpt import NanoGPT
from bench.peers.program import Program
from bench.peers.torchtitan import Torchtitan
from common.errors import UserError

PEERS: dict[str, type[Program]] = {each.name: each for each in (Transformers, Liger, NanoGPT, Torchtitan)}


def require(names: list[str], nanogpt: Path | None) -> list[Program]:
    """The programs. Raises UserError if one is unknown or not installed."""
    programs = []
    for name in names:
        if name not in PEERS:
            raise UserError(f"--peer: {name!r} is not one of {', '.join(PEERS)}")
        programs.append(PEERS[name](nanogpt))
        programs[-1].require()
    return programs
