"""Makes tokens: reads all prompts of a batch in one pass, then one token of each sequence at a time.

B sequences · T tokens of the longest prompt · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from common.errors import UserError
from generation.cache import KeyValueCache, LayerCache, cached_attention
from generation.choice import GREEDY, Choice, draw
from model import Attention, Transformer
from ops.activation import Delta, no_delta
from ops.heads import Rotary


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choice: Choice = GREEDY,
    *,
    seeds: Sequence[int] | None = None,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """The new tokens of each prompt, all prompts in one batch. The model must be in eval mode.

    A sequence ends before a token of `ends`, after max_new_tokens, and when prompt and new text fill the
    model's context. seeds: one for each prompt, where tokens are drawn. Raises UserError for a prompt that is
    empty, too long, or of unknown ids.
    """
    check_prompts(model, prompts)
    attention = [module.attend for module in model.modules() if isinstance(module, Attention)]
    assert all(attend is cached_attention for attend in attention), "build it with attend=cached_attention"
    device, context = model.embed.weight.device, model.config.block_size
    lengths = [len(prompt) for prompt in prompts]
    room = [min(max_new_tokens, context - length) for length in lengths]
    cache = KeyValueCache(model, len(prompts), min(context, max(lengths) + max_new_tokens))
    draws = draw(range(len(prompts)) if seeds is None else seeds, max(room), device)
    positions = torch.tensor(lengths, device=device)
    logits = read_prompts(model, cache, prompts)
    if not bool(logits.isfinite().all()):  # sync point
        raise UserError("the model gives values that are not finite; its weights are of no use")
    tokens = choice.choose(logits, draws[0])
    found = tokens.tolist()  # sync point

    def step(tokens: torch.Tensor, positions: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Stores these tokens (B,) at their positions (B,), and returns the next ones (B,)."""
        x, delta = _run_blocks(model, tokens[None], positions, cache.layers(positions))
        return choice.choose(model.head(x, delta)[0].float(), draws)  # of logits (B, V)

    advance: Callable[..., Any] = step
    running = list(range(len(prompts)))
    new: list[list[int]] = [[] for _ in prompts]
    for made in range(1, max(room) + 1):
        running = [number for number in running if found[number] not in ends]
        for number in running:
            new[number].append(found[number])
        running = [number for number in running if made < room[number]]
        if not running:
            break
        if made == 1 and device.type == "cuda":
            # as a CUDA graph: without it, a step of one token waits for hundreds of kernel launches
            inputs = (tokens.clone(), positions.clone(), draws[0].clone())
            advance = torch.cuda.make_graphed_callables(step, inputs)
        tokens = advance(tokens, positions, draws[made])
        # a sequence that has ended stays in the batch, and writes to the last slot at most
        positions = (positions + 1).clamp(max=len(cache.slots) - 1)
        found = tokens.tolist()  # sync point
    return new


def check_prompts(model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
    """Raises UserError if the model cannot continue one of them."""
    context, vocabulary = model.config.block_size, model.config.vocab_size
    for number, prompt in enumerate(prompts, 1):
        wrong = ""
        if not prompt:
            wrong = "is empty; give at least one character"
        elif len(prompt) >= context:
            wrong = f"has {len(prompt):,} tokens, but the model's context (block_size) has {context:,} for "
            wrong += "prompt and new text together; shorten the prompt"
        elif not 0 <= min(prompt) <= max(prompt) < vocabulary:
            wrong = f"has the id {max(prompt):,}, but the model has only the ids below {vocabulary:,}; take "
            wrong += "this token out, or use the tokenizer of this model"
        if wrong:
            raise UserError(f"{f'prompt {number}' if len(prompts) > 1 else 'the prompt'} {wrong}")


def read_prompts(model: Transformer, cache: KeyValueCache, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Stores the prompts in the cache. Returns the logits (B, V) after the last token of each."""
    device = model.embed.weight.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, T), with 0 on the right
    positions = torch.arange(ids.shape[1], device=device)
    x, (delta, _) = _run_blocks(model, ids, positions, cache.layers())
    last = torch.arange(len(rows), device=device), torch.tensor([len(row) - 1 for row in rows], device=device)
    return model.head(x[last], (delta[last], None)).float()  # not of all tokens: logits are large


def _run_blocks(
    model: Transformer, ids: torch.Tensor, positions: torch.Tensor, caches: list[LayerCache]
) -> tuple[torch.Tensor, Delta]:
    """The residual stream after the last block, of ids (1 or B, T) at positions (T,). Transformer.forward
    knows only windows that begin at position 0."""
    x = model.embed(ids)
    rotary = None
    if model.positions is not None:
        x = x + model.positions(positions)
    else:
        rotary = Rotary(model.rotary_cos[positions], model.rotary_sin[positions])
    x = x.to(model.compute_dtype)
    delta = no_delta(x)
    for block, cache in zip(model.blocks, caches, strict=True):
        x, delta = block(x, delta, rotary, cache)
    return x, delta
