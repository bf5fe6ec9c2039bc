"""Convert damaged checkpoints: the result loads as its source does, or there is a one-line error and no files."""

import shutil
import warnings

import damage
import mlx.core as mx
import pytest
from fuzzing import Files, assert_orderly, profile, tree, watched
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import mlx_mtp

BASES = ["step3p5", "sharded", "qwen3_5", "mimo"]
COMMANDS = ["--mlx-path new", "--mlx-path new --mtp-layout shards", "--mlx-path new -q --q-group-size 32"]
COMMANDS += ["--mlx-path new -d --dtype float16", "--mtp-only --mtp-path new.safetensors"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return Files((name, damage.build(name, tmp_path_factory.mktemp(name))) for name in BASES)


def parameters(path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(tree_flatten(mlx_mtp.load_model(path, lazy=True).parameters()))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name], equal_nan=True) for name in a)


@profile(9)
@given(data=st.data())
def test_a_damaged_source(bases, tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("case")
    files, flags = dict(bases[data.draw(st.sampled_from(BASES))]), data.draw(st.sampled_from(COMMANDS)).split()
    done = [
        damage.KINDS[kind](data.draw, files)
        for kind in data.draw(st.lists(st.sampled_from(sorted(damage.KINDS)), min_size=1, max_size=2))
    ]
    path = damage.put(directory / "checkpoint", files)
    before = tree(directory)
    result = watched(directory, ["convert", "--hf-path", str(path), *flags], done)
    assert_orderly(result)
    if result.returncode:
        assert tree(directory) == before, done
    elif flags[0] == "--mtp-only":
        assert mx.load(str(directory / "new.safetensors")), done
    else:
        found = parameters(directory / "new")
        assert {"-q", "-d"} & set(flags) or same(found, parameters(path)), done
    shutil.rmtree(directory)
