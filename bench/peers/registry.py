"""The peers by their names, and what each of them needs, said before any run starts."""

from __future__ import annotations

from bench.peers.hugging_face import Transformers
from bench.peers.liger import Liger
from bench.peers.program import Program
from bench.peers.torchtitan import Torchtitan
from common.errors import UserError

PEERS: dict[str, type[Program]] = {each.name: each for each in (Transformers, Liger, Torchtitan)}
REMOVED = {"nanogpt": "nanoGPT's own train.py times its iterations, if its log_interval is 1"}


def require(names: list[str]) -> list[Program]:
    """The programs. Raises UserError if one is unknown or not installed."""
    programs = []
    for name in names:
        if name not in PEERS:
            instead = f"; it was removed: {REMOVED[name]}" if name in REMOVED else ""
            raise UserError(f"--peer: {name!r} is not one of {', '.join(PEERS)}{instead}")
        programs.append(PEERS[name]())
        programs[-1].require()
    return programs
