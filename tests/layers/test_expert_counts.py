"""Count a model's experts, by which the cost of a row grows."""

import families
import pytest

import mlx_mtp
from mlx_mtp.decoding.policy import learned
from mlx_mtp.layers.experts import expert_counts


@pytest.mark.parametrize(
    ("name", "counts"), [("mimo", None), ("glm4_moe", (4, 2)), ("nemotron_h_latent", (6, 2)), ("qwen3_next", (4, 2))]
)
def test_the_counts_are_those_of_the_config(tmp_path, name, counts):
    model = mlx_mtp.load_model(families.build(name, tmp_path)[0])
    assert expert_counts(model.modules()) == counts
    experts, used = counts or (0, 1)
    growth = learned(model).growth
    unused = 1 - used / experts if experts else 1.0
    assert growth(3) / growth(1) == pytest.approx(1 + unused + unused**2)
