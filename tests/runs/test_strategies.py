"""Strategies, and with each of them the keys of memory and communication: they change what is stored, sent
and recomputed, not what is learned, and any of them takes up the checkpoints of any other. Under torchrun
with 2 and 4 gloo processes, and with 4 as two machines of two."""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.checkpoint_parts import as_format_2
from support.helpers import (
    STRATEGIES,
    TINY,
    checkpoint_tensors,
    last_run,
    launch,
    losses,
    make_dataset,
    run_in_one_launch,
    write_config,
)
from support.ranks import on_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

import model_builder
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import build_optimizer
from training.optimization.step import _gradient_sum
from training.process.world import World
from training.strategies import fused_sums
from training.strategies.fsdp import Fsdp
from training.strategies.parallelize import parallelism_line, parallelize

ALL = ["single", *STRATEGIES]
ITERATIONS, HALF = 4, 2
CONFIG = {
    **TINY,
    "n_layer": 3,  # 'selective' recomputes the first and the last
    # 65 rows and head width 2 do not divide by 2 or 4: some ranks hold fewer rows, some none
    "vocab_size": 65,
    "n_head": 8,
    "num_key_value_heads": 4,
    "n_embd": 16,
    "batch_size": 2,
    "eval_batch_size": None,
    "max_iters": ITERATIONS,
    "gradient_log_interval": 1,
    "eval_interval": HALF,
    "keep_last": None,
}
# 8 sequences in an iteration, for any number of processes
EIGHT = ["--gradient_accumulation_steps=auto", f"--tokens_per_iter={8 * 32}"]
NINE = ["--batch_size=1", f"--tokens_per_iter={9 * 32}"]  # for three processes, where rows do not divide
BF16 = ["--dtype=bfloat16"]
STORED = {  # in fewer bits; a run whose replicas differ fails
    "bf16 weights": [*BF16, "--param_dtype=bfloat16"],
    "bf16 moments": ["--adam_dtype=bfloat16"],
    "rounded stochastically": [
        *(*BF16, "--param_dtype=bfloat16", "--adam_dtype=bfloat16", "--weight_rounding=stochastic"),
        *("--beta2=0.999", "--drift_check_interval=1"),
    ],
    "8-bit moments": [  # matrices of 4,096 numbers, in rows of 64 and of 300
        *(*BF16, "--param_dtype=bfloat16", "--adam_dtype=8bit", "--weight_rounding=stochastic"),
        *("--n_embd=64", "--d_ff=300", "--drift_check_interval=1"),
    ],
}
DROPOUT = "--dropout=0.1"
MUON = {
    "muon": ["--optimizer=muon"],  # in float32
    # a rate at which rounding to nearest loses most of an update
    "muon, bf16": ["--optimizer=muon", *BF16, "--drift_check_interval=1"],
    "muon, stored in bf16": [
        *("--optimizer=muon", *BF16, "--param_dtype=bfloat16", "--adam_dtype=8bit"),
        *("--weight_rounding=stochastic", "--drift_check_interval=1"),
    ],
}
OF_OTHERS = {  # one file each, which the core does not know
    "lion": ["--optimizer=support.lion"],
    "int8": [*BF16, "--low_precision=support.int8_weights", "--low_precision_scope=layers_and_head"],
}
RESUMED = {"kept": [DROPOUT, "--activation_checkpointing=none"], **STORED, **MUON, **OF_OTHERS}
VARIANTS = {  # name -> flags, for one process and for every strategy
    "plain": [],
    "float16": ["--dtype=float16"],
    "loss_chunks": ["--loss_chunks=3"],
    "reduced in bf16": ["--reduce_dtype=bfloat16"],
    **{
        level: [DROPOUT, f"--activation_checkpointing={level}"]
        for level in ("selective", "full", "memory_bound", "attention")
    },
    "published shapes": [
        *("--head_dim=6", "--qkv_bias=True"),  # 8 heads of 6 on a width of 16; 96 biases
        "--rope_scaling={'rope_type': 'yarn', 'factor': 4, 'original_max_position_embeddings': 8}",
    ],
    **RESUMED,
}
# ZeRO-1 stands for DDP where blocks are recomputed or logits come in parts (both are
# training/strategies/replicated.py). Strategies that have parts of tensors stand for those that have whole
# ones where a resume reads what an optimizer keeps.
LIKE_ZERO1 = ("loss_chunks", "selective", "full", "memory_bound", "attention")
OF_VARIANTS = [(s, name) for s in ALL for name in VARIANTS if s != "ddp" or name not in LIKE_ZERO1]
OF_RESUMES = [(s, name) for s in ALL for name in RESUMED if name == "kept" or s in ("zero1", "fsdp")]
# quantized weights that a delayed scale remembers, tied to the embedding, in blocks that are recomputed
DELAYED_FP8 = [
    *(*BF16, "--low_precision=fp8_delayed", "--n_embd=64", "--d_ff=128", "--weight_tying=True"),
    "--activation_checkpointing=full",
]
TIED = ["--weight_tying=True", "--activation_checkpointing=full"]
ONE_STRATEGY = {
    **{(s, "delayed fp8"): DELAYED_FP8 for s in ("zero1", "fsdp")},
    **{(s, "muon, by four"): ["--optimizer=muon"] for s in STRATEGIES},
    **{(s, "muon, by three"): ["--optimizer=muon", *NINE] for s in ("single", *STRATEGIES)},
    **{(s, "one micro-step"): ["--batch_size=auto"] for s in ("single", *STRATEGIES)},
    ("fsdp", "muon, hybrid"): ["--optimizer=muon", "--fsdp_sharding=hybrid"],
    **{(s, "by four"): ["--batch_size=auto"] for s in STRATEGIES},
    ("fsdp", "fused"): BF16,
    ("fsdp", "fused, hybrid"): [*BF16, "--fsdp_sharding=hybrid"],
    ("fsdp", "fused, tied"): [*BF16, *TIED, "--reshard_after_forward=True"],
    ("single", "tied"): [*BF16, *TIED],
    ("fsdp", "reshard"): ["--reshard_after_forward=True"],
    ("fsdp", "reshard, full"): ["--reshard_after_forward=True", "--activation_checkpointing=full"],
    ("fsdp", "hybrid on one machine"): ["--fsdp_sharding=hybrid"],
    ("single", "bf16"): BF16,
}
COMPILED = {
    (s, f"{level}, compiled"): [f"--activation_checkpointing={level}", "--compile=True"]
    for s in ALL
    for level in ("attention", "full")
} | {(s, "compiled"): ["--compile=True"] for s in ("single", "zero1", "fsdp")}
OTHER_NUMBERS = {"by three": 3, "by four": 4}  # of processes
PARALLEL = [(s, name) for name in ("plain", "by four") for s in STRATEGIES]


