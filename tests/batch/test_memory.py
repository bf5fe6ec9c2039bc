"""Memory does not grow while thousands of sequences join and leave."""

import gc
import random
import resource
import sys

import mlx.core as mx
import pytest
from sweep import sweep

import mlx_mtp

EACH = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of `ru_maxrss`
TEXTS = 5000


@sweep
@pytest.mark.parametrize("replayed", [False, True])
def test_memory_does_not_grow(tiny_models, replayed):
    """Up to four sequences decode at once, and end or are removed; the first fifth is the reference."""
    model, _ = tiny_models(0)
    rng, stats = random.Random(0), mlx_mtp.Stats()
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=2, compile_cycles=replayed, stats=stats)
    active, held, resident = set(), [], []
    for joined in range(TEXTS + 1):
        prompt = [rng.randrange(model.vocab_size) for _ in range(rng.choice([1, 3, 20]))]
        active |= set(batch.insert([prompt], [rng.randint(1, 6)]))
        while len(active) > 3:
            active -= {r.uid for r in batch.next_generated() if r.finish_reason}
            if active and rng.random() < 0.05:
                batch.remove([active.pop()])
        if joined % (TEXTS // 10) == 0:
            batch.remove(active)
            active.clear()
            gc.collect()
            mx.clear_cache()
            held.append(mx.get_active_memory())
            resident.append(EACH * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert stats.compiled_cycles > 0.1 * stats.cycles if replayed else stats.compiled_cycles == 0
    assert batch.prompt_cache_nbytes == 0
    assert max(held[3:]) - held[2] < 100_000
    assert resident[-1] - resident[2] < 5_000_000
