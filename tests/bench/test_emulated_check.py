"""The doctor's check of each kernel in the emulator, and the kernels that a line names."""

import mlx.core as mx
from metal_cases import linux_only

from mlx_mtp.bench import emulated_check
from mlx_mtp.bench.doctor_summary import launched
from mlx_mtp.bench.kernels_cases import SMALL
from mlx_mtp.tuning.kernel_switch import trials


@linux_only
def test_the_emulator_checks_the_kernels_of_recurrences():
    """Their cache must have the type of the rows, otherwise plain operations run instead."""
    found = emulated_check.of_op("gated_delta_verify")
    assert found["wrong"] is None
    assert found["kernels"] == ["delta_inputs", "gated_delta_verify", "gated_norm"]
    assert found["launches"] == 3


@linux_only
def test_the_emulator_finds_a_wrong_kernel(monkeypatch):
    assert emulated_check.of_op("add_norm")["wrong"] is None
    assert emulated_check.of_op("verify_qmm")["wrong"] is None
    for op, wrong in (("add_norm", "errs by"), ("verify_qmm", "differs from one row alone")):
        site = SMALL[op]()
        ours = site.ours
        site.ours = lambda x, ours=ours: [y * 1.05 for y in ours(x)]
        monkeypatch.setitem(emulated_check.SMALL, op, lambda site=site: site)
        assert wrong in emulated_check.of_op(op)["wrong"]


def test_a_line_names_the_kernels_that_it_launches():
    of = {op: launched(trials([SMALL[op]()], mx.bfloat16)[-1]) for op in ("add_norm", "verify_moe")}
    assert of["add_norm"] == {"kernels": ["add_norm"], "splits": [], "most_threads": {}}
    assert of["verify_moe"]["kernels"] == ["moe_down", "moe_glu", "moe_route"]
    assert of["verify_moe"]["splits"] == ["moe_down", "moe_glu"]
