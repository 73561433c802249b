"""batch_size='auto': what fits and how it is chosen; what a dry run says of a GPU that is not here, and that
what it proposes is true: typed as it stands, it ends in "fits", or nothing fits."""

import dataclasses
import math
import re

import pytest
import torch
from support.helpers import ROOT, STATED

from common.errors import UserError
from training import dry_run
from training.configuration.batch import sequences_per_gpu
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.hardware.peaks import table_peak
from training.memory import micro_batch
from training.memory.estimate import needed_memory
from training.memory.gpus import CARDS, DeviceMemory, card_memory, device_memory, find_card
from training.memory.micro_batch import choose, resolve_micro_batch, settings_that_fit
from training.process.memory import GIB
from training.process.world import World

FULL = sorted(path.name for path in ROOT.glob("config/full_*.py"))
QWEN = "full_qwen3_1.8b_optimal.py"


def full(name: str, *flags: str, processes: int = 1) -> TrainConfig:
    return load_config([str(ROOT / "config" / name), *flags], processes)


def chosen(name: str, card: str, *flags: str, processes: int = 1):
    return choose(full(name, *flags, processes=processes), processes, card_memory(CARDS[card]))


# --- the full configs ---


@pytest.mark.parametrize("name", FULL)
def test_a_full_config_fits_from_48_gb_on_and_keeps_its_tokens_on_every_number_of_gpus(name):
    tokens = full(name).tokens_per_iter
    for processes in range(1, 9):
        if tokens % (2048 * processes):
            with pytest.raises(UserError, match="cannot be reached exactly"):
                full(name, processes=processes)
            continue
        for card in ("A6000", "H100", "B200"):
            config, found = chosen(name, card, processes=processes)
            assert found.fits, (card, processes, found)
            assert config.samples_per_iter(processes) * 2048 == tokens


@pytest.mark.parametrize("card", ["RTX-4090", "T4"])
@pytest.mark.parametrize("name", FULL)
def test_24_and_16_gb_are_refused_before_the_model_is_built(name, card, monkeypatch):
    memory = card_memory(CARDS[card])
    monkeypatch.setattr(micro_batch, "device_memory", lambda device, local_size: memory)
    with pytest.raises(UserError) as error:
        resolve_micro_batch(full(name), ALONE)
    text = str(error.value)
    needs, has = re.search(r"need ([\d.]+) GiB by the estimate, and .* has ([\d.]+) GiB", text).groups()
    assert "1 x 2048 tokens" in text and float(needs) > 22 and float(has) == round(memory.gib, 2)
    fits = "1 GPU: --activation_checkpointing=full --adam_dtype=8bit", "8 GPUs: --use_fsdp=True"
    assert any(one in text for one in fits) or (card == "T4" and "it needs more GPUs" in text)


def test_an_evaluation_alone_is_not_refused_and_takes_any_number_of_processes(monkeypatch):
    monkeypatch.setattr(micro_batch, "device_memory", lambda *_: card_memory(CARDS["RTX-4090"]))
    world = dataclasses.replace(ALONE, size=5)
    monkeypatch.setattr(micro_batch, "gather_objects", lambda value, world: [value] * world.size)
    stated = full(QWEN, "--eval_only=True", processes=5)
    assert sequences_per_gpu(stated, 5) == 16, "whatever tokens_per_iter is"
    config, _ = resolve_micro_batch(stated, world)
    assert (config.batch_size, config.gradient_accumulation_steps) == (1, 1)


# --- the rule ---

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("memory_of", "made"),  # Qwen3 1.8B: (batch_size, loss_chunks) whose memory there is, and what is chosen
    [
        ((16, 1), (16, 1)),  # the largest that fits
        ((12, 1), (12, 1)),
        ((64, 1), (16, 1)),  # up to where more is not faster
        ((12, 4), (8, 1)),  # from 16,384 tokens on in one part, though 12 x 2048 would fit in four
        ((6, 2), (6, 2)),  # fewer tokens grow by more parts,
        ((6, 1), (6, 1)),
        ((1, 4), (1, 4)),  # which are small only where nothing else fits
    ],
)
def test_what_is_chosen_in_exactly_the_memory_of_other_numbers(memory_of, made):
    config, (batch_size, parts) = full(QWEN), memory_of
    numbers = {"batch_size": batch_size, "loss_chunks": parts, "gradient_accumulation_steps": 1}
    memory = DeviceMemory(needed_memory(dataclasses.replace(config, **numbers), 1), "a GPU")
    resolved, found = choose(config, 1, memory)
    assert found.fits and found.needed_gib <= memory.gib
    assert (resolved.batch_size, resolved.loss_chunks) == made
    free = {name: getattr(config, name) for name in numbers}
    assert dataclasses.replace(resolved, **free) == config, "nothing else is changed"
    assert micro_batch._parts(16_384, 4096) == [1, 2, 4], "a part may have exactly the least of tokens"


