"""generation/: tokens by the key/value cache against transformers and against the model without a cache."""

import pytest
import torch
from support.hf_models import VOCAB, make

from common.errors import UserError
from generation.cache import cached_attention
from generation.choice import Choice
from generation.decoding import generate
from model_builder import build_model
from model_config import model_config
from training.pretrained.reading import load_pretrained

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 3, 3, 41, 7, 22], [8], [60, 1, 13]]  # of different lengths
DRAWN = Choice(temperature=1.0, top_k=50, top_p=0.95)
SIZES = dict(n_layer=2, n_head=4, n_embd=32, d_ff=64, vocab_size=VOCAB, block_size=24)


def built(preset="qwen3", **keys):
    config = model_config(preset, **{**SIZES, "n_kv_head": 2, **keys})
    model = build_model(config, cached_attention).init_weights("cpu", seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at a start, so that no two logits are alike
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.fixture(scope="module")
def model():
    return built()


# --- against transformers ---


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3.2", "qwen2", "qwen3", "qwen3 untied"])
def test_greedy_tokens_in_fp32_are_those_of_transformers(name, tmp_path):
    theirs = make(name)
    theirs.save_pretrained(tmp_path)
    _, ours = load_pretrained(f"hf:{tmp_path}", CPU, cached_attention)
    eos = 2
    expected = []
    for prompt in PROMPTS:
        made = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=eos, pad_token_id=eos
        )
        new = made[0, len(prompt) :].tolist()
        expected.append(new[: new.index(eos)] if eos in new else new)
    assert any(len(set(new)) > 3 for new in expected)  # not one token again and again
    assert generate(ours.eval(), PROMPTS, 24, ends={eos}) == expected


# --- against the model without a cache ---


@pytest.mark.parametrize(
    "keys",
    [
        dict(preset="qwen3"),
        dict(preset="gpt2", n_kv_head=4, bias=True),
        dict(preset="llama3", weight_tying=True, n_kv_head=1),
    ],
    ids=lambda keys: keys["preset"],
)
def test_logits_by_the_cache_are_those_of_the_whole_text(keys):
    model = built(**keys)
    seen = watch_logits(model, lambda: generate(model, PROMPTS, 12))
    with torch.no_grad():
        for number, prompt in enumerate(PROMPTS):
            (new,) = generate(model, [prompt], 12)
            expected = model(torch.tensor([prompt + new[:-1]]))[0, len(prompt) - 1 :]
            torch.testing.assert_close(seen[:, number], expected, rtol=1e-4, atol=1e-4)


def watch_logits(model, run) -> torch.Tensor:
    """The head's logits (tokens, B, V) during run()."""
    found = []
    hook = model.head.register_forward_hook(lambda _, __, logits: found.append(logits.view(-1, VOCAB)))
    run()
    hook.remove()
    return torch.stack(found)


def test_a_training_step_and_an_evaluation_may_use_cached_attention(model):
    ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    manual = build_model(model.config).init_weights("cpu", seed=1)
    manual.load_state_dict(model.state_dict())
    assert model(ids, ids).item() == pytest.approx(manual(ids, ids).item(), rel=1e-5)


@pytest.mark.parametrize("choice", [Choice(), DRAWN], ids=["greedy", "drawn"])
def test_a_batch_gives_each_prompt_the_tokens_that_it_gets_alone(model, choice):
    seeds = [7, 8, 9]
    together = generate(model, PROMPTS, 16, choice, seeds=seeds)
    assert [len(new) for new in together] == [16] * 3
    for prompt, seed, new in zip(PROMPTS, seeds, together, strict=True):
        assert generate(model, [prompt], 16, choice, seeds=[seed]) == [new]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(model):
    one, again, other = generate(model, [[3, 4]] * 3, 20, DRAWN, seeds=[1, 1, 2])
    assert one == again != other


# --- where a sequence ends ---


