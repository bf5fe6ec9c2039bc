"""Check every text that MLX would compile with clang's front end for C++ for OpenCL, which stands for Metal's."""

import functools
import json

import mlx.core as mx
import published
import pytest
from metal_cases import linux_only
from metal_texts import FEW, GROUPS, collected, texts
from sweep import SWEEP, paired, sampled

from mlx_mtp.bench import compile_jobs
from mlx_mtp.bench.random_model import shaped_model
from mlx_mtp.emulator.front_end import check
from mlx_mtp.kernels._source import DIRECTORY
from mlx_mtp.tuning.kernel_sites import place
from mlx_mtp.tuning.kernel_switch import trials

pytestmark = linux_only
LAYERS = 12  # the first layers of a released config include all of its kinds


@pytest.mark.parametrize("group", sampled([*FEW][::8], GROUPS))
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


@functools.cache
def listed():
    """Return the texts that `mlx-mtp doctor --compile-only` compiles."""
    return {launch.text for launch in compile_jobs.launches()}


KINDS = ("qwen3.5-27b", "glm-5.1")
RELEASED_FILES = sampled([file for file in published.FILES if file.stem in KINDS], published.FILES)


@pytest.mark.parametrize(
    ("file", "rows"),
    paired(RELEASED_FILES, ["candidates", "together"]),
    ids=lambda given: getattr(given, "stem", given),
)
def test_the_texts_of_released_configs_are_among_those_that_doctor_compiles(file, rows, tmp_path, monkeypatch):
    """Each released model's config, with weights in 4 bits, launches its kernels with all row counts."""
    monkeypatch.setattr(mx, "eval", lambda *_: None)  # weights are not computed
    config = published.read_config(file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = min(LAYERS, config.get("text_config", config)["num_hidden_layers"])
    with collected() as found:
        model, _ = shaped_model(tmp_path / "config.json", layers=layers)
        for trial in trials(place(model), mx.bfloat16, rows):
            for alternative in (trial, trial.of_split()):
                alternative.pairs[0][0](trial.x(0))
    ours = [text for text in found if text.kernel in compile_jobs.OPS]
    assert ours
    missing = [text.text.rpartition("decltype(")[2] for text in dict.fromkeys(ours) if text not in listed()]
    assert not missing, "\n".join(missing)


def test_all_launches_are_small():
    """They run on a hosted machine with little memory."""
    sizes = [
        sum(x.nbytes for x in launch.call["inputs"] if isinstance(x, mx.array)) for launch in compile_jobs.launches()
    ]
    assert max(sizes) < 2**26
