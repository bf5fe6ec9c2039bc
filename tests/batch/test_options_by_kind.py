"""CONTRIBUTING's table of what can be combined: its cells are what the code accepts and refuses."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlx_mtp
from mlx_mtp.batch.drivers import is_lone
from mlx_mtp.cache.pool import Pool

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
ROWS = re.findall(
    r"^\| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.partition("### What can be combined?")[2], re.MULTILINE
)


def lone(cache) -> bool:
    return is_lone(SimpleNamespace(cache=cache, remaining=50))


def cell(begin: str, column: int) -> str:
    """Return the cell of the row whose first cell begins so."""
    (row,) = [row for row in ROWS if row[0].startswith(begin)]
    return row[column]


@pytest.mark.parametrize("layout", [{}, {"max_kv_size": 24}, {"kv_bits": 8}, {"kv_bits": 4, "mtp_kv_bits": 8}])
def test_caches_that_a_pool_holds(tiny_models, layout):
    model, _ = tiny_models(0, head_dim=32)
    cache = mlx_mtp.make_prompt_cache(model, **layout)
    assert not lone(cache)
    assert len(Pool(cache).layers) == len(cache.layers)
    assert cell("caches of keys and values", 2) == "yes, in a pool"


def test_sequences_that_decode_alone(tiny_models):
    model, _ = tiny_models(0, head_dim=32)
    assert lone(mlx_mtp.make_prompt_cache(model, kv_bits=8, quantized_kv_start=10))
    assert lone(SimpleNamespace(is_mlx_lm=True, quantizing=None, offset=0))
    assert cell("`quantized_kv_start`", 2) == "yes, decoded alone"


def test_what_ranks_refuse(tiny_models, monkeypatch):
    model, _ = tiny_models(0)
    monkeypatch.setattr(model.runtime, "ranks", SimpleNamespace(size=2, rank=0))
    with pytest.raises(ValueError, match=r"^model: split over 2 ranks; a batch needs one rank"):
        mlx_mtp.BatchGenerator(model)
    assert cell("several sequences", 3) == "no: refused by `BatchGenerator`"
    assert cell("adapters", 3) == "no: refused by `load`"  # tests/ranks/test_split.py


@pytest.mark.parametrize(
    "options", [{"draft_p_min": 0.5}, {"compile_cycles": True}, {"adaptive": True}, {"logprobs": True}]
)
def test_options_of_one_and_of_several(tiny_models, options):
    """Both accept them and yield the same tokens."""
    model, _ = tiny_models(0)
    alone = [token for token, *_ in mlx_mtp.generate_step([1, 2, 3], model, max_tokens=8, **options)]
    batch = mlx_mtp.BatchGenerator(model, **options)
    batch.insert([[1, 2, 3], [2, 1]], [8, 8])
    found = {0: [], 1: []}
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found[0] == alone
    assert all(cell(begin, column).startswith("yes") for begin in ("`adaptive`", "grammar") for column in (1, 2, 3))
