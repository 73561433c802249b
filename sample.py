"""Generates text from a run's checkpoint, or from weights in Hugging Face's format.

    python sample.py --out_dir=out-quickstart --prompt="def main(" --num_samples=2
    python sample.py --hf=exported --prompt="Once upon a time"
    python sample.py --hf=Qwen3-0.6B --chat --prompts=questions.txt --top_p=0.95

Text goes to stdout, as it is made if it is a single one; its speed goes to stderr. docs/sampling.md has the
details.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from common.arguments import real_number, user_folder, user_path, whole_number
from common.command import run_command, say
from common.errors import UserError
from common.json_file import read_regular
from common.text import plain
from data.pipeline.meta_file import load_tokenizer, read_meta
from data.tokenizers.tokenizer import EOT_NAMES, Tokenizer, open_tokenizer
from generation.cache import cache_bytes, cached_attention
from generation.chat import apply_template
from generation.choice import Choice
from generation.decoding import Speed, check_prompts
from generation.precision import compute_in
from generation.text import generate_text
from model import Transformer
from training.batches.fingerprint import tokenizer_identity
from training.checkpoints.loading import load_model
from training.configuration.dataset_name import first_folder
from training.configuration.dtypes import DTYPES
from training.configuration.seeds import SAMPLING, stream_seed
from training.pretrained.folder import PREFIX, read_generation
from training.pretrained.generation_settings import end_ids, first_weights
from training.pretrained.reading import load_pretrained
from training.pretrained.same_tokenizer import check_recorded, check_rows
from training.process.memory import GIB, free_host_bytes

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-3, 1e3  # logits divided by it stay numbers in float32
TOP_P_MIN = 1e-6  # 0 would leave no token
MAX_PROMPTS = 1 << 28  # bytes of a file


class Source(NamedTuple):
    """Where text comes from."""

    model: Transformer
    tokenizer: Tokenizer
    folder: Path  # of the tokenizer
    ends: set[int]  # ids of end-of-text
    about: str


class Text(NamedTuple):
    """One that is to be made."""

    title: str
    prompt: str
    ids: list[int]
    seed: int


def main(argv: list[str]) -> None:
    options = parse(argv)
    prompts = read_prompts(options)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source = load_hf(options, device) if options.hf else load_run(options, device)
    compute_in(source.model, options.dtype)
    ids, ends = encode(options, source, prompts)
    check_prompts(source.model, ids)
    check_memory(options, source.model, ids)
    print(source.about, flush=True)
    say_room(options, source.model.config.block_size, ids)
    texts, speed = list_texts(options, source.tokenizer, ids), Speed()
    try:
        while batch := list(itertools.islice(texts, options.batch_size)):
            show(options, source, batch, ends, speed)
    except torch.OutOfMemoryError:
        raise UserError("the GPU's memory is full; lower --batch_size or --max_new_tokens") from None
    say(str(speed))


def show(
    options: argparse.Namespace, source: Source, batch: list[Text], ends: set[int], speed: Speed
) -> None:
    """Makes the texts of a batch and prints them; a single one as it is made."""
    alone = len(batch) == 1
    if alone:
        print(f"{batch[0].title}\n{batch[0].prompt}", end="", flush=True)
    made = generate_text(
        source.model,
        source.tokenizer,
        [text.ids for text in batch],
        options.max_new_tokens,
        Choice(options.temperature, options.top_k, options.top_p),
        seeds=[text.seed for text in batch],
        ends=ends,
        on_text=(lambda _, more: print(more, end="", flush=True)) if alone else None,
        speed=speed,
    )
    if alone:
        print(flush=True)
        return
    for text, new in zip(batch, made, strict=True):
        print(f"{text.title}\n{text.prompt}{new}", flush=True)


def encode(
    options: argparse.Namespace, source: Source, prompts: list[str]
) -> tuple[list[list[int]], set[int]]:
    """The ids of each prompt, and the ids that end a text."""
    if options.chat:
        ids, ends = apply_template(source.folder, prompts)
    else:
        ids, ends = [source.tokenizer.encode(prompt) for prompt in prompts], set()
    return ids, set() if options.ignore_eot else source.ends | ends


def list_texts(options: argparse.Namespace, tokenizer: Tokenizer, prompts: list[list[int]]) -> Iterator[Text]:
    """Every text that is to be made, one at a time: --num_samples may be any number."""
    numbers = itertools.count()
    for number, ids in enumerate(prompts, 1):
        begins = f"prompt {number}, " if len(prompts) > 1 else ""
        for sample in range(1, options.num_samples + 1):
            seed = stream_seed(options.seed, SAMPLING, next(numbers))
            yield Text(f"--- {begins}sample {sample} ---", tokenizer.decode(ids), ids, seed)


def check_memory(options: argparse.Namespace, model: Transformer, prompts: list[list[int]]) -> None:
    """Raises UserError if main memory has no room for a batch: the kernel would end this process without a
    word."""
    texts = min(options.batch_size, options.num_samples * len(prompts))
    slots = min(model.config.block_size, max(map(len, prompts)) + options.max_new_tokens)
    need, free = cache_bytes(model, texts, slots), free_host_bytes()
    if model.embed.weight.device.type == "cpu" and need > free:
        raise UserError(
            f"the keys and values of {texts:,} texts of {slots:,} tokens need {need / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} are free; lower --batch_size or --max_new_tokens"
        )


def say_room(options: argparse.Namespace, context: int, prompts: list[list[int]]) -> None:
    room = context - max(map(len, prompts))
    if room < options.max_new_tokens:
        say(
            f"the model's context has {context:,} tokens, which leave room for {room:,} new ones after the "
            f"longest prompt: text ends there, not after --max_new_tokens={options.max_new_tokens}"
        )


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Those of --prompt, then those of the file, one in each line that is not blank."""
    prompts: list[str] = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = read_regular(options.prompts, MAX_PROMPTS).decode("utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise UserError(f"--prompts: {options.prompts} cannot be read: {error}") from None
        prompts += [line.removesuffix("\r") for line in lines if line.strip()]
        if not prompts:
            raise UserError(f"--prompts: {options.prompts} holds no prompt; write one in each line")
    if any(plain(prompt) != prompt for prompt in prompts):
        raise UserError("a prompt has a control character, or is no UTF-8; take it out")
    return prompts or ["\n"]


# --- where text comes from ---


def load_run(options: argparse.Namespace, device: torch.device) -> Source:
    """The model of a checkpoint, and the tokenizer of its dataset."""
    checkpoint, saved, model = load_model(Path(options.out_dir), options.checkpoint, device, cached_attention)
    folder = first_folder(options.dataset or saved.config["dataset"])
    was, *_ = saved.data.get("sources", [saved.data])
    found = tokenizer_identity(read_meta(folder)["tokenizer"] or {})
    check_recorded(was["tokenizer"], str(checkpoint), found, str(folder), "name the run's with --dataset")
    loss = "not evaluated" if saved.val_loss is None else f"validation loss {saved.val_loss:.4f}"
    about = f"checkpoint {checkpoint}, iteration {saved.iteration}, {loss}"
    ends = set(end_ids(first_weights(saved.pretrained), was.get("eot_id")))
    return Source(model, load_tokenizer(folder), folder, ends, about)


def load_hf(options: argparse.Namespace, device: torch.device) -> Source:
    """The same of weights in Hugging Face's format."""
    source = options.hf if options.hf.startswith(PREFIX) else f"{PREFIX}{options.hf}"
    weights, model = load_pretrained(source, device, cached_attention)
    tokenizer = open_tokenizer(str(weights.folder))
    rows = model.config.vocab_size
    check_rows(tokenizer, rows, f"the model in {weights.folder}", "put the model's own there")
    config, generation = weights.architecture().fields, read_generation(weights.folder)
    # the ids at which transformers' generate stops; if the folder names none, those of EOT_NAMES
    ends = set(end_ids({"config": config, "generation": generation}, None))
    ends = ends or {one for name in EOT_NAMES if (one := tokenizer.token_id(name)) is not None}
    return Source(model, tokenizer, weights.folder, ends, f"weights {weights.folder}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text from a run's checkpoint or other weights.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--out_dir", type=user_path, help="the run's out_dir")
    model.add_argument(
        "--hf", type=user_path, help="weights in Hugging Face's format: FOLDER or OWNER/NAME[@REVISION]"
    )
    parser.add_argument(
        "--checkpoint",
        default="latest",
        help="latest, best, or a name such as step-00001000 (default: latest)",
    )
    parser.add_argument("--prompt", action="append", default=[], help="may be repeated (a line break)")
    parser.add_argument("--prompts", type=user_folder, metavar="FILE", help="a prompt in each line")
    parser.add_argument("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument(
        "--num_samples", type=whole_number(1), default=1, help="texts for each prompt (default: 1)"
    )
    parser.add_argument(
        "--batch_size", type=whole_number(1, 1024), default=8, help="texts made at a time (default: 8)"
    )
    parser.add_argument(
        "--max_new_tokens", type=whole_number(1), default=200, help="of each text (default: 200)"
    )
    parser.add_argument("--ignore_eot", action="store_true", help="go on after the end-of-text token")
    hottest = real_number(0, TEMPERATURE_MAX)
    parser.add_argument(
        "--temperature", type=hottest, default=0.8, help="0: the most likely token (default: 0.8)"
    )
    parser.add_argument(
        "--top_k", type=whole_number(0), default=200, help="the k most likely; 0: all (default: 200)"
    )
    share = "of these, the fewest that have this probability together (default: 1, all)"
    parser.add_argument("--top_p", type=real_number(TOP_P_MIN, 1), default=1.0, help=share)
    parser.add_argument(
        "--seed", type=whole_number(0), default=1337, help="the same seed, the same texts (default: 1337)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="to compute in (float32)")
    parser.add_argument(
        "--dataset", type=user_path, help="a name in data/ or a path, if it has moved since training"
    )
    options = parser.parse_args(argv)
    if 0 < options.temperature < TEMPERATURE_MIN:
        parser.error(f"--temperature must be 0 or at least {TEMPERATURE_MIN}, got {options.temperature}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda, but torch finds no CUDA GPU; use --device=cpu")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
