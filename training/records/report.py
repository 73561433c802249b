"""The start-up report: what will run, on what, how it is counted. As text for the console and log, and as the
record's startup_info. Also the whole output of --dry_run=True."""

from __future__ import annotations

import subprocess

from model_config import ModelConfig
from training.configuration.keys import ROOT, TrainConfig
from training.hardware.peaks import Peak
from training.optimization.compile import is_recomputed
from training.process.world import machine_size
from training.strategies.parallelize import strategy_name

GB = 2**30
SOFTWARE = (
    "python",
    "torch",
    "numpy",
    "cuda",
    "cudnn",
    "nccl",
    "driver",
)  # versions that a number depends on
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Section = list[tuple[str, str]]


def estimate_memory(
    model: ModelConfig, parameters: int, config: TrainConfig, world_size: int
) -> dict[str, float]:
    """Estimated GiB per GPU by part, when the last forward has just ended: the peak. Without the allocator's
    reserve and the temporaries of a backward. Assumes a fused attention kernel and compiled blocks; without
    compile, more is needed."""
    shards = world_size
    if config.use_fsdp and config.fsdp_sharding == "hybrid":
        shards = min(machine_size(), world_size)
    stored, moment, compute = (BYTES[name] for name in (config.param_dtype, config.adam_dtype, config.dtype))
    adam_shards = shards if config.use_zero1 or config.use_fsdp else 1
    logits = compute * config.batch_size * config.block_size / config.loss_chunks * model.vocab_size
    head = model.vocab_size * model.n_embd
    parts = {
        f"weights ({config.param_dtype})": stored * parameters / adam_shards,
        f"Adam moments ({config.adam_dtype})": 2 * moment * parameters / adam_shards,
        **_weights_and_gradients(model, parameters, config, shards),
        "activations": _activation_bytes(model, config),
        "logits": logits,
        "head's gradient (float32)": 4 * head,
    }
    if config.low_precision != "none":
        with_head = config.low_precision_scope == "layers_and_head"
        parts["fp8 weights, both layouts"] = 2 * (model.n_layer * _block_weights(model) + with_head * head)
        parts["logits"] += with_head * 2 / compute * logits  # their gradient in fp8, both layouts
    return {name: size / GB for name, size in parts.items()}


def _weights_and_gradients(model: ModelConfig, parameters: int, config: TrainConfig, shards: int) -> dict:
    """Bytes of what the model computes with, where that is not the optimizer's own, and of the gradients."""
    stored, compute = BYTES[config.param_dtype], BYTES[config.dtype]
    if not config.use_fsdp:
        rounded = 0 if config.param_dtype == "float32" else stored / (shards if config.use_zero1 else 1)
        parts = {"gradient sums (float32)": (4 + rounded) * parameters}  # and as the optimizer takes them
        if config.use_zero1 or config.dtype != config.param_dtype:
            parts[f"working weights ({config.dtype})"] = compute * parameters
        return parts
    gathered = parameters
    if config.reshard_after_forward:  # two blocks, one of them on its way, and what is in no block
        gathered -= max(0, model.n_layer - 2) * _block_weights(model)
    parts = {
        f"gradients ({config.param_dtype})": stored * parameters / shards,
        f"gathered weights ({config.dtype})": compute * gathered,
        "head's gradient, again": (4 + compute) * model.vocab_size * model.n_embd,  # scaled, and rounded
    }
    if config.gradient_accumulation_steps > 1:
        parts[f"whole gradients ({config.reduce_dtype})"] = BYTES[config.reduce_dtype] * parameters
    return parts


def _block_weights(model: ModelConfig) -> int:
    """Elements of one block's matrices."""
    attention = 2 * model.n_embd * (model.n_embd + model.n_kv_head * model.head_dim)
    return attention + (3 if model.ffn_type == "swiglu" else 2) * model.n_embd * model.d_ff


