"""The keys of memory and communication, alone and with each strategy: they change what is stored, sent and
recomputed, not what is learned. Under torchrun with 2 gloo processes, and with 4 as two machines of two."""

import contextlib
import gc
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.helpers import (
    TINY,
    checkpoint_tensors,
    last_run,
    launch,
    make_dataset,
    run_in_one_launch,
    write_config,
)
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import model_builder
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.optimization.compile import compile_and_checkpoint
from training.optimization.optimizer import build_optimizer
from training.process import world as process_world
from training.process.world import World
from training.strategies import fused_sums, zero1
from training.strategies import replicated as replicated_strategy
from training.strategies.parallelize import parallelism_line, parallelize
from training.strategies.replicated import Bucket

STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}
ALL = ["single", *STRATEGIES]
ITERATIONS, HALF = 4, 2
CONFIG = {
    **TINY,
    "n_layer": 3,  # 'selective' recomputes the first and the last
    "vocab_size": 65,  # rows that no number of processes here divides
    "n_head": 8,
    "num_key_value_heads": 4,
    "n_embd": 16,
    "batch_size": 2,
    "max_iters": ITERATIONS,
    "gradient_log_interval": 1,
    "eval_interval": HALF,
    "keep_last": None,
}
BF16 = ["--dtype=bfloat16"]
STOCHASTIC = [
    *(*BF16, "--param_dtype=bfloat16", "--adam_dtype=bfloat16", "--weight_rounding=stochastic"),
    *("--beta2=0.999", "--drift_check_interval=1"),  # a run whose replicas differ fails
]
EIGHT_BIT = [  # matrices of 4,096 numbers, in rows of 64 and of 300
    *(*BF16, "--param_dtype=bfloat16", "--adam_dtype=8bit", "--weight_rounding=stochastic"),
    *("--n_embd=64", "--d_ff=300", "--drift_check_interval=1"),
]
VARIANTS = {  # name -> flags, for one process and for every strategy
    "plain": [],
    "loss_chunks": ["--loss_chunks=3"],
    "reduced in bf16": ["--reduce_dtype=bfloat16"],
    "kept": ["--dropout=0.1", "--activation_checkpointing=none"],
    "selective": ["--dropout=0.1", "--activation_checkpointing=selective"],
    "full": ["--dropout=0.1", "--activation_checkpointing=full"],
    "memory_bound": ["--dropout=0.1", "--activation_checkpointing=memory_bound"],
    "attention": ["--dropout=0.1", "--activation_checkpointing=attention"],
    "bf16 weights": [*BF16, "--param_dtype=bfloat16"],
    "bf16 weights, part 1": [*BF16, "--param_dtype=bfloat16", f"--max_iters={HALF}"],
    "published shapes": [
        *("--head_dim=6", "--qkv_bias=True"),  # 8 heads of 6 on a width of 16; 96 biases
        "--rope_scaling={'rope_type': 'yarn', 'factor': 4, 'original_max_position_embeddings': 8}",
    ],
    "bf16 moments": ["--adam_dtype=bfloat16"],
    "bf16 moments, part 1": ["--adam_dtype=bfloat16", f"--max_iters={HALF}"],
    "rounded stochastically": STOCHASTIC,
    "rounded stochastically, part 1": [*STOCHASTIC, f"--max_iters={HALF}"],
    "8-bit moments": EIGHT_BIT,
    "8-bit moments, part 1": [*EIGHT_BIT, f"--max_iters={HALF}"],
}
# quantized weights that a delayed scale remembers, tied to the embedding, in blocks that are recomputed
DELAYED_FP8 = [
    *(*BF16, "--low_precision=fp8_delayed", "--n_embd=64", "--d_ff=128", "--weight_tying=True"),
    "--activation_checkpointing=full",
]
TIED = ["--weight_tying=True", "--activation_checkpointing=full"]
ONE_STRATEGY = {
    **{(s, "delayed fp8"): DELAYED_FP8 for s in ("zero1", "fsdp")},
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
} | {
    ("single", "compiled"): ["--compile=True"],
    ("zero1", "compiled"): ["--compile=True"],
    ("fsdp", "compiled"): ["--compile=True"],
}
RESUMED = {  # name -> (folder it goes on in, flags)
    "bf16 weights, part 2": ("bf16 weights, part 1", VARIANTS["bf16 weights"]),
    "bf16 moments, part 2": ("bf16 moments, part 1", VARIANTS["bf16 moments"]),
    "rounded stochastically, part 2": ("rounded stochastically, part 1", STOCHASTIC),
    "8-bit moments, part 2": ("8-bit moments, part 1", EIGHT_BIT),
}