def out_dir(folder: Path, strategy: str, variant: str) -> Path:
    return folder / f"{strategy}-{variant}".replace(" ", "_").replace(",", "")


def checkpoint(folder: Path, strategy: str, variant: str, iteration: int = ITERATIONS) -> Path:
    return out_dir(folder, strategy, variant) / "checkpoints" / f"step-{iteration:08d}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    make_dataset(folder / "tokens", vocab_size=65)
    write_config(folder / "run.py", **CONFIG, dataset=str(folder / "tokens"))
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """(strategy, variant) -> run record."""
    variants = {key: VARIANTS[key[1]] for key in OF_VARIANTS} | ONE_STRATEGY
    variants = {key: (key[1], flags) for key, flags in variants.items()}
    back = ["--init_from=resume", f"--resume_from=step-{HALF:08d}"]
    for strategy, name in OF_RESUMES:
        variants[strategy, f"{name}, resumed"] = (name, [*RESUMED[name], *back])
    return records_of(folder, variants)


@pytest.fixture(scope="module")
def compiled(folder):
    """The same of the variants that compile."""
    return records_of(folder, {key: (key[1], flags) for key, flags in COMPILED.items()})


def records_of(folder, variants: dict[tuple[str, str], tuple[str, list[str]]]) -> dict[tuple[str, str], dict]:
    """(strategy, variant) -> run record, of (strategy, variant) -> (name of out_dir, flags); 8 sequences an
    iteration, by one process, two or four."""
    commands = {1: [], 2: [], 3: [], 4: []}
    for (strategy, name), (where, flags) in variants.items():
        processes = 1 if strategy == "single" else OTHER_NUMBERS.get(name.split(", ")[-1], 2)
        out = f"--out_dir={out_dir(folder, strategy, where)}"
        commands[processes].append([folder / "run.py", out, *EIGHT, *STRATEGIES.get(strategy, []), *flags])
    for processes, of_processes in commands.items():
        if of_processes:
            run_in_one_launch(folder, of_processes, processes)
    found = {}
    for (strategy, name), (where, _) in variants.items():
        paths = out_dir(folder, strategy, where).glob("run_*.json")
        first, *_, last = [*sorted(paths, key=lambda path: path.stat().st_mtime_ns)] * 2
        found[strategy, name] = json.loads((first if name == where else last).read_text())
    return found


