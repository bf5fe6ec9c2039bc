"""Load the tensors in a checkpoint's files, whatever the index lists; an unneeded file causes no error."""

import fnmatch
import json
import shutil
import warnings
from pathlib import Path

import families
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from portless import CONFIGS
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.checkpoint import files
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.checkpoint.weight_names import weight_names

LISTS = json.loads((Path(__file__).parents[1] / "support" / "fixtures" / "file_lists.json").read_text())
INDEX = "model.safetensors.index.json"
HEADS = 3  # the layer of glm4_moe's heads


def parameters(path: Path, **options) -> dict[str, mx.array]:
    found = dict(tree_flatten(mlx_mtp.load_model(path, lazy=True, **options).parameters()))
    mx.eval(found)  # before a test changes the files
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]) for n in a)


class Checkpoint:
    """A tiny GLM-4.5 whose tensors can be put into files of any names."""

    def __init__(self, path: Path):
        self.path, self.weights, _ = families.build("glm4_moe", path / "whole")
        self.expected = parameters(self.path)
        self.target = {name: w for name, w in self.expected.items() if not name.startswith("mtp.")}

    def written(self, path: Path, trunk="model-{}-of-2.safetensors", heads="mtp.safetensors", index=True):
        """A directory with the trunk in two files and the heads in one, and the file of each tensor."""
        path.mkdir()
        shutil.copy(self.path / "config.json", path)
        places = {}
        for i, name in enumerate(sorted(self.weights)):
            places[name] = heads if f".layers.{HEADS}." in name else trunk.format(1 + i % 2)
        for file in set(places.values()):
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(path / file), {n: self.weights[n] for n in places if places[n] == file})
        if index:
            write_index(path, places)
        return path, places


