"""Run the worked example of kernels/README.md exactly as printed."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from metal_cases import linux_only

from mlx_mtp import emulator

pytestmark = linux_only
TEXT = (Path(__file__).parents[2] / "kernels" / "README.md").read_text()


def test_the_guide_shows_the_actual_output():
    mx.random.seed(0)
    first, *rest = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (message,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    names: dict = {}
    with pytest.raises(emulator.KernelFault) as error:
        exec(first, names)
    assert str(error.value).split() == message.split()
    for block in rest:
        exec(block, names)
    assert len(rest) == 3