def two_machines(*arguments: object) -> list[str]:
    """Two launches of torchrun with two processes each, which meet on this machine's own address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    meeting = ["--master_addr=127.0.0.1", f"--master_port={port}"]
    return launch([[*launcher, f"--node_rank={rank}", *meeting, *arguments] for rank in (0, 1)])


LOAD_ALL = "support.checkpoint_loads:load_all"  # (gives the number of pairs that it loaded)


def load_all(folder: Path, processes: int, *saved: object) -> int:
    """Loads each of them with each strategy at this world size."""
    return on_ranks(processes, LOAD_ALL, folder / "run.py", *saved)[0]


def norms(record: dict) -> list[float]:
    return [row["gradients"]["global_norm"] for row in record["training_iterations"]]


def evaluations(record: dict) -> list[float]:
    return [step[key] for step in record["eval_steps"] for key in ("val_loss", "train_loss")]


def agree(record: dict, expected: dict, relative: float, of_norms: float) -> None:
    assert len(losses(record)) == ITERATIONS and len(evaluations(record)) == 2 * ITERATIONS / HALF
    assert losses(record) == pytest.approx(losses(expected), rel=relative)
    assert norms(record) == pytest.approx(norms(expected), rel=of_norms)
    assert evaluations(record) == pytest.approx(evaluations(expected), rel=relative)


def differing(checkpoint: Path, other: Path) -> list[str]:
    """The tensors of two checkpoints that are not bit-equal."""
    ours, theirs = checkpoint_tensors(checkpoint), checkpoint_tensors(other)
    assert ours.keys() == theirs.keys() and any(key.startswith("rng.") for key in ours)
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


# --- the same figures ---

# variant -> (strategy and variant whose figures it has; how far losses and norms may be apart). None: its own
SAME = {
    **dict.fromkeys(("plain", "by four", "one micro-step"), ("single", "plain", 1e-5, 1e-4)),
    **dict.fromkeys(("muon", "muon, by four", "muon, hybrid"), ("single", "muon", 1e-5, 1e-4)),
    "muon, by three": ("single", "muon, by three", 1e-5, 1e-4),  # with as many sequences
    "published shapes": ("single", "published shapes", 1e-5, 1e-4),
    # 8 x 32 tokens, or fewer, do not divide by 3: the last part is shorter
    "loss_chunks": (None, "plain", 1e-5, 1e-4),
    # with dropout: a recomputed block must draw the masks that its forward drew
    **dict.fromkeys(LIKE_ZERO1[1:], (None, "kept", 1e-6, 1e-6)),
    **dict.fromkeys(("reshard", "reshard, full", "hybrid on one machine"), ("fsdp", "plain", 1e-6, 1e-5)),
    "fused, hybrid": ("fsdp", "fused", 1e-6, 1e-5),
}
OF_SAME = [(s, v) for s, v in [*OF_VARIANTS, *ONE_STRATEGY] if v in SAME and (s, v) != SAME[v][:2]]


@pytest.mark.parametrize(("strategy", "variant"), OF_SAME)
def test_strategies_divisions_and_what_only_saves_memory_change_no_figure(runs, strategy, variant):
    whose, reference, relative, of_norms = SAME[variant]
    agree(runs[strategy, variant], runs[whose or strategy, reference], relative, of_norms)


@pytest.mark.parametrize(("name", "variant"), PARALLEL)
def test_throughput_is_global_and_says_over_how_many(runs, name, variant):
    record, processes = runs[name, variant], 4 if variant == "by four" else 2
    info = record["startup_info"]
    assert info["hardware"]["parallelism"] == name
    assert info["hardware"]["num_gpus"] == processes and info["tokens_per_iter"] == 8 * 32
    assert record["config"]["gradient_accumulation_steps_per_gpu"] == 4 // processes
    assert record["config"]["gradient_accumulation_steps_global"] == 4
    rows, alone = record["training_iterations"], runs["single", "plain"]["training_iterations"]
    for row, expected in zip(rows, alone, strict=True):
        assert row["tokens_per_sec"] == pytest.approx(8 * 32 / (row["time_ms"] / 1000))
        assert row["tokens_per_sec_per_gpu"] == pytest.approx(row["tokens_per_sec"] / processes)
        deviation = expected["gradients"]["grad_std"]
        assert row["gradients"]["grad_std"] == pytest.approx(deviation, rel=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_variants_are_what_their_names_say(runs, name):
    """Else they would have equal figures."""
    of_one, config = runs[name, "one micro-step"]["config"], runs["single", "plain"]["config"]
    assert (of_one["batch_size"], config["batch_size"]) == (8 // (1 if name == "single" else 2), 2)
    assert of_one["gradient_accumulation_steps"] == 1
    published, plain = runs[name, "published shapes"], losses(runs[name, "plain"])
    assert losses(published)[0] != pytest.approx(plain[0], rel=1e-6)
    model = published["startup_info"]["model"]["architecture"]
    assert (model["head_dim"], model["qkv_bias"], model["rope_scaling"]["factor"]) == (6, True, 4.0)
    assert published["startup_info"]["flops"]["audit"]["exact"]
    assert plain != losses(runs[name, "muon"]) != losses(runs[name, "kept"]) != plain


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float16_with_loss_scaling_follows_fp32_in_every_strategy(runs, folder, strategy):
    """The scale starts at 2^16 and the sharded ranks must agree on it."""
    record = runs[strategy, "float16"]
    assert not any(row.get("skipped_updates") for row in record["training_iterations"])
    assert losses(record) == pytest.approx(losses(runs["single", "plain"]), rel=2e-3)
    state = checkpoint_tensors(checkpoint(folder, strategy, "float16"))
    assert (state["loss_scale.scale"], state["loss_scale.growth_tracker"]) == (65536.0, ITERATIONS)


@pytest.mark.parametrize("variant", OF_OTHERS)
@pytest.mark.parametrize("strategy", ALL)
def test_an_optimizer_or_a_recipe_of_others_learns_alike_under_every_strategy(runs, strategy, variant):
    found = losses(runs[strategy, variant])
    assert found == pytest.approx(losses(runs["single", variant]), rel=5e-3)
    assert found[-1] < found[0] - 0.1
    assert found != losses(runs["single", {"lion": "plain", "int8": "bf16"}[variant]])


def test_zero1_and_fsdp_shard_the_optimizer_state_on_disk(runs, folder):
    """Two ranks write about half of the moments each; DDP's ranks share the writing of whole tensors."""
    for name in ("zero1", "fsdp"):
        written = checkpoint(folder, name, "plain")
        sizes = [sum(path.stat().st_size for path in written.glob(f"tensors-0000{r}-*")) for r in (0, 1)]
        assert 0.5 < sizes[0] / sizes[1] < 2.0, sizes


