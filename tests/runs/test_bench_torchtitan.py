"""torchtitan as a peer of bench.throughput. The package itself is not needed: a stand-in has the few names
that we use, and trains with our model. Where torchtitan is installed, its own classes are looked at, too."""

import dataclasses
import importlib.metadata
import types

import pytest
import torch
from support.helpers import ROOT, TINY, make_dataset, write_config

import model_builder
from bench import peer_torchtitan, peers, throughput
from bench.peer import report
from bench.peer_torchtitan import Batches, RowLog, Titan, train
from bench.plan import make_plan
from bench.process import end_with_status
from bench.results import measure
from bench.suites import Variant
from bench.torchtitan_job import llama_arguments, llama_factor, make_job, qwen3_arguments, scaling_arguments
from common.errors import UserError
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.configuration.files_and_flags import load_config
from training.hardware.gpu_monitor import watch_gpus
from training.optimization.schedule import learning_rate
from training.process.world import World

QWEN3 = ["config/quickstart.py", "--device=cuda", "--dtype=bfloat16"]
LLAMA = [*QWEN3, "--arch_preset=llama3", "--vocab_size=4096"]
LLAMA3_SCALING = (
    "--rope_scaling={'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, "
    "'high_freq_factor': 4.0, 'original_max_position_embeddings': 64}"
)


SECTIONS = ["job", "metrics", "model", "debug", "training", "optimizer", "lr_scheduler", "compile"]
SECTIONS += ["activation_checkpoint", "parallelism"]


class Empty(types.SimpleNamespace):
    """A JobConfig in which every section is there."""

    def __init__(self):
        sections = {name: types.SimpleNamespace() for name in SECTIONS}
        sections["model"].converters = []
        sections["lr_scheduler"].decay_ratio = None
        linear = types.SimpleNamespace(float8=types.SimpleNamespace())
        super().__init__(quantize=types.SimpleNamespace(linear=linear), **sections)


# --- the stand-in ---


class Metrics:
    def __init__(self, job, dims):
        self.logged = []

    def log(self, step, global_avg_loss, **others):
        self.logged.append(step)


@dataclasses.dataclass
class Spec:
    model_cls: type
    model_args: dict
    build_dataloader_fn: object = None
    build_tokenizer_fn: object = None
    build_metrics_processor_fn: object = None
    state_dict_adapter: object = None


class Qwen3(torch.nn.Module):
    """As many parameters as the model of these arguments has, and a loss that is the mean target."""

    def __init__(self, arguments):
        super().__init__()
        self.arguments = arguments
        self.weight = torch.nn.Parameter(torch.zeros(arguments["parameters"]))


def stand_in(parameters: int, steps: int | None = None) -> tuple[Titan, dict]:
    """torchtitan as far as it is used, and what its trainer saw. It ends after `steps` if that is stated."""
    seen: dict = {"batches": [], "closed": False}

    class Trainer:
        def __init__(self, job):
            spec = seen["spec"]
            seen["job"] = job
            self.job = job
            self.model_parts = [spec.model_cls(spec.model_args[job.model.flavor])]
            self.loader = iter(spec.build_dataloader_fn(dp_rank=0, tokenizer=None))
            self.metrics_processor = spec.build_metrics_processor_fn(job, None, None)
            seen["metrics"] = self.metrics_processor

        def train(self):
            accumulation = self.job.training.global_batch_size // self.job.training.local_batch_size
            for step in range(1, (self.job.training.steps if steps is None else steps) + 1):
                batches = [next(self.loader) for _ in range(accumulation)]
                seen["batches"] += [(inputs["input"], labels) for inputs, labels in batches]
                if self.metrics_processor.should_log(step):
                    self.metrics_processor.log(step, 5.0 - step, global_max_loss=0.0)

        def close(self):
            seen["closed"] = True

    def arguments(**given):
        return {**given, "parameters": parameters}

    spec = types.SimpleNamespace(register_train_spec=lambda name, spec: seen.update(spec=spec))
    qwen3 = types.SimpleNamespace(get_train_spec=lambda: Spec(Qwen3, {}), Qwen3ModelArgs=arguments)
    return Titan(Trainer, Empty, Metrics, spec, None, {"qwen3": qwen3}), seen


