"""Lets any rank ask all ranks to stop or to save, so that every rank learns of it at the same iteration.

The trap: a rank that stops alone leaves the others in a collective forever, and a flag that travels through
the GPU makes the host wait for the GPU. So small numbers travel from CPU to CPU (gloo), in parallel to the
iteration, and are read before the next one: what a rank asks in iteration n, all know before n + 2.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from training.process.world import World, all_gather, cpu_group

# Their values: a signal's number; an iteration; a time (training/faults/stragglers.py).
QUESTIONS = ("stop", "checkpoint", "own_seconds")


class Consensus:
    """ask() on any rank, from any thread; exchange() on all ranks; then all of them have the same answers."""

    def __init__(self, world: World):
        self.world, self.group = world, cpu_group(world)
        self.lock = threading.Lock()
        self.asked = dict.fromkeys(QUESTIONS, 0.0)
        self.answers = torch.zeros(world.size, len(QUESTIONS), dtype=torch.float64)  # what each rank asked
        # (communication, what it sends, where it receives)
        self.under_way: tuple[dist.Work | None, torch.Tensor, torch.Tensor] | None = None

    def ask(self, question: str, value: float = 1) -> None:
        """Sends the value once, with the next exchange."""
        with self.lock:
            self.asked[question] = value

    def exchange(self, at_once: bool = False) -> None:
        """Takes the answers to what was asked before the last exchange, and sends what has been asked since.
        With at_once, waits for the answers to the latter, too. All ranks."""
        answers = [self._receive()] if self.under_way else []
        self._send()
        if at_once or self.group is None:
            answers.append(self._receive())
        if answers:
            self.answers = torch.stack(answers).amax(0)

    def answer(self, question: str) -> float:
        """The largest value that any rank has asked with; 0 if none has asked."""
        return max(self.by_rank(question))

    def by_rank(self, question: str) -> list[float]:
        return self.answers[:, QUESTIONS.index(question)].tolist()

    def _send(self) -> None:
        with self.lock:
            mine = torch.tensor([[self.asked[question] for question in QUESTIONS]], dtype=torch.float64)
            self.asked = dict.fromkeys(QUESTIONS, 0.0)
        everyone = mine.repeat(self.world.size, 1)
        work = all_gather(everyone, mine, group=self.group, async_op=True) if self.group else None
        self.under_way = work, mine, everyone  # gloo needs both tensors until it is done

    def _receive(self) -> torch.Tensor:
        assert self.under_way, "_send() comes first"
        work, _, everyone = self.under_way
        if work:
            work.wait()
        self.under_way = None
        return everyone
