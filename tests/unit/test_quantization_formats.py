"""Rounding to E2M1, E4M3, E5M2, E8M0 and bf16, over all bf16 numbers; and random bits for it: Philox's known
answers, the same bits for any division of the work, and none shared."""

import itertools

import pytest
import torch
from support.tensors import E4M3, E5M2, random

from ops.quantization.formats import round_to_bf16_stochastically, to_float8
from ops.quantization.random_bits import bf16_stochastically, philox, random_bits, random_key
from recipes.formats.numbers import (
    divided,
    e2m1_codes,
    e2m1_values,
    e8m0_values,
    round_to_e2m1,
    round_to_e2m1_stochastically,
    round_up_to_e8m0,
)

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7
EVERY_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NUMBERS = EVERY_BF16[~EVERY_BF16.isnan()]
FINITE = EVERY_BF16[EVERY_BF16.isfinite()]

# --- E2M1 ---


def nearest_code(x):
    """The nearest of the 8 magnitudes by trying all, and of two equally near ones the even code."""
    distances = (x.double().abs().clamp(max=100)[:, None] - torch.tensor(E2M1_MAGNITUDES).double()).abs()
    is_odd = torch.arange(8) % 2
    candidates = distances == distances.amin(1, keepdim=True)
    best = (candidates * (2 - is_odd)).argmax(1)
    return (best + 8 * x.signbit()).to(torch.uint8)


def test_every_bf16_number_becomes_the_nearest_e2m1_number():
    assert len(NUMBERS) == 2**16 - 254
    assert torch.equal(e2m1_codes(round_to_e2m1(NUMBERS)), nearest_code(NUMBERS))


def test_nan_becomes_the_largest_e2m1_number_and_inf_saturates():
    x = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    assert round_to_e2m1(x).tolist() == [6, 6, 6, -6]
    assert round_to_e2m1_stochastically(x, torch.full((4,), 255)).tolist() == [6, 6, 6, -6]


def test_codes_are_read_back():
    codes = torch.arange(16, dtype=torch.uint8)
    assert e2m1_values(codes).tolist() == [*E2M1_MAGNITUDES, *(-number for number in E2M1_MAGNITUDES)]
    assert torch.equal(e2m1_codes(e2m1_values(codes)), codes)


@pytest.mark.parametrize("bits", [0, 1, 77, 128, 255])
def test_stochastic_rounding_of_every_bf16_number_equals_the_formula_in_fp64(bits):
    magnitude = FINITE.double().abs().clamp(max=6)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    moved = magnitude + bits / 256 * step
    moved_step = torch.where(moved < 2, 0.5, torch.where(moved < 4, 1.0, 2.0))
    expected = ((moved / moved_step).floor() * moved_step).clamp(max=6).copysign(FINITE.double())
    ours = round_to_e2m1_stochastically(FINITE, torch.full(FINITE.shape, bits))
    assert torch.equal(ours.double(), expected)


# --- E4M3, E5M2, E8M0 ---


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448), (E5M2, 57344)])
def test_every_bf16_number_becomes_the_nearest_fp8_number_or_saturates_and_nan_stays(dtype, largest):
    x = torch.tensor([1e30, -1e30, torch.inf, -torch.inf])
    assert to_float8(x, dtype).float().tolist() == [largest, -largest, largest, -largest]
    assert to_float8(torch.tensor([torch.nan]), dtype).float().isnan().all()
    all_codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = all_codes[all_codes.isfinite()].unique().double()
    x = FINITE.double().clamp(-values[-1], values[-1])
    above = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    nearest = torch.minimum((values[above] - x).abs(), (x - values[above - 1]).abs())
    assert torch.equal((to_float8(FINITE, dtype).double() - x).abs(), nearest)


