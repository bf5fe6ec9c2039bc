"""Fixtures of GGUF files: one of Step-3.5, and a cache of transcoded files for one test."""

import gguf_files
import pytest
from gguf_samples import checkpoint, written


@pytest.fixture
def cache(own_cache):
    return own_cache / "gguf"


@pytest.fixture(scope="session")
def step(tmp_path_factory):
    """(checkpoint directory, config, its converted tensors, GGUF file) of Step-3.5, in Q8_0."""
    folder = tmp_path_factory.mktemp("step")
    directory, config, weights = checkpoint("step3p5", folder / "hub")
    file = written("step3p5", folder / "x.gguf", config, weights, gguf_files.KINDS.Q8_0)
    return directory, config, gguf_files.tensors_of(config, weights), file
