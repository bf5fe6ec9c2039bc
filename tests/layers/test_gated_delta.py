"""Check rollback of gated-delta layers that run three kernels between their projections, and their saved caches."""

import itertools

import families
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gated_cases import same
from metal_cases import linux_only
from mlx_lm.models import qwen3_5
from mlx_lm.models.gated_delta import gated_delta_ops
from qwen import QWEN_TEXT
from stock_ops import stock_ops
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.recurrent import RecurrentCache
from mlx_mtp.cache.slots import PooledState
from mlx_mtp.layers.gated_delta import Recurrence, row_by_row
from mlx_mtp.models.qwen3_5 import GatedDeltaNet
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.kernel_trials import decide

ALL = frozenset(range(1, 100))
KERNELS = ["delta_inputs", "gated_delta_verify", "gated_norm"]
HEADS = {"linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_value_head_dim": 8}


class Fed(GatedDeltaNet):
    """A layer that takes the outputs of its input projections and returns the input of its output projection."""

    def __init__(self, key_dim: int, dtype: mx.Dtype):
        super().__init__(qwen3_5.TextModelArgs.from_dict({**QWEN_TEXT, **HEADS, "linear_key_head_dim": key_dim}))
        self.set_dtype(dtype)
        self.A_log, self.out_proj = self.A_log - 2, nn.Identity()  # a slowly decaying state
        self.widths = np.cumsum([self.conv_dim, self.value_dim, self.num_v_heads]).tolist()

    def inputs(self, x):
        qkv, z, b, a = mx.split(x, self.widths, axis=-1)
        return qkv, z.reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim), b, a

    def rows(self, count: int) -> mx.array:
        return mx.random.normal((1, count, self.widths[-1] + self.num_v_heads)).astype(self.conv1d.weight.dtype)


def roll(layer, cache, x, *, start: int, until: int, seed: int, fused=lambda: True):
    """Return outputs of rows from `start` on, from verifies of which random parts are accepted, and the position
    reached.

    The rejected rows of each verify differ from the rows that follow.
    """
    rng, position, outputs = np.random.default_rng(seed), start, []
    cache.seek(mx.array([position]), position)
    counts = set()
    while position < until:
        T = int(rng.integers(1, 7))
        kept = min(int(rng.integers(0, T + 1)), x.shape[1] - position)
        wrong = mx.flip(x, axis=1)[:, : T - kept] * 2
        layer.verify_rows = ALL if fused() else frozenset()
        y = layer(mx.concatenate([x[:, position : position + kept], wrong], axis=1), None, cache)
        outputs.append(y[:, :kept])
        position += kept
        cache.seek(mx.array([position]), position + T - kept)
        counts.add("none" if kept == 0 else "all" if kept == T else "some")
    assert counts == {"none", "some", "all"}
    return mx.concatenate(outputs, axis=1), position


@linux_only
@pytest.mark.parametrize(
    ("key_dim", "dtype", "start"),
    sampled([(128, mx.bfloat16, 5)], [(128, mx.bfloat16, 5), (32, mx.float16, 0), (32, mx.float32, 5)]),
)
def test_verifies_have_the_bits_of_single_rows(key_dim, dtype, start):
    """After a prompt of `start` rows: the bits of row-by-row steps, also for a prefill after a tape."""
    layer = Fed(key_dim, dtype)
    x, rolled, single = layer.rows(40), RecurrentCache(), RecurrentCache()
    with emulator.emulated(emulator.Options(fp_contract="fast", traffic=False)) as launches:
        layer.verify_rows = ALL
        want = mx.concatenate([layer(x[:, t : t + 1], None, single) for t in range(40)], axis=1)
        assert [launch.kernel for launch in launches] == KERNELS * 40
        assert len(single.parts) == 3
        if start:
            assert same(layer(x[:, :start], None, rolled), want[:, :start])
        y, end = roll(layer, rolled, x, start=start, until=30, seed=start)
        assert same(y, want[:, start:end])
        assert rolled.tape
        rolled.seek(end, end)
        assert same(layer(x[:, end:], None, rolled), want[:, end:])
    assert {launch.kernel for launch in launches} == set(KERNELS)
    assert all(map(same, rolled.parts[1:], single.parts[1:]))
    assert len(rolled.parts) == 3


@linux_only
def test_sequences_share_the_launches():
    """One sequence follows a prompt, the other also a verify; then they accept different parts of a verify."""
    layer, caches, pool = Fed(128, mx.bfloat16), [RecurrentCache(), RecurrentCache()], PooledState()
    layer.verify_rows, x = ALL, mx.concatenate([layer.rows(12), layer.rows(12)])
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        for cache, row in zip(caches, x, strict=True):
            layer(row[None, :3], None, cache)
            cache.seek(mx.array([3]), 3)
        layer(x[1:, 3:6], None, caches[1])
        caches[1].seek(mx.array([4]), 6)
        pool.regroup(mx.array([0, 1]), caches)
        pool.offset = mx.array([3, 4])
        for rows, kept in ((slice(4, 7), mx.array([3, 1])), (slice(7, 9), mx.array([1, 2]))):
            before, start = len(launches), pool.offset
            y = layer(x[:, rows], None, pool)
            assert [launch.kernel for launch in launches[before:]] == KERNELS
            assert same(y, mx.concatenate([layer(x[i : i + 1, rows], None, c) for i, c in enumerate(caches)]))
            pool.offset = start + kept
            for cache, position in zip(caches, pool.offset.tolist(), strict=True):
                cache.seek(mx.array([position]), 9)