def test_a_stated_micro_batch_gets_the_fewest_parts_with_which_it_fits():
    """One where none fits, as the warning then says; on a CPU, always one."""
    stated = {"batch_size": 8, "gradient_accumulation_steps": 1}
    for parts in (1, 2, 8):
        config = dataclasses.replace(full(QWEN), tokens_per_iter=None, **stated)
        in_parts = dataclasses.replace(config, loss_chunks=parts)
        memory = DeviceMemory(needed_memory(in_parts, 1), "a GPU")
        assert choose(config, 1, memory)[0].loss_chunks == parts
        on_cpu = dataclasses.replace(config, device="cpu")
        resolved, found = choose(on_cpu, 1, memory)
        assert resolved == dataclasses.replace(on_cpu, loss_chunks=1) and not found.set_aside
    config, found = choose(config, 1, DeviceMemory(20, "a GPU"))
    assert config.loss_chunks == 1 and not found.fits and found.warnings(config, 1)


def test_all_ranks_choose_for_the_smallest_memory(monkeypatch):
    ranks = [card_memory(CARDS[name]) for name in ("H200", "A6000", "H100")]
    monkeypatch.setattr(micro_batch, "gather_objects", lambda value, world: ranks)
    monkeypatch.setattr(micro_batch, "device_memory", lambda *_: ranks[0])
    config, found = resolve_micro_batch(full(QWEN, processes=3), dataclasses.replace(ALONE, size=3))
    assert found.device == "NVIDIA RTX A6000"
    assert config == chosen(QWEN, "A6000", processes=3)[0]


# --- what the user states ---


def test_two_numbers_win_and_tokens_per_iter_is_set_aside_and_of_one_the_other_follows_exactly():
    config, found = chosen(QWEN, "A6000", "--batch_size=22", "--gradient_accumulation_steps=2")
    assert (config.batch_size, config.gradient_accumulation_steps, config.loss_chunks) == (22, 2, 1)
    assert found.set_aside and not found.fits
    (warning,) = found.warnings(config, 1)
    best = "--batch_size=4 --gradient_accumulation_steps=11 --loss_chunks=2 (4 x 2048 tokens, "
    assert f"NVIDIA RTX A6000 has 47.50 GiB; what fits: 1 GPU: {best}" in warning
    assert not chosen(QWEN, "H200", *STATED, "--tokens_per_iter=131072")[1].set_aside
    config, _ = chosen(QWEN, "A6000", "--batch_size=16", processes=2)
    assert (config.batch_size, config.gradient_accumulation_steps) == (16, 12)
    config, _ = chosen(QWEN, "H200", "--gradient_accumulation_steps=48", processes=4)
    assert (config.batch_size, config.gradient_accumulation_steps) == (2, 48)


@pytest.mark.parametrize(
    ("flags", "processes", "named"),
    [
        (["--batch_size=22"], 1, "set --tokens_per_iter=765952 or --tokens_per_iter=811008"),
        ([], 5, "set --tokens_per_iter=778240 or --tokens_per_iter=788480"),
        (["--tokens_per_iter=1000"], 1, "make multiples of 2,048 tokens; set --tokens_per_iter=2048"),
        (["--tokens_per_iter=None"], 1, "batch_size='auto' .* needs tokens_per_iter"),
        (["--tokens_per_iter=0"], 1, "tokens_per_iter=0 must be at least 1"),
        (["--batch_size=none"], 1, "batch_size='none' in the flag .*, expected int or 'auto'"),
    ],
)
def test_what_cannot_be_exact_names_the_nearest_that_can_be_typed(flags, processes, named):
    with pytest.raises(UserError, match=named):
        full(QWEN, *flags, processes=processes)
    for near in re.findall(r"--tokens_per_iter=\d+", named):
        typed = full(QWEN, *flags, near, processes=processes)
        assert typed.tokens_per_iter == int(near.partition("=")[2])


# --- memory of the device ---