def out_dir(folder: Path, strategy: str, variant: str) -> Path:
    return folder / f"{strategy}-{variant}".replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    make_dataset(folder / "tokens", vocab_size=65)
    write_config(folder / "run.py", **CONFIG, dataset=str(folder / "tokens"))
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """(strategy, variant) -> run record."""
    variants = {(s, name): flags for s in ALL for name, flags in VARIANTS.items()} | ONE_STRATEGY
    variants = {key: (key[1], flags) for key, flags in variants.items()}
    for strategy in ALL:
        for name, (where, flags) in RESUMED.items():
            variants[strategy, name] = (where, [*flags, "--init_from=resume"])
    return records_of(folder, variants)


@pytest.fixture(scope="module")
def compiled(folder):
    """The same of the variants that compile."""
    return records_of(folder, {key: (key[1], flags) for key, flags in COMPILED.items()})


def records_of(folder, variants: dict[tuple[str, str], tuple[str, list[str]]]) -> dict[tuple[str, str], dict]:
    """(strategy, variant) -> run record, of (strategy, variant) -> (name of out_dir, flags); 8 sequences an
    iteration, by one process or by two."""
    commands = {1: {}, 2: {}}
    for (strategy, name), (where, flags) in variants.items():
        processes = 1 if strategy == "single" else 2
        commands[processes][strategy, name] = [
            str(folder / "run.py"),
            f"--out_dir={out_dir(folder, strategy, where)}",
            f"--gradient_accumulation_steps={4 // processes}",
            *STRATEGIES.get(strategy, []),
            *flags,
        ]
    for processes, of_processes in commands.items():
        run_in_one_launch(folder, list(of_processes.values()), processes)
    return {
        (strategy, name): last_run(out_dir(folder, strategy, where))
        for (strategy, name), (where, _) in variants.items()
    }


