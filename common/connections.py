"""Tells which ranks have died, on whatever machine: from its first second, each rank holds a TCP connection
to rank 0, and the kernel closes it when a process ends, however it ends. A process that is stopped, or that
holds the interpreter lock, keeps its connection. If a machine is lost, keepalive closes those to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a lost machine: noticed after 90 s
CONNECT_TIMEOUT_S = 10.0
WELCOME = b"w"  # rank 0's answer; a program that closes the connection without it is another one


def listen(ranks: int) -> socket.socket:
    """For rank 0, on a port that the system chooses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=ranks, dualstack_ipv6=both)


def accept_ranks(listener: socket.socket, greetings: dict[bytes, int], lost: set[int]) -> None:
    """Rank 0: adds each rank to `lost` whose connection closes. Does not return. greetings: what each rank
    sends with hold(); strangers do not know it."""

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep_alive(writer.get_extra_info("socket"))
        with contextlib.suppress(OSError):
            rank = greetings.get(await reader.read(64))
            if rank is not None:
                writer.write(WELCOME)
                with contextlib.suppress(OSError):
                    await reader.read()
                lost.add(rank)
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(watch, sock=listener) as server:
            await server.serve_forever()

    asyncio.run(serve())


def hold(host: str, port: int, greeting: bytes, lost: set[int]) -> bool:
    """Another rank: returns when its connection closes, with rank 0 in `lost`. False if it gets none."""
    with contextlib.suppress(OSError):
        one = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        os.register_at_fork(after_in_child=one.close)  # data workers outlive this process by seconds
        _keep_alive(one)
        one.settimeout(None)
        one.sendall(greeting)
        if one.recv(1) == WELCOME:
            with contextlib.suppress(OSError):
                one.recv(1)
            lost.add(0)
            return True
    return False


def _keep_alive(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