def test_e8m0_rounds_up_to_a_power_of_two_and_is_read_back_exactly():
    x = torch.tensor([1.0, 1.0000001, 2.0, 3.0, 2.0**-126, 2.0**-127, 2.0**-130, 0.0, 2.0**127, 3e38])
    assert round_up_to_e8m0(x).tolist() == [127, 128, 128, 129, 1, 0, 0, 0, 254, 254]
    others = torch.tensor([2.0**-127 * 1.5, torch.inf, torch.nan])
    assert round_up_to_e8m0(others).tolist() == [1, 254, 255]
    values = e8m0_values(torch.arange(256, dtype=torch.uint8))
    assert torch.equal(values[:255].double(), 2.0 ** torch.arange(-127, 128).double())
    assert values[255].isnan()
    assert torch.equal(round_up_to_e8m0(values[:255]), torch.arange(255, dtype=torch.uint8))


# --- bf16 ---


@pytest.mark.parametrize("bits", [0, 1, 32768, 65535])
def test_what_bf16_holds_stays_whatever_the_bits_are_and_nan_stays_nan(bits):
    given = torch.full(NUMBERS.shape, bits, dtype=torch.int32)
    rounded = round_to_bf16_stochastically(NUMBERS.float(), given)
    assert torch.equal(rounded.view(torch.int16), NUMBERS.view(torch.int16))
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    assert round_to_bf16_stochastically(nans.view(torch.float32), given[:5]).isnan().all()


def test_every_fraction_is_rounded_away_from_0_by_as_many_of_the_65536_bits():
    bits = torch.arange(2**16, dtype=torch.int32)
    for sign, fraction in ((1, 0), (1, 1), (-1, 12345), (1, 32768), (-1, 65535)):
        x = (torch.tensor(0x3F800000 + fraction, dtype=torch.int32)).view(torch.float32) * sign
        rounded = round_to_bf16_stochastically(x.expand(2**16).contiguous(), bits)
        assert (rounded.abs() > 1).sum() == fraction and (rounded * sign >= 1).all()


def test_above_the_largest_number_of_bf16_is_inf():
    x = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    assert round_to_bf16_stochastically(x, torch.ones(2, dtype=torch.int32)).isinf().all()
    down = round_to_bf16_stochastically(x, torch.zeros(2, dtype=torch.int32))
    assert down.float().abs().eq(torch.finfo(torch.bfloat16).max).all()


@pytest.mark.parametrize(
    ("function", "dtype", "bits", "message"),
    [
        (round_to_e2m1_stochastically, torch.float32, 3, "one number of random bits for each element"),
        (round_to_bf16_stochastically, torch.float32, 3, "bits for each element"),
        (round_to_bf16_stochastically, torch.bfloat16, 2, "needs fp32"),
    ],
)
def test_stochastic_rounding_needs_bits_for_each_element_and_to_bf16_fp32(function, dtype, bits, message):
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(2, dtype=dtype), torch.zeros(bits))


def test_a_quotient_is_rounded_once():
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    assert torch.equal(divided(x, 2688), (x.double() / 2688).float())


# --- random bits ---

FULL = 0xFFFFFFFF
STEP = {"seed": 1337, "iteration": 20, "micro_step": 3, "tensor": 17}
KEY = random_key(**STEP)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_answers_that_random123_publishes(counter, key, answer):
    """kat_vectors of Random123, philox4x32 10."""
    words = philox(tuple(torch.tensor([word]) for word in counter), tuple(map(torch.tensor, key)))
    assert tuple(word.item() for word in words) == answer


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_any_chunk_has_the_bits_of_the_whole(bits):
    whole = random_bits(1000, KEY, bits=bits)
    for start, end in [(0, 1), (0, 1000), (1, 17), (15, 16), (16, 48), (333, 999), (999, 1000), (5, 5)]:
        assert torch.equal(random_bits(end - start, KEY, bits=bits, start=start), whole[start:end])


def test_the_bits_of_an_element_are_those_of_its_place_in_its_counter():
    """Element 37 of 8 bits: counter 2, word 1, byte 1."""
    words = philox(tuple(torch.tensor([word]) for word in (2, 17, 3, 20)), tuple(torch.tensor([1337, 0])))
    assert random_bits(1, KEY, start=37).item() == words[1].item() >> 8 & 255
    assert random_bits(1, KEY, bits=16, start=21).item() == words[2].item() >> 16
    assert random_bits(1, KEY, bits=32, start=9).item() & FULL == words[1].item()


