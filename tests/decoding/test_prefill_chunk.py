"""The prefill chunk is chosen once from a timed sample, the same on all ranks, and does not change later."""

from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
import tiny

import mlx_mtp
from mlx_mtp.decoding import prefill_chunk
from mlx_mtp.decoding.options import default_chunk, max_chunk
from mlx_mtp.decoding.prefill_chunk import CHUNKS, MOST_SECONDS, SAMPLE, growth, largest_chunk, multiply_adds
from mlx_mtp.demo import demo_path
from mlx_mtp.serve.server import Loaded, Settings, shared


def another_process(monkeypatch):
    """Drop the choice of this process, as another one has none."""
    monkeypatch.setattr(prefill_chunk, "_chosen", {})


@pytest.fixture
def gpu(monkeypatch, own_cache):
    """A device that takes `seconds` for the sample, which is not run. timed: the models that were timed."""
    device = SimpleNamespace(seconds=0.1, timed=[])

    def sample_seconds(model, blank):
        device.timed.append(model)
        return device.seconds

    another_process(monkeypatch)
    monkeypatch.setattr(prefill_chunk, "sample_seconds", sample_seconds)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(prefill_chunk, "growth", lambda model, blank, context: 1.0)
    return device


class FixedRanks:
    """Ranks of which rank 0 shares `shared`, in this order."""

    size = 2

    def __init__(self, rank, shared_values):
        self.rank, self.shared_values = rank, shared_values

    def broadcast(self, value=None):
        if self.rank == 0:
            self.shared_values.append(value)
            return value
        return self.shared_values.pop(0)


def model_of(ranks=None):
    weights = {"weight": mx.zeros((2, 2))}
    own = SimpleNamespace(max_position_embeddings=4096)
    full = {"windows": lambda: [None], "head_windows": list, "no_hidden": lambda: mx.zeros((1, 1, 2)), "mtp": []}
    return SimpleNamespace(parameters=lambda: weights, args=own, ranks=ranks, NO_KV_BITS=None, **full)


