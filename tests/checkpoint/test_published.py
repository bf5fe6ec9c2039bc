"""Map every tensor name of published checkpoints to a parameter, and every parameter to a tensor."""

import warnings
from pathlib import Path

import published
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.models import eagle3

DRAFTERS = [file for file in published.FILES if file.stem.startswith("eagle3-")]
MODELS = [file for file in published.FILES if file not in DRAFTERS]
PORTS = {p.stem for p in (Path(__file__).parents[2] / "mlx_mtp" / "models").glob("*.py")}


def checkpoint(file: Path) -> published.Published:
    found = published.read(file)
    model_type = found.config["model_type"]
    assert MODEL_REMAPPING.get(model_type, model_type) in PORTS
    return found


def loaded(path: Path, checkpoint: published.Published):
    """Return the model from sparse files of the published shapes."""
    published.write(path, checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not checkpoint.heads() else "error")
        return mlx_mtp.load_model(path, lazy=True, kernels="off")


def check(model, checkpoint: published.Published) -> None:
    """Check which tensor became which parameter; the loader has checked names and shapes."""
    port = type(model)
    ignored = {n for n in checkpoint.tensors if any(n.startswith(a) or n.endswith(a) for a in port.IGNORED)}
    places = {name: model.renamed(name) for name in checkpoint.tensors.keys() - ignored}
    parameters = {path for path, _ in tree_flatten(model.parameters())}
    made = {path for paths in places.values() for path in paths}
    made |= {path.removesuffix("weight") + "scales" for path in made if path.endswith("weight")}  # of packed weights
    assert made >= parameters, "a parameter has no source"
    modules, heads = {path.rpartition(".")[0] for path in parameters}, checkpoint.heads()
    scales = ("_scale", "_scale_inv")
    for name, paths in places.items():
        assert paths, f"{name} is dropped"
        assert all(p.removesuffix("_scale_inv") in parameters or name.endswith(scales) for p in paths), (name, paths)
        assert all(p.rpartition(".")[0] in modules for p in paths), (name, paths)
        assert all(p.startswith("mtp.") == (name in heads) for p in paths), (name, paths)
    assert bool(model.report.ignored) == bool(ignored)


def depths(checkpoint: published.Published) -> int:
    """Return the number of heads in a checkpoint, by a tensor that each has exactly once."""
    once = ("eh_proj.weight", "mtp.fc.weight", ".input_proj.weight")
    return sum(name.endswith(once) for name in checkpoint.heads())


@pytest.mark.parametrize("file", published.FILES, ids=lambda f: f.stem)
def test_the_fixture_lists_as_many_tensors_as_were_published(file):
    found = published.read(file)
    assert found.total in (None, len(found.tensors))
    assert found.config["model_type"]
    assert "config: " in file.read_text()
    assert "tensors: " in file.read_text()


# One of each family.
FEW = {published.read_config(file)["model_type"]: file for file in MODELS}


@pytest.mark.parametrize("file", sampled([*FEW.values()][::4], MODELS), ids=lambda f: f.stem)
def test_every_name_is_mapped(tmp_path, file):
    """Full sizes with two experts per layer; the next test has all experts."""
    found = checkpoint(file).with_experts(2)
    model = loaded(tmp_path, found)
    check(model, found)
    assert model.report.heads == depths(found)
    own = any(name.endswith(("shared_head.head.weight", "shared_head.output.weight")) for name in found.heads())
    assert model.report.lm_head.startswith("own" if own else "shared") or not depths(found)


@sweep
@pytest.mark.parametrize("name", ["qwen3-next-80b", "qwen3.6-35b-a3b", "nemotron-3-super"])
def test_every_name_is_mapped_with_all_experts(tmp_path, name):
    """One checkpoint for each layout of experts."""
    found = checkpoint(next(file for file in MODELS if file.stem == name))
    check(loaded(tmp_path, found), found)


@pytest.mark.parametrize("file", DRAFTERS, ids=lambda f: f.stem)
def test_every_name_of_a_drafter_is_mapped(file):
    """The drafter has the config's sizes, and no weight is computed."""
    found = published.read(file)
    names = found.tensors.keys() - set(eagle3.IGNORED)
    assert eagle3.refuses(found.config, names) is None
    spec = eagle3.make_spec(found.config, names, 64, {})
    head = eagle3.make_head(spec, found.config, names, found.config["hidden_size"])
    places = {name: spec.locate(name, 0) for name in names}
    assert all(places.values()), "a name belongs nowhere"
    shapes = {place[1]: found.tensors[name][0] for name, place in places.items() if place}
    assert shapes == {name: array.shape for name, array in tree_flatten(head.parameters())}
