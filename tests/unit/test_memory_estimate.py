"""The memory estimate is what was measured, in a table of runs; each of its terms is there for a reason."""

import functools

import pytest
from support.helpers import ROOT

import model_builder
from training.configuration.files_and_flags import load_config
from training.records.memory_estimate import estimate_memory, needed_memory, reserved_memory

# The promise is 3 %. On the GPU that the runs were measured on, all of them agree within 0.1 %, but for one
# with 0.65 % (eager fp8 blocks that are recomputed).
ACCURACY = 0.007

GPT2, QWEN, B200 = "full_gpt2_1.36b", "full_qwen3_1.8b_optimal", "full_qwen3_1.8b_b200_optimal"
LLAMA, LLAMA_1_5B, LLAMA_2_2B = "full_llama_1.36b", "full_llama3_1.5b_optimal", "full_llama3_2.2b_chinchilla"
FP8 = "low_precision=fp8_tensorwise"
FP8_HEAD = FP8 + " low_precision_scope=layers_and_head"
FULL, SELECTIVE = "activation_checkpointing=full", "activation_checkpointing=selective"
FSDP = "use_fsdp=True"

# One or two H200s, 2026-11-22, torch 2.11.0+cu130, 4 iterations of 2 accumulation steps unless the flags say
# otherwise: processes, config, flags, GiB that were allocated and reserved at most
# (max_allocated_gb and max_reserved_gb of the last row of the run's record).
MEASURED = [
    (1, GPT2, "batch_size=2 compile=False", 27.26, 27.28),
    (1, GPT2, "batch_size=2 dtype=float32", 30.42, 30.44),
    (1, GPT2, "batch_size=4", 32.79, 32.81),
    (1, GPT2, "batch_size=4 bias=True", 32.79, 32.82),
    (1, GPT2, "batch_size=4 dropout=0.1", 33.44, 33.45),
    (1, GPT2, "batch_size=4 dropout=0.1 compile=False", 33.44, 33.46),
    (1, GPT2, "batch_size=8", 43.83, 43.84),
    (1, GPT2, "batch_size=8 compile=False", 43.83, 43.84),
    (1, GPT2, f"batch_size=8 {SELECTIVE}", 34.40, 34.52),
    (1, GPT2, f"batch_size=8 {FULL}", 26.16, 26.71),
    (1, GPT2, "batch_size=8 loss_chunks=16", 42.44, 42.45),
    (1, GPT2, "batch_size=16", 65.92, 65.93),
    (1, LLAMA, "batch_size=4", 34.70, 34.70),
    (1, LLAMA, "batch_size=4 compile=False", 34.70, 34.70),
    (1, LLAMA, f"batch_size=8 {FP8}", 47.18, 47.41),
    (1, LLAMA, "batch_size=16", 72.68, 72.70),
    (1, LLAMA_1_5B, "batch_size=2 compile=False", 33.47, 33.49),
    (1, LLAMA_1_5B, "batch_size=4", 40.00, 40.01),
    (1, LLAMA_2_2B, "batch_size=1 compile=False", 43.42, 43.43),
    (1, LLAMA_2_2B, "batch_size=4", 58.71, 58.71),
    (1, LLAMA_2_2B, f"batch_size=4 {FULL}", 42.32, 42.45),
    (1, QWEN, "batch_size=4 activation=gelu", 47.86, 47.87),
    (1, QWEN, "batch_size=4 activation=gelu compile=False", 50.11, 50.13),
    (1, QWEN, f"batch_size=32 loss_chunks=16 {FULL} {FP8_HEAD}", 51.21, 52.22),
    (1, QWEN, f"batch_size=32 loss_chunks=16 {FULL} {FP8_HEAD} compile=False", 53.93, 54.87),
    (1, QWEN, f"batch_size=64 loss_chunks=8 {FULL} compile=False", 67.27, 69.50),
    (1, QWEN, "batch_size=1", 35.90, 35.91),
    (1, QWEN, "batch_size=1 compile=False", 35.90, 35.91),
    (1, QWEN, "batch_size=2 compile=False", 39.88, 39.89),
    (1, QWEN, "batch_size=4", 47.86, 47.87),
    (1, QWEN, "batch_size=4 gradient_accumulation_steps=1", 47.86, 47.87),
    (1, QWEN, "batch_size=4 compile=False", 47.86, 47.87),
    (1, QWEN, "batch_size=4 compile=False loss_chunks=4", 46.12, 46.13),
    (1, QWEN, f"batch_size=4 compile=False {SELECTIVE}", 41.51, 41.54),
    (1, QWEN, f"batch_size=4 compile=False {FULL}", 35.88, 35.91),
    (1, QWEN, f"batch_size=4 compile=False {FP8_HEAD}", 51.51, 51.72),
    (1, QWEN, f"batch_size=4 loss_chunks=4 {FP8_HEAD}", 48.61, 49.30),
    (1, QWEN, "batch_size=4 dtype=float16", 47.86, 47.87),
    (1, QWEN, "batch_size=4 adam_dtype=bfloat16", 41.04, 41.05),
    (1, QWEN, "batch_size=4 param_dtype=bfloat16", 44.45, 44.49),
    (1, QWEN, f"batch_size=4 param_dtype=bfloat16 adam_dtype=bfloat16 {FP8}", 38.39, 38.50),
    (1, QWEN, "batch_size=4 use_cuda_graphs=True", 47.86, 48.36),
    (1, QWEN, "batch_size=4 block_size=4096", 63.82, 63.84),
    (1, QWEN, "batch_size=8", 63.82, 63.84),
    (1, QWEN, "batch_size=8 loss_chunks=4", 60.34, 60.36),
    (1, QWEN, f"batch_size=8 {SELECTIVE}", 51.12, 51.13),
    (1, QWEN, f"batch_size=8 {FULL}", 39.86, 40.13),
    (1, QWEN, f"batch_size=8 {FP8}", 63.07, 63.25),
    (1, QWEN, f"batch_size=8 {FP8_HEAD}", 68.29, 68.47),
    (1, QWEN, f"batch_size=8 {FP8_HEAD} {SELECTIVE}", 57.09, 57.36),
    (1, QWEN, f"batch_size=8 {FP8_HEAD} {FULL}", 47.33, 47.71),
    (1, QWEN, "batch_size=16", 95.73, 95.75),
    (1, QWEN, f"batch_size=16 loss_chunks=8 {FULL}", 39.69, 40.24),
    (1, QWEN, f"batch_size=16 {FP8_HEAD}", 101.83, 102.16),
    (2, QWEN, "batch_size=4", 47.86, 47.87),
    (2, QWEN, "batch_size=4 use_zero1=True", 37.63, 37.65),
    (2, QWEN, f"batch_size=4 use_zero1=True {FP8_HEAD}", 41.28, 41.39),
    (2, QWEN, f"batch_size=4 {FSDP}", 37.63, 42.85),
    (2, QWEN, f"batch_size=4 {FSDP} gradient_accumulation_steps=1", 30.91, 36.01),
    (2, QWEN, f"batch_size=4 {FSDP} reshard_after_forward=True", 35.48, 40.64),
    (2, QWEN, f"batch_size=4 {FSDP} reduce_dtype=bfloat16", 34.23, 40.04),
    (2, QWEN, f"batch_size=4 {FSDP} {SELECTIVE}", 31.28, 36.55),
    (2, QWEN, f"batch_size=4 {FSDP} {FP8_HEAD}", 41.28, 46.58),
]

