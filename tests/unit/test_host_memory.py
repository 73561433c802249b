"""Free memory is that of the machine, the container or the job, whichever is least. Each case plants what the
kernel shows a process: /proc/self/cgroup, /proc/meminfo, and the folders of cgroups."""

import functools
import os
from pathlib import Path

import pytest
import torch

from training.memory.gpus import device_memory
from training.process import memory
from training.process.memory import GIB, free_host_bytes, host_bytes

NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cgroup): plants it on a machine of 64 GiB, of which 50 are available."""
    proc = tmp_path / "proc"
    proc.mkdir()
    monkeypatch.setattr(memory, "PROCESS", proc)
    monkeypatch.setattr(memory, "MEMORY", proc / "meminfo")
    monkeypatch.setattr(memory, "MOUNT", tmp_path / "cg")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.get)
    kib = 50 * GIB // 1024
    (proc / "meminfo").write_text(f"MemTotal: {2 * kib} kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n")
    return (proc / "cgroup").write_text


FILES = {  # of a cgroup of each version: its limit, what is used, the file cache in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", str(NO_LIMIT_V1)),
    2: ("memory.max", "memory.current", "inactive_file", "max"),
}


@pytest.fixture
def v2(tmp_path):
    """v2(folder, limit, used, inactive): a cgroup of version 2, in GiB."""

    def make(
        folder: str, limit: float | None, used: float, inactive=0.0, high: float | None = None, version=2
    ):
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        limit_file, usage, cache, no_limit = FILES[version]
        for name, value in ((limit_file, limit), ("memory.high", high)):
            (path / name).write_text(f"{no_limit if value is None else int(value * GIB)}\n")
        (path / usage).write_text(f"{int(used * GIB)}\n")
        stat = f"anon 5\nfile 7\nactive_file 9\n{cache} {int(inactive * GIB)}\n"
        # version 1 also has the part of the cgroup itself, without those below it
        (path / "memory.stat").write_text(stat + "inactive_file 1\n" * (version == 1))

    return make


@pytest.fixture
def v1(v2):
    return functools.partial(v2, version=1)


def seen() -> tuple[float, float]:
    """(all, free) in GiB."""
    return host_bytes() / GIB, free_host_bytes() / GIB


def test_a_machine_without_limits_has_what_the_kernel_calls_available(machine, v2):
    machine("0::/user.slice\n")
    v2("cg/user.slice", None, 3)
    assert seen() == (64, 50)


def test_a_limit_of_version_2_counts_without_the_file_cache_that_can_be_dropped(machine, v2):
    """A CPU's micro-batch may have half of it, here for two processes."""
    machine("0::/\n")
    v2("cg", 8, 6, inactive=2.5)
    assert seen() == (8, 4.5)
    assert device_memory(torch.device("cpu"), 2).gib == 2
    v2("cg", 8, 9)
    assert seen() == (8, 0), "more is used than is allowed"
    v2("cg", 8, 2, high=6)
    assert seen() == (6, 4), "memory.high counts as well"


def test_each_cgroup_above_the_own_one_counts(machine, v2):
    """Slurm limits the job and its step; what other steps of the job use is missing, too."""
    job = "system.slice/slurmstepd.scope/job_7"
    machine(f"0::/{job}/step_0/user/task_0\n")
    v2(f"cg/{job}/step_0/user/task_0", None, 1)
    v2(f"cg/{job}/step_0", 20, 1)
    v2(f"cg/{job}", 16, 14)
    assert seen() == (16, 2)


def test_version_1_under_slurm(machine, v1):
    path = "/slurm/uid_1000/job_7/step_0/task_0"
    machine(f"9:cpuset:/\n4:cpuacct,memory:{path}\n1:name=systemd:/\n")
    v1(f"cg/memory{path}", None, 1)
    v1("cg/memory/slurm/uid_1000/job_7", 10, 7, inactive=1)
    v1("cg/memory", None, 30)
    assert seen() == (10, 4)


def test_in_a_container_the_mount_begins_at_the_container_s_own_cgroup(machine, v1):
    machine("4:memory:/docker/ab12/child\n")
    v1("cg/memory", 4, 3)
    v1("cg/memory/child", 6, 1)
    assert seen() == (4, 1)


def test_hybrid_has_its_memory_in_version_1(machine, v1):
    machine("4:memory:/job\n1:cpu:/other\n0::/job\n")
    v1("cg/memory/job", 12, 2)
    v1("cg/cpu/job", 1, 1)  # of another controller
    assert seen() == (12, 10)


@pytest.mark.parametrize("own", ["/../..", "/../sibling", "/gone (deleted)"])
def test_a_process_outside_its_namespace_takes_the_highest_cgroup_that_it_can_see(machine, v2, own):
    machine(f"0::{own}\n")
    v2("cg", 8, 1)
    v2("sibling", 2, 1)  # above the mount: something else
    assert seen() == (8, 7)


@pytest.mark.parametrize("odd", [b"", b"max\n", b"\xff\xfe", b"-1\n", b"0\n", b"9" * 5000, b"a b c:d\n:\n"])
def test_odd_and_missing_files_limit_nothing_and_raise_nothing(machine, v2, tmp_path, odd):
    machine("0::/a\n")
    v2("cg/a", 8, 1)
    for name in ("memory.max", "memory.current", "memory.stat"):
        (tmp_path / "cg/a" / name).write_bytes(odd)
    assert seen() == (64, 50)
    for name in ("memory.max", "memory.high", "memory.current", "memory.stat"):
        (tmp_path / "cg/a" / name).unlink()
    (tmp_path / "cg/a" / "memory.max").mkdir()
    assert seen() == (64, 50)
    (memory.PROCESS / "cgroup").write_bytes(odd)
    assert seen() == (64, 50)
    (memory.PROCESS / "cgroup").unlink()
    assert seen() == (64, 50)
    memory.MEMORY.write_bytes(odd)
    assert seen() == (64, float("inf"))


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="this system has no cgroups")
def test_this_machine_s_own_files_can_be_read():
    assert 0 < host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_host_bytes() <= host_bytes()