def _activation_bytes(model: ModelConfig, config: TrainConfig) -> float:
    """What the forward of all blocks keeps for the backward. A recomputed block keeps its input alone, and
    one at a time has everything."""
    compute, tokens = BYTES[config.dtype], config.batch_size * config.block_size
    C, F = model.n_embd, model.d_ff
    qkv = C + 2 * model.n_kv_head * model.head_dim
    heads = 2 * qkv if model.position_encoding == "rope" else qkv  # as projected, and as attention takes them
    up = 2 * F if model.ffn_type == "swiglu" else F
    inputs = 2 * C + F  # of qkv, up and down; that of out is the context below
    layer = 3 * C + heads + up  # two residuals and the context
    if config.low_precision == "none":
        layer = compute * (layer + inputs)
    else:
        layer = compute * layer + inputs + C  # in fp8, which the context is not
    recomputed = sum(is_recomputed(i, config.activation_checkpointing) for i in range(model.n_layer))
    whole = model.n_layer - recomputed + (recomputed > 0)
    return tokens * (whole * layer + recomputed * compute * C)


def startup_info(
    config: TrainConfig,
    model: ModelConfig,
    counts: dict[str, int],
    flops: dict,
    peak: Peak,
    hardware: dict,
    optimizer: dict,
    attention: dict,
    world_size: int,
) -> dict:
    """The record's startup_info. hardware is describe_hardware's result."""
    software = {name: hardware[name] for name in SOFTWARE}
    hardware = {name: value for name, value in hardware.items() if name not in SOFTWARE}
    return {
        "model": {
            "total_params": counts["total"],
            "trainable_params": counts["trainable"],
            "non_embedding_params": counts["non_embedding"],
            "architecture": model.to_dict(),
        },
        "optimizer": optimizer,
        "hardware": {
            **hardware,
            "num_gpus": world_size,
            "precision": config.dtype,
            "parallelism": strategy_name(config, world_size),
            "peak": _describe_peak(peak),
            **({"peak_fp8": _describe_peak(peak.fp8)} if peak.fp8 else {}),
        },
        "software": software,
        "git": git_state(),
        "attention": attention,
        "flops": flops,
        "tokens_per_iter": config.samples_per_iter(world_size) * config.block_size,
        "estimated_memory_gb": estimate_memory(model, counts["total"], config, world_size),
    }


def accumulation_steps(config: TrainConfig, world_size: int) -> dict[str, int]:
    """Both counts by name: a log that gave one number for 2 and for 8 GPUs once hid a wrong MFU."""
    per_gpu = config.gradient_accumulation_steps
    return {
        "gradient_accumulation_steps_per_gpu": per_gpu,
        "gradient_accumulation_steps_global": per_gpu * world_size,
    }


def git_state() -> dict:
    """Commit of this code and whether it was changed; None outside a git checkout."""

    def git(*arguments):
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "modified": bool(git("status", "--porcelain", "-uno")) if commit else None}


# --- text ---


def report_lines(config: TrainConfig, info: dict) -> list[str]:
    """The report as lines, one section after another."""
    sections = {
        "MODEL ARCHITECTURE": _architecture(info),
        "TRAINING CONFIGURATION": _training(config, info),
        "HARDWARE": _hardware(config, info),
        "THEORETICAL PERFORMANCE": _performance(info),
    }
    lines = []
    for title, rows in sections.items():
        lines += ["", "=" * 78, title, "=" * 78]
        lines += [f"{name + ':':<28} {text}" for name, text in rows]
    return lines


def _architecture(info: dict) -> Section:
    model, counts = info["model"]["architecture"], info["model"]
    group = model["n_head"] // model["n_kv_head"]
    return [
        ("Preset", model["arch"]),
        (
            "Layers, heads, width, FFN",
            f"{model['n_layer']}, {model['n_head']}, {model['n_embd']}, {model['d_ff']}",
        ),
        (
            "Key/value heads",
            f"{model['n_kv_head']} (group of {group})" if group > 1 else str(model["n_kv_head"]),
        ),
        ("Vocabulary", f"{model['vocab_size']:,}{' (tied)' if model['weight_tying'] else ''}"),
        ("Positions", _positions(model)),
        (
            "Normalization",
            f"{model['normalization']}, eps {model['norm_eps']:g}{', QK-norm' * model['qk_norm']}",
        ),
        ("Feed-forward", f"{model['ffn_type']}, {model['activation']}"),
        ("Bias, dropout", f"{model['bias']}, {model['dropout']:g}"),
        ("Parameters", f"{counts['total_params']:,}"),
        ("  trainable", f"{counts['trainable_params']:,}"),
    ]


