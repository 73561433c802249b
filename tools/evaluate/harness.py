"""Runs benchmarks of EleutherAI's lm-eval on our model. This file alone imports lm-eval.

lm-eval is told that there is one process: each rank builds all requests, computes its share of them, and
gets the results of the others. So no request is computed twice, and a task may have fewer examples than there
are ranks.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from common.errors import UserError
from common.text import one_line
from generation.text import generate_text
from tools.evaluate.scoring import Scorer, batches, windows
from tools.evaluate.subject import Subject
from training.process.world import gather_objects

VERSION = lm_eval.__version__
YAML = (".yaml", ".yml")
MAX_NEW_TOKENS = 256  # of tasks that do not say how many; the default of lm-eval's `hf`


class OurLM(TemplateLM):
    """Our model as lm-eval sees one. What is not here is in TemplateLM: how contexts and continuations are
    encoded."""

    def __init__(self, subject: Subject, scorer: Scorer):
        super().__init__()
        self.subject, self.scorer = subject, scorer

    @property
    def eot_token_id(self) -> int:
        if self.subject.prefix_id is None:
            raise UserError(
                "this task predicts a text from its first token on, but the model's tokenizer has no "
                "end-of-text token to begin with; leave the task out, or evaluate the text with --text"
            )
        return self.subject.prefix_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = self.subject.tokenizer.encode(string)
        prefixed = self.subject.adds_prefix and add_special_tokens is not False
        return [self.eot_token_id, *ids] if prefixed else ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self.scorer.score([(context, continuation) for _, context, continuation in requests])
        return [(-score.nats, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, each cut into windows that do not overlap but for the last one."""
        pairs, owners, prefix_id = [], [], self.eot_token_id
        for number, request in enumerate(requests):
            (text,) = request.args
            ids, length = self.subject.tokenizer.encode(text), self.subject.block_size
            for pair in windows(ids, prefix_id, length, stride=length):
                pairs.append(pair)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self.scorer.score(pairs), strict=True):
            totals[owner] -= score.nats
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        world = self.scorer.world
        mine = range(world.rank, len(requests), world.size)
        groups: dict[
            tuple[int, tuple[str, ...]], list[int]
        ] = {}  # a batch has one limit and one set of stops
        for number in mine:
            groups.setdefault(self._limits(requests[number].args[1]), []).append(number)
        found: dict[int, str] = {}
        for (count, stops), numbers in groups.items():
            for batch in batches(numbers, self.scorer.batch_size):
                texts = [requests[number].args[0] for number in batch]
                found.update(zip(batch, self._generate(texts, count, stops), strict=True))
        merged: dict[int, str] = {}
        for share in gather_objects(found, world):
            merged |= share
        return [merged[number] for number in range(len(requests))]

    def _limits(self, arguments: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
        """At most how many tokens a text has, and what ends it. Raises UserError."""
        keys = normalize_gen_kwargs(arguments, MAX_NEW_TOKENS)
        if keys["do_sample"]:
            raise UserError("this task samples at random (do_sample=true); tools.evaluate decodes greedily")
        count = keys["max_gen_toks"]
        if self.subject.block_size <= count:
            raise UserError(
                f"a task generates up to {count:,} tokens, which do not fit into this model's context of "
                f"{self.subject.block_size:,} with its question; leave that task out"
            )
        return count, tuple(handle_stop_sequences(keys["until"], eos=None))

    def _generate(self, contexts: Sequence[str], count: int, stops: Sequence[str]) -> list[str]:
        room = self.subject.block_size - count
        prompts = [self.tok_encode(context)[-room:] or [self.eot_token_id] for context in contexts]
        subject = self.subject
        made = generate_text(
            subject.model, subject.tokenizer, prompts, count, ends=subject.end_ids, stops=stops
        )
        return [postprocess_generated_text(text, list(stops), None) for text in made]


# --- tasks ---


def load_tasks(names: list[str], include_path: str | None) -> tuple[TaskManager, dict[str, Any]]:
    """lm-eval's manager, and the tasks. A name is that of a task of lm-eval or of a task file in
    include_path, or it is the path of a task file. Raises UserError."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path={include_path}: there is no such folder")
    for name in names:
        if name.endswith(YAML) and not Path(name).is_file():
            raise UserError(f"--tasks={name}: there is no such task file")
    manager = _index(include_path, include_defaults=False)
    if any(name not in manager.all_subtasks and not name.endswith(YAML) for name in names):
        manager = _index(include_path, include_defaults=True)  # reads 14,000 files: 10 s
    for name in names:
        if name not in manager.all_tasks and not name.endswith(YAML):
            near = difflib.get_close_matches(name, manager.all_tasks, n=4)
            raise UserError(
                f"--tasks: lm-eval {VERSION} has no task {name!r}; "
                + (f"near it: {', '.join(near)}" if near else "a local task file is named by its path")
            )
    try:
        return manager, manager.load(names)
    except Exception as error:  # of datasets, jinja, YAML, and lm-eval's own
        offline = " (the hub is switched off by HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise UserError(
            f"--tasks={','.join(names)}: lm-eval cannot load it{offline}: {type(error).__name__}: "
            f"{one_line(str(error), 300)}"
        ) from error


def _index(include_path: str | None, include_defaults: bool) -> TaskManager:
    try:
        return TaskManager(include_path=include_path, include_defaults=include_defaults)
    except Exception as error:  # a YAML file that is none
        raise UserError(
            f"--include_path={include_path}: lm-eval cannot read its task files: {type(error).__name__}: "
            f"{one_line(str(error), 300)}"
        ) from error


def run_tasks(
    manager: TaskManager,
    tasks: dict[str, Any],
    lm: OurLM,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """{name: what is recorded} of every task and group. All ranks; what the others return is not used."""
    found = simple_evaluate(
        model=lm,
        tasks=[*tasks["groups"].values(), *_outside_groups(tasks)],
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
    )
    if found is None:  # on every rank but the first
        return {}
    return {
        name: {
            "version": found["versions"].get(name),
            "n_shot": found["n-shot"].get(name),
            "examples": found.get("n-samples", {}).get(name),
            "metrics": _metrics(metrics),
        }
        for name, metrics in found["results"].items()
    }


def _outside_groups(tasks: dict[str, Any]) -> list[Any]:
    inside = {task.task_name for group in tasks["groups"].values() for task in group.get_all_tasks()}
    return [task for name, task in tasks["tasks"].items() if name not in inside]


def _metrics(found: dict[str, Any]) -> dict[str, Any]:
    """By 'metric,filter', as lm-eval names them. None: not estimated ('N/A'), or no finite number."""
    numbers = {name: value for name, value in found.items() if "," in name}
    return {
        name: value if isinstance(value, (int, float)) and math.isfinite(value) else None
        for name, value in numbers.items()
    }
