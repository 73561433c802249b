"""The cores of a job are those that its affinity and its cgroups leave it. Each case plants what the kernel
shows a process: /proc/self/cgroup, and the folders of cgroups."""

import os
import re

import pytest
from support.imports import read_sources

from common import cgroups
from common.cgroups import usable_cores
from data.pipeline.command import make_parser

PERIOD = {"cpu.cfs_period_us": "100000\n"}


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """plant(cgroup, {folder: {file: content}}) on a job that may use 8 of 64 cores."""
    monkeypatch.setattr(cgroups, "PROCESS", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path / "cg")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def plant(cgroup: str, groups: dict[str, dict[str, str]]):
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cgroup").write_text(cgroup)
        for folder, files in groups.items():
            (tmp_path / "cg" / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (tmp_path / "cg" / folder / name).write_text(content)

    return plant


CASES = [  # (/proc/self/cgroup, the cgroups, cores)
    ("", {}, 8),
    ("0::/\n", {"": {"cpu.max": "max 100000\n"}}, 8),
    ("0::/\n", {"": {"cpu.max": "300000 100000\n"}}, 3),
    ("0::/\n", {"": {"cpu.max": "150000 100000\n"}}, 2),  # one core would leave a third of it unused
    ("0::/\n", {"": {"cpu.max": "1000 100000\n"}}, 1),
    ("0::/\n", {"": {"cpu.max": "3200000 100000\n"}}, 8),
    # a limit of each cgroup above the own one counts
    ("0::/a/b\n", {"a/b": {"cpu.max": "600000 100000\n"}, "a": {"cpu.max": "20000 10000\n"}}, 2),
    # version 1, of a machine, and in a container whose mount begins at its own cgroup
    ("3:cpu,cpuacct:/a\n", {"cpu/a": {"cpu.cfs_quota_us": "400000\n"} | PERIOD}, 4),
    ("3:cpu,cpuacct:/docker/ab\n", {"cpu": {"cpu.cfs_quota_us": "400000\n"} | PERIOD}, 4),
    ("3:cpu,cpuacct:/a\n", {"cpu/a": {"cpu.cfs_quota_us": "-1\n"} | PERIOD}, 8),
    *(("0::/\n", {"": {"cpu.max": odd}}, 8) for odd in ("", "9 0", "x", "max", "9" * 5000 + " 1", "-5 1")),
]


@pytest.mark.parametrize(("cgroup", "groups", "cores"), CASES)
def test_the_cores_of_a_job_are_those_of_the_least_limit(plant, cgroup, groups, cores):
    plant(cgroup, groups)
    assert usable_cores() == cores


def test_where_the_system_tells_no_affinity_all_cores_count(plant, monkeypatch):
    plant("", {})
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64


def test_a_preparation_begins_a_worker_for_each_core_of_the_job(plant, tmp_path, monkeypatch):
    plant("0::/\n", {"": {"cpu.max": "300000 100000\n"}})
    assert make_parser("", tmp_path, 0.1).parse_args([]).workers == 3


def test_nothing_else_counts_cores():
    counts = re.compile(r"\b(process_)?cpu_count\(|sched_getaffinity\(")
    assert [path for path, source in read_sources().items() if counts.search(source)] == ["common/cgroups.py"]
