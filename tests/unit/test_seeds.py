"""Random streams: each has a seed of its own, and those that decide which samples a run sees never change."""

import itertools

import pytest
from support.helpers import TINY

import model
import model_builder
from training.configuration.keys import TrainConfig
from training.configuration.seeds import (
    DROPOUT,
    EPOCH,
    EVALUATION,
    LOW_PRECISION,
    MIXTURE_BLOCK,
    SAMPLING,
    WEIGHT_ROUNDING,
    stream_seed,
)

PURPOSES = (EPOCH, EVALUATION, DROPOUT, MIXTURE_BLOCK, LOW_PRECISION, WEIGHT_ROUNDING, SAMPLING)


def test_no_purpose_rank_epoch_or_block_shares_a_seed():
    """16 ranks, 16 epochs, 16 blocks and the evaluation of 3 runs, and the weights, which model.py seeds."""
    for one, other in itertools.combinations(PURPOSES, 2):
        assert one.stop <= other.start or other.stop <= one.start
    streams = [(purpose, number) for purpose in PURPOSES for number in range(min(16, len(purpose)))]
    seeds = [stream_seed(seed, *stream) for seed in (0, 1, 1337) for stream in streams]
    weights = model_builder.build_model(TrainConfig(**TINY).model_config()).named_parameters()
    seeds += [model._name_seed(seed, name) for name, _ in weights for seed in (0, 1, 1337)]
    assert len(set(seeds)) == len(seeds) > 3 * (3 * 16 + 1)


@pytest.mark.parametrize(("purpose", "number"), [(EVALUATION, 1), (EPOCH, len(EPOCH)), (DROPOUT, -1)])
def test_number_of_another_purpose_is_out_of_reach(purpose, number):
    with pytest.raises(AssertionError):
        stream_seed(0, purpose, number)


def test_order_of_the_data_keeps_its_seeds():
    """Runs that exist go on with the samples that were left: these numbers must never change."""
    assert stream_seed(1337, EPOCH, 0) == 13582406009521608908
    assert stream_seed(1337, EPOCH, 3) == 12033480821423410592
    assert stream_seed(1337, EVALUATION) == 11787149519771401653
    assert stream_seed(1337, MIXTURE_BLOCK, 5) == 6347850421643909034
