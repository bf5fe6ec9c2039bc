"""Run every kernel on float32: a default run has most kernels in 16 bits, which hide branches and errors."""

import mlx.core as mx
import pytest
from kernel_calls import CALLS
from metal_cases import exact, linux_only, relative_error

from mlx_mtp import emulator
from mlx_mtp.bench import kernels_cases
from mlx_mtp.kernels._source import DIRECTORY

pytestmark = linux_only


def test_every_kernel_has_a_case():
    assert {name for names in CALLS for name in names.split()} == {path.stem for path in DIRECTORY.glob("*.metal")}


@pytest.mark.parametrize("names", CALLS)
def test_values_are_those_of_the_reference(names, monkeypatch):
    """On a CPU the same call computes the references; no kernel reads or writes 16 bits here."""
    with kernels_cases.in_type(mx.float32):
        call = CALLS[names]()
    launched, build = [], emulator.kernel.build

    def built(signature, *more):
        types = [p.declaration for p in signature.parameters] + [value for _, _, value in signature.template]
        assert not [type_ for type_ in types if "float16" in type_]
        launched.append(signature)
        return build(signature, *more)

    want = call()
    mx.eval(want)
    monkeypatch.setattr(emulator.kernel, "build", built)
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        got = call()
    assert {launch.kernel for launch in launches} == set(names.split())
    assert len(launched) == len(launches)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, exact(theirs)) < 1e-5
