"""A model's state other than its weights is in one object, which every builder of a model creates."""

import re
from pathlib import Path

import families
import pytest
from portless import CONFIGS

import mlx_mtp
from mlx_mtp.bench.random_model import random_model
from mlx_mtp.layers.runtime import Runtime

PACKAGE = Path(mlx_mtp.__file__).parent
ATTACHED = r"""(hasattr|getattr)\(model, "_|vars\(model\)|\bmodel\.(_\w+|report|ranks|untested) = """


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of a port, of mlx-lm, and with random weights; the first one twice."""
    folder = tmp_path_factory.mktemp("models")
    port, _, _ = families.build("glm4_moe", folder / "port")
    plain, _ = families.headless(folder / "plain", CONFIGS["starcoder2"])
    with pytest.warns(UserWarning, match="has no MTP port"):
        other = mlx_mtp.load_model(plain)
    return [mlx_mtp.load_model(port), mlx_mtp.load_model(port), other, random_model(Path(port, "config.json"))]


def test_no_module_attaches_state_to_a_model():
    for file in PACKAGE.rglob("*.py"):
        assert not re.search(ATTACHED, file.read_text()), file


def test_each_model_has_a_state_of_its_own(models):
    assert len({id(model.runtime) for model in models}) == len(models)
    for model in models:
        assert isinstance(model.runtime, Runtime)
        assert model.runtime.untested is model.ranks is None


def test_users_read_the_report_and_cannot_replace_it(models):
    for model, family in zip(models, ("glm4_moe", "glm4_moe", "starcoder2", "glm4_moe"), strict=True):
        assert model.report.family == family
        with pytest.raises(AttributeError):
            model.report = None


def test_facts_are_noted_where_there_is_a_report(models):
    for runtime in (models[-1].runtime, Runtime()):
        runtime.note(kernels=("one",))
    assert models[-1].report.kernels == ("one",)
    assert runtime.report is None