@linux_only
def test_mlx_lms_path_gives_the_same_outputs():
    """Up to rounding: the CPU's convolution and exponentials differ from the kernels'."""
    layer = Fed(128, mx.float32)
    x, fused, plain = layer.rows(30), RecurrentCache(), RecurrentCache()
    with emulator.emulated(emulator.Options(fp_contract="fast", traffic=False)) as launches:
        y, _ = roll(layer, fused, x, start=0, until=25, seed=1)
        want, _ = roll(layer, plain, x, start=0, until=25, seed=1, fused=lambda: False)
    assert {launch.kernel for launch in launches} > set(KERNELS)
    assert mx.allclose(y, want, rtol=1e-4, atol=1e-5)


def test_either_path_reads_the_tape_of_the_other():
    """The kernels' references and mlx-lm's ops alternate, each starting from the other's tape."""
    layer = Fed(32, mx.float32)
    x, single, rolled = layer.rows(60), RecurrentCache(), RecurrentCache()
    want = mx.concatenate([layer(x[:, t : t + 1], None, single) for t in range(60)], axis=1)
    rng = np.random.default_rng(3)
    y, end = roll(layer, rolled, x, start=0, until=50, seed=2, fused=lambda: bool(rng.integers(2)))
    assert mx.allclose(y, want[:, :end], rtol=1e-4, atol=1e-5)


def fuse(model, on: bool) -> int:
    """Set the switch of every gated-delta layer; return their number."""
    layers = [m for m in model.modules() if hasattr(m, "verify_rows")]
    for layer in layers:
        layer.verify_rows = ALL if on else frozenset()
    return len(layers)


def text(model, prompt: list[int], n: int, k: int, **options) -> list[int]:
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, **options)
    return [token for token, _, _ in steps]


@pytest.mark.parametrize("name", sampled(["qwen3_next"], ["qwen3_5", "qwen3_next"]))
def test_texts_and_saved_caches(tmp_path, name):
    """A cache saved by either path, and the tape in it, can be read by both."""
    path, _, _ = families.build(name, tmp_path)
    model, prompt = mlx_mtp.load_model(path), [1, 2, 3, 4, 5]
    assert fuse(model, False) == 3
    expected = text(model, prompt, 18, 0)
    for saver in (False, True):
        fuse(model, saver)
        cache = mlx_mtp.make_prompt_cache(model)
        begun = text(model, prompt, 9, 3, prompt_cache=cache)
        assert [len(c.tape) for c in cache.layers if c.is_state] == [6 if saver else 0] * 3
        mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
        for reader in (False, True):
            fuse(model, reader)
            copy = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)
            assert begun + text(model, begun[-1:], 9, 2, prompt_cache=copy) == expected, (saver, reader)


@linux_only
@sweep
@pytest.mark.parametrize(("ratio", "rows"), [(2.0, set(range(1, 9))), (0.5, set())])
def test_a_trial_releases_its_states(ratio, rows, quick_trials):
    """A trial runs after rows of its own, with a tape, and releases them."""
    layer = Fed(32, mx.float32)
    site = Recurrence(layer, RecurrentCache)
    tried = kernel_switch.trials([site], mx.float32)
    with emulator.emulated(emulator.Options(traffic=False)) as launches, stock_ops():
        verdicts = decide(tried, lane=None, timer=lambda trial: ratio, budget=1e9)
        assert site.before
        kernel_switch.switch([site], verdicts, mx.float32)
    assert {trial.key for trial in tried if verdicts[trial.key].right} == {trial.key for trial in tried}
    assert set(KERNELS) < {launch.kernel for launch in launches}
    assert (layer.verify_rows, site.before) == (rows, [])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("key_heads", "value_heads", "vector_gates"), [(2, 6, False), (2, 2, True)])
def test_rows_one_by_one_have_the_bits_of_mlx_lm(dtype, key_heads, value_heads, vector_gates):
    for rows, masked, begun in itertools.product((1, 2, 4, 7), (False, True), (False, True)):
        q, k = (mx.random.normal((1, rows, key_heads, 32)).astype(dtype) for _ in range(2))
        v = mx.random.normal((1, rows, value_heads, 16)).astype(dtype)
        g = mx.random.uniform(shape=(1, rows, value_heads, 32) if vector_gates else (1, rows, value_heads))
        beta = mx.random.uniform(shape=(1, rows, value_heads)).astype(dtype)
        state = mx.random.normal((1, value_heads, 16, 32)) if begun else None
        mask = mx.random.uniform(shape=(1, rows)) > 0.4 if masked else None
        expected, after = gated_delta_ops(q, k, v, g, beta, state, mask)
        y, found, each = row_by_row(q, k, v, g, beta, state, mask)
        assert (each is None) == (rows > 4)
        if rows <= 4 and not masked:
            assert mx.array_equal(each[:, -1].reshape(after.shape), after)
        assert y.dtype == expected.dtype
        assert mx.array_equal(y, expected)
        assert mx.array_equal(found, after)
        nothing, found, _ = row_by_row(None, k, v, g, beta, state, mask)
        assert nothing is None
        assert mx.array_equal(found, after)
