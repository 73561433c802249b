"""The cores of a job and its free memory are those of the machine, the container or the job, whichever is
least. Each case plants what the kernel shows a process: /proc/self/cgroup, /proc/meminfo, and the folders of
cgroups."""

import os
import re
from pathlib import Path

import pytest
import torch
from support.imports import read_sources

from common import cgroups
from common.cgroups import usable_cores
from data.pipeline.command import make_parser
from training.memory.gpus import device_memory
from training.process import memory
from training.process.memory import GIB, free_host_bytes, host_bytes

NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cgroup, {folder: {file: content}}): a job that may use 8 of 64 cores, on a machine of 64 GiB,
    of which 50 are available."""
    proc = tmp_path / "proc"
    proc.mkdir()
    monkeypatch.setattr(cgroups, "PROCESS", proc)
    monkeypatch.setattr(memory, "MEMORY", proc / "meminfo")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path / "cg")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.get)
    kib = 50 * GIB // 1024
    (proc / "meminfo").write_text(f"MemTotal: {2 * kib} kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n")

    def machine(cgroup: str, groups: dict[str, dict[str, object]]):
        (proc / "cgroup").write_text(cgroup)
        for folder, files in groups.items():
            (tmp_path / "cg" / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (tmp_path / "cg" / folder / name).write_text(f"{content}\n")

    return machine


# --- cores ---

PERIOD = {"cpu.cfs_period_us": 100000}
OF_CORES = [  # (/proc/self/cgroup, the cgroups, cores)
    ("", {}, 8),
    *(
        ("0::/\n", {"": {"cpu.max": limit}}, cores)
        for limit, cores in (
            ("max 100000", 8),
            ("300000 100000", 3),
            ("150000 100000", 2),  # one core would leave a third of it unused
            ("1000 100000", 1),
            ("3200000 100000", 8),
            *((odd, 8) for odd in ("", "9 0", "x", "max", "9" * 5000 + " 1", "-5 1")),
        )
    ),
    # a limit of each cgroup above the own one counts
    ("0::/a/b\n", {"a/b": {"cpu.max": "600000 100000"}, "a": {"cpu.max": "20000 10000"}}, 2),
    # version 1, of a machine, and in a container whose mount begins at its own cgroup
    ("3:cpu,cpuacct:/a\n", {"cpu/a": {"cpu.cfs_quota_us": 400000} | PERIOD}, 4),
    ("3:cpu,cpuacct:/docker/ab\n", {"cpu": {"cpu.cfs_quota_us": 400000} | PERIOD}, 4),
    ("3:cpu,cpuacct:/a\n", {"cpu/a": {"cpu.cfs_quota_us": -1} | PERIOD}, 8),
]


@pytest.mark.parametrize(("cgroup", "groups", "cores"), OF_CORES)
def test_the_cores_of_a_job_are_those_of_the_least_limit_and_so_are_workers(
    machine, tmp_path, cgroup, groups, cores
):
    machine(cgroup, groups)
    assert usable_cores() == make_parser("", tmp_path, 0.1).parse_args([]).workers == cores


def test_where_the_system_tells_no_affinity_all_cores_count(machine, monkeypatch):
    machine("", {})
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64


def test_nothing_else_counts_cores():
    counts = re.compile(r"\b(process_)?cpu_count\(|sched_getaffinity\(")
    assert [path for path, source in read_sources().items() if counts.search(source)] == ["common/cgroups.py"]


# --- memory ---

FILES = {  # of a cgroup of each version: its limit, what is used, the file cache in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", NO_LIMIT_V1),
    2: ("memory.max", "memory.current", "inactive_file", "max"),
}


def of_memory(folder: str, limit: float | None, used: float, inactive=0.0, high=None) -> dict[str, object]:
    """The files of a cgroup, in GiB; of version 1 below a controller's name."""
    version = 1 if folder.startswith(("memory", "cpu")) else 2
    limit_file, usage, cache, no_limit = FILES[version]
    bounds = {limit_file: limit, "memory.high": high}
    stat = f"anon 5\nfile 7\nactive_file 9\n{cache} {int(inactive * GIB)}"
    stat += "\ninactive_file 1" * (version == 1)  # the part of the cgroup itself, without those below it
    files = {name: no_limit if value is None else int(value * GIB) for name, value in bounds.items()}
    return files | {usage: int(used * GIB), "memory.stat": stat}