@pytest.mark.parametrize("grown", [1.0, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_largest_chunk_below_two_seconds(chunk, grown):
    most = MOST_SECONDS * SAMPLE / chunk / grown
    assert largest_chunk(0.999 * most, grown) == chunk
    assert largest_chunk(1.001 * most, grown) == max(chunk // 2, CHUNKS[-1])


def test_a_machine_that_is_too_slow_gets_the_smallest_chunk():
    assert largest_chunk(100.0, 5.0) == CHUNKS[-1] == min(CHUNKS)


def test_a_choice_is_remembered_for_the_model_and_the_format_of_its_caches(gpu, monkeypatch):
    gpu.seconds = 0.4
    assert prefill_chunk.prefill_chunk(model_of(), {}) == 1024
    gpu.seconds = 9.0
    for nothing in ({}, {"kv_bits": None, "quantized_kv_start": 5000, "kv_group_size": 64}):
        assert prefill_chunk.prefill_chunk(model_of(), nothing) == 1024
    another_process(monkeypatch)
    assert prefill_chunk.prefill_chunk(model_of(), {}) == 1024
    assert prefill_chunk.prefill_chunk(model_of(), {}, lazy=True) == 1024
    assert len(gpu.timed) == 1
    other = model_of()
    other.args.head_dim = 64
    assert prefill_chunk.prefill_chunk(other, {"kv_bits": 8}) == 256
    assert len(gpu.timed) == 2


def test_a_process_keeps_its_choice_whatever_becomes_of_the_file(gpu, monkeypatch, tmp_path):
    assert prefill_chunk.prefill_chunk(model_of(), {}) == 2048
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text(file.read_text().replace("2048", "7"))
    gpu.seconds = 9.0
    assert prefill_chunk.prefill_chunk(model_of(), {}) == 2048
    another_process(monkeypatch)
    assert prefill_chunk.prefill_chunk(model_of(), {}) == 256, "a file that this module cannot have written"
    assert prefill_chunk.prefill_chunk(model_of(), {}, lazy=True) == 256


def test_lazy_weights_are_not_read(gpu):
    assert prefill_chunk.prefill_chunk(model_of(), {}, lazy=True) == CHUNKS[-1]
    assert prefill_chunk.prefill_chunk(model_of(), {}) == CHUNKS[-1], "the process has begun with it"
    assert not gpu.timed


@pytest.mark.parametrize("remembered", [False, True])
def test_all_ranks_take_what_rank_0_has_chosen(gpu, monkeypatch, tmp_path, remembered):
    shared_values = []
    for again in range(1 + remembered):
        another_process(monkeypatch)
        gpu.seconds = 9.0 if again else 0.1
        assert prefill_chunk.prefill_chunk(model_of(FixedRanks(0, shared_values)), {}) == 2048
    shared_values = shared_values[-1:] if remembered else shared_values
    another_process(monkeypatch)
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "of rank 1"))
    gpu.seconds = 9.0  # this machine is slower
    timed = len(gpu.timed)
    assert prefill_chunk.prefill_chunk(model_of(FixedRanks(1, shared_values)), {}) == 2048
    assert not shared_values, "both ranks exchanged as many messages"
    assert len(gpu.timed) == timed + (not remembered), "all ranks time the sample, or none"
    assert not (tmp_path / "of rank 1").exists()


def test_a_cpu_times_nothing():
    model = mlx_mtp.load_model(demo_path())
    assert model.report.prefill_chunk is None
    assert default_chunk(model) == max_chunk() == 256


def test_the_fastest_run_after_the_first_counts(tiny_models, monkeypatch):
    model, times = tiny_models()[0], iter([0.0, 50.0, 60.0, 64.0, 70.0, 73.0])
    monkeypatch.setattr(prefill_chunk, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert prefill_chunk.sample_seconds(model, mlx_mtp.make_prompt_cache(model)) == 3.0


def test_every_reader_of_prompts_has_the_models_chunk(monkeypatch):
    """generate, batches, sessions and the server use the chunk that the load chose, unless another is given."""
    monkeypatch.setattr("mlx_mtp.checkpoint.load.prefill_chunk", lambda model, layout, lazy: 48)
    model, tokenizer = mlx_mtp.load(demo_path())
    assert model.report.prefill_chunk == 48
    assert "48 tokens of a prompt at a time" in str(model.report)
    monkeypatch.setattr("mlx_mtp.decoding.options.mx", SimpleNamespace(cpu=0, default_device=lambda: 1))
    assert default_chunk(model) == 48

    def chunks(**options):
        seen = []
        cut = {"max_tokens": 0, "prompt_progress_callback": lambda done, total: seen.append(done), **options}
        list(mlx_mtp.generate_step([1] * 100, model, **cut))
        return seen

    assert chunks() == [0, 48, 96, 100]
    assert chunks(prefill_step_size=60) == [0, 60, 100]
    assert mlx_mtp.BatchGenerator(model).settings.chunk == 48
    assert mlx_mtp.BatchGenerator(model, prefill_step_size=60).settings.chunk == 60
    given = {"names": ("a",), "host": "", "port": 0, "rules": None, "options": {}, "sampling": {}, "template": {}}
    loaded, identities = Loaded(model, tokenizer, {}, {}), set()
    for step in (None, 32, 60):
        tree = shared(loaded, Settings(**given, step=step)).tree
        assert tree.chunking.step == (step or 48)
        identities.add(tree.identity)
    assert len(identities) == 3, "files of other chunks are not used"


def test_attention_counts_at_the_longest_context(tiny_models):
    model = tiny_models()[0]
    blank = mlx_mtp.make_prompt_cache(model)
    near, far, farther = (multiply_adds(model, blank, context, SAMPLE) for context in (1024, 2048, 3072))
    assert 0 < near < far
    args, full = model.args, sum(window is None for window in model.windows())
    a_position = 2 * args.num_attention_heads * args.head_dim * full
    assert far - near == farther - far == SAMPLE * 1024 * a_position
    assert growth(model, blank, 2048) == far / multiply_adds(model, blank, SAMPLE, SAMPLE)


@pytest.mark.parametrize("layout", [{"kv_bits": 8, "kv_group_size": 32}, {"max_kv_size": 600}])
def test_the_format_of_the_caches_counts(tiny_models, layout):
    size = {**tiny.CONFIG["attention_other_setting"], "head_dim": 32}
    model = tiny_models(vocab_size=40, head_dim=32, attention_other_setting=size)[0]
    blank = mlx_mtp.make_prompt_cache(model, **layout)
    near, far = growth(model, blank, 1024), growth(model, blank, 8192)
    assert far == near if "max_kv_size" in layout else far > near > 1


def test_latent_attention_counts(tmp_path):
    model = mlx_mtp.load_model(families.build("deepseek_v3", tmp_path)[0])
    blank = mlx_mtp.make_prompt_cache(model)
    assert growth(model, blank, 8192) > growth(model, blank, 1024) > 1


def test_models_with_mlx_lms_own_caches_count_attention_too():
    """n rows without a cache attend to n x n positions: b is derived from the work a n + b n^2."""
    per_row, per_pair = 1000, 3
    blank, rows = SimpleNamespace(is_mlx_lm=True), []

    def work(model, blank, context, n):
        rows.append(n)
        return per_row * n + per_pair * n * n

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_chunk, "multiply_adds", work)
        found = growth(None, blank, 8192)
        assert [growth(None, blank, context) for context in (SAMPLE // 2, SAMPLE)] == [1.0, 1.0]
    assert found == pytest.approx((per_row + per_pair * 8192) / (per_row + per_pair * SAMPLE))