# From LOG.md: three with full recomputation whose fullest moment is a block's backward, and documents that do
# not see each other. What was reserved is not known.
LOGGED = [
    (1, B200, f"batch_size=64 gradient_accumulation_steps=4 loss_chunks=8 {FULL}", 66.3),
    (1, B200, f"batch_size=96 loss_chunks=8 {FULL}", 84.0),
    (1, B200, f"batch_size=128 loss_chunks=8 {FULL}", 101.8),
    (1, "qwen3_1.7b", "batch_size=8 gradient_accumulation_steps=4 doc_masking=True", 102.9),
    (2, QWEN, "batch_size=16", 95.73),
    (2, QWEN, f"batch_size=16 {FSDP}", 85.50),
    (2, QWEN, "batch_size=8 use_zero1=True", 53.59),
    (2, QWEN, f"batch_size=8 {FSDP}", 53.59),
]


@functools.cache
def parameters_of(model) -> int:
    return model_builder.build_model(model).count_parameters()["total"]


def arguments(name: str, flags: str = "", processes: int = 1):
    """What estimate_memory takes."""
    stated = [f"--{flag}" for flag in f"batch_size=16 gradient_accumulation_steps=2 {flags}".split()]
    config = load_config([str(ROOT / "config" / f"{name}.py"), *stated], processes)
    model = config.model_config()
    return model, parameters_of(model), config, processes


