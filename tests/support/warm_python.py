"""Python processes that start in a tenth of a second: forks of one process that has imported torch.

    from support.warm_python import Popen, run  # as subprocess has them, for commands of sys.executable

Most of a short run of train.py is the import of torch, 2 s a process. A server, one for each pytest process,
imports it once and forks for each command. The fork takes the streams, folder, environment, session, command
line and largest file of the command and runs the script as Python would. The fork imports the project itself,
so the files that are on disk now are tested. A command gets a fresh interpreter instead

- if it is neither `python [-u] SCRIPT ...` nor `python [-u] -m MODULE ...`,
- if the environment has variables that Python or a library reads when it starts (_READ_AT_START),
- if the limits of this process (RLIMIT_AS and others) are not those that the server has,
- with NANOMFU_COLD_PROCESSES=1, as `make test-all` sets it.

The ranks of torchrun must be its own children. So a fork that becomes torchrun first forks children that
wait, before it has any thread, and each becomes a rank when torchrun starts one.
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
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

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
RANKS = 4  # that wait in a torchrun; if it starts more, the others are fresh interpreters
MESSAGE_BYTES = 1 << 18
COMMAND_BYTES = 16_384  # room for the command line, as /proc shows it
_READ_AT_START = re.compile(
    r"(?!PYTHONUNBUFFERED$|PYTHONPATH$)PYTHON|LC_|LANG|LD_|TORCH|TRITON_INTERPRET|MKL_|CUDA_|MPL"
)


# --- for tests ---


class Popen(subprocess.Popen):
    """subprocess.Popen, except that a command of this Python may be a fork of the server."""

    _ended: socket.socket | None = None  # tells how a fork ended; None for a fresh interpreter

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
        request = _request(argv, os.fspath(cwd or os.getcwd()), environment, session)
        self._ended, theirs = socket.socketpair()
        with theirs:
            self.pid = _server().start(request, [*streams, theirs.fileno()])
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _status(self, timeout: float | None) -> tuple[int, int]:
        """As os.waitpid: (pid, status), or (0, 0) if it still runs."""
        if not select.select([self._ended], [], [], timeout)[0]:
            return 0, 0
        status = self._ended.recv(4)
        self._ended.close()
        return self.pid, struct.unpack("i", status)[0] if status else signal.SIGKILL  # the server was killed

    def _try_wait(self, wait_flags):
        if self._ended is None:
            return super()._try_wait(wait_flags)
        return self._status(0 if wait_flags & os.WNOHANG else None)

    def _internal_poll(self, *arguments, **keywords):
        if self._ended is None or self.returncode is not None:
            return super()._internal_poll(*arguments, **keywords)
        if self._waitpid_lock.acquire(False):
            try:
                pid, status = self._status(0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(args, *, timeout=None, check=False, capture_output=False, **keywords) -> subprocess.CompletedProcess:
    """subprocess.run with that Popen."""
    if capture_output:
        keywords |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **keywords) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def _is_warm(argv: list[str], environment: dict[str, str]) -> bool:
    words = [word for word in argv[1:] if word != "-u"]
    python = bool(words) and argv[0] == sys.executable
    plain = python and (words[0] == "-m" or not words[0].startswith("-"))
    small = len(json.dumps([argv, environment])) < MESSAGE_BYTES and sum(map(len, argv)) < COMMAND_BYTES // 2
    special = {name for name in environment if _READ_AT_START.match(name)}
    special = {name for name in special if environment[name] != os.environ.get(name)}
    return (
        plain
        and small
        and not special
        and _limits() == _LIMITS
        and not environment.get("NANOMFU_COLD_PROCESSES")
    )


def _limits() -> list[tuple[int, int]]:
    names = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
    return [resource.getrlimit(getattr(resource, name)) for name in names]


_LIMITS = _limits()  # of this process when it began, and so of the server


def _request(argv: list[str], cwd: str, environment: dict[str, str], session: bool) -> bytes:
    request = {"argv": argv, "cwd": cwd, "environment": environment, "session": bool(session)}
    request["file_size"] = resource.getrlimit(resource.RLIMIT_FSIZE)
    return json.dumps(request).encode()


class _Server:
    """The process that forks; it ends when this one does."""

    def __init__(self):
        self.connection, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        room = "-" * COMMAND_BYTES  # forks write their command lines over it
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), room],
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | threads,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES)
        self.pid = os.getpid()
        atexit.register(self.connection.close)

    def start(self, request: bytes, fds: list[int]) -> int:
        socket.send_fds(self.connection, [request], fds)
        answer = self.connection.recv(4)
        assert answer, f"the server of tests/support/warm_python.py has ended: {self.process.poll()}"
        return struct.unpack("i", answer)[0]


_started: list[_Server] = []


def _server() -> _Server:
    if not _started or _started[0].pid != os.getpid():
        _started[:] = [_Server()]
    return _started[0]


# --- the server ---


def serve(connection: socket.socket) -> dict:
    """Forks for each request. Returns in the fork, with its request; the server itself ends here."""
    children: dict[int, socket.socket] = {}  # pid -> who waits for its end
    told: dict[socket.socket, int] = {}  # ended, but not yet asked for: until then its pid is not given away
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    while True:
        for ready in select.select([connection, wake, *told], [], [])[0]:
            if ready == wake:
                os.read(wake, 4096)
            elif ready is not connection:
                os.waitpid(told.pop(ready), 0)
                ready.close()
            else:
                message, fds, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
                if not message:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return take_over(json.loads(message), fds[:3])
                children[pid] = socket.socket(fileno=fds.pop())
                for fd in fds:
                    os.close(fd)
                connection.send(struct.pack("i", pid))
        for pid in list(children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _, status = wait_without_reaping(pid)
                waiting = children.pop(pid)
                try:
                    waiting.send(struct.pack("i", status))
                except BrokenPipeError:  # nobody asks
                    pass
                told[waiting] = pid


def wait_without_reaping(pid: int) -> tuple[int, int]:
    """(pid, status) as os.waitpid gives it; the zombie stays, and so does its pid."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    status = ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status
    return pid, status | (0x80 if ended.si_code == os.CLD_DUMPED else 0)


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


