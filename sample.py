"""Generates text from a run's checkpoint, or from weights in Hugging Face's format.

    python sample.py --out_dir=out-quickstart --prompt="def main(" --num_samples=2
    python sample.py --hf=exported --prompt="Once upon a time"
    python sample.py --hf=Qwen3-0.6B --chat --prompts=questions.txt --top_p=0.95

Text goes to stdout, and its speed to stderr. docs/sampling.md has the details.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from common.command import before_torch, run_command, say

if __name__ == "__main__":
    before_torch()

import torch

from common.arguments import real_number, user_folder, user_path, whole_number
from common.errors import UserError
from common.text import plain
from generation.choice import Choice
from generation.decoding import check_prompts, generate
from generation.source import apply_template, choose_device, compute_in, load_run, load_weights
from training.configuration.dtypes import DTYPES
from training.configuration.seeds import SAMPLING, stream_seed

TEMPERATURE_MAX = 1e3
OF_NANOGPT = {
    "--start": "--prompt='...', or --prompts=FILE with a prompt in each line",
    "--init_from": "--out_dir=FOLDER of a run, or --hf=openai-community/gpt2-xl",
}
TOP_P_MIN = 1e-6  # 0 would leave no token


def main(argv: list[str]) -> None:
    options = parse(argv)
    prompts = read_prompts(options)
    device = choose_device(options.device)
    if options.hf:
        source = load_weights(options.hf, device)
    else:
        source = load_run(Path(options.out_dir), options.checkpoint, device, options.dataset)
    compute_in(source.model, options.dtype)
    if options.chat:
        ids, ends = apply_template(source.folder, prompts)
    else:
        ids, ends = [source.tokenizer.encode(prompt) for prompt in prompts], set()
    ends = set() if options.ignore_eot else source.ends | ends
    check_prompts(source.model, ids)
    print(source.about, flush=True)
    context = source.model.config.block_size
    if (room := context - max(map(len, ids))) < options.max_new_tokens:
        left = f"which leave room for {room:,} new ones after the longest prompt: text ends there"
        say(f"the model's context has {context:,} tokens, {left}")
    choice = Choice(options.temperature, options.top_k, options.top_p)
    total, tokens, began = len(ids) * options.num_samples, 0, time.perf_counter()
    try:
        for start in range(0, total, options.batch_size):
            places = range(start, min(start + options.batch_size, total))
            seeds = [stream_seed(options.seed, SAMPLING, place) for place in places]
            given = [ids[place // options.num_samples] for place in places]
            made = generate(source.model, given, options.max_new_tokens, choice, seeds=seeds, ends=ends)
            for place, old, new in zip(places, given, made, strict=True):
                number, sample = divmod(place, options.num_samples)
                begins = f"prompt {number + 1}, " if len(ids) > 1 else ""
                # decoded together, because some tokenizers drop the space in front of the first token
                text = source.tokenizer.decode([*old, *new])
                print(f"--- {begins}sample {sample + 1} ---\n{text}", flush=True)
                tokens += len(new)
    except torch.OutOfMemoryError:
        raise UserError("the GPU's memory is full; lower --batch_size or --max_new_tokens") from None
    seconds = time.perf_counter() - began
    say(f"{tokens:,} new tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Those of --prompt, then those of the file, one in each line that is not blank."""
    prompts: list[str] = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text("utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise UserError(f"--prompts: {options.prompts} cannot be read: {error}") from None
        prompts += [line for line in lines if line.strip()]
        if not prompts:
            raise UserError(f"--prompts: {options.prompts} holds no prompt; write one in each line")
    if any(plain(prompt) != prompt for prompt in prompts):
        raise UserError("a prompt has a control character, or is no UTF-8; take it out")
    return prompts or ["\n"]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text from a run's checkpoint or other weights.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--out_dir", type=user_path, help="the run's out_dir")
    source.add_argument("--hf", type=user_path, help="Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]")
    add, count = parser.add_argument, whole_number(1)
    add("--checkpoint", default="latest", help="latest (the default), best, or a name: step-00001000")
    add("--dataset", type=user_path, help="a name in data/ or a path, if it has moved since training")
    add("--prompt", action="append", default=[], help="may be repeated (a line break)")
    add("--prompts", type=user_folder, metavar="FILE", help="a prompt in each line")
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--num_samples", type=count, default=1, help="texts for each prompt (1)")
    add("--batch_size", type=whole_number(1, 1024), default=8, help="texts made at a time (8)")
    add("--max_new_tokens", type=count, default=200, help="of each text (200)")
    add("--ignore_eot", action="store_true", help="go on after the end-of-text token")
    hottest, share = real_number(0, TEMPERATURE_MAX), real_number(TOP_P_MIN, 1)
    add("--temperature", type=hottest, default=0.8, help="0: the most likely token (0.8)")
    add("--top_k", type=whole_number(0), default=200, help="the k most likely; 0: all (200)")
    add("--top_p", type=share, default=1.0, help="of these, the fewest that have this share; 1: all (1)")
    add("--seed", type=whole_number(0), default=1337, help="the same seed, the same texts (1337)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--dtype", choices=list(DTYPES), default="float32", help="to compute in (float32)")
    for word in argv:
        if instead := OF_NANOGPT.get(word.partition("=")[0]):
            raise UserError(f"{word.partition('=')[0]} is nanoGPT's; here: {instead}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