def two_machines(*arguments: object) -> list[str]:
    """Two launches of torchrun with two processes each, which meet on this machine's own address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    meeting = ["--master_addr=127.0.0.1", f"--master_port={port}"]
    return launch([[*launcher, f"--node_rank={rank}", *meeting, *arguments] for rank in (0, 1)])


def losses(record: dict) -> list[float]:
    return [row["loss"] for row in record["training_iterations"]]


def norms(record: dict) -> list[float]:
    return [row["gradients"]["global_norm"] for row in record["training_iterations"]]


def evaluations(record: dict) -> list[float]:
    return [step["val_loss"] for step in record["eval_steps"]]


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


# --- shapes of published models ---


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_head_width_biases_and_scaled_positions_are_trained_alike_by_every_strategy(runs, folder, strategy):
    single, many = (runs[name, "published shapes"] for name in ("single", strategy))
    assert losses(many) == pytest.approx(losses(single), rel=1e-5)
    assert norms(many) == pytest.approx(norms(single), rel=1e-4)
    assert evaluations(many) == pytest.approx(evaluations(single), rel=1e-5)
    assert losses(many)[0] != pytest.approx(losses(runs[strategy, "plain"])[0], rel=1e-6)
    model = many["startup_info"]["model"]["architecture"]
    assert (model["head_dim"], model["qkv_bias"], model["rope_scaling"]["factor"]) == (6, True, 4.0)
    assert many["startup_info"]["flops"]["audit"]["exact"]


# --- the loss ---


@pytest.mark.parametrize("strategy", ALL)
def test_loss_chunks_do_not_change_the_losses(runs, strategy):
    """8 x 32 tokens, or fewer, do not divide by 3: the last part is shorter."""
    plain, chunked = runs[strategy, "plain"], runs[strategy, "loss_chunks"]
    assert losses(chunked) == pytest.approx(losses(plain), rel=1e-5)
    assert norms(chunked) == pytest.approx(norms(plain), rel=1e-4)
    assert evaluations(chunked) == pytest.approx(evaluations(plain), rel=1e-5)


# --- activation checkpointing ---


@pytest.mark.parametrize("mode", ["memory_bound", "attention", "selective", "full"])
@pytest.mark.parametrize("strategy", ALL)
def test_recomputed_blocks_have_the_same_masks_losses_and_gradients(runs, strategy, mode):
    """With dropout: a recomputed block must draw the masks that its forward drew."""
    kept, recomputed = runs[strategy, "kept"], runs[strategy, mode]
    assert losses(kept) != losses(runs[strategy, "plain"])
    assert losses(recomputed) == pytest.approx(losses(kept), rel=1e-6)
    assert norms(recomputed) == pytest.approx(norms(kept), rel=1e-6)
    assert evaluations(recomputed) == pytest.approx(evaluations(kept), rel=1e-6)


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


@pytest.mark.parametrize(
    "variant", ["bf16 weights", "bf16 moments", "rounded stochastically", "8-bit moments"]
)
@pytest.mark.parametrize("strategy", ALL)
def test_a_resume_with_bf16_tensors_is_bit_exact(runs, folder, strategy, variant):
    whole, resumed = runs[strategy, variant], runs[strategy, f"{variant}, part 2"]
    assert resumed["startup_info"]["resumed_from"].endswith(f"step-{HALF:08d}")
    assert losses(resumed) == losses(whole)  # its record begins with the first part's rows
    name = f"checkpoints/step-{ITERATIONS:08d}"
    theirs = checkpoint_tensors(out_dir(folder, strategy, variant) / name)
    ours = checkpoint_tensors(out_dir(folder, strategy, f"{variant}, part 1") / name)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    if variant == "8-bit moments":
        assert ours["optimizer.embed.weight.exp_avg"].dtype == torch.uint8
        assert ours["optimizer.embed.weight.exp_avg_scale"].shape == (65, 1)
        return
    both = ("model.", "optimizer.")
    bf16 = {"bf16 weights": "model.", "bf16 moments": "optimizer."}.get(variant, both)
    for key, tensor in ours.items():
        if key.startswith(both) and not key.endswith(".step"):
            assert (tensor.dtype == torch.bfloat16) == key.startswith(bf16), key


@pytest.mark.parametrize("variant", ["bf16 weights", "bf16 moments"])
def test_a_checkpoint_with_bf16_tensors_loads_into_fp32_and_back(runs, folder, run, tmp_path, variant):
    """bf16 to fp32 is exact; fp32 to bf16 rounds. The log and the record name the setting that changed."""
    start = out_dir(folder, "single", variant) / "checkpoints" / f"step-{ITERATIONS:08d}"
    there = tmp_path / "out"
    shutil.copytree(start, there / "checkpoints" / start.name)
    key = "param_dtype" if variant == "bf16 weights" else "adam_dtype"
    flags = [
        folder / "run.py",
        f"--out_dir={there}",
        "--init_from=resume",
        "--gradient_accumulation_steps=4",
        *VARIANTS[variant],
        "--eval_iters=3",
    ]
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


@pytest.mark.parametrize("variant", ["reshard", "reshard, full", "hybrid on one machine"])
def test_ways_of_sharding_change_nothing_but_memory(runs, variant):
    plain, found = runs["fsdp", "plain"], runs["fsdp", variant]
    assert losses(found) == pytest.approx(losses(plain), rel=1e-6)
    assert norms(found) == pytest.approx(norms(plain), rel=1e-5)
    assert evaluations(found) == pytest.approx(evaluations(plain), rel=1e-6)
    assert losses(runs["fsdp", "fused, hybrid"]) == pytest.approx(losses(runs["fsdp", "fused"]), rel=1e-6)


HYBRID = ["--use_fsdp=True", "--fsdp_sharding=hybrid"]


@pytest.mark.slow
def test_hybrid_sharding_over_two_machines_gives_the_losses_of_one_process(runs, folder, tmp_path):
    plain = runs["single", "plain"]
    flags = [*HYBRID, "--gradient_accumulation_steps=1"]
    out = folder / "hybrid"
    two_machines("train.py", folder / "run.py", f"--out_dir={out}", *flags)
    record = last_run(out)
    assert record["startup_info"]["hardware"]["num_gpus"] == 4
    assert losses(record) == pytest.approx(losses(plain), rel=1e-5)
    assert evaluations(record) == pytest.approx(evaluations(plain), rel=1e-5)
    for row, expected in zip(record["training_iterations"], plain["training_iterations"], strict=True):
        for name in ("global_norm", "grad_mean", "grad_std"):
            ours, theirs = row["gradients"][name], expected["gradients"][name]
            assert ours == pytest.approx(theirs, rel=1e-3 if name == "grad_mean" else 1e-4)

    checkpoints = [
        path / "checkpoints" / f"step-{HALF:08d}" for path in (out, out_dir(folder, "single", "plain"))
    ]
    worker = ["tests/support/load_worker.py", folder / "run.py", *checkpoints]
    assert "loaded 6 pairs" in launch([worker])[0]  # one process reads what hybrid sharding saved
    assert "loaded 8 pairs" in two_machines(*worker)[0]  # and the other way round, four strategies


def test_nccl_goes_first_under_fsdp(folder):
    fsdp = ["--use_fsdp=True"]
    for flags in ([], ["--use_zero1=True"], fsdp, HYBRID, [*fsdp, "--backend=gloo"], [*fsdp, "--device=cpu"]):
        config = load_config([str(folder / "run.py"), "--device=cuda", *flags], 2)
        assert config.nccl_goes_first == (flags == fsdp), flags
        assert ("NCCL first on the GPU" in parallelism_line(config, "any")) == (flags == fsdp), flags


# --- when gradients travel, and what a strategy holds: rank 0 of two, the other one imagined ---


@pytest.fixture
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield World(rank=0, local_rank=0, size=2, device=torch.device("cpu"), local_size=2)
    dist.destroy_process_group()


def assemble(folder: Path, world: World, *flags: str):
    """(model, strategy, optimizer, config) as train.py puts them together."""
    config = load_config([str(folder / "run.py"), *flags], world.size)
    model = model_builder.build_model(config.model_config(), dtype=DTYPES[config.dtype])
    model.init_weights("cpu", seed=0)
    compile_and_checkpoint(model, config)
    strategy = parallelize(model, config, world)
    return model, strategy, build_optimizer(strategy.shards, config), config


def micro_step(strategy, last: bool) -> None:
    ids = torch.arange(2 * 32).view(2, 32) % 65
    strategy.micro_step(last)
    strategy.forward(ids, ids).backward()


def watch(model, strategy, monkeypatch) -> list[str]:
    """A list that fills with 'backward of X' and 'sends X' as they happen, X a part of the model."""
    events = []

    def part_of(tensor) -> str:
        at = tensor.untyped_storage().data_ptr()
        (bucket,) = (b for b in strategy.buckets if b.flat.untyped_storage().data_ptr() == at)
        first = next(iter(bucket.views))
        return ".".join(first.split(".")[:2]) if first.startswith("blocks") else first.split(".")[0]

    def recorded(communicate, gradients):
        def run(*tensors, **options):
            event = f"sends {part_of(tensors[gradients])}"
            if event not in events:  # ZeRO-1 sends matrices, then vectors
                events.append(event)
            return communicate(*tensors, **options)

        return run

    monkeypatch.setattr(dist, "all_reduce", recorded(dist.all_reduce, 0))
    monkeypatch.setattr(zero1, "reduce_scatter", recorded(zero1.reduce_scatter, 1))
    parts = {f"blocks.{i}": block for i, block in enumerate(model.blocks)} | {"head": model.head}
    for name, module in parts.items():
        module.register_full_backward_pre_hook(lambda *_, name=name: events.append(f"backward of {name}"))
    return events


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("strategy_flags", [[], ["--use_zero1=True"]], ids=["ddp", "zero1"])
def test_gradients_travel_beside_the_backward_of_the_blocks_below(
    folder, world, monkeypatch, strategy_flags, recompute
):
    flags = [*strategy_flags, f"--activation_checkpointing={recompute}"]
    model, strategy, _, _ = assemble(folder, world, *flags)
    events = watch(model, strategy, monkeypatch)
    parts = ["head", "blocks.2", "blocks.1", "blocks.0"]
    for _ in range(2):
        micro_step(strategy, last=False)
    assert events == 2 * [f"backward of {part}" for part in parts]  # nothing is sent before the last one
    events.clear()
    micro_step(strategy, last=True)
    assert events == [
        *("backward of head", "backward of blocks.2", "sends head", "sends blocks.2"),
        *("backward of blocks.1", "sends blocks.1", "backward of blocks.0", "sends blocks.0"),
    ]
    events.clear()
    strategy.reduce_gradients(torch.zeros(()))
    assert events == ["sends embed"]


def test_a_few_messages_hold_what_travels_beside_the_backward():
    """The first is the longest, so that most of the backward is left to hide it; the last is one block."""
    head, block = nn.Linear(2048, 1000), nn.Linear(2048, 256)
    modules = {"head": head} | {f"blocks.{i}": block for i in reversed(range(24))}
    buckets = {name: Bucket(dict(module.named_parameters()), 2) for name, module in modules.items()}
    messages = replicated_strategy.in_messages(buckets)
    assert [name for message in messages for name in message] == list(modules)
    lengths = [sum(len(buckets[name].flat) for name in message) for message in messages]
    for i, length in enumerate(lengths[:-1]):
        assert sum(lengths[i + 1 :]) / 2 <= length <= sum(lengths) / 2
    assert len(messages) <= 9
    assert messages[-1] == ["blocks.0"]


class Sending:
    """What a communication in progress is; says when somebody waits for it."""

    def __init__(self, events: list[str], what: str):
        self.events, self.what = events, what

    def wait(self) -> None:
        if f"waits for {self.what}" not in self.events[-1:]:  # each matrix is sent by itself
            self.events.append(f"waits for {self.what}")


def test_only_nccl_gets_collectives_together(world, monkeypatch):
    """With several coalesced all-gathers under way, gloo ends a process by a segmentation fault."""
    started, together = [], []

    @contextlib.contextmanager
    def coalescing(async_ops):
        yield together.append(len(started))

    monkeypatch.setattr(dist, "_coalescing_manager", coalescing)
    for backend, found in (("gloo", [True, True]), ("nccl", [False, False])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        started.clear()
        process_world.start_together(
            lambda tensor, async_op=False: started.append(async_op), [(torch.ones(1),)] * 2, []
        )
        assert started == found
    assert together == [0]  # for NCCL, and before the first of them


@pytest.mark.parametrize("strategy_flags", [[], ["--use_zero1=True"]], ids=["ddp", "zero1"])
def test_norms_are_computed_while_the_embedding_s_gradient_travels(
    folder, world, monkeypatch, strategy_flags
):
    """It is complete only at the end of the backward, which can hide nothing more."""
    model, strategy, _, _ = assemble(folder, world, *strategy_flags)
    micro_step(strategy, last=True)
    events = watch(model, strategy, monkeypatch)
    (module,) = {replicated_strategy, zero1} & {sys.modules[type(strategy).__module__]}
    monkeypatch.setattr(module, "norms", lambda grads, **_: events.append("norms") or torch.ones(len(grads)))
    for where, name in ((dist, "all_reduce"), (zero1, "reduce_scatter")):
        monkeypatch.setattr(where, name, lambda *_, **__: Sending(events, "the embedding"))
    strategy.works.clear()
    strategy.reduce_gradients(torch.zeros(()))
    assert events == ["norms", "waits for the embedding", "norms"]


def storages() -> dict[int, int]:
    """Address -> bytes of the memory of every tensor alive; what torch.compile traced with has none."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    real = (t for t in alive if t.device.type == "cpu" and not isinstance(t, (FakeTensor, FunctionalTensor)))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}