# --- Muon ---


@pytest.mark.parametrize(("strategy", "variant"), [key for key in OF_SAME if "muon" in key[1]])
def test_muon_ends_with_the_weights_and_momenta_of_one_process(runs, folder, strategy, variant):
    ours, theirs = (
        checkpoint_tensors(checkpoint(folder, *key)) for key in ((strategy, variant), SAME[variant][:2])
    )
    for key in ours:
        if key.startswith(("model.", "optimizer.")):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5, msg=key)


def updated(settings: list[str], world: World) -> dict[str, tuple[int, torch.Tensor]]:
    """Name of a weight -> index of this rank's first element, and its part after some updates."""
    config = load_config(settings, world.size)
    model = model_builder.build_model(config.model_config()).init_weights(world.device, seed=5)
    strategy = parallelize(model, config, world)
    optimizer = build_optimizer(strategy.shards, config, strategy.row_group)
    scale, zero, rate = (torch.full((), value, device=world.device) for value in (2.0, 0.0, 0.02))
    for i in range(3):
        for number, shard in enumerate(strategy.shards):
            generator = torch.Generator().manual_seed(100 * i + number)
            whole = torch.randn(shard.parameter.shape, generator=generator).to(world.device)
            mine = whole.view(-1)[shard.start : shard.start + shard.local.numel()].view_as(shard.local)
            shard.local.grad = mine.to(shard.local.dtype)
        optimizer.step(rate, scale, zero)
    return {shard.name: (shard.start, shard.local.detach().view(-1)) for shard in strategy.shards}


