"""What a dry run proposes is true: typed as it stands, it ends in "fits", or nothing fits."""

import re

import pytest
from support.helpers import ROOT

from common.errors import UserError
from training import dry_run
from training.configuration.files_and_flags import load_config
from training.memory.gpus import CARDS, card_memory
from training.memory.micro_batch import choose, settings_that_fit

NOTHING = "nothing that was tried: it needs more GPUs"
CONFIGS = sorted(path.name for path in ROOT.glob("config/*.py"))


def load(name: str, *flags: str, processes: int = 1):
    flags = (*flags, "--trackers=")
    if name.startswith("cpt_"):  # its shape is in the weights that it begins with
        name, flags = "qwen3_1.7b.py", ("--batch_size=8", "--gradient_accumulation_steps=4", *flags)
    return load_config([str(ROOT / "config" / name), *flags], processes)


def proposals(name: str, card: str, processes: int, *flags: str) -> list[tuple[int, list[str], float]]:
    """(processes, flags, GiB) of each line that says what fits."""
    config = load(name, *flags, "--dry_run=True", processes=processes)
    lines = settings_that_fit(config, processes, card_memory(CARDS[card]))
    if lines == [NOTHING]:
        return []
    split = (re.fullmatch(r"(\d) GPUs?: (.*?) ?\(\d+ x \d+ tokens, ([\d.]+) GiB\)", line) for line in lines)
    return [(int(found[1]), found[2].split(), float(found[3])) for found in split]


def with_flags(flags: tuple[str, ...], more: list[str]) -> list[str]:
    """As a user edits a command: a flag is there once."""
    named = {flag.partition("=")[0]: flag for flag in (*flags, *more)}
    return list(named.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_proposal_fits_and_keeps_the_tokens_of_an_iteration(name):
    """Of every config on every GPU."""
    config = load(name, "--dry_run=True")
    for card in CARDS:
        numbers, found = choose(config, 1, card_memory(CARDS[card]))
        tokens = numbers.samples_per_iter(1) * numbers.block_size
        for gpus, flags, gib in [] if found.fits else proposals(name, card, 1):
            typed = load(name, *flags, "--dry_run=True", processes=gpus)
            numbers, found = choose(typed, gpus, card_memory(CARDS[card]))
            assert found.fits and found.needed_gib == pytest.approx(gib, abs=0.01), (card, flags)
            assert numbers.samples_per_iter(gpus) * numbers.block_size == tokens, (card, flags)


TYPED = [
    ("qwen3_0.6b.py", "H100", 1, ("--batch_size=16", "--gradient_accumulation_steps=2")),
    ("qwen3_1.7b.py", "H100", 1, ("--batch_size=8", "--gradient_accumulation_steps=4")),
    ("cpt_qwen3_1.7b_4096.py", "H100", 1, ()),
    ("qwen3_4b.py", "H100", 1, ()),
    ("qwen3_4b.py", "T4", 1, ()),
    ("llama3.2_1b.py", "RTX-4090", 8, ()),
    ("full_qwen3_1.8b_optimal.py", "RTX-4090", 1, ("--batch_size=16", "--gradient_accumulation_steps=auto")),
    ("full_qwen3_1.8b_optimal.py", "A6000", 1, ("--gradient_accumulation_steps=2",)),
    ("full_qwen3_1.8b_optimal.py", "A6000", 1, ("--loss_chunks=1", "--batch_size=24")),
    ("full_qwen3_1.8b_b200_optimal.py", "B200", 8, ("--batch_size=128", "--gradient_accumulation_steps=2")),
    ("full_llama3_2.2b_chinchilla.py", "RTX-5090", 8, ()),
    ("speedrun_124m.py", "T4", 1, ("--batch_size=64",)),
]


@pytest.fixture(scope="module")
def flops():
    """Of a small model: no proposal depends on them, and their audit builds the model."""
    return dry_run.count_flops(load("train_shakespeare_char.py"))


@pytest.mark.parametrize("number", range(len(TYPED)))
def test_a_typed_proposal_ends_in_fits(number, flops, monkeypatch):
    """One of those of each case: the first, the second, ..."""
    name, card, processes, stated = TYPED[number]
    found = proposals(name, card, processes, *stated)
    gpus, flags, _ = found[number % len(found)] if found else (processes, [], 0)
    config = load(name, *with_flags(stated, flags), "--dry_run=True", f"--gpu={card}", processes=gpus)
    monkeypatch.setattr(dry_run, "count_flops", lambda config: flops)
    text = "\n".join(dry_run.dry_run(config, gpus))
    assert re.search("^Fits: +yes", text, re.M) if found else NOTHING in text, flags


# --- messages of batch_size='auto' ---


@pytest.mark.parametrize(
    ("flags", "processes", "proposed"),
    [
        (["--batch_size=auto"], 1, "--gradient_accumulation_steps=auto --tokens_per_iter=61440"),
        (["--batch_size=auto"], 8, "--gradient_accumulation_steps=auto --tokens_per_iter=491520"),
        (["--gradient_accumulation_steps=auto"], 1, "--batch_size=auto --tokens_per_iter=61440"),
        (["--batch_size=auto", "--gradient_accumulation_steps=auto"], 3, "--tokens_per_iter=184320"),
    ],
)
def test_auto_without_tokens_proposes_those_of_the_config_file(flags, processes, proposed):
    """12 x 5 sequences of 1,024 tokens on each GPU."""
    with pytest.raises(UserError, match=f"set {proposed}, or state both numbers") as error:
        load("train_gpt2_124m.py", *flags, processes=processes)
    typed = with_flags(tuple(flags), re.search("set (.*), or", str(error.value))[1].split())
    config = load("train_gpt2_124m.py", *typed, processes=processes)
    assert choose(config, processes, card_memory(CARDS["H100"]))[1].fits


@pytest.mark.parametrize(("batch_size", "steps"), [(64, 4), (96, 2), (128, 2)])
def test_a_published_batch_that_does_not_fit_is_offered_with_what_makes_it_fit(batch_size, steps):
    stated = (f"--batch_size={batch_size}", f"--gradient_accumulation_steps={steps}")
    name = "full_qwen3_1.8b_b200_optimal.py"
    kept = ["--loss_chunks=8", "--activation_checkpointing=full"]
    assert (8, kept) in [found[:2] for found in proposals(name, "B200", 8, *stated)]
    numbers, found = choose(load(name, *stated, *kept, processes=8), 8, card_memory(CARDS["B200"]))
    assert found.fits and (numbers.batch_size, numbers.gradient_accumulation_steps) == (batch_size, steps)
