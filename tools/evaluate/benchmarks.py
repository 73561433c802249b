"""Benchmarks by EleutherAI's lm-eval: its own backend `hf` runs the model from a folder in Hugging Face's
format. This file alone imports lm-eval.

lm-eval is told that there is one process. Each rank has the whole model, answers its share of the requests,
and gets the answers of the others. So no request is computed twice, a task may have fewer examples than there
are ranks, and the ranks may be on several machines.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from common.errors import UserError
from common.text import one_line
from training.process.world import World, gather_objects

VERSION = lm_eval.__version__
YAML = (".yaml", ".yml")
BACKEND_LOG = logging.getLogger("lm_eval.models.huggingface")
TRUNCATING = "Truncating"  # in the backend's warning that a context loses its first tokens


class SharedHF(HFLM):
    """lm-eval's `hf`, whose requests are divided among the ranks. All ranks, with the same requests."""

    def __init__(self, world: World, **keys: Any):
        super().__init__(**keys)
        self.world, self.truncated = world, 0

    def loglikelihood(self, requests, disable_tqdm=False):
        return self._share(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return self._share(super().loglikelihood_rolling, requests)

    def generate_until(self, requests, disable_tqdm=False):
        return self._share(super().generate_until, requests)

    def _share(self, answer: Callable[..., list], requests: list) -> list:
        world = self.world
        shares = gather_objects(answer(requests[world.rank :: world.size], not world.is_main), world)
        return [shares[number % world.size][number // world.size] for number in range(len(requests))]

    def count_truncated(self, record: logging.LogRecord) -> bool:
        """A filter of the backend's log: counts the warnings instead of showing thousands of them."""
        self.truncated += TRUNCATING in record.getMessage()
        return record.levelno >= logging.ERROR


def load_tasks(names: list[str], include_path: str | None) -> tuple[TaskManager, dict[str, Any]]:
    """lm-eval's manager, and the tasks. A name is that of a task of lm-eval or of include_path, or the
    path of a task file. Raises UserError."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        unknown = [name for name in names if name not in manager.all_tasks and not name.endswith(YAML)]
        if unknown:
            manager = TaskManager(include_path=include_path)  # reads lm-eval's 14,000 files: 10 s
        for name in set(unknown) - set(manager.all_tasks):
            near = difflib.get_close_matches(name, manager.all_tasks, n=4) or ["a task file by its path"]
            raise UserError(f"lm-eval {VERSION} has no task {name!r}; near it: {', '.join(near)}")
        return manager, manager.load(names)
    except UserError:
        raise
    except Exception as error:  # of datasets, jinja, YAML, and lm-eval's own
        why = f"{type(error).__name__}: {one_line(str(error), 300)}"
        raise UserError(f"--tasks={','.join(names)}: lm-eval cannot load it: {why}") from error


def run_tasks(
    manager: TaskManager, tasks: dict[str, Any], lm: SharedHF, num_fewshot: int | None, limit: int | None
) -> dict[str, Any]:
    """{name: what is recorded} of every task and group; what ranks after the first return is not used. All
    ranks. Raises UserError."""
    inside = {task.task_name for group in tasks["groups"].values() for task in group.get_all_tasks()}
    outside = [task for name, task in tasks["tasks"].items() if name not in inside]
    keys = dict(task_manager=manager, num_fewshot=num_fewshot, limit=limit, log_samples=False)
    BACKEND_LOG.setLevel(logging.WARNING)
    BACKEND_LOG.addFilter(lm.count_truncated)
    try:
        found = lm_eval.simple_evaluate(model=lm, tasks=[*tasks["groups"].values(), *outside], **keys)
    except AssertionError as error:  # that is how the backend says that something is too long
        why = str(error) or f"an answer is longer than the model's context of {lm.max_length:,}"
        raise UserError(f"lm-eval's backend refuses a task: {one_line(why, 300)}") from error
    finally:
        BACKEND_LOG.removeFilter(lm.count_truncated)
    return {
        name: {
            "version": found["versions"].get(name),
            "n_shot": found["n-shot"].get(name),
            "examples": found.get("n-samples", {}).get(name),
            "metrics": {key: _number(value) for key, value in metrics.items() if "," in key},
        }
        for name, metrics in (found or {"results": {}})["results"].items()
    }


def _number(value: Any) -> float | None:
    """None: not estimated ('N/A'), or no finite number."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def open_model(folder: str, dtype: torch.dtype, batch_size: int, world: World, **keys: Any) -> SharedHF:
    """All ranks. logits_cache gives wrong scores where equal tokens are divided into context and answer at
    different places; without it, a batch of any size gives the scores of a batch of one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(world.device)
    keys |= dict(batch_size=batch_size, logits_cache=False, softmax_dtype="float32")
    return SharedHF(world, pretrained=model, tokenizer=folder, **keys)