def wrong_updates(world: World, config: str, *dtypes: str) -> list:
    """On a rank: the weights whose rows, updated by Muon from the same gradients, have other bits than those
    that it computes alone."""
    wrong = []
    for dtype in dtypes:
        settings = [config, "--optimizer=muon", "--batch_size=1", f"--dtype={dtype}"]
        whole = updated(settings, World(0, 0, 1, world.device))
        for name, flags in STRATEGIES.items():
            for weight, (start, part) in updated([*settings, *flags], world).items():
                if not torch.equal(part, whole[weight][1][start : start + len(part)]):
                    wrong.append((dtype, name, weight))
    return wrong


@pytest.mark.parametrize("processes", [3, 4])  # rows that do not divide, and some without any
def test_the_same_gradients_give_the_bits_of_one_process_s_updates(folder, processes):
    function, dtypes = "runs.test_strategies:wrong_updates", ("bfloat16", "float32", "float16")
    assert on_ranks(processes, function, folder / "run.py", *dtypes) == [[]] * processes


@pytest.mark.parametrize("variant", MUON)
def test_equal_gradients_give_muon_s_updates_equal_bits_however_rows_are_shared(runs, folder, variant):
    """DDP has whole matrices, ZeRO-1 and FSDP send rows to owners and back. Gradients of two ranks have one
    sum, in whatever order they are added."""
    whole, *others = (checkpoint(folder, name, variant) for name in STRATEGIES)
    assert [differing(other, whole) for other in others] == [[], []]


@pytest.mark.reshard
@pytest.mark.parametrize(
    ("variant", "processes"),
    [("lion", 2), *(pytest.param("muon", processes, marks=pytest.mark.slow) for processes in (1, 2, 4))],
)
def test_every_strategy_loads_what_any_other_saved_of_another_optimizer(runs, folder, variant, processes):
    saved = [checkpoint(folder, s, variant, HALF) for s in ALL]
    saved += [checkpoint(folder, s, "muon, by four", HALF) for s in STRATEGIES if variant == "muon"]
    pairs = len(saved) * (3 if processes == 1 else 4)
    assert load_all(folder, processes, *RESUMED[variant], *saved) == pairs


def test_another_optimizer_is_refused_unless_allowed_and_then_begins_afresh(runs, folder, run, capsys):
    flags = [folder / "run.py", *EIGHT, "--init_from=resume", f"--max_iters={ITERATIONS}"]
    for was, now in (("plain", "muon"), ("muon", "adamw")):
        saved = checkpoint(folder, "single", was, HALF)
        out = folder / f"to_{now}"
        shutil.copytree(saved, out / "checkpoints" / saved.name)
        command = [*flags, f"--out_dir={out}", f"--optimizer={now}"]
        assert run(*command) == 2
        assert "--allow_changes=optimizer" in capsys.readouterr().err
        assert run(*command, "--allow_changes=optimizer") == 0
        assert (
            "begins with moments of zero" in (out / last_run(out)["run_name"]).with_suffix(".log").read_text()
        )
        tensors = checkpoint_tensors(out / "checkpoints" / f"step-{ITERATIONS:08d}")
        assert {float(tensors[key]) for key in tensors if key.endswith(".step")} == {ITERATIONS - HALF}
        assert ("optimizer.blocks.0.attn.qkv.weight.momentum" in tensors) == (now == "muon")


# --- any checkpoint by any strategy ---


