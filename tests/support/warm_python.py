"""Python processes that start in a tenth of a second: forks of one process that has imported torch.

    from support.warm_python import Popen, run  # as subprocess has them, for commands of sys.executable

Most of a short run of train.py is the import of torch, 2 s a process. A server, one for each pytest process,
imports it once and forks for each command. The fork takes the streams, folder, environment, session, command
line and largest file of the command and runs the script as Python would. The fork imports the project itself,
so the files that are on disk now are tested. A command gets a fresh interpreter instead

- if it is neither `python [-u] SCRIPT ...` nor `python [-u] -m MODULE ...`,
- if the environment has variables that Python or a library reads when it starts (_READ_AT_START),
- with NANOMFU_COLD_PROCESSES=1, as `make test-all` sets it.

The ranks of torchrun must be its own children. So a fork that becomes torchrun first forks a server of its
own, before it has any thread.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import re
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

PRELOADED = (
    "matplotlib.pyplot",
    "numpy",
    "safetensors.torch",
    "tokenizers",
    "torch",
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "tqdm",
)
TORCHRUN = "torch.distributed.run"
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
MESSAGE_BYTES = 1 << 18
COMMAND_BYTES = 16_384  # room for the command line, as /proc shows it
_READ_AT_START = re.compile(
    r"(?!PYTHONUNBUFFERED$|PYTHONPATH$)PYTHON|LC_|LANG|LD_|TORCH(?!ELASTIC_|_NCCL_ASYNC)|TRITON_INTERPRET"
    r"|MKL_|CUDA_|MPL"
)


# --- for tests ---


class Popen(subprocess.Popen):
    """subprocess.Popen, except that a command of this Python may be a fork of the server."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        argv = [os.fspath(arg) for arg in args] if isinstance(args, (list, tuple)) else []
        environment = dict(os.environ if env is None else env)
        if preexec_fn or pass_fds or executable or not _is_warm(argv, environment):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        # rest: startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        # restore_signals, gid, gids, uid, umask, start_new_session, from Python 3.11 on process_group
        pipes, session = rest[3:9], rest[14]
        given = (pipes[0], pipes[3], pipes[5])
        streams = [own if end == -1 else end for own, end in enumerate(given)]
        request = {"argv": argv, "cwd": os.fspath(cwd or os.getcwd()), "environment": environment}
        request |= {"session": bool(session), "file_size": resource.getrlimit(resource.RLIMIT_FSIZE)}
        self.pid = _server().start(json.dumps(request).encode(), streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(args, **keywords) -> subprocess.CompletedProcess:
    """subprocess.run with that Popen."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(args, **keywords)


def _is_warm(argv: list[str], environment: dict[str, str]) -> bool:
    words = [word for word in argv[1:] if word != "-u"]
    python = bool(words) and argv[0] == sys.executable
    plain = python and (words[0] == "-m" or not words[0].startswith("-"))
    small = len(json.dumps([argv, environment])) < MESSAGE_BYTES and sum(map(len, argv)) < COMMAND_BYTES // 2
    special = {name for name in environment if _READ_AT_START.match(name)}
    special = {name for name in special if environment[name] != os.environ.get(name)}
    return plain and small and not special and not environment.get("NANOMFU_COLD_PROCESSES")


class _Server:
    """The process that forks, behind a socket; it ends when this one does. Its forks become children of this
    process: it forks twice, and the child of a process that has ended is given to the nearest one above that
    asked for such children."""

    def __init__(self, connection: socket.socket):
        self.connection, self.pid = connection, os.getpid()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def start(self, request: bytes, streams: list[int]) -> int:
        socket.send_fds(self.connection, [request], streams)
        answer = self.connection.recv(4)
        assert answer, "the server of tests/support/warm_python.py has ended"
        return struct.unpack("i", answer)[0]


_started: list[_Server] = []


def _server() -> _Server:
    if not _started or _started[0].pid != os.getpid():
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        room = "-" * COMMAND_BYTES  # forks write their command lines over it
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), room],
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | threads,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        _started[:] = [_Server(ours)]
        atexit.register(ours.close)
    return _started[0]


# --- the server ---


def serve(connection: socket.socket) -> dict:
    """Forks for each request. Returns in the fork, with its request; the server itself ends here."""
    while True:
        message, fds, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        readable, writable = os.pipe()
        between = os.fork()
        if not between:
            between, pid = os.getpid(), os.fork()
            if pid:
                os.write(writable, struct.pack("i", pid))
                os._exit(0)
            while os.getppid() == between:  # until it has its parent
                time.sleep(0.0005)
            return take_over(json.loads(message), fds)
        for fd in (*fds, writable):
            os.close(fd)
        os.waitpid(between, 0)
        connection.send(os.read(readable, 4))
        os.close(readable)


def take_over(request: dict, streams: list[int]) -> dict:
    """This fork becomes the process that was asked for, up to the script's first line."""
    if request["session"]:
        os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, tuple(request["file_size"]))
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    unbuffered = "-u" in request["argv"][:2] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(
        open(0, "rb", closefd=False), encoding=sys.stdin.encoding, errors=sys.stdin.errors
    )
    sys.stdout = output(1, sys.stdout, unbuffered)
    sys.stderr = output(2, sys.stderr, unbuffered)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.orig_argv = request["argv"]
    show_command(request["argv"])
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    time.tzset()
    return request


def output(fd: int, like: io.TextIOWrapper, unbuffered: bool) -> io.TextIOWrapper:
    """sys.stdout or sys.stderr as Python opens it, in the server's locale."""
    binary = open(fd, "wb", buffering=0 if unbuffered else -1, closefd=False)
    by_line = not unbuffered and (fd == 2 or binary.isatty())
    return io.TextIOWrapper(
        binary, like.encoding, like.errors, "\n", line_buffering=by_line, write_through=unbuffered
    )


def show_command(argv: list[str]) -> None:
    """In /proc/PID/cmdline, by which tests find the processes of a run."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    command = "\0".join(argv).encode()[: end - begin - 1]
    ctypes.memmove(begin, command.ljust(end - begin, b"\0"), end - begin)


# --- torchrun ---


def fork_server() -> dict | None:
    """In a fork that becomes torchrun, before it has any thread: another server, a child of its own. None in
    torchrun, whose children the ranks will be; in a rank, its request."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        show_command(["forks ranks"])
        return serve(theirs)
    theirs.close()
    _started[:] = [_Server(ours)]
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(handler).Popen = Popen
    return None


def arguments_of(argv: list[str]) -> list[str]:
    """What stands behind python and its own options."""
    return [word for i, word in enumerate(argv[1:]) if not (word == "-u" and i == 0)]


def main() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # not everybody installs all of them
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork's collector need not look at what was imported here
    sys.path.pop(0)  # tests/support
    words = arguments_of(serve(socket.socket(fileno=int(sys.argv[1])))["argv"])
    if words[:2] == ["-m", TORCHRUN]:
        sys.modules.pop(TORCHRUN)  # it is about to become __main__
        if rank := fork_server():
            words = arguments_of(rank["argv"])
    try:
        status = run_script(words)
    except KeyboardInterrupt:  # Python ends a script by the signal
        sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        leave(status)


def run_script(words: list[str]) -> int:
    """The exit status of the script. Python itself ends it after an exception."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise  # a message, which Python prints
        return (end.code or 0) & 0xFF
    return 0


def leave(status: int) -> None:
    """Ends as Python does, but without deleting every object: that takes 0.4 s where torch is imported."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # Python says so in its own way
        sys.exit(status)
    os._exit(status)


if __name__ == "__main__":
    main()
