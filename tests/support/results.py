"""Create results of `mlx-mtp bench` with made-up times, in the form that its commands write."""

import json
import random

from mlx_mtp.bench.result import result

DEMO = {"name": "demo", "target_bytes": 11251744, "head_bytes": 6112512, "dtype": "float32", "synthetic": None}
CATEGORIES = ("code_python", "explain_concept", "creative_short")
ROUNDS = 3


def as_read(found: dict) -> dict:
    """Return a result as read from its JSON file, where keys are strings."""
    return json.loads(json.dumps(found))


def decode_result(contexts=(0,), noise=0.01, seed=0, **model) -> dict:
    """Plain steps of 10 ms, cycles of 10 + 2.5 k ms; 9, 7 and 4 of 10 drafts are accepted at depths 1 to 3."""
    draw = random.Random(seed)
    entries = [
        _entry(draw, context, category, contender, noise)
        for context in contexts
        for category in CATEGORIES
        for contender in ("mlx-lm", "plain", "k=1", "k=2", "k=3", "adaptive")
    ]
    more = {"entries": entries, "differences": [], "left_out": {}}
    return as_read(result("decode", DEMO | model, {"rounds": ROUNDS, "contexts": contexts}, **more))


def _entry(draw: random.Random, context: int, category: str, contender: str, noise: float) -> dict:
    k = {"mlx-lm": 0, "plain": 0, "adaptive": 2}.get(contender) if contender[1] != "=" else int(contender[2:])
    cycles = 40
    accepted = [round(cycles * share) for share in (0.9, 0.7, 0.4)][:k]
    tokens = 1 + cycles + sum(accepted)
    step = 0.010 + 0.0025 * k + 0.001 * (contender == "mlx-lm")
    seconds = [cycles * step * (1 + draw.uniform(-noise, noise)) for _ in range(ROUNDS)]
    counted = contender != "mlx-lm"
    return {
        **{"context": context, "kv_bits": None, "mtp_kv_bits": None, "category": category, "contender": contender},
        **{"prompt_tokens": context or 60, "read_seconds": 0.1, "read_peak_bytes": 10**6, "text": "0"},
        **{"tokens": [tokens] * ROUNDS, "seconds": seconds, "peak_bytes": [10**6] * ROUNDS},
        "cycles": [cycles] * ROUNDS if counted else [],
        "drafted": [[cycles] * k] * ROUNDS if counted else [],
        "accepted": [accepted] * ROUNDS if counted else [],
        "paused": [""] * ROUNDS if counted else [],
        "lookup_drafted": [0] * ROUNDS if counted else [],
        "lookup_accepted": [0] * ROUNDS if counted else [],
    }


def verify_result(sides=("stock", "ours"), contexts=(128, 4096), noise=0.01, seed=0, **model) -> dict:
    """T(M) = T(1) (0.6 + 0.4 M) for stock, T(1) (0.9 + 0.1 M) for ours, of the whole model and two parts."""
    draw = random.Random(seed)
    slopes = {"stock": 0.4, "ours": 0.1}
    curves = [
        {
            **{"name": name, "context": context},
            "seconds": {
                side: {
                    m: [0.01 * (1 + slopes[side] * (m - 1)) * (1 + draw.uniform(-noise, noise)) for _ in range(5)]
                    for m in range(1, 17)
                }
                for side in sides
            },
        }
        for name, context in [*(("whole", c) for c in contexts), ("projections", None), ("attention", contexts[-1])]
    ]
    return as_read(result("verify", DEMO | model, {"rows": list(range(1, 17)), "contexts": contexts}, curves=curves))


def profile_result(k=3, noise=0.01, seed=0, **model) -> dict:
    draw = random.Random(seed)
    of_cycle = {"draft": 0.004 * bool(k), "verify": 0.012, "accept": 0.0005}
    of_cycle |= {"build the draft": 0.001 * bool(k), "build the verify": 0.0015, "commit": 0.0001}
    cycles = 20
    seconds = {
        name: [cycles * s * (1 + draw.uniform(-noise, noise)) for _ in range(5)]
        for name, s in {"prefill": 0.1 / cycles, **of_cycle}.items()
    }
    more = {"seconds": seconds, "unexplained": [0.002] * 5, "wall": [0.5] * 5, "undisturbed": [0.45] * 5}
    more |= {
        "tokens": 60,
        "cycles": cycles,
        "operations": {},
        "bytes": {},
        "bandwidth": {"rate": 1e10, "source": "x"},
    }
    return as_read(result("profile", DEMO | model, {"k": k, "context": None, "max_tokens": 64}, **more))


def kernels_result(timed=True) -> dict:
    names = {"qmm 4096x4096": ("verify_qmm", 1.4), "experts": ("verify_moe", 0.9)}
    rows = range(1, 9)
    if timed:
        found = [
            {"name": name, "op": op, "shape": "", "rows": m, "wrong": None}
            | {"seconds": {"stock": [gain * 1e-3 * m] * 3, "ours": [1e-3 * m] * 3}}
            for name, (op, gain) in names.items()
            for m in rows
        ]
    else:
        found = [
            {"op": op, "rows": m, "launches": 1, "requested": 1024, "written": 64, "largest": "w", "reread": float(m)}
            for op, _ in names.values()
            for m in rows
        ]
    return as_read(result("kernels", {"name": "kernels"}, {"op": None, "rows": 8, "emulate": not timed}, found=found))


def made(speeds: dict[str, list[float]], **changes) -> dict:
    """Return a hand-made result: each loop generates 21 tokens of one prompt at these speeds."""
    entry = {
        **{"context": 0, "kv_bits": None, "mtp_kv_bits": None, "category": "a", "prompt_tokens": 11},
        **{"read_seconds": 0.5, "read_peak_bytes": 7, "text": "x", "lookup_drafted": [], "lookup_accepted": []},
        **{"cycles": [], "drafted": [], "accepted": []},
    }
    entries = []
    for name, values in speeds.items():
        counts = {"tokens": [21] * len(values), "seconds": [20 / v for v in values], "peak_bytes": [5] * len(values)}
        entries.append({**entry, **counts, "contender": name})
    model = {"name": "m", "synthetic": None, "dtype": "float32"}
    return {
        "environment": {"mlx": "1"},
        "model": model,
        "options": {},
        "entries": entries,
        "differences": [],
    } | changes