def _positions(model: dict) -> str:
    theta = f", theta {model['rope_theta']:g}" if model["position_encoding"] == "rope" else ""
    return f"{model['position_encoding']}{theta}, up to {model['block_size']:,} tokens"


def _training(config: TrainConfig, info: dict) -> Section:
    gpus = info["hardware"]["num_gpus"]
    per_gpu, everywhere = accumulation_steps(config, gpus).values()
    decay = config.lr_schedule if config.decay_lr else "constant"
    schedule = f"{config.learning_rate:g} to {config.min_lr:g}, {decay}, warm-up {config.warmup_iters:,}"
    if config.decay_lr:
        schedule += f", decay to iteration {config.lr_decay_iters:,}"
    groups = info["optimizer"]["param_groups"]
    return [
        *_datasets(config, info),
        ("Micro-batch per GPU", f"{config.batch_size} x {config.block_size} tokens"),
        ("Accumulation steps", f"{per_gpu} per GPU ({everywhere} over {gpus} GPU{'s' * (gpus > 1)})"),
        ("Tokens per iteration", f"{info['tokens_per_iter']:,}"),
        (
            "Iterations",
            f"{config.max_iters:,} ({config.max_iters * info['tokens_per_iter'] / 1e9:.3f} B tokens)",
        ),
        ("Learning rate", schedule),
        ("Optimizer", f"{info['optimizer']['type']}, betas {config.beta1:g} {config.beta2:g}"),
        ("  weight decay", "; ".join(f"{g['weight_decay']:g} on {g['params']:,}" for g in groups)),
        ("Gradient clipping", f"norm {config.grad_clip:g}" if config.grad_clip else "off"),
        ("Precision", _precision(config)),
        ("torch.compile", _compilation(config)),
        ("Attention backend", info["attention"]["line"]),
        ("Windows", _windows(config)),
        ("DataLoader", _dataloader(config)),
    ]


def _windows(config: TrainConfig) -> str:
    cut = {"stream": "tokens cut anywhere", "truncate": "whole documents, long ones cut off"}[config.packing]
    seen = "documents do not see each other" if config.doc_masking else "no mask between documents"
    return f"{cut}; {seen}"


def _datasets(config: TrainConfig, info: dict) -> Section:
    if "data" not in info:  # a dry run looks at none
        return [("Dataset", config.dataset)]
    sources = info["data"]["sources"]
    rows = [("Dataset", f"{len(sources)} sources, mixed by weight")] if len(sources) > 1 else []
    for source in sources:
        text = f"{source['tokens']['train'] / 1e9:.3f} B tokens, {source['epochs']:.3g} epochs"
        if len(sources) > 1:
            rows.append((f"  {source['name']}", f"{100 * source['weight']:.4g} % of samples, {text}"))
        else:
            rows.append(("Dataset", f"{source['name']}, {text}"))
        if packing := source.get("packing"):
            cut = packing["tokens_cut_off"] / source["tokens"]["train"]
            text = f"{packing['documents']:,} documents in {packing['windows']:,} windows"
            rows.append(
                (
                    "  packed",
                    f"{text}; {cut:.1%} of the tokens cut off, {packing['share_padded']:.2%} padding",
                )
            )
    if config.verify_data == "size":
        rows.append(("  verified", "sizes and recorded ids; no hash of a file that was never read whole"))
    return rows