def estimate(name: str, flags: str = "", processes: int = 1) -> dict[str, float]:
    return estimate_memory(*arguments(name, flags, processes))


def total(name: str, flags: str = "", processes: int = 1) -> float:
    return sum(estimate(name, flags, processes).values())


# --- against measurements ---


@pytest.mark.parametrize(("processes", "config", "flags", "peak", "reserved"), MEASURED)
def test_the_estimate_is_the_measured_peak(processes, config, flags, peak, reserved):
    given = arguments(config, flags, processes)
    assert sum(estimate_memory(*given).values()) == pytest.approx(peak, rel=ACCURACY)
    # what must be free is a bit more than what the allocator took: a run that is said to fit does fit
    assert reserved < reserved_memory(*given) < 1.03 * reserved + (3 if "graphs" in flags else 0)


@pytest.mark.parametrize(("processes", "config", "flags", "peak"), LOGGED)
def test_the_estimate_is_the_peak_that_the_log_has(processes, config, flags, peak):
    assert total(config, flags, processes) == pytest.approx(peak, rel=ACCURACY)


# --- terms that the table cannot show apart ---


def test_eager_blocks_need_more_where_compiled_ones_free_earlier():
    """Recomputed blocks keep their inputs during their backward; fp8's feed-forward layer is one function,
    whose tensors stay until its end; an activated gate that no kernel of ours recomputes is kept."""
    for flags in (
        f"batch_size=64 loss_chunks=8 {FULL}",
        f"batch_size=64 loss_chunks=8 {FULL} {FP8_HEAD}",
        "batch_size=4 activation=gelu",
    ):
        assert total(QWEN, f"{flags} compile=False") > 1.005 * total(QWEN, flags), flags
    assert total(QWEN, "compile=False") == total(QWEN)  # the kernels keep the same


def test_only_with_several_micro_steps_does_fsdp_keep_whole_gradients():
    whole = "whole gradients (float32)"
    assert estimate(QWEN, FSDP, 2)[whole] == pytest.approx(4 * 1_830_395_904 / 2**30)
    assert whole not in estimate(QWEN, f"{FSDP} gradient_accumulation_steps=1", 2)


def test_gradients_sent_in_bfloat16_are_copies_where_activations_are_few():
    """At a batch of one, the end of the backward is the fullest moment: 2 more bytes for each parameter."""
    small = f"batch_size=1 block_size=256 {FULL} loss_chunks=1"
    sent = estimate(QWEN, f"{small} reduce_dtype=bfloat16", 2)
    assert sent["gradients being sent"] == pytest.approx(2 * 1_830_395_904 / 2**30)
    assert total(QWEN, f"{small} reduce_dtype=bfloat16", 2) > total(QWEN, small, 2)
    assert total(QWEN, f"{small} reduce_dtype=bfloat16") == total(QWEN, small)  # one process sends nothing


def test_what_must_be_free_is_more_than_the_estimate_and_more_still_with_other_processes():
    one, two = arguments(QWEN), arguments(QWEN, "", 2)
    assert sum(estimate_memory(*one).values()) < reserved_memory(*one) < needed_memory(*one)
    assert needed_memory(*one) < needed_memory(*two)
    graphs = arguments(QWEN, "use_cuda_graphs=True")  # an evaluation runs beside the captured memory
    assert reserved_memory(*graphs) - reserved_memory(*one) == pytest.approx(estimate(QWEN)["logits"])
