"""A rank whose process ends is noticed by rank 0, and rank 0 by all others. One that is late is not."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.helpers import ROOT

from common import connections
from common.connections import WELCOME, accept_ranks, hold, listen

pytestmark = pytest.mark.dead_rank

SECONDS = 20  # for a process that begins, or a connection that closes
# a process of a rank: it is told an address and a greeting, and then what to do
RANK = """
import ctypes, os, sys, threading, time
from common.connections import hold
port, greeting, what = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3]
threading.Thread(target=hold, args=("127.0.0.1", port, greeting, set()), daemon=True).start()
sys.stdin.readline()
if what == "fork" and os.fork() == 0:
    time.sleep(60)
if what == "hold":
    ctypes.PyDLL(None).sleep(60)
time.sleep(60)
"""


def until(condition) -> bool:
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def in_thread(function, *arguments) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def rank_0():
    """(its port, the ranks whose greetings it has had, the ranks that it has lost)"""

    class Known(dict):
        def get(self, greeting):
            if (rank := super().get(greeting)) is not None:
                met.add(rank)
            return rank

    met, lost, listener = set(), set(), listen(1000)
    known = Known({f"token {rank}".encode(): rank for rank in range(1, 1001)})
    in_thread(accept_ranks, listener, known, lost)
    return listener.getsockname()[1], met, lost


@pytest.mark.parametrize("what", ["sleep", "hold", "fork", "SIGSTOP"])
def test_a_rank_that_is_killed_is_lost_and_one_that_is_stopped_or_holds_the_interpreter_lock_is_not(
    rank_0, what
):
    """Also if a data worker of it lives on, which was forked and has its sockets."""
    port, met, lost = rank_0
    command = [sys.executable, "-c", RANK, str(port), "token 7", what]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True, text=True)
    try:
        assert until(lambda: met == {7})
        time.sleep(0.2)  # until it has the answer
        process.stdin.write("\n")
        process.stdin.flush()
        if what == "SIGSTOP":
            process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert not lost and process.poll() is None
        process.kill()
        assert until(lambda: lost == {7})
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_end_of_rank_0_is_noticed_by_another_rank():
    code = "from common.connections import *; one = listen(9); print(one.getsockname()[1], flush=True);"
    code += "accept_ranks(one, {b'token 1': 1}, set())"
    first = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lost: set[int] = set()
    holding = in_thread(hold, "localhost", int(first.stdout.readline()), b"token 1", lost)
    time.sleep(0.5)
    assert holding.is_alive() and not lost
    first.kill()
    holding.join(SECONDS)
    assert lost == {0}
    first.wait()


def test_a_stranger_is_no_rank_and_another_programs_end_is_no_death(rank_0):
    port, met, lost = rank_0
    for says in (b"", b"token 1001", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(says)
    with socket.create_server(("127.0.0.1", 0)) as other:
        in_thread(lambda: other.accept()[0].close())
        mine: set[int] = set()
        assert not hold("127.0.0.1", other.getsockname()[1], b"token 1", mine) and not mine
    with socket.create_connection(("127.0.0.1", port)) as rank:  # it serves on
        rank.sendall(b"token 1")
        assert rank.recv(9) == WELCOME
    assert until(lambda: lost == {1}) and met == {1}


def test_rank_0_holds_a_thousand_ranks(rank_0):
    port, met, lost = rank_0
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 4096:
        pytest.skip(f"{most} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4096), most))
    try:
        ranks = [socket.create_connection(("127.0.0.1", port)) for _ in range(1000)]
        for number, one in enumerate(ranks, 1):
            one.sendall(f"token {number}".encode())
        assert all(one.recv(9) == WELCOME for one in ranks) and len(met) == 1000 and not lost
        for number in (3, 500, 1000):
            ranks[number - 1].close()
        assert until(lambda: lost == {3, 500, 1000})
    finally:
        for one in ranks:
            one.close()
        assert until(lambda: len(lost) == 1000)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="only Linux tells")
def test_a_machine_that_is_lost_is_noticed_within_100_seconds(rank_0, monkeypatch):
    """By both sides: the kernel closes a connection whose other side answers no more."""
    port, met, _ = rank_0
    keys, seconds, keep_alive = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), [], connections._keep_alive

    def told(one):
        keep_alive(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (one.getsockopt(socket.IPPROTO_TCP, getattr(socket, key)) for key in keys)
        seconds.append(idle + interval * count)

    monkeypatch.setattr(connections, "_keep_alive", told)
    in_thread(hold, "127.0.0.1", port, b"token 2", set())
    assert until(lambda: len(seconds) == 2) and all(60 < one < 100 for one in seconds)