def _precision(config: TrainConfig) -> str:
    stored, moments = config.param_dtype, config.adam_dtype
    both = stored == moments
    text = f"{config.dtype} compute, {stored} weights"
    text += " and optimizer state" if both else f", {moments} optimizer state"
    if config.low_precision != "none":
        text += f"; {config.low_precision} matmuls in {config.low_precision_scope}"
    return text


def _compilation(config: TrainConfig) -> str:
    text = f"True ({config.compile_scope})" if config.compile else "False"
    if config.activation_checkpointing != "none":
        text += f", activation checkpointing {config.activation_checkpointing}"
    return text


def _dataloader(config: TrainConfig) -> str:
    if not config.use_dataloader:
        return "off, batches are read in the training process"
    return (
        f"{config.dataloader_num_workers} workers, {config.dataloader_prefetch_factor} iterations ahead each"
    )


def _hardware(config: TrainConfig, info: dict) -> Section:
    hardware, software = info["hardware"], info["software"]
    memory = f" ({hardware['gpu_memory_gb']:.1f} GB)" if hardware.get("gpu_memory_gb") else ""
    estimate = info["estimated_memory_gb"]
    total = sum(estimate.values())
    return [
        ("Device", f"{hardware['num_gpus']} x {hardware['gpu_name']}{memory}"),
        ("Parallelism", _parallelism(config, hardware["parallelism"])),
        ("torch, CUDA, cuDNN, NCCL", ", ".join(str(software[k]) for k in ("torch", "cuda", "cudnn", "nccl"))),
        ("Peak per GPU", _peak(hardware["peak"])),
        *([("  fp8", _peak(hardware["peak_fp8"]))] if "peak_fp8" in hardware else []),
        ("Estimated memory per GPU", f"{total:.2f} GB"),
        *((f"  {name}", f"{size:.2f} GB") for name, size in estimate.items()),
    ]


def _parallelism(config: TrainConfig, strategy: str) -> str:
    extras = [
        f"{config.fsdp_sharding} sharding" * (config.fsdp_sharding != "full"),
        "reshard after forward" * config.reshard_after_forward,
        f"gradients travel in {config.reduce_dtype}" * (config.reduce_dtype != "float32"),
    ]
    return ", ".join([strategy, *filter(None, extras)])


def _describe_peak(peak: Peak) -> dict:
    return {
        "tflops_per_gpu": peak.tflops,
        "source": peak.source,
        "reason": peak.reason,
        "sparse": peak.sparse,
        "measured": peak.measured,
    }


def _peak(peak: dict) -> str:
    if peak["tflops_per_gpu"] is None:
        return f"none ({peak['reason']})"
    return f"{peak['tflops_per_gpu']:.1f} TFLOPS{' 2:4 sparse' * peak['sparse']} ({peak['source']})"


def _performance(info: dict) -> Section:
    flops, peak = info["flops"], info["hardware"]["peak"]
    rows = [("MFU formula", flops["calculation_method"])]
    rows += [(f"FLOPs/token, {method}", f"{total:,}") for method, total in flops["totals"].items()]
    rows += [
        ("  causal half of the scores", f"{flops['flops_per_token_causal']:,}"),
        ("Audit by FlopCounterMode", _audit(flops["audit"])),
        (
            "Attention/FFN FLOPs",
            "not given by this formula" if (r := flops["attention_to_ffn_ratio"]) is None else f"{r:.4f}",
        ),
    ]
    if peak["tflops_per_gpu"]:
        tokens = peak["tflops_per_gpu"] * 1e12 * info["hardware"]["num_gpus"] / flops["flops_per_token"]
        rows += [(f"Tokens/s at {percent} % MFU", f"{tokens * percent / 100:,.0f}") for percent in (100, 50)]
    return rows


def _audit(audit: dict) -> str:
    if audit["exact"]:
        return f"exact ({audit['counted_flops_per_sequence']:,} per sequence)"
    deviation = 100 * (audit["formula_over_counted"] - 1)
    return f"{deviation:+.2f} % ({audit['counted_flops_per_sequence']:,} counted per sequence)"
