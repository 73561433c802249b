"""Random bits: Philox's known answers, the same bits for any division of the work, and none shared."""

import itertools

import pytest
import torch

from ops.quantization.random_bits import philox, random_bits

FULL = 0xFFFFFFFF
STEP = {"seed": 1337, "iteration": 20, "micro_step": 3, "tensor": 17}


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
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(word.item() for word in words) == answer


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_any_chunk_has_the_bits_of_the_whole(bits):
    whole = random_bits(1000, **STEP, bits=bits)
    for start, end in [(0, 1), (0, 1000), (1, 17), (15, 16), (16, 48), (333, 999), (999, 1000), (5, 5)]:
        assert torch.equal(random_bits(end - start, **STEP, bits=bits, start=start), whole[start:end])


def test_the_bits_of_an_element_are_those_of_its_place_in_its_counter():
    """Element 37 of 8 bits: counter 2, word 1, byte 1."""
    words = philox(tuple(torch.tensor([word]) for word in (2, 17, 3, 20)), (1337, 0))
    assert random_bits(1, **STEP, start=37).item() == words[1].item() >> 8 & 255
    assert random_bits(1, **STEP, bits=16, start=21).item() == words[2].item() >> 16
    assert random_bits(1, **STEP, bits=32, start=9).item() & FULL == words[1].item()


def test_elements_beyond_32_bits_have_bits_of_their_own():
    far = 2**35 + 5
    assert not torch.equal(random_bits(64, **STEP, start=far), random_bits(64, **STEP, start=5))


def test_numbers_on_the_device_give_the_same_bits():
    tensors = {name: torch.tensor(number) for name, number in STEP.items()}
    assert torch.equal(random_bits(100, **tensors), random_bits(100, **STEP))


def test_a_64_bit_seed_counts_in_full():
    low, high = ({**STEP, "seed": seed} for seed in (7, 7 + 2**63))
    assert not torch.equal(random_bits(64, **low), random_bits(64, **high))


def test_no_two_seeds_iterations_micro_steps_or_tensors_share_bits():
    names = ("seed", "iteration", "micro_step", "tensor")
    rows = [
        tuple(random_bits(16, **dict(zip(names, numbers, strict=True))).tolist())
        for numbers in itertools.product(range(4), repeat=4)
    ]
    assert len(set(rows)) == 4**4


def test_numbers_are_uniform_and_those_of_two_tensors_uncorrelated():
    n = 2**16
    a, b = (random_bits(n, **{**STEP, "tensor": tensor}).double() for tensor in (1, 2))
    counts = torch.bincount(a.long(), minlength=256)
    chi_squared = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 170 < chi_squared < 350  # 255 degrees of freedom: 255 +- 4 x 22.6
    correlation = torch.corrcoef(torch.stack((a, b, a.roll(1), a.roll(16))))
    assert (correlation - torch.eye(4)).abs().max() < 4 / n**0.5


@pytest.mark.parametrize(("bits", "largest"), [(8, 255), (16, 65535)])
def test_numbers_fill_their_range(bits, largest):
    numbers = random_bits(2**20, **STEP, bits=bits)
    assert numbers.dtype == torch.int32
    assert numbers.min() == 0 and numbers.max() == largest


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 4}, "8, 16 or 32 bits, not 4"),
        ({"iteration": 2**32}, r"iteration=4294967296 is not from 0 to 2\^32 - 1"),
        ({"tensor": -1}, "tensor=-1 is not from 0"),
        ({"seed": 2**64}, r"from 0 to 2\^64 - 1"),
        ({"start": -1}, "elements -1 to 15 are not within"),
        ({"start": 2**36}, "are not within 0 to 68719476736"),
    ],
)
def test_numbers_that_do_not_fit_are_errors(changed, message):
    with pytest.raises(ValueError, match=message):
        random_bits(16, **{**STEP, **changed})
