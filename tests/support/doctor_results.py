"""Results of `mlx-mtp doctor` without a run."""

from results import decode_result, profile_result, verify_result

COUNTED = {"op": "add_norm", "shape": "512", "rows": 4, "against": "error", "wrong": None}
COUNTED |= {"launches": 1, "requested": 2048, "reread": 1.0}
TIMED = {"of": "a", "op": "add_norm", "shape": "512", "rows": 2, "wrong": None, "ratio": 1.25, "compile_seconds": 0.3}
MACHINE = dict.fromkeys(("chip", "os", "python", "mlx", "mlx_lm", "mlx_mtp", "commit", "device", "blas"), "that")


def found_of(*kernels, metal=False, **parts):
    found = {
        "environment": {**MACHINE, "gpu_cores": None, "memory_bytes": None},
        "metal": metal,
        "kernels": {"found": list(kernels)},
        "matrix_unit": {"not_read": "no Metal GPU"},
        "facts": {"name": "demo", "found": []},
        "verify": verify_result(("stock",), (8,), noise=0),
        "decode": decode_result(noise=0),
        "host": profile_result(noise=0),
        "thermal": {"before": None, "after": "no warning"},
        **{"seconds": 3.0, "date": "2000-01-01"},
    }
    return found | parts