@pytest.fixture
def small(tmp_path):
    """A configuration, the process, and its own loader of the same batches."""
    tokens = make_dataset(tmp_path / "tokens", eot_id=0)
    keys = {**TINY, "arch_preset": "qwen3", "dataset": tokens, "packing": "truncate"}
    keys |= {"gradient_accumulation_steps": 2, "max_iters": 6, "log_interval": 2}
    keys["peak_tflops"] = 1.0
    keys["block_size"] = 64  # a document has about 43 tokens, so windows have padding
    config = load_config([str(write_config(tmp_path / "run.py", **keys))])
    world = World(0, 0, 1, torch.device("cpu"))

    def loader():
        return Loader(make_windows(open_sources(config, scan=False), config)["train"], config, world)

    return config, world, loader


def test_its_trainer_gets_our_batches_and_its_steps_are_rows(small):
    config, world, loader = small
    count = model_builder.build_model(config.model_config()).count_parameters()["total"]
    titan, seen = stand_in(count)
    facts, rows = train(titan, config, world, loader())
    assert [row["iter"] for row in rows] == [0, 2, 4, 5] and seen["metrics"].logged == [1, 3, 5, 6]
    assert [row["loss"] for row in rows] == [4.0, 2.0, 0.0, -1.0]
    assert all(row["time_ms"] > 0 for row in rows) and {"gpu_reason", "memory"} <= rows[0].keys()
    assert (facts["parameters"], facts["class"], seen["closed"]) == (count, "Qwen3", True)
    printed = report(config, world, "torchtitan", facts, rows)
    tokens_per_iter = 2 * config.batch_size * config.block_size
    assert rows[1]["tokens_per_sec"] == pytest.approx(tokens_per_iter / (rows[1]["time_ms"] / 1000))
    figures = measure(printed["training_iterations"], 1)  # as bench.throughput reads them
    assert figures["rows"] == 2 and len(figures["mfu_percent"]) == 2
    ours = loader()
    for iteration in range(config.max_iters):
        x, y = ours.next()
        for step in range(2):
            inputs, labels = seen["batches"][2 * iteration + step]
            assert torch.equal(inputs, x[step])
            assert torch.equal(labels, torch.where(y[step] < 0, -100, y[step]))
    assert any((labels == -100).any() for _, labels in seen["batches"])  # padding


def test_a_model_with_other_parameters_is_no_comparison(small):
    config, world, loader = small
    titan, seen = stand_in(7)
    with pytest.raises(
        UserError, match="has 7 parameters, our qwen3 .* a shape that torchtitan does not have"
    ):
        train(titan, config, world, loader())
    assert seen["closed"] and not seen["batches"]


def test_a_training_that_ends_early_is_no_figure(small):
    config, world, loader = small
    count = model_builder.build_model(config.model_config()).count_parameters()["total"]
    with pytest.raises(UserError, match="torchtitan ended before iteration 6"):
        train(stand_in(count, steps=3)[0], config, world, loader())


def test_time_of_a_row_is_that_of_its_iterations(small, monkeypatch):
    config, world, _ = small
    log = type("Both", (RowLog, Metrics), {})(None, None)
    now = iter([100.0, 107.0, 109.0, 113.0])
    clock = types.SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(peer_torchtitan, "time", clock)
    log.keep(config, world, watch_gpus(world))
    for step in range(1, 6):
        if log.should_log(step):
            log.log(step, 1.0)
    assert [row["time_ms"] for row in log.rows] == [7000.0, 1000.0, 2000.0]


# --- what it is told ---


def test_shape_batch_and_optimizer_are_ours(small):
    config, _, _ = small
    job = make_job(Empty(), config, world_size=2)
    assert job.training.global_batch_size == config.batch_size * 2 * 2
    assert (job.training.local_batch_size, job.training.steps) == (config.batch_size, 6)
    assert (job.optimizer.lr, job.optimizer.beta2) == (config.learning_rate, config.beta2)
    assert (job.activation_checkpoint.mode, job.parallelism.fsdp_reshard_after_forward) == ("none", "never")
    model = config.model_config()
    given = qwen3_arguments(model)
    assert (given["dim"], given["hidden_dim"]) == (model.n_embd, model.d_ff)
    assert given["enable_weight_tying"] is model.weight_tying
    unclipped = make_job(Empty(), dataclasses.replace(config, grad_clip=0.0), 1)
    assert unclipped.training.max_norm == float("inf")  # at 0 it would set every gradient to 0


