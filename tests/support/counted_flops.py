"""Counts the FLOPs of each model once a process: every run does so, in about half of a tiny run's time."""

import copy


def once_a_model(count_flops):
    """training.records.utilization.count_flops, whose result depends on the model alone."""
    counts = {}

    def count(config) -> dict:
        model = config.model_config()  # it has the block_size, too
        if model not in counts:
            counts[model] = count_flops(config)
        return copy.deepcopy(counts[model])

    return count