class _Ranks:
    """Children of a fork that becomes torchrun: each waits until torchrun starts a rank."""

    def __init__(self):
        self.waiting: list[tuple[int, socket.socket]] = []

    def fork(self) -> dict | None:
        """None in torchrun; in a child, once it is asked for, its request."""
        for _ in range(RANKS):
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, other in self.waiting:
                    other.close()
                show_command(["waits to be a rank"])
                message, fds, *_ = socket.recv_fds(theirs, MESSAGE_BYTES, 3)
                if not message:
                    os._exit(0)
                return take_over(json.loads(message), fds)
            theirs.close()
            os.set_inheritable(ours.fileno(), False)
            self.waiting.append((pid, ours))
        return None

    def popen(self) -> type[subprocess.Popen]:
        """What torchrun starts its ranks with."""
        ranks = self

        class RankPopen(subprocess.Popen):
            def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
                if not ranks.waiting:
                    fresh = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
                    return super()._execute_child(*fresh)
                pipes = rest[3:9]
                given = (pipes[0], pipes[3], pipes[5])
                streams = [own if end == -1 else end for own, end in enumerate(given)]
                environment = dict(os.environ if env is None else env)
                self.pid, connection = ranks.waiting.pop(0)
                with connection:
                    message = _request(list(args), os.getcwd(), environment, rest[14])
                    socket.send_fds(connection, [message], streams)
                self._child_created = True
                self._close_pipe_fds(*pipes)

        return RankPopen


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
        ranks = _Ranks()
        rank = ranks.fork()
        if rank is None:
            handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
            importlib.import_module(handler).Popen = ranks.popen()
        else:
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