def test_elements_beyond_32_bits_and_seeds_of_63_bits_count_in_full():
    far = 2**35 + 5
    assert not torch.equal(random_bits(64, KEY, start=far), random_bits(64, KEY, start=5))
    low, high = (random_key(**{**STEP, "seed": seed}) for seed in (7, 7 + 2**62))
    assert not torch.equal(random_bits(64, low), random_bits(64, high))


def test_no_two_seeds_iterations_micro_steps_tensors_or_streams_share_bits():
    keys = [(random_key(*numbers), 0) for numbers in itertools.product(range(4), repeat=4)]
    keys += [(random_key(1, tensor=n), stream) for n in (0, 1, 2**30 - 1) for stream in range(4)]
    rows = [tuple(random_bits(16, key, stream=stream).tolist()) for key, stream in keys]
    assert len(set(rows)) == 4**4 + 3 * 4 - 2  # tensors 0 and 1 of seed 1 are in both lists


def test_numbers_are_uniform_and_those_of_two_tensors_uncorrelated():
    n = 2**16
    a, b = (random_bits(n, random_key(**{**STEP, "tensor": tensor})).double() for tensor in (1, 2))
    counts = torch.bincount(a.long(), minlength=256)
    chi_squared = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 170 < chi_squared < 350  # 255 degrees of freedom: 255 +- 4 x 22.6
    correlation = torch.corrcoef(torch.stack((a, b, a.roll(1), a.roll(16))))
    assert (correlation - torch.eye(4)).abs().max() < 4 / n**0.5


@pytest.mark.parametrize(("bits", "largest"), [(8, 255), (16, 65535)])
def test_numbers_fill_their_range(bits, largest):
    numbers = random_bits(2**20, KEY, bits=bits)
    assert numbers.dtype == torch.int32
    assert numbers.min() == 0 and numbers.max() == largest


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"iteration": 2**32}, r"iteration=4294967296 is not from 0 to 2\^32 - 1"),
        ({"tensor": -1}, "tensor=-1 is not from 0"),
        ({"tensor": 2**30}, r"from 0 to 2\^30 - 1"),
        ({"seed": 2**63}, r"from 0 to 2\^63 - 1"),
        ({"start": -1}, "elements -1 to 15 are not within"),
        ({"start": 2**36}, "are not within 0 to 68719476736"),
    ],
)
def test_numbers_that_do_not_fit_are_an_error(changed, message):
    numbers = {"start": 0, **STEP, **changed}
    with pytest.raises(ValueError, match=message):
        random_bits(16, start=numbers.pop("start"), key=random_key(**numbers))


def test_a_key_is_read_at_each_call_and_never_by_the_host():
    """A captured CUDA graph has its address; on the meta device, a look at its numbers would be an error."""
    key = KEY.clone()
    first = random_bits(64, key)
    key[1] += 1
    assert torch.equal(random_bits(64, key), random_bits(64, random_key(**{**STEP, "iteration": 21})))
    assert not torch.equal(random_bits(64, key), first)
    assert random_bits(64, key.to("meta")).shape == (64,)


# --- stochastic rounding to bf16 ---


def test_rounded_numbers_are_one_of_both_neighbors_and_right_on_average():
    """4,096 draws of each of 64 numbers; a draw is x + step with probability p, so its deviation is known."""
    draws, x = 4096, random(64) * 10.0 ** torch.linspace(-30, 30, 64)
    rounded = bf16_stochastically(x.expand(draws, 64).contiguous(), KEY).double()
    below = (x.view(torch.int32) & -65536).view(torch.float32).double()
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32).double()
    assert ((rounded == below) | (rounded == above)).all()
    p = (x.double() - below) / (above - below)
    bound = 4 * (p * (1 - p) / draws).sqrt() * (above - below).abs()
    assert ((rounded.mean(0) - x.double()).abs() <= bound).all()
