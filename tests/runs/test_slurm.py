"""scripts/slurm_train.sh, as far as a machine without Slurm allows: srun, scancel and scontrol are stand-ins,
and a node is a torchrun of its own on this machine."""

import os
import shutil
import subprocess
import sys

import pytest
from support.faults import prepare, wait_for_all
from support.helpers import ROOT

ITERATIONS = 400  # the signal passes through several programs
SCRIPT = ROOT / "scripts" / "slurm_train.sh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def config(folder):
    return prepare(folder, max_iters=ITERATIONS)


FAKES = {
    "srun": """
        while [ "${1#--}" != "$1" ]; do shift; done
        echo $$ > "$FAKE/srun.pid"; echo $PPID > "$JOB_PID"
        pids=
        for _ in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & pids="$pids $!"; done
        status=0
        trap : USR1  # Slurm signals the tasks, not srun
        for pid in $pids; do
            while kill -0 $pid 2>/dev/null; do wait $pid; done
            wait $pid || status=1
        done
        exit $status
    """,
    # every process of the step, as Slurm does
    "scancel": """
        echo "$@" >> "$FAKE/scancel"
        all() { for child in $(cat /proc/$1/task/*/children); do echo $child; all $child; done; }
        kill -USR1 $(all $(cat "$FAKE/srun.pid"))
    """,
    "scontrol": """
        case $1 in show) echo localhost ;; *) echo "$@" >> "$FAKE/scontrol" ;; esac
    """,
}


@pytest.fixture
def slurm(config, folder, tmp_path):
    """slurm(out, *flags, nodes=, processes=, fault=): the job, with a Slurm that is this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in FAKES.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}")
        (programs / name).chmod(0o755)

    def slurm(out, *flags, nodes=1, processes=2, fault=""):
        job = SCRIPT.read_text().replace("train.py", "tests/support/fault_worker.py")
        (tmp_path / "job.sh").write_text(job)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "FAKE": str(tmp_path),
            "JOB_PID": str(tmp_path / "job.pid"),
            "FAULT": fault,
            "GPUS_PER_NODE": str(processes),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": str(nodes),
        }
        command = ["bash", str(tmp_path / "job.sh"), str(config), f"--out_dir={out}", *flags]
        how = {"cwd": ROOT, "env": {**os.environ, **environment}, "start_new_session": True}
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        ended = wait_for_all(out, 100, lambda log: subprocess.Popen(command, stdout=log, **streams, **how))
        files = [tmp_path / name for name in ("scancel", "scontrol")]
        return ended, [path.read_text().split() if path.exists() else [] for path in files]

    return slurm


@pytest.mark.slow
def test_the_time_limit_of_a_job_on_two_nodes_saves_and_requeues_it(slurm, folder):
    out = folder / "two-nodes"
    ended, (scancel, scontrol) = slurm(out, nodes=2, processes=1, fault="SIGUSR1 job 10")
    assert ended.status == 0, ended.output[-3000:]
    assert scancel == ["--signal=USR1", "4711"] and scontrol == ["requeue", "4711"]
    assert 10 <= ended.steps[-1] < ITERATIONS and ended.record()["status"] == "interrupted"
    assert ended.record()["startup_info"]["hardware"]["num_gpus"] == 2


@pytest.mark.chaos
def test_a_requeued_job_goes_on_and_is_not_requeued_when_it_is_done(slurm, folder):
    out = folder / "requeued"
    slurm(out, fault="SIGUSR1 job 10")
    ended, (_, scontrol) = slurm(out)
    assert ended.status == 0 and "Resuming from" in ended.output, ended.output[-3000:]
    assert ended.steps[-1] == ITERATIONS and scontrol == ["requeue", "4711"], "once, by the first"


@pytest.mark.chaos
def test_a_job_that_fails_is_not_requeued(slurm, folder):
    ended, (scancel, scontrol) = slurm(folder / "fails", fault="raise 1 10")
    assert ended.status == 1 and not scancel and not scontrol


def test_the_script_is_sound():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)