def test_float8_leaves_the_head_out_and_is_gathered_in_float8_by_several():
    config = load_config([*QWEN3, "--low_precision=fp8_tensorwise"])
    for processes in (1, 2):
        job = make_job(Empty(), config, processes)
        float8 = job.quantize.linear.float8
        assert job.model.converters == ["quantize.linear.float8"] and float8.filter_fqns == ["output"]
        assert float8.enable_fsdp_float8_all_gather is (processes == 2)
    assert make_job(Empty(), load_config(QWEN3), 1).model.converters == []


def rate(scheduler, step: int) -> float:
    """torchtitan's share of the peak rate, as in its components/lr_scheduler.py, for linear decays."""
    ratio = scheduler.decay_ratio
    decay = scheduler.total_steps - scheduler.warmup_steps
    decay = decay if ratio is None else round(scheduler.total_steps * ratio)
    stable = scheduler.total_steps + 1 - decay  # it begins after the warm-up and ends here
    if step < scheduler.warmup_steps:
        return (step + 1) / scheduler.warmup_steps
    if step < stable:
        return 1.0
    return 1 - (1 - scheduler.min_lr_factor) * (step + 1 - stable) / decay


@pytest.mark.parametrize("schedule", ["linear", "wsd", "constant"])
def test_rates_follow_our_schedule(schedule):
    flags = [f"--lr_schedule={schedule}", "--warmup_iters=20", "--max_iters=200", "--lr_decay_iters=200"]
    config = load_config([*QWEN3, *flags])
    scheduler = make_job(Empty(), config, 1).lr_scheduler
    for step in range(200):
        ours = learning_rate(step, config) / config.learning_rate
        assert rate(scheduler, step) == pytest.approx(ours, abs=0.06), step  # a step later or earlier


@pytest.mark.parametrize("n_embd", [64, 192, 1536, 2048, 2304, 4096])
@pytest.mark.parametrize("d_ff", [1, 255, 512, 5461, 6144, 8192, 14336])
def test_its_llama_gets_our_feed_forward_width(n_embd, d_ff):
    width = int(2 * (4 * n_embd) / 3)  # models/llama3/model/model.py, FeedForward
    assert int(llama_factor(n_embd, d_ff) * width) == d_ff


def test_its_llama_scales_frequencies_only_where_ours_does():
    plain, scaled = (load_config([*LLAMA, *flags]).model_config() for flags in ([], [LLAMA3_SCALING]))
    assert llama_arguments(plain)["rope_theta"] == plain.rope_theta
    assert scaling_arguments(plain) == {"scaling_factor": 1.0}
    assert scaling_arguments(scaled)["scaling_factor"] == 8.0
    assert scaling_arguments(scaled)["original_max_position_embeddings"] == 64


# --- what it cannot do ---


@pytest.mark.parametrize(
    "flags, processes, reason",
    [
        (QWEN3, 1, None),
        ([*QWEN3, "--weight_tying=True"], 1, None),
        ([*QWEN3, "--weight_tying=True"], 2, "does not shard tied weights"),
        (LLAMA, 2, None),
        ([*LLAMA, LLAMA3_SCALING], 1, None),
        ([*QWEN3, LLAMA3_SCALING], 1, "Qwen3 has no rope_scaling"),
        ([*LLAMA, "--rope_scaling={'rope_type': 'linear', 'factor': 2.0}"], 1, "type llama3, not linear"),
        ([*LLAMA, "--weight_tying=True"], 1, "an output head of its own"),
        ([*LLAMA, "--head_dim=64"], 1, "together as wide as the model"),
        (["config/full_gpt2_1.36b.py"], 1, "has Qwen3 and LLaMA 3, without biases, not gpt2"),
        ([*QWEN3, "--arch_preset=qwen2"], 1, "not qwen2"),
        ([*QWEN3, "--dropout=0.1"], 1, "no dropout"),
        ([*QWEN3, "--device=cpu"], 1, "needs a GPU"),
        ([*QWEN3, "--dtype=float32"], 1, "compares bfloat16"),
        ([*QWEN3, "--low_precision=fp8_tensorwise"], 1, None),
        ([*QWEN3, "--low_precision=mxfp8"], 1, "fp8_tensorwise, not mxfp8"),
        ([*QWEN3, "--low_precision=fp8_tensorwise", "--low_precision_skip_last=1"], 1, "in all blocks"),
    ],
)
def test_what_torchtitan_cannot_train_is_said_before_any_run(flags, processes, reason, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)  # torchao
    found = peers.obstacle("torchtitan", load_config(flags), processes)
    assert found is None if reason is None else reason in found