@pytest.mark.reshard
@pytest.mark.slow
def test_all_81_pairs_of_strategies_and_world_sizes_load_each_other_bit_for_bit(runs, folder):
    """3 strategies at 1, 2 and 4 processes, both ways; and FSDP's hybrid sharding, where it can be loaded."""
    several = [checkpoint(folder, *key, HALF) for key in PARALLEL]
    one = checkpoint(folder, "single", "plain", HALF)
    assert load_all(folder, 1, f"--save={folder / 'one'}", one, *several) == (7 + 3) * 3
    sharded = [folder / "one" / f"{name}-1" / "checkpoints" / one.name for name in ("zero1", "fsdp")]
    for processes in (2, 4):
        assert load_all(folder, processes, one, *sharded, *several) == 9 * 4


@pytest.fixture(scope="module")
def older(runs, folder):
    """Each strategy's checkpoint as an earlier version would have saved it -> as it is."""
    saved = {s: checkpoint(folder, s, "plain", HALF) for s in ALL}
    made = {as_format_2(path, folder / "older" / s / path.name): path for s, path in saved.items()}
    assert "model.blocks.1.ffn.up.weight" in differing(*next(iter(made.items()))), "its rows are others"
    return made


@pytest.mark.reshard
@pytest.mark.damage
@pytest.mark.parametrize("processes", [1, 2])
def test_every_strategy_loads_what_any_other_saved_in_format_2(older, folder, processes):
    pairs = load_all(folder, processes, *(f"{path}={whole}" for path, whole in older.items()))
    assert pairs == len(ALL) * {1: 3, 2: 4}[processes]


@pytest.mark.reshard
@pytest.mark.parametrize("variant", ["by four", *OF_OTHERS])
def test_a_run_goes_on_with_another_number_of_processes(runs, folder, run, variant):
    """Saved by four or two, continued by one with the same samples in each iteration: 10 losses agree."""
    flags = [*EIGHT, f"--max_iters={HALF + 10}", "--eval_interval=0", *OF_OTHERS.get(variant, [])]
    whole, changed = (folder / f"{out}-{variant}" for out in ("unchanged", "changed"))
    assert run(folder / "run.py", *flags, f"--out_dir={whole}") == 0
    saved = checkpoint(folder, "fsdp", variant, HALF)
    shutil.copytree(saved, changed / "checkpoints" / saved.name)
    assert run(folder / "run.py", *flags, f"--out_dir={changed}", "--init_from=resume") == 0
    ours, theirs = losses(last_run(changed)), losses(last_run(whole))
    relative = 5e-3 if variant in OF_OTHERS else 1e-5
    assert len(ours) == 10 and ours == pytest.approx(theirs[HALF:], rel=relative)


@pytest.mark.resume
@pytest.mark.parametrize(("strategy", "variant"), OF_RESUMES)
def test_a_resume_is_bit_exact(runs, folder, strategy, variant):
    whole, resumed = runs[strategy, variant], runs[strategy, f"{variant}, resumed"]
    assert resumed["startup_info"]["resumed_from"].endswith(f"step-{HALF:08d}")
    assert losses(resumed) == losses(whole)  # its record begins with the first part's rows
    rates = [[row["lr"] for row in record["training_iterations"]] for record in (whole, resumed)]
    assert len(rates[0]) == ITERATIONS and rates[0] == rates[1]
    ours = checkpoint(folder, strategy, variant)
    (theirs,) = out_dir(folder, strategy, variant).glob(f"checkpoints/{ours.name}.before")
    assert differing(ours, theirs) == []
    assert json.loads((ours / "state.json").read_text())["samples_seen"] == 8 * ITERATIONS


def test_dropout_differs_between_ranks(runs, folder):
    """Else a resume with one generator restored for all would be bit-exact, too."""
    state = checkpoint_tensors(checkpoint(folder, "ddp", "kept"))
    assert not torch.equal(state["rng.0.cpu"], state["rng.1.cpu"])


# --- FSDP's gradients, which the matmuls may sum ---


