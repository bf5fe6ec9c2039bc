"""Metal's front end, as far as clang's of C++ for OpenCL stands for it, accepts every text that MLX would compile."""

import pytest
from metal_cases import linux_only
from metal_texts import GROUPS, texts
from sweep import SWEEP, sampled

from mlx_mtp.emulator.front_end import check
from mlx_mtp.kernels._source import DIRECTORY

pytestmark = linux_only

# Launches of each group that stand for all: every op, and each of the three types.
FEW = {
    "products affine-4-64": 6,
    "products affine-3-32": 3,
    "products mxfp8-8-32": 3,
    "products nvfp4-4-16": 3,
    "matrices affine-6-128": 3,
    "matrices mxfp4-4-32": 2,
    "experts affine-5-64": 4,
    "experts nvfp4-4-16": 2,
    "heads affine-8-64": 3,
    "heads mxfp4-4-32": 2,
    "attention mlx.core.bfloat16": 4,
    "attention mlx.core.float32": 2,
    "attention mlx.core.float16": 2,
    "dense": 4,
    "dense_heads": 4,
    "routers": 4,
    "latent": 6,
    "norms": 9,
    "recurrences": 9,
}


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