def test_float8_needs_torchao(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    config = load_config([*QWEN3, "--low_precision=fp8_tensorwise"])
    assert peers.obstacle("torchtitan", config).endswith("pip install torchao")


def test_the_requirements_file_has_the_version_that_is_asked_for():
    pinned = (ROOT / "requirements-peers.txt").read_text()
    assert f"\ntorchtitan=={peers.TORCHTITAN_VERSION} " in pinned


@pytest.mark.parametrize(
    "version, missing, message",
    [
        (None, [], "torchtitan 0.2.2, which is missing here: pip install -r requirements-peers.txt"),
        ("0.3.0", [], "torchtitan 0.2.2, which is 0.3.0 here"),
        (
            "0.2.2",
            ["tyro", "datasets"],
            "imports datasets, tyro, which it lacks here: pip install -r",
        ),
    ],
)
def test_missing_torchtitan_is_one_line_before_any_run(
    version, missing, message, monkeypatch, tmp_path, capsys
):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(peers.importlib.metadata, "version", installed)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in missing else name)
    command = ["--suite", "quick", f"--output={tmp_path / 'out'}", "--peer=torchtitan"]
    assert end_with_status(throughput.main, command) == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and not (tmp_path / "out").exists()


def test_fp8_and_bf16_are_compared_with_their_own_run(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    keys = {"device": "cuda", "dtype": "bfloat16"}
    variants = (
        Variant("bf16", "config/quickstart.py", keys),
        Variant("chunks", "config/quickstart.py", {**keys, "loss_chunks": 2}),
        Variant("fp8", "config/quickstart.py", {**keys, "low_precision": "fp8_tensorwise"}),
    )
    plan = make_plan(variants, [], None, 1, ["torchtitan"], None)
    of = {entry.name: entry for entry in plan}
    assert of["bf16"].peers == of["chunks"].peers == ["torchtitan: bf16"]
    assert of["fp8"].peers == ["torchtitan: fp8"]
    assert of["torchtitan: fp8"].program == ["-m", "bench.peer_torchtitan"]


# --- torchtitan itself, where it is installed ---


def fields_of(section, path: str = "") -> set[str]:
    """The names of all fields, as 'section.field'."""
    found = set()
    for name, value in vars(section).items():
        nested = dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace)
        found |= fields_of(value, f"{path}{name}.") if nested else {path + name}
    return found


def test_every_setting_is_one_of_torchtitans():
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -r requirements-peers.txt")
    from torchtitan.config import JobConfig

    config = load_config([*QWEN3, "--low_precision=fp8_tensorwise", "--lr_schedule=wsd"])
    assert fields_of(make_job(Empty(), config, 2)) <= fields_of(JobConfig())


@pytest.mark.parametrize("flags", [QWEN3, [*QWEN3, "--weight_tying=True"], [*LLAMA, "--d_ff=500"]])
def test_its_models_have_our_number_of_parameters(flags):
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install -r requirements-peers.txt")
    config = load_config(flags)
    spec, arguments = peer_torchtitan.model_of(peer_torchtitan.import_torchtitan(), config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    assert peer_torchtitan.check_parameters(model, config.model_config(), "torchtitan")


def test_batches_hold_no_state_of_their_own(small):
    batches = Batches(small[2]())
    batches.load_state_dict(batches.state_dict())
    inputs, labels = next(iter(batches))
    assert inputs["input"].shape == labels.shape == (small[0].batch_size, small[0].block_size)
