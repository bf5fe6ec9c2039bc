"""Damaged checkpoints, converted: what loads as its source does, or one line and nothing else."""

import os
import shutil
import warnings

import damage
import mlx.core as mx
import pytest
from command_line import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from test_fuzz_checkpoint import Bases, assert_orderly, tree

import mlx_mtp

LONG = os.environ.get("MLX_MTP_SWEEP") == "1"
EXAMPLES = int(os.environ.get("MLX_MTP_EXAMPLES", 1000)) if LONG else 25
BASES = ["step3p5", "sharded", "qwen3_5", "mimo"]
COMMANDS = ["--mlx-path new", "--mlx-path new --mtp-layout shards", "--mlx-path new -q --q-group-size 32"]
COMMANDS += ["--mlx-path new -d --dtype float16", "--mtp-only --mtp-path new.safetensors"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return Bases((name, damage.build(name, tmp_path_factory.mktemp(name))) for name in BASES)


def parameters(path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(tree_flatten(mlx_mtp.load_model(path, lazy=True).parameters()))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name], equal_nan=True) for name in a)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not LONG, suppress_health_check=list(HealthCheck))
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
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        result = call("convert", "--hf-path", path, *flags)
    assert_orderly(result, "convert")
    if result.returncode:
        assert tree(directory) == before, done
    elif flags[0] == "--mtp-only":
        assert mx.load(str(directory / "new.safetensors")), done
    else:
        found = parameters(directory / "new")
        assert {"-q", "-d"} & set(flags) or same(found, parameters(path)), done
    shutil.rmtree(directory)
