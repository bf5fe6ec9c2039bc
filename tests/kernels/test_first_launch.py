"""Run each kernel as its first launch alone does: computed inputs are zeros, and the emulator checks every access."""

from functools import partialmethod
from unittest import mock

import mlx.core as mx
import pytest
from kernel_calls import CALLS
from metal_cases import linux_only
from metal_texts import GROUPS
from sweep import sampled

from mlx_mtp.bench.kernels_cases import in_type
from mlx_mtp.emulator import MetalKernel, Options
from mlx_mtp.emulator.kernel import replaced
from mlx_mtp.emulator.texts import TextKernel, text_kernel
from mlx_mtp.kernels import _first_launch, _source, run_new

pytestmark = linux_only
# Without pairs of rows and experts the products of experts write nothing, and their sums read nothing.
NO_PAIRS = Options(allow=("unwritten", "uninitialised"), traffic=False)


def call_of(names):
    with in_type(mx.float32):
        return CALLS[names]()


def calls_of(group):
    return lambda: [launch() for launch in GROUPS[group]()]


@pytest.mark.parametrize("names", sampled(CALLS, [*CALLS, *GROUPS]))
def test_a_first_launch_stays_inside_its_arrays(names, monkeypatch):
    call = call_of(names) if names in CALLS else calls_of(names)
    monkeypatch.setattr(TextKernel, "runs_at_once", False)
    _source._made.cache_clear()  # so that no variant has run
    _first_launch.drop_new()  # what other tests' kernels left
    with replaced(text_kernel):
        call()
        ops = {launch.key[0] for launch in _first_launch._thread.new.values()}
        with mock.patch.object(TextKernel, "__call__", partialmethod(MetalKernel.__call__, options=NO_PAIRS)):
            run_new()  # raises what the emulator finds
    assert ops == set(names.split()) or names in GROUPS
