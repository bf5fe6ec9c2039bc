"""Recorded steps end behind every row that they may write, at every edge of the buffers."""

import itertools
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
from plans import Listed, follow

import mlx_mtp
from mlx_mtp.cache import growing
from mlx_mtp.decoding.drafters.drafter import Drafter, Frame
from mlx_mtp.decoding.drafters.lookup import Lookup
from mlx_mtp.decoding.recordable import recordable
from mlx_mtp.decoding.run import Drafts, Run
from mlx_mtp.tuning.plan import Plan

EDGES = (256, 2048, 4096, 8192)


class Reading(Drafter):
    """Drafts nothing; pads runs of up to 16 rows to 4 or 16 rows."""

    def __init__(self):
        self.row_counts = {"": (4, 16)}


class Buffers:
    """Caches with room for a number of positions, a multiple of 256."""

    def __init__(self, places):
        self.places = places

    @property
    def stepped(self):
        return [self]

    def hold(self, rows: int) -> None:
        self.places = max(self.places, -(-rows // 256) * 256)


@pytest.mark.parametrize("drafter", [None, Reading()])
def test_a_step_ends_behind_its_last_row(drafter):
    """The newest token is after 0 to size - 1 accepted drafts; k drafts follow it.

    The end is that of buffers of up to 4,096 positions, or the next multiple of 2,048, not that of larger buffers.
    """
    for edge, size, k, places in itertools.product(EDGES, (1, 2, 4, 16), (0, 1, 3, 15), (0, 3072, 20480)):
        for base in range(edge - 40, edge + 2, 1 if places == 0 else 7):
            cache, tokens = Buffers(places), mx.zeros((1, size), mx.int32)
            run = Run(mx.zeros((1, size, 2)), tokens, mx.zeros(1, mx.int32))
            frame, given = recordable(Frame(SimpleNamespace(), cache, Plan("lookup", k), drafter, (), base), run)
            end = frame.base + given.size + k + 1
            assert end >= base + size + k + 1
            assert cache.places >= base + size + k + 1
            assert given.size == ((4 if size <= 4 else 16) if drafter else 1)
            assert end == cache.places if cache.places <= 4096 else end < base + 16 + k + 1 + 2048


@pytest.mark.parametrize("n", [45, 49, 52])
def test_no_row_is_written_behind_a_buffer(tmp_path, monkeypatch, n, recorded_at_once):
    """Copies of 15 drafts, all accepted, up to the end of a buffer of 64 positions."""
    mx.disable_compile()  # each cycle calls the functions that are recorded; every test's setup enables it again
    monkeypatch.setattr(growing, "STEP", 32)
    model, prompt = mlx_mtp.load_model(families.build("glm4_moe_untied", tmp_path)[0]), [1, 2, 3, 0, 2, 2, 1, 3, 0, 1]
    how = {"max_tokens": n, "num_draft_tokens": 0}
    text = prompt + [token for token, *_ in mlx_mtp.generate_step(prompt, model, **how)]
    given, real, written = mx.array(text + [0] * 32, mx.int32), mx.slice_update, []

    def propose(self, frame, run, k):
        at = mx.array(frame.cache.layers[0].offset).reshape(-1, 1)
        return Drafts(mx.take(given, at + 1 + mx.arange(k)))

    def slice_update(array, update, start, axes):
        written.append(start.item() + update.shape[axes[0]])
        assert written[-1] <= array.shape[axes[0]]
        return real(array, update, start, axes)

    monkeypatch.setattr(Lookup, "propose", propose)
    monkeypatch.setattr(mx, "slice_update", slice_update)
    follow(monkeypatch, Listed([Plan("lookup", 15)]))
    how |= {"num_draft_tokens": 1, "prompt_lookup": True, "compile_cycles": True}
    assert prompt + [token for token, *_ in mlx_mtp.generate_step(prompt, model, **how)] == text
    assert max(written) > n
