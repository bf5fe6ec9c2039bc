"""Fixtures: tiny checkpoints on disk, loaded once per session."""

import mlx.core as mx
import pytest
import tiny

import mlx_mtp


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """(seed, config changes) -> (our model, mlx-lm's plain model) of one random checkpoint."""
    built = {}

    def build(seed: int = 0, **changes):
        key = (seed, repr(sorted(changes.items())))
        if key not in built:
            config = {**tiny.CONFIG, **changes}
            weights = tiny.random_weights(config, seed=seed)
            path = tiny.save(tmp_path_factory.mktemp("checkpoint"), config, weights)
            built[key] = mlx_mtp.load_model(path), tiny.plain_model(config, weights)
        return built[key]

    return build


def pytest_collection_modifyitems(items):
    if mx.metal.is_available():
        return
    skip = pytest.mark.skip(reason="needs a Mac GPU; this machine has no Metal")
    for item in items:
        if "metal" in item.keywords:
            item.add_marker(skip)
