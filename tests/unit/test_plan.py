"""tools.plan: the published plans come out to three digits, and a budget buys the model of least loss."""

import re

import pytest
from support.helpers import ROOT

from common.errors import UserError
from mfu_versions import model_builder_v2 as v2
from mfu_versions import model_builder_v3 as v3
from model import Transformer
from tools.plan import __main__ as plan_command
from tools.plan.law import HOFFMANN
from tools.plan.search import best_plan, iso_flop, overtrained, plan, plan_flops
from tools.plan.shapes import FAMILIES, shape_for, shape_of, shapes_of
from training.configuration.files_and_flags import load_config

BUDGET = 1.36e21
# config: tokens as published, loss; FLOPs by v2's printed score term and by v3; what 1.36e21 by v3 buys
PUBLISHED = {
    "full_llama_1.36b.py": (84.72e9, "2.372", "1.360", "7.1", "163.0", "2.312"),
    "full_llama3_1.5b_optimal.py": (101.909e9, "2.335", "1.362", "8.8", "158.2", "2.296"),
    "full_llama3_2.2b_chinchilla.py": (61.545e9, "2.351", "1.371", "8.2", "102.4", "2.299"),
    "full_qwen3_1.8b_optimal.py": (81.727e9, "2.340", "1.382", "8.4", "131.7", "2.294"),
}
SMALL = ("qwen3", 4096, 128)  # a family with the vocabulary of quickstart: quick to build


def shipped(name):
    return shape_of(name, load_config([str(ROOT / "config" / name)]).model_config())


def printed_flops_per_token(model):
    """By v2's attention_to_ffn_ratio as it was published, whose score term is 2 n_head S^2 H; no logits."""
    flops = v2.count_flops(model, model.block_size)
    forward = model.n_layer * flops["ffn_flops_per_layer"] * (1 + flops["attention_to_ffn_ratio"])
    return 3 * forward / model.block_size


# --- the law and the published plans ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_plans_come_out_to_three_digits(name):
    tokens, loss, printed, by_v3, bought, loss_bought = PUBLISHED[name]
    shape = shipped(name)
    assert f"{plan(HOFFMANN, shape, tokens).loss:.3f}" == loss
    assert f"{plan(HOFFMANN, shape, tokens).flops / 1e20:.1f}" == by_v3
    assert f"{printed_flops_per_token(shape.model) * tokens / 1e21:.3f}" == printed
    whole = plan_flops(HOFFMANN, shape, BUDGET)
    assert (f"{whole.tokens / 1e9:.1f}", f"{whole.loss:.3f}") == (bought, loss_bought)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_count_without_embeddings_gives_the_published_losses(name):
    tokens, loss, *_ = PUBLISHED[name]
    shape = shipped(name)
    embedding = shape.model.vocab_size * shape.model.n_embd
    for without in (embedding, 2 * embedding):
        assert f"{HOFFMANN.loss(shape.parameters - without, tokens):.3f}" != loss


def test_a_plan_outside_of_the_fitted_runs_says_so():
    assert HOFFMANN.beyond(1e9, 20e9) == []
    assert "above" in HOFFMANN.beyond(70e9, 400e9)[0]
    assert [line.split(",")[0] for line in HOFFMANN.beyond(1e6, 1e6)] == [
        "extrapolated: 1e+06 parameters",
        "extrapolated: 1e+06 tokens",
    ]


# --- shapes ---


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_rule_of_a_family_gives_its_shipped_shape(arch):
    given = shipped(FAMILIES[arch].shipped)
    found = shape_for(arch, given.parameters)
    assert found.model == given.model
    assert (found.parameters, found.flops_per_token) == (given.parameters, given.flops_per_token)


@pytest.mark.parametrize("size", [2e6, 11e6, 90e6])
def test_a_shape_has_about_the_wanted_size_and_the_counted_parameters(size):
    shape = shape_for(SMALL[0], size, *SMALL[1:])
    assert shape.parameters == pytest.approx(size, rel=0.08)
    built: Transformer = v3.build_model(shape.model)
    assert built.count_parameters()["total"] == shape.parameters


@pytest.mark.parametrize(("size", "says"), [(1e3, "smaller --vocab_size"), (1e15, "family has shapes")])
def test_a_size_beyond_the_family_is_an_error(size, says):
    with pytest.raises(UserError, match=says):
        shape_for(SMALL[0], size, *SMALL[1:])


# --- what is best ---


def test_every_other_shape_at_these_flops_has_a_higher_loss():
    best = best_plan(HOFFMANN, SMALL[0], 1e18, *SMALL[1:])
    plans = iso_flop(HOFFMANN, shapes_of(*SMALL), 1e18)
    assert len(plans) > 20
    assert all(each.loss > best.loss for each in plans if each.shape != best.shape)
    assert all(each.flops == pytest.approx(1e18) for each in plans)