def write_index(path: Path, places: dict, name: str = INDEX) -> None:
    (path / name).write_text(json.dumps({"weight_map": places}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def says(path: Path, message: str, **options) -> dict:
    with pytest.warns(UserWarning, match=message):
        return parameters(path, **options)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("glm"))


@pytest.mark.parametrize("name", LISTS)
def test_what_is_read_and_downloaded_of_released_repositories(name, tmp_path, monkeypatch):
    """Every weight file that the loader reads, and no second copy; Python files only on request."""
    given = LISTS[name]
    code = given.get("code", ["configuration_x.py"])
    names = [*given["read"], *given["left"], *given["small"], *code]
    assert weight_names(names, given["index"]) == sorted(given["read"])
    for asked in (False, True):
        here = tmp_path / str(asked)

        def download(repo, revision=None, allow_patterns=(), here=here):
            for file in names:
                if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                    (here / file).parent.mkdir(parents=True, exist_ok=True)
                    (here / file).write_text(json.dumps({"weight_map": dict(enumerate(given["index"]))}))
            return str(here)

        monkeypatch.setattr(files, "snapshot_download", download)
        monkeypatch.setattr(files.HfApi, "list_repo_files", lambda *_, **__: names)
        found = files.resolve("someone/model", code=asked)
        got = {file.relative_to(found).as_posix() for file in found.rglob("*") if file.is_file()}
        assert got == {*given["read"], *given["small"], *(code if asked else ())}


SHARDS = ["model-{}-of-2.safetensors", "pytorch_model-0000{}-of-00002.safetensors", "weights.0{}.safetensors"]
SHARDS += ["consolidated-0000{}-of-00002.safetensors", "model_pp0_ep{}_shard0.safetensors", "shard{}.safetensors"]


@pytest.mark.parametrize(("shards", "index"), paired(SHARDS, [True, False]))
def test_shards_of_any_name(glm, tmp_path, shards, index):
    path, _ = glm.written(tmp_path / "new", shards, index=index)
    assert same(parameters(path), glm.expected)
    facts = inspect_checkpoint(path)
    assert (facts.problems, facts.depths, facts.missing) == ((), 1, ())


@pytest.mark.parametrize("shards", sampled(SHARDS[:1], SHARDS[:4]))
def test_shards_of_any_name_without_a_port(tmp_path, shards):
    path, _ = families.headless(tmp_path / "plain", CONFIGS["starcoder2"])
    expected = parameters(path, mtp=False)
    (path / "model.safetensors").rename(path / shards.format(1))
    assert same(parameters(path, mtp=False), expected)


PLACES = ["mtp.safetensors", "model-mtp-00001.safetensors", "extra/heads.safetensors", "heads.safetensors"]
PLACES += ["a/b/c.safetensors", "model_mtp.safetensors", "mtp/model.safetensors", "model-00003-of-00003.safetensors"]


@pytest.mark.parametrize("place", sampled(PLACES[::2], PLACES))
def test_heads_in_whatever_file_the_index_names(glm, tmp_path, place):
    path, _ = glm.written(tmp_path / "new", heads=place)
    assert same(parameters(path), glm.expected)
    assert same(parameters(glm.path, mtp_path=path), glm.expected)
    assert inspect_checkpoint(path).missing == ()


def of_another_conversion(path, places):
    write_index(path, {n: f.replace("-of-2", "-of-9") for n, f in places.items()})


def with_what_text_does_not_need(path, places):
    vision = {"model.visual.blocks.0.attn.qkv.weight": "model-1-of-2.safetensors"}
    write_index(
        path, places | vision | {"audio_tower.layers.0.fc1.weight": "audio.safetensors", "x.y": "x.safetensors"}
    )


def with_more_experts_and_other_names(path, places):
    old = {n.replace(".experts.0.", ".experts.99."): f for n, f in places.items() if ".experts.0." in n}
    quantized = {n.replace(".weight", ".scales"): f for n, f in places.items() if "q_proj.weight" in n}
    write_index(path, places | old | quantized)


def that_is_cut(path, places):
    (path / INDEX).write_text((path / INDEX).read_text()[:-20])


STALE = [of_another_conversion, with_what_text_does_not_need, with_more_experts_and_other_names, that_is_cut]


@pytest.mark.parametrize("change", STALE)
def test_an_index_that_contradicts_the_files_is_a_warning(glm, tmp_path, change):
    path, places = glm.written(tmp_path / "new")
    change(path, places)
    assert same(says(path, r"index\.json"), glm.expected)
    facts = inspect_checkpoint(path)
    assert not facts.problems
    assert any("index.json" in text for text in facts.warnings)


def test_an_index_that_contradicts_the_files_without_a_port(tmp_path):
    path, _ = families.headless(tmp_path / "plain", CONFIGS["starcoder2"])
    expected = parameters(path, mtp=False)
    write_index(path, {"lm_head.weight": "model-9-of-9.safetensors", "vision.x": "vision.safetensors"})
    assert same(says(path, "the output does not depend", mtp=False), expected)


@pytest.mark.parametrize("kind", ["missing", "cut", "empty"])
def test_a_needed_file_is_named(glm, tmp_path, kind):
    path, _ = glm.written(tmp_path / "new")
    file = path / "model-2-of-2.safetensors"
    {"missing": file.unlink, "cut": lambda: cut(file), "empty": lambda: file.write_bytes(b"")}[kind]()
    for options in ({}, {"mtp": False}):
        state = rf"missing; {INDEX} expects tensor" if kind == "missing" else "truncated or damaged"
        with pytest.raises(ValueError, match=rf"model-2-of-2\.safetensors: {state}") as error:
            mlx_mtp.load_model(path, **options)
        assert "\n" not in str(error.value)
    (path / INDEX).unlink()
    with pytest.raises(ValueError, match=r"is missing" if kind == "missing" else "model-2-of-2.*truncated"):
        mlx_mtp.load_model(path)


def test_a_needed_file_is_named_without_a_port(tmp_path):
    path, _ = families.headless(tmp_path / "plain", CONFIGS["starcoder2"])
    weights = mx.load(str(path / "model.safetensors"))
    parts = [dict([*weights.items()][:4]), dict([*weights.items()][4:])]
    for i, part in enumerate(parts):
        mx.save_safetensors(str(path / f"model-{i + 1}-of-2.safetensors"), part)
    (path / "model.safetensors").unlink()
    write_index(path, {name: f"model-{i + 1}-of-2.safetensors" for i, part in enumerate(parts) for name in part})
    cut(path / "model-2-of-2.safetensors")
    with pytest.raises(ValueError, match=r"model-2-of-2\.safetensors: truncated or damaged"):
        mlx_mtp.load_model(path)
    (path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"model-2-of-2\.safetensors: missing; {INDEX} expects tensor"):
        mlx_mtp.load_model(path)


def test_a_file_that_no_text_needs_may_be_damaged(glm, tmp_path):
    path, places = glm.written(tmp_path / "new")
    (path / "model-visual.safetensors").write_bytes(b"cut")
    write_index(path, places | {"visual.blocks.0.weight": "model-visual.safetensors"})
    assert same(
        says(path, r"model-visual\.safetensors: truncated or damaged .*; the output does not depend on it"),
        glm.expected,
    )


def test_heads_that_were_not_downloaded(glm, tmp_path):
    """Heads are loaded by default, but the output does not need them."""
    path, _ = glm.written(tmp_path / "new")
    (path / "mtp.safetensors").unlink()
    with pytest.warns(UserWarning, match="no MTP heads found"):
        found = says(path, r"lists tensor model\.layers\.3\.\S+ in mtp\.safetensors and \d+ more")
    assert same(found, glm.target)


def test_a_part_of_the_heads_that_was_not_downloaded(glm, tmp_path):
    path, places = glm.written(tmp_path / "new")
    heads = mx.load(str(path / "mtp.safetensors"))
    gone = next(name for name in heads if "eh_proj" in name)
    mx.save_safetensors(str(path / "mtp.safetensors"), {n: w for n, w in heads.items() if n != gone})
    write_index(path, places | {gone: "more.safetensors"})
    with pytest.raises(ValueError, match=rf"more\.safetensors: missing; {INDEX} expects tensor {gone} in it"):
        mlx_mtp.load_model(path)


def renamed(names):
    return lambda heads: {names(name): w for name, w in heads.items()}


BROKEN_HEADS = {
    "none": lambda heads: {},
    "one tensor missing": lambda heads: dict([*heads.items()][1:]),
    "experts missing": lambda heads: {n: w for n, w in heads.items() if ".experts.1." not in n},
    "NaN": lambda heads: {n: w * float("nan") for n, w in heads.items()},
    "other shapes": lambda heads: {n: w[:1] for n, w in heads.items()},
    "other types": lambda heads: {n: w.astype(mx.int32) for n, w in heads.items()},
    "other modules": renamed(lambda n: n.replace("eh_proj", "fuse").replace("self_attn", "mixer")),
    "another prefix": renamed(lambda n: n.replace(f"model.layers.{HEADS}.", "mtp_block.0.")),
    "another depth": renamed(lambda n: n.replace(f".layers.{HEADS}.", ".layers.7.")),
}


@pytest.mark.parametrize(
    ("case", "place"),
    paired(BROKEN_HEADS, ["mtp.safetensors", "model-mtp-1.safetensors", "model-2-of-2.safetensors"]),
)
def test_without_heads_nothing_of_theirs_fails(glm, tmp_path, case, place):
    path, places = glm.written(tmp_path / "new", heads=place)
    stored = mx.load(str(path / place))
    heads = {name: w for name, w in stored.items() if f".layers.{HEADS}." in name}
    changed = BROKEN_HEADS[case](heads)
    mx.save_safetensors(str(path / place), {n: w for n, w in stored.items() if n not in heads} | changed)
    for listed in (places, {n: f for n, f in places.items() if n not in heads} | dict.fromkeys(changed, place)):
        write_index(path, listed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(parameters(path, mtp=False), glm.target)


@pytest.mark.parametrize("kind", ["missing", "cut", "a directory"])
def test_without_heads_their_file_is_not_needed(glm, tmp_path, kind):
    path, _ = glm.written(tmp_path / "new", heads="model-mtp.safetensors")
    file = path / "model-mtp.safetensors"
    cut(file) if kind == "cut" else file.unlink()
    if kind == "a directory":
        file.mkdir()
    assert same(parameters(path, mtp=False), glm.target)


def test_a_layer_that_config_denies_is_no_head(glm, tmp_path):
    path, _ = glm.written(tmp_path / "new")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    with pytest.raises(ValueError, match=r"is not part of the model; config\.json expects 2 layers"):
        mlx_mtp.load_model(path, mtp=False)


def test_copies_of_a_tensor(glm, tmp_path):
    """The index chooses a copy; without it equal copies are accepted, and others are an error."""
    path, places = glm.written(tmp_path / "new")
    name = "model.norm.weight"
    mx.save_safetensors(str(path / "model-copy.safetensors"), {name: glm.weights[name]})
    (path / INDEX).unlink()
    assert same(parameters(path), glm.expected)
    mx.save_safetensors(str(path / "model-copy.safetensors"), {name: glm.weights[name] + 1})
    with pytest.raises(ValueError, match=rf"tensor {name} is in model-\S+\.safetensors, too, and differs"):
        mlx_mtp.load_model(path)
    write_index(path, places)
    assert same(parameters(path), glm.expected)
    write_index(path, places | {name: "model-copy.safetensors"})
    assert mx.array_equal(parameters(path)["model.norm.weight"], glm.weights[name] + 1)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("old", ["model-1-of-9.safetensors", "model.safetensors"])
def test_shards_that_an_earlier_conversion_left(glm, tmp_path, old, index):
    """With an index, or with only one complete set; leftover shards also contain names that the new ones lack."""
    path, _ = glm.written(tmp_path / "new", index=index)
    left = {"model.norm.weight": glm.weights["model.norm.weight"] + 1, "model.layers.0.old.weight": mx.zeros(3)}
    mx.save_safetensors(str(path / old), left)
    if not index and old == "model.safetensors":
        with pytest.raises(ValueError, match=r"tensor model\.norm\.weight is in \S+, too, and differs"):
            mlx_mtp.load_model(path)
    else:
        assert same(says(path, rf"{old}: not used; it repeats tensors"), glm.expected)


def test_a_sidecar_with_copies_of_the_trunks_tensors(glm, tmp_path):
    path, _ = glm.written(tmp_path / "new", index=False)
    heads = mx.load(str(path / "mtp.safetensors"))
    shared = {name: glm.weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    mx.save_safetensors(str(path / "mtp.safetensors"), heads | shared)
    assert same(parameters(path), glm.expected)


@pytest.mark.parametrize(
    ("file", "message"), [("x-Q4_K_M.gguf", "GGUF file; name the file"), ("pytorch_model.bin", r"\.bin format")]
)
def test_weights_of_another_format_are_named(glm, tmp_path, file, message):
    shutil.copy(glm.path / "config.json", tmp_path)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"no model\*\.safetensors in it[;,] .*{message}"):
        mlx_mtp.load_model(tmp_path)