@pytest.mark.parametrize(("fused", "reference"), [("fused", "bf16"), ("fused, tied", "tied")])
def test_gradients_that_fsdp_s_matmuls_sum_are_those_of_one_process(runs, fused, reference):
    """In bf16, where autograd would round each micro-step's gradient; also where weights come and go."""
    single, found = runs["single", reference], runs["fsdp", fused]
    assert found["startup_info"]["gradient_sums"]["used"] == "in the matmul"
    assert norms(found)[0] == pytest.approx(norms(single)[0], rel=1e-6)
    assert losses(found) == pytest.approx(losses(single), rel=1e-5)
    assert evaluations(found) == pytest.approx(evaluations(single), rel=1e-4)


def test_a_torch_that_sums_elsewhere_is_reported(monkeypatch):
    config = TrainConfig(use_fsdp=True, gradient_accumulation_steps=2, device="cpu")
    assert parallelism_line(config, "fsdp") == "fsdp, gradients summed in the matmul"
    parameter = type("FSDPParam", (), {"__annotations__": {}})
    monkeypatch.setattr(fused_sums, "import_module", lambda name: SimpleNamespace(FSDPParam=parameter))
    assert not fused_sums.fuses_gradient_sums(config)
    found = fused_sums.describe_fusion(config)["gradient_sums"]
    assert (found["asked"], found["used"]) == ("in the matmul", "by FSDP")
    reason = f"FSDP of torch {torch.__version__} keeps its sums of gradients elsewhere"
    assert parallelism_line(config, "fsdp") == f"fsdp, gradients summed by FSDP ({reason})"


# --- compiled ---


@pytest.mark.slow
@pytest.mark.parametrize("key", COMPILED, ids=" ".join)
def test_compiled_blocks_compute_the_same_also_where_they_are_recomputed(runs, compiled, key):
    assert losses(compiled[key]) == pytest.approx(losses(runs[key[0], "plain"]), rel=1e-5)


# --- dtypes of what is stored and sent ---


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_may_travel_in_bf16(runs, strategy):
    """Each rank's sum is rounded once, to 2^-9 = 0.2 %, and FSDP sums the micro-steps in bf16, too. The first
    norm is of equal weights; later ones follow the weights apart."""
    plain, reduced = runs[strategy, "plain"], runs[strategy, "reduced in bf16"]
    assert losses(reduced) != losses(plain)
    assert losses(reduced) == pytest.approx(losses(plain), rel=3e-3)
    assert norms(reduced)[0] == pytest.approx(norms(plain)[0], rel=1e-3)


@pytest.mark.parametrize(
    ("variant", "reference", "relative"),
    [
        ("bf16 weights", "bf16", 2e-2),
        ("bf16 moments", "plain", 5e-3),
        ("rounded stochastically", "bf16", 2e-2),
        ("8-bit moments", "8-bit moments", 5e-3),
    ],
)
@pytest.mark.parametrize("strategy", ALL)
def test_weights_and_moments_may_be_stored_in_fewer_bits(runs, strategy, variant, reference, relative):
    found = losses(runs[strategy, variant])
    assert found == pytest.approx(losses(runs["single", reference]), rel=relative)
    assert found[-1] < found[0] - 0.2


@pytest.mark.parametrize("variant", STORED)
@pytest.mark.parametrize("strategy", ALL)
def test_a_checkpoint_holds_the_dtypes_that_were_asked_for(runs, folder, strategy, variant):
    tensors = checkpoint_tensors(checkpoint(folder, strategy, variant))
    if variant == "8-bit moments":
        assert tensors["optimizer.embed.weight.exp_avg"].dtype == torch.uint8
        assert tensors["optimizer.embed.weight.exp_avg_scale"].shape == (65, 1)
        return
    both = ("model.", "optimizer.")
    bf16 = {"bf16 weights": "model.", "bf16 moments": "optimizer."}.get(variant, both)
    for key, tensor in tensors.items():
        if key.startswith(both) and not key.endswith(".step"):
            assert (tensor.dtype == torch.bfloat16) == key.startswith(bf16), key


