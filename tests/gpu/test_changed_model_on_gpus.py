"""A model that somebody changes trains alike in each division of one GPU and of two, compiled, in bf16."""

import pytest
from support.changed_models import EXAMPLES, LAYER, OTHERS, TORCHS, train_changed
from support.gpu_runs import TWO_GPUS
from support.helpers import SMALL, last_run, make_dataset

pytestmark = pytest.mark.gpu

NAMES = [TORCHS, LAYER, "each block twice", "frozen embedding", "beside the fused loss"]
NAMES += ["a norm that is not used"]


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=TWO_GPUS)])
def test_a_changed_model_trains_alike_in_each_division(tmp_path, most):
    assert set(NAMES) <= {*EXAMPLES, *OTHERS}
    dataset = make_dataset(tmp_path / "tokens", train_tokens=200_000)
    settings = {**SMALL, "dataset": str(dataset), "max_iters": 6, "grad_clip": 0.5, "learning_rate": 1e-3}
    outs = train_changed(tmp_path, NAMES, settings, most)
    for (name, *division), out in outs.items():
        rows, alone = (last_run(path)["training_iterations"] for path in (out, outs[name, "alone", 8]))
        for row, wanted in zip(rows, alone, strict=True):
            assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-2), (name, division)
            norms = (one["gradients"]["global_norm"] for one in (row, wanted))
            assert next(norms) == pytest.approx(next(norms), rel=4e-2), (name, division)
