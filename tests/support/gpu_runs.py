"""train.py on GPUs, with the settings of a folder's run.py."""

from support.helpers import last_run, run_train


def train(folder, out: str, *flags: str, config: str = "run.py", processes: int = 1, **env: str) -> dict:
    """The record of a run in folder / out."""
    arguments = folder / config, f"--out_dir={folder / out}", *flags
    done = run_train(*arguments, processes=processes, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return last_run(folder / out)


def losses(record: dict) -> list[float]:
    return [row["loss"] for row in record["training_iterations"]]