@pytest.mark.parametrize("compute", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_zero1_holds_one_copy_of_the_gradients_and_half_of_the_optimizer_s_state(folder, world, compute):
    """Also between micro-steps and after the reduction, when a copy would be there if one were made."""
    before = storages()
    flags = ["--use_zero1=True", "--n_embd=64", f"--dtype={compute}", "--vocab_size=66"]
    model, strategy, optimizer, _ = assemble(folder, world, *flags)
    parameters = model.count_parameters()["total"]
    working = {"float32": 4, "bfloat16": 2}[compute]
    expected = (working + 4 + 3 * 4 / 2) * parameters  # whole, whole; half of weights and two moments

    def held() -> int:
        return sum(size for at, size in storages().items() if at not in before)

    slack = 0.03 * parameters * 4  # vectors in full, rotary angles
    assert abs(held() - expected) < slack
    micro_step(strategy, last=False)
    assert abs(held() - expected) < slack
    micro_step(strategy, last=True)
    strategy.reduce_gradients(torch.zeros(()))
    assert abs(held() - expected) < slack
    buckets = [bucket.flat.untyped_storage().data_ptr() for bucket in strategy.buckets]
    assert all(s.local.grad.untyped_storage().data_ptr() in buckets for s in strategy.shards)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", [[], ["--use_zero1=True"]], ids=["ddp", "zero1"])
def test_gradients_sent_in_bf16_are_the_updates_as_they_arrive(folder, world, sharding, weights):
    """Nothing is copied back to the sums, and the copies that were sent are gone before the next forward."""
    flags = [*sharding, "--dtype=bfloat16", "--reduce_dtype=bfloat16", f"--param_dtype={weights}"]
    model, strategy, _, _ = assemble(folder, world, *flags)
    micro_step(strategy, last=False)
    before = storages()
    micro_step(strategy, last=True)
    strategy.reduce_gradients(torch.zeros(()))
    sent = {tensor.untyped_storage().data_ptr() for copy in strategy.sent.values() for tensor in copy.tensors}
    assert sent.isdisjoint(before)
    for shard in strategy.shards:
        expected = strategy._mine(shard, strategy.views[shard.name]).bfloat16()
        assert torch.equal(shard.grad.bfloat16(), expected) and expected.any()
        # a CPU's update wants gradients in the weights' dtype; a GPU's takes any
        assert shard.grad.dtype == shard.local.dtype
        assert (shard.grad.untyped_storage().data_ptr() in sent) == (weights == "bfloat16")
    if not sharding:
        squares = sum(shard.grad.double().square().sum() for shard in strategy.shards)
        assert strategy.loss_and_norm()[1].item() == pytest.approx(squares.sqrt().item(), rel=1e-6)
    del expected
    strategy.clear_gradients()
    left = sum(size for at, size in storages().items() if at not in before)
    assert left < 100 * len(strategy.shards) and not strategy.has_gradients()  # the loss and the norms