@pytest.mark.parametrize("variant", ["bf16 weights", "bf16 moments"])
def test_a_checkpoint_with_bf16_tensors_loads_into_fp32_and_back(runs, folder, run, tmp_path, variant):
    """bf16 to fp32 is exact; fp32 to bf16 rounds. The log and the record name the setting that changed."""
    start, there = checkpoint(folder, "single", variant), tmp_path / "out"
    shutil.copytree(start, there / "checkpoints" / start.name)
    key = "param_dtype" if variant == "bf16 weights" else "adam_dtype"
    flags = [folder / "run.py", f"--out_dir={there}", *EIGHT, "--init_from=resume", *STORED[variant]]
    assert run(*flags, f"--{key}=float32", f"--max_iters={ITERATIONS + 5}") == 0
    assert last_run(there)["startup_info"]["changed_since_checkpoint"][key] == ["bfloat16", "float32"]
    wide = checkpoint_tensors(there / "checkpoints" / f"step-{ITERATIONS + 5:08d}")
    assert {t.dtype for k, t in wide.items() if k.startswith(("model.", "optimizer."))} == {torch.float32}
    assert run(*flags, f"--max_iters={ITERATIONS + 6}") == 0
    narrow = checkpoint_tensors(there / "checkpoints" / f"step-{ITERATIONS + 6:08d}")
    assert torch.bfloat16 in {t.dtype for t in narrow.values()}
    record = last_run(there)
    assert losses(record)[0] < losses(runs["single", variant])[0] - 0.3


# --- FSDP's ways of sharding ---

HYBRID = ["--use_fsdp=True", "--fsdp_sharding=hybrid"]


@pytest.mark.parametrize("rank", range(4))
def test_under_hybrid_sharding_a_rank_has_the_rows_of_its_place_and_replicas_count_once(rank):
    """The other three ranks, on two machines, are imagined."""
    config = TrainConfig(**{**CONFIG, "use_fsdp": True, "fsdp_sharding": "hybrid"})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        model = model_builder.build_model(config.model_config()).init_weights("cpu", seed=0)
        whole = {name: weight.detach().clone().view(-1) for name, weight in model.named_parameters()}
        strategy = Fsdp(model, config, World(rank, rank % 2, 4, torch.device("cpu"), local_size=2))
        assert (strategy.parts, strategy.replicas) == (2, 2)
        for shard in strategy.shards:
            mine = whole[shard.name][shard.start : shard.start + shard.local.numel()]
            assert torch.equal(shard.local.detach().view(-1), mine), shard.name
            shard.local.grad = torch.ones_like(shard.local)
        strategy.loss = torch.tensor(6.0)
        loss, norm = strategy.loss_and_norm()  # this rank's shares: nothing is added to them
        elements = sum(shard.local.numel() for shard in strategy.shards)
        assert loss == 6 / 4 and norm.item() ** 2 == pytest.approx(elements / 2)
        assert _gradient_sum(strategy.shards).item() == pytest.approx(elements / 2)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_hybrid_sharding_over_two_machines_gives_the_losses_of_one_process(runs, folder, tmp_path):
    plain = runs["single", "plain"]
    out = folder / "hybrid"
    two_machines("train.py", folder / "run.py", f"--out_dir={out}", *EIGHT, *HYBRID)
    record = last_run(out)
    assert record["startup_info"]["hardware"]["num_gpus"] == 4
    agree(record, plain, 1e-5, 1e-4)
    for row, expected in zip(record["training_iterations"], plain["training_iterations"], strict=True):
        for name, relative in (("grad_mean", 1e-3), ("grad_std", 1e-4)):
            assert row["gradients"][name] == pytest.approx(expected["gradients"][name], rel=relative)

    saved = [out / "checkpoints" / f"step-{HALF:08d}", checkpoint(folder, "single", "plain", HALF)]
    assert load_all(folder, 1, *saved) == 6  # one process reads what hybrid sharding saved
    output, _ = two_machines("tests/support/ranks.py", LOAD_ALL, folder / "run.py", *saved)
    assert json.loads(output.splitlines()[-1]) == [8] * 4  # and the other way round, four strategies


def test_nccl_goes_first_under_fsdp(folder):
    fsdp = ["--use_fsdp=True"]
    for flags in ([], ["--use_zero1=True"], fsdp, HYBRID, [*fsdp, "--backend=gloo"], [*fsdp, "--device=cpu"]):
        config = load_config([str(folder / "run.py"), "--device=cuda", *flags], 2)
        assert config.nccl_goes_first == (flags == fsdp), flags
        assert ("NCCL first on the GPU" in parallelism_line(config, "any")) == (flags == fsdp), flags