def test_a_sequence_ends_before_end_of_text_and_the_others_go_on(model):
    whole = generate(model, PROMPTS, 16, DRAWN, seeds=[7, 8, 9])
    eot = whole[1][4]
    cut = [new[: new.index(eot)] if eot in new else new for new in whole]
    assert len(cut[1]) < 5 and max(map(len, cut)) == 16
    assert generate(model, PROMPTS, 16, DRAWN, seeds=[7, 8, 9], ends={eot}) == cut


def test_end_of_text_as_the_first_token_gives_no_token(model):
    ((first, *_),) = generate(model, [[5]], 4)
    assert generate(model, [[5]], 4, ends=[first]) == [[]]


def test_text_ends_where_the_context_is_full(model):
    prompts = [list(range(1, 22)), [1, 2]]
    assert [len(new) for new in generate(model, prompts, 100)] == [3, 22]
    assert [len(new) for new in generate(model, [list(range(23))], 2**62)] == [1]


# --- bad input ---


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            [[1] * 24],
            r"^the prompt has 24 tokens, but the model's context \(block_size\) has 24 for prompt and",
        ),
        ([[1], [1] * 30], "^prompt 2 has 30 tokens, .* shorten the prompt$"),
        ([[1], []], "^prompt 2 is empty; give at least one character$"),
        (
            [[1, VOCAB]],
            "^the prompt has the id 64, but the model has only the ids below 64; take this token out",
        ),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_one_message(model, prompts, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompts, 4)


def test_weights_that_are_not_finite_give_no_text():
    model = built()
    with torch.no_grad():
        model.embed.weight[5, 0] = float("nan")
    with pytest.raises(UserError, match="values that are not finite"):
        generate(model, [[5]], 4)


# --- how a token is chosen ---


def shares(logits, choice, count=10_000) -> list[float]:
    """The share of each id, for draws that lie evenly in [0, 1)."""
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = choice.choose(torch.tensor(logits).expand(count, -1), draws)
    return (torch.bincount(tokens, minlength=len(logits)) / count).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_are_divided_by_the_temperature(temperature):
    logits = [0.0, 2.0, 1.0]
    expected = (torch.tensor(logits) / temperature).softmax(0).tolist()
    assert shares(logits, Choice(temperature)) == pytest.approx(expected, abs=2e-4)
    assert shares(logits, Choice(temperature, top_k=3, top_p=1.0)) == pytest.approx(expected, abs=2e-4)


def test_a_low_temperature_takes_the_most_likely_token_and_a_high_one_takes_all_alike():
    assert shares([0.0, 2.0, 1.0], Choice(0.02)) == [0, 1, 0]
    assert shares([0.0, 2.0, 1.0], Choice(1000.0)) == pytest.approx([1 / 3] * 3, abs=1e-3)
    assert shares([0.0, 2.0, 1.0], Choice(0.0)) == [0, 1, 0]


def test_top_k_leaves_the_k_most_likely_tokens():
    found = shares([0.0, 2.0, 1.0, -1.0], Choice(5.0, top_k=2))
    assert [share > 0 for share in found] == [False, True, True, False]
    assert all(share > 0 for share in shares([0.0, 2.0, 1.0, -1.0], Choice(5.0, top_k=9)))


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.6, 0.9, 0.999])
def test_top_p_leaves_the_tokens_that_transformers_leaves(top_k, top_p):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    logits = [0.3, 2.0, -1.0, 1.1, 0.0]
    expected = torch.tensor([logits]) / 1.3
    if top_k:
        expected = transformers.TopKLogitsWarper(top_k)(None, expected)
    expected = transformers.TopPLogitsWarper(top_p)(None, expected)[0].softmax(0)
    assert 0 < (expected == 0).sum() or top_p == 0.999
    assert shares(logits, Choice(1.3, top_k, top_p)) == pytest.approx(expected.tolist(), abs=2e-4)


def test_the_first_and_the_last_draw_take_tokens_that_stay():
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]]).expand(2, -1)
    draws = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert Choice(1.0).choose(logits, draws).tolist() == [1, 2]
    assert Choice(1.0, top_p=0.5).choose(logits, draws).tolist() == [2, 2]
