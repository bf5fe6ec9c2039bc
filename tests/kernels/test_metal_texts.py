"""Metal's front end, as far as clang's of C++ for OpenCL stands for it, accepts every text that MLX would compile."""

import pytest
from metal_cases import linux_only
from metal_texts import FEW, GROUPS, texts
from sweep import SWEEP, sampled

from mlx_mtp.emulator.front_end import check
from mlx_mtp.kernels._source import DIRECTORY

pytestmark = linux_only


@pytest.mark.parametrize("group", sampled(FEW, GROUPS))
def test_texts_are_accepted(group):
    found = [
        each
        for text in texts(GROUPS[group](), None if SWEEP else FEW[group])
        for each in check(text.text, text.kernel)
    ]
    assert not found, "\n".join(map(str, dict.fromkeys(found)))


def test_every_kernel_is_among_them():
    launched = {text.kernel for group, few in FEW.items() for text in texts(GROUPS[group](), few)}
    assert launched == {path.stem for path in DIRECTORY.glob("*.metal")}
