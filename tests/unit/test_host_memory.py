"""Free memory is that of the machine, the container or the job, whichever is least. Each case plants what the
kernel shows a process: /proc/self/cgroup, /proc/meminfo, and the folders of cgroups."""

import os
from pathlib import Path

import pytest
import torch

from common import cgroups
from training.memory.gpus import device_memory
from training.process import memory
from training.process.memory import GIB, free_host_bytes, host_bytes

NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cgroup): plants it on a machine of 64 GiB, of which 50 are available."""
    proc = tmp_path / "proc"
    proc.mkdir()
    monkeypatch.setattr(cgroups, "PROCESS", proc)
    monkeypatch.setattr(memory, "MEMORY", proc / "meminfo")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path / "cg")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.get)
    kib = 50 * GIB // 1024
    (proc / "meminfo").write_text(f"MemTotal: {2 * kib} kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n")
    return (proc / "cgroup").write_text


FILES = {  # of a cgroup of each version: its limit, what is used, the file cache in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", str(NO_LIMIT_V1)),
    2: ("memory.max", "memory.current", "inactive_file", "max"),
}


@pytest.fixture
def plant(tmp_path):
    """plant(folder, limit, used, inactive, high) in GiB: a cgroup, of version 1 below a controller's name."""

    def plant(folder: str, limit: float | None, used: float, inactive=0.0, high=None):
        path = tmp_path / "cg" / folder
        path.mkdir(parents=True, exist_ok=True)
        version = 1 if folder.startswith(("memory", "cpu")) else 2
        limit_file, usage, cache, no_limit = FILES[version]
        for name, value in ((limit_file, limit), ("memory.high", high)):
            (path / name).write_text(f"{no_limit if value is None else int(value * GIB)}\n")
        (path / usage).write_text(f"{int(used * GIB)}\n")
        stat = f"anon 5\nfile 7\nactive_file 9\n{cache} {int(inactive * GIB)}\n"
        # version 1 also has the part of the cgroup itself, without those below it
        (path / "memory.stat").write_text(stat + "inactive_file 1\n" * (version == 1))

    return plant


def seen() -> tuple[float, float]:
    """(all, free) in GiB."""
    return host_bytes() / GIB, free_host_bytes() / GIB


JOB = "slurmstepd.scope/job_7"
CASES = [  # (/proc/self/cgroup, the cgroups, what is seen)
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


@pytest.mark.parametrize(("own", "groups", "expected"), CASES)
def test_memory_is_that_of_the_least_limit(machine, plant, own, groups, expected):
    machine(f"{own}\n")
    for folder, numbers in groups.items():
        plant(folder, *numbers)
    assert seen() == expected


def test_a_cpu_s_micro_batch_may_have_half_of_it(machine, plant):
    machine("0::/\n")
    plant("", 8, 6, 2.5)
    assert device_memory(torch.device("cpu"), 2).gib == 2  # for each of two processes


@pytest.mark.parametrize("odd", [b"", b"max\n", b"\xff\xfe", b"-1\n", b"0\n", b"9" * 5000, b"a b c:d\n:\n"])
def test_odd_and_missing_files_limit_nothing_and_raise_nothing(machine, plant, tmp_path, odd):
    machine("0::/a\n")
    plant("a", 8, 1)
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