def seen() -> tuple[float, float]:
    """(all, free) in GiB."""
    return host_bytes() / GIB, free_host_bytes() / GIB


JOB = "slurmstepd.scope/job_7"
OF_MEMORY = [  # (/proc/self/cgroup, the cgroups, what is seen)
    # a machine without limits has what the kernel calls available
    ("0::/user.slice", {"user.slice": (None, 3)}, (64, 50)),
    # a limit counts without the file cache that can be dropped; more may be used than is allowed
    ("0::/", {"": (8, 6, 2.5)}, (8, 4.5)),
    ("0::/", {"": (8, 9)}, (8, 0)),
    # memory.high counts as well
    ("0::/", {"": (8, 2, 0, 6)}, (6, 4)),
    # each cgroup above the own one counts: what other steps of Slurm's job use is missing, too
    (f"0::/{JOB}/step/task", {f"{JOB}/step/task": (None, 1), f"{JOB}/step": (20, 1), JOB: (16, 14)}, (16, 2)),
    # version 1 under Slurm
    (
        f"9:cpuset:/\n4:cpuacct,memory:/{JOB}/task\n1:name=systemd:/",
        {f"memory/{JOB}/task": (None, 1), f"memory/{JOB}": (10, 7, 1), "memory": (None, 30)},
        (10, 4),
    ),
    # in a container the mount begins at the container's own cgroup
    ("4:memory:/docker/ab12/child", {"memory": (4, 3), "memory/child": (6, 1)}, (4, 1)),
    # hybrid has its memory in version 1; the second cgroup is another controller's
    ("4:memory:/job\n1:cpu:/other\n0::/job", {"memory/job": (12, 2), "cpu/job": (1, 1)}, (12, 10)),
    # a process outside its namespace: the highest cgroup that it can see; above the mount is something else
    *(
        (f"0::{own}", {"": (8, 1), "../sibling": (2, 1)}, (8, 7))
        for own in ("/../..", "/../sibling", "/gone (deleted)")
    ),
]


@pytest.mark.parametrize(("own", "groups", "expected"), OF_MEMORY)
def test_memory_is_that_of_the_least_limit_and_half_of_it_for_micro_batches(machine, own, groups, expected):
    machine(f"{own}\n", {folder: of_memory(folder, *numbers) for folder, numbers in groups.items()})
    assert seen() == expected
    assert device_memory(torch.device("cpu"), 2).gib == expected[0] / 4  # for each of two processes


@pytest.mark.parametrize("odd", [b"", b"max\n", b"\xff\xfe", b"-1\n", b"0\n", b"9" * 5000, b"a b c:d\n:\n"])
def test_odd_and_missing_files_limit_nothing_and_raise_nothing(machine, tmp_path, odd):
    machine("0::/a\n", {"a": of_memory("a", 8, 1)})
    for name in ("memory.max", "memory.current", "memory.stat"):
        (tmp_path / "cg/a" / name).write_bytes(odd)
    assert seen() == (64, 50)
    for name in ("memory.max", "memory.high", "memory.current", "memory.stat"):
        (tmp_path / "cg/a" / name).unlink()
    (tmp_path / "cg/a" / "memory.max").mkdir()
    assert seen() == (64, 50)
    (cgroups.PROCESS / "cgroup").write_bytes(odd)
    assert seen() == (64, 50)
    (cgroups.PROCESS / "cgroup").unlink()
    assert seen() == (64, 50)
    memory.MEMORY.write_bytes(odd)
    assert seen() == (64, float("inf"))


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="this system has no cgroups")
def test_this_machine_s_own_files_can_be_read():
    assert 0 < host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_host_bytes() <= host_bytes()
