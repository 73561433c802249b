"""Random bits: Philox's known answers, the same bits for any division of the work, and none shared."""

import itertools

import pytest
import torch
from support.tensors import random

from ops.quantization.random_bits import bf16_stochastically, philox, random_bits, random_key

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