def test_a_limit_for_this_process_is_honored(monkeypatch):
    properties = type("Properties", (), {"total_memory": 80 * GIB, "major": 9, "minor": 0, "name": "X"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    fractions = {0: 0.5, None: 1.0}  # None is the current device
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fractions.get)
    assert device_memory(torch.device("cuda", 0), 8) == DeviceMemory(40.0, "X")
    assert device_memory(torch.device("cuda"), 8) == DeviceMemory(80.0, "X")


def test_a_gpu_is_found_by_its_short_and_by_its_whole_name_and_has_its_own_peak():
    for names in (("H100", "h100", "NVIDIA H100 80GB HBM3"), ("4090", "rtx-4090", "GeForce RTX 4090")):
        assert len({find_card(name) for name in names}) == 1
    without = {name for name, card in CARDS.items() if table_peak(card.device, "bfloat16").tflops is None}
    assert without == {"T4"}
    with pytest.raises(UserError, match="gpu='H1000' is not one of B200, "):
        find_card("H1000")


# --- the dry run ---


@pytest.fixture(scope="module")
def flops():
    return dry_run.count_flops(full(QWEN))


@pytest.fixture
def answer(flops, monkeypatch):
    """answer(flags...): the text of a dry run of Qwen3 1.8B, whose FLOPs are audited once."""
    monkeypatch.setattr(dry_run, "count_flops", lambda config: flops)
    return lambda *flags, processes=1: "\n".join(
        dry_run.dry_run(full(QWEN, "--dry_run=True", *flags, processes=processes), processes)
    )


def test_a_dry_run_answers_for_a_gpu_that_is_not_here(answer):
    text = answer("--gpu=H100")
    assert "8 x 2048 tokens (auto: fits by the estimate)" in text
    assert re.search(r"Fits: +yes, with [\d.]+ GiB \(\d+ %\) to spare", text)
    assert re.search(r"Tokens/s at 50 % MFU: +47,923\n", text)  # 989.4 TFLOPS / 10.32 GF / 2
    assert "does not fit" not in text and "as --gpu names none" not in text
    assert re.search("HBM3, as --gpu names none, 79.10 GiB", answer())
    assert "DOES IT FIT" not in answer(*STATED) and math.isinf(dry_run.ANY.gib), "of stated numbers for none"


def test_a_dry_run_says_what_is_missing_and_what_the_gpu_cannot_do(answer):
    """What it says would fit, is typed below."""
    text = answer("--gpu=A100-40GB", *STATED)
    assert re.search(r"Fits: +no, [\d.]+ GiB \(\d+ %\) is missing", text)
    lines = re.findall(r"^  (\d) GPUs?: .* \(\d+ x 2048 tokens, [\d.]+ GiB\)$", text, re.M)
    assert {*lines} == {"1", "2", "4", "8"}
    assert "(auto: the smallest, and it does not fit)" in answer("--gpu=RTX-4090")
    text = answer("--gpu=T4", "--low_precision=fp8_tensorwise")
    assert "Tesla T4 has no bfloat16; use --dtype=float16" in text
    assert "Tesla T4 cannot run fp8_tensorwise" in text


def test_gpu_belongs_to_a_dry_run():
    with pytest.raises(UserError, match="set --dry_run=True"):
        full(QWEN, "--gpu=H100")
    with pytest.raises(UserError, match="gpu and device='cpu' contradict each other"):
        dry_run.dry_run(full(QWEN, "--gpu=H100", "--dry_run=True", "--device=cpu"), 1)


# --- what is proposed ---

NOTHING = "nothing that was tried: it needs more GPUs"
CONFIGS = sorted(path.name for path in ROOT.glob("config/*.py"))


def load(name: str, *flags: str, processes: int = 1):
    flags = (*flags, "--trackers=")
    if name.startswith("cpt_"):  # its shape is in the weights that it begins with
        name, flags = "qwen3_1.7b.py", ("--batch_size=8", "--gradient_accumulation_steps=4", *flags)
    return full(name, *flags, processes=processes)


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
def small_flops():
    """Of a small model: no proposal depends on them, and their audit builds the model."""
    return dry_run.count_flops(load("train_shakespeare_char.py"))


@pytest.mark.parametrize("number", range(len(TYPED)))
def test_a_typed_proposal_ends_in_fits(number, small_flops, monkeypatch):
    """One of those of each case: the first, the second, ..."""
    name, card, processes, stated = TYPED[number]
    found = proposals(name, card, processes, *stated)
    gpus, flags, _ = found[number % len(found)] if found else (processes, [], 0)
    config = load(name, *with_flags(stated, flags), "--dry_run=True", f"--gpu={card}", processes=gpus)
    monkeypatch.setattr(dry_run, "count_flops", lambda config: small_flops)
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