def test_an_over_trained_model_is_smaller_and_gives_up_loss():
    best = best_plan(HOFFMANN, SMALL[0], 1e20, *SMALL[1:])
    chain = [best, *overtrained(HOFFMANN, SMALL[0], best)]
    assert len(chain) == 5
    for larger, smaller in zip(chain, chain[1:], strict=False):
        assert smaller.shape.parameters < larger.shape.parameters and smaller.tokens > larger.tokens
        assert smaller.loss > larger.loss
        assert smaller.flops == pytest.approx(best.flops)


def test_1_36e21_flops_of_v3_buy_the_shipped_qwen3_as_the_compute_optimal_one():
    best = best_plan(HOFFMANN, "qwen3", BUDGET)
    assert (best.shape.parameters, f"{best.tokens / 1e9:.1f}") == (1_830_395_904, "131.7")


@pytest.mark.parametrize(("flops", "says"), [(1e9, "too few"), (1e29, "too many")])
def test_a_budget_whose_best_model_is_outside_of_the_family_is_an_error(flops, says):
    with pytest.raises(UserError, match=says):
        best_plan(HOFFMANN, SMALL[0], flops, *SMALL[1:])


# --- the command ---


SMALL_FLAGS = ["--arch=qwen3", "--vocab_size=4096", "--block_size=128"]


def test_the_command_prints_the_plan_of_a_config(capsys):
    config = ROOT / "config" / "full_llama3_1.5b_optimal.py"
    plan_command.main([f"--config={config}", "--tokens=101.909e9", "--gpus=8xH200", "--mfu=0.6157"])
    printed = capsys.readouterr().out
    assert "predicted loss: 2.335\n" in printed
    assert "8.7614e+20 by v3 (8,597,274,624 per token)" in printed
    assert "time: 49.9 hours, 400 GPU-hours" in printed
    assert "fitted to MassiveText" in printed


def test_a_predicted_loss_above_that_of_a_random_guess_is_called_out(capsys):
    plan_command.main([f"--config={ROOT / 'config' / 'quickstart.py'}", "--tokens=614400"])
    assert "above that of a random guess, ln(4096) = 8.318" in capsys.readouterr().out


def test_the_command_draws_the_curve_of_a_budget(capsys, tmp_path):
    plan_command.main(["--flops=1e18", *SMALL_FLAGS, f"--output={tmp_path / 'curve.png'}"])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "Over-trained qwen3" in printed and "extrapolated" in printed


def test_a_written_config_has_the_shape_and_the_tokens_and_starts(run, capsys, tmp_path):
    path = tmp_path / "planned_10m.py"
    flags = [*SMALL_FLAGS, "--size=1e7", "--tokens=2e8", f"--write={path}", "--dataset=quickstart"]
    plan_command.main(flags)
    config = load_config([str(path)])
    assert config.model_config() == shape_for(SMALL[0], 1e7, *SMALL[1:]).model
    assert config.max_iters * config.tokens_per_iter == pytest.approx(2e8, rel=0.01)
    assert config.lr_decay_iters == config.max_iters >= 2000
    capsys.readouterr()
    assert run(path, "--dry_run=True", "--gpu=H200") == 0
    assert re.search("Fits: +yes", capsys.readouterr().out)
    with pytest.raises(UserError, match="not overwritten"):
        plan_command.main(flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "nothing to plan"),
        (["--flops=0"], "--flops=0 is not above 0"),
        (["--flops=nan"], "--flops=nan is not above 0"),
        (["--flops=1e40"], "at most 1e\\+30"),
        (["--gpus=8xH200", "--hours=-1", "--mfu=0.5"], "--hours=-1 is not above 0"),
        (["--gpus=0xH200", "--hours=1", "--mfu=0.5"], "has 0 GPUs"),
        (["--gpus=H200", "--hours=1", "--mfu=0.5"], "write it as 8xH200"),
        (["--gpus=8xH900", "--hours=1", "--mfu=0.5"], "'H900' is not one of B200"),
        (["--gpus=2xT4", "--hours=1", "--mfu=0.5"], "no bf16 peak is known for the Tesla T4"),
        (["--gpus=8xH200", "--hours=1", "--mfu=61"], "write 61 % as 0.61"),
        (["--gpus=8xH200", "--hours=1", "--mfu=0"], "not a fraction above 0"),
        (["--gpus=8xH200", "--hours=1"], "needs an MFU: state it"),
        (["--hours=1", "--mfu=0.5"], "state the GPUs, too"),
        (["--hours=1"], "of which machine"),
        (["--flops=1e21", "--gpus=8xH200", "--hours=1", "--mfu=0.5"], "--flops and --hours both"),
        (["--tokens=1e9"], "of which model"),
        (["--size=1e9"], "state how long"),
        (["--size=1e9", "--tokens=1e9"], "need one family"),
        (["--flops=1e21", "--output=x.jpg"], "must end in .png"),
        (["--flops=1e21", "--arch=qwen3", "--write=x.txt"], "must end in .py"),
    ],
)
def test_flags_beyond_sense_are_one_clear_line(flags, says):
    with pytest.raises(UserError, match=says) as raised:
        plan_command.main(flags)
    assert "\n" not in str(raised.value)
