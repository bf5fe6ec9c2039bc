"""A vision tower is found in every layout, kept by conversions, and read at the first picture."""

import contextlib
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
import seeing
from command_line import call
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.convert_vision import extract_vision
from mlx_mtp.checkpoint.inspect import as_text, inspect_checkpoint
from mlx_mtp.decoding.memory_needs import needs
from mlx_mtp.pictures.image import open_image
from mlx_mtp.pictures.vision import vision_of

pytest.importorskip("PIL", reason="needs Pillow: the extra vision, or test")
from PIL import Image

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8))
WIDER = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 4}  # columns that are whole groups of 32
TOWER = ("model.visual.", "vision_tower.")


def load(path, **options):
    return mlx_mtp.load_model(path, lazy=True, **options)


def features(model):
    vision = vision_of(model)
    return np.array(vision.features(vision.picture(open_image(PICTURE))).astype(mx.float32))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints with one tower: released, converted, without a tower, and as mlx-vlm converts."""
    folder = tmp_path_factory.mktemp("seeing")
    released, weights = seeing.build(folder / "released", **WIDER)
    paths = {"released": released, "converted": folder / "converted", "4 bits": folder / "4bits"}
    convert(released, paths["converted"])
    convert(released, paths["4 bits"], quantize=True, q_group_size=32, mtp_layout="shards")
    paths["blind"] = blind = folder / "blind"
    shutil.copytree(paths["converted"], blind)
    without_tower(blind)
    tower = {name: w for name, w in weights.items() if name.startswith(TOWER)}
    for name, quantized in (("mlx-vlm's", False), ("mlx-vlm's, 8 bits", True)):
        paths[name] = folder / name
        shutil.copytree(blind, paths[name])
        as_mlx_vlm(paths[name], released, tower, quantized=quantized)
    return paths


def without_tower(path):
    """Make a conversion one of mlx-lm's: without the tower, its files and its part of config.json."""
    for name in ("vision.safetensors", "preprocessor_config.json", "model.safetensors.index.json"):
        (path / name).unlink()
    config = json.loads((path / "config.json").read_text())
    del config["vision_config"]
    (path / "config.json").write_text(json.dumps(config))


def as_mlx_vlm(path, released, tower, *, quantized):
    """Add a tower in mlx-vlm's names and order of axes, quantized where columns are whole groups."""
    weights = dict(mx.load(str(path / "model.safetensors")))
    for name, w in tower.items():
        own = name.replace("model.visual.", "vision_tower.")
        if "patch_embed.proj.weight" in name:
            weights[own] = w.transpose(0, 2, 3, 4, 1)
        elif quantized and w.ndim == 2:
            parts = mx.quantize(w, 32, 8)
            weights |= dict(zip((own, own[:-6] + "scales", own[:-6] + "biases"), parts, strict=True))
        else:
            weights[own] = w
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    shutil.copy(released / "config.json", path)
    shutil.copy(released / "preprocessor_config.json", path)


def test_every_layout_has_the_same_features(made):
    expected = features(load(made["released"]))
    for name in ("converted", "4 bits", "mlx-vlm's"):
        assert np.array_equal(features(load(made[name])), expected), name
    quantized = features(load(made["mlx-vlm's, 8 bits"]))
    assert 0 < np.abs(quantized - expected).max() < 0.02 * np.abs(expected).max()


def test_a_conversion_keeps_the_tower_as_it_is(made, tmp_path):
    stored = mx.load(str(made["released"] / "model.safetensors"))
    tower = {name: w for name, w in stored.items() if name.startswith(TOWER)}
    for name in ("converted", "4 bits"):
        kept = mx.load(str(made[name] / "vision.safetensors"))
        assert kept.keys() == tower.keys()
        assert all(kept[n].dtype == w.dtype and mx.array_equal(kept[n], w) for n, w in tower.items())
        assert not any(n.startswith(TOWER) for n in mx.load(str(made[name] / "model.safetensors")))
        for file in ("config.json", "preprocessor_config.json"):
            ours, theirs = (json.loads((made[at] / file).read_text()) for at in (name, "released"))
            assert ours.get("vision_config") == theirs.get("vision_config")
            assert file == "config.json" or ours == theirs
    again = tmp_path / "again"  # from mlx-vlm's layout, and from a conversion
    for name in ("mlx-vlm's, 8 bits", "4 bits"):
        convert(made[name], again)
        assert np.array_equal(features(load(again)), features(load(made[name])))
        shutil.rmtree(again)


def test_a_conversion_without_a_tower_says_how_to_add_it(made, tmp_path):
    path = tmp_path / "blind"
    shutil.copytree(made["blind"], path)
    model = load(path)
    assert model.vision is None
    command = f"mlx-mtp convert --hf-path RELEASED --vision-only --vision-path {path}"
    with pytest.raises(ValueError, match="no vision tower in it; to add it: ") as e:
        vision_of(model)
    assert str(e.value) == f"{path}: no vision tower in it; to add it: {command}"
    assert str(e.value) in str(model.report)
    released = str(made["released"])
    result = call(*command.replace("RELEASED", released).split()[1:])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1] == "vision     0.53 MB in 33 tensors, stored as F32"
    expected = features(load(released))
    assert np.array_equal(features(load(path)), expected)
    # Elsewhere, too, and from the released checkpoint itself.
    done = extract_vision(released, tmp_path / "alone.safetensors")
    for place in (done.path, made["released"], made["converted"], made["converted"] / "vision.safetensors"):
        assert np.array_equal(features(load(made["blind"], vision_path=place)), expected), place
    (tmp_path / "again").mkdir()
    convert(path, tmp_path / "again")
    assert np.array_equal(features(load(tmp_path / "again")), expected)


def test_text_needs_no_tower_and_the_first_picture_reads_it(made, tmp_path):
    path = tmp_path / "converted"
    shutil.copytree(made["converted"], path)
    off, on = load(path, vision=False), load(path)
    assert off.vision is None
    assert on.vision.nbytes == sum(w.nbytes for w in mx.load(str(path / "vision.safetensors")).values())
    with pytest.raises(ValueError, match=r"loaded without its vision tower; omit vision=False \(--no-vision\)"):
        vision_of(off)
    assert needs(on, 100).total - needs(off, 100).total == on.vision.nbytes
    assert {n: w.shape for n, w in tree_flatten(on.parameters())} == {
        n: w.shape for n, w in tree_flatten(off.parameters())
    }
    picture = on.vision.picture(open_image(PICTURE))
    assert not on.vision.is_read
    rows = on.vision.features(picture)
    assert on.vision.is_read
    (path / "vision.safetensors").unlink()  # nothing is read again
    assert on.vision.features(picture) is rows


def changed(weights, **tensors):
    return {name: w for name, w in (weights | tensors).items() if w is not None}


BIAS, QKV = "model.visual.merger.linear_fc2.bias", "model.visual.blocks.1.attn.qkv.weight"
DAMAGE = {
    "a missing tensor": ({BIAS: None}, {}, "tensor model.visual.merger.linear_fc2.bias is missing"),
    "a wrong shape": (
        {QKV: mx.ones((3, 64))},
        {},
        r"blocks.1.attn.qkv.weight has shape (3, 64); config.json expects",
    ),
    "an unknown tensor": (
        {"model.visual.deepstack_merger_list.0.norm.weight": mx.ones(4)},
        {},
        "is not part of the vision tower that config.json describes",
    ),
    "integers": ({QKV: mx.ones((192, 64), mx.int32)}, {}, "has type I32; expected floating-point numbers"),
    "features of inner blocks": ({}, {"deepstack_visual_indexes": [0]}, "deepstack_visual_indexes"),
    "another width": ({}, {"out_hidden_size": 16}, "its features have 16 columns, the model's hidden size is 32"),
    "no depth": ({}, {"depth": None}, "the vision tower cannot be built from config.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tower_is_a_warning_for_text_and_an_error_for_pictures(kind, made, tmp_path):
    tensors, vision, reason = DAMAGE[kind]
    path = tmp_path / "damaged"
    shutil.copytree(made["released"], path)
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.save_safetensors(str(path / "model.safetensors"), changed(weights, **tensors), {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["vision_config"] |= vision
    (path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="pictures are refused"):
        model = mlx_mtp.load_model(path, lazy=True)
    assert reason in str(model.runtime.blind)
    with pytest.raises(ValueError, match="damaged") as e:
        vision_of(model)
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="damaged"):
        mlx_mtp.load_model(made["blind"], vision_path=path, lazy=True)


def test_damage_that_only_the_values_show(made, tmp_path):
    shutil.copytree(made["converted"], path := tmp_path / "damaged")
    weights = dict(mx.load(str(path / "vision.safetensors")))
    mx.save_safetensors(str(path / "vision.safetensors"), weights | {QKV: mx.full((192, 64), float("nan"))})
    with pytest.raises(ValueError, match=r"damaged: tensor blocks\.1\.attn\.qkv\.weight holds NaN"):
        features(load(path))
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight holds NaN"):
        convert(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_settings_of_the_processor(made, tmp_path):
    shutil.copytree(made["converted"], path := tmp_path / "other")
    picture = open_image(PICTURE)
    first = load(path).vision.picture(picture)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.4, 0.5, 0.5]}))
    second = load(path).vision.picture(picture)
    assert first.grid == second.grid
    assert first.digest != second.digest  # its features differ
    for text in ("[]", "{", '{"patch_size": 14}', '{"size": 3}'):
        (path / "preprocessor_config.json").write_text(text)
        warned = pytest.warns(UserWarning, match="not usable") if text in "[]{" else contextlib.nullcontext()
        with warned:
            vision = mlx_mtp.load_model(path, lazy=True).vision
        if vision is not None:
            with pytest.raises(ValueError, match=r"preprocessor_config\.json") as e:
                vision.picture(picture)
            assert "\n" not in str(e.value)


def test_inspect_reads_headers(made):
    facts = inspect_checkpoint(made["4 bits"], values=False)
    assert (facts.vision.tensors, facts.vision.types) == (33, {"F32": facts.vision.loaded})
    assert "vision     0.53 MB in 33 tensors, stored as F32; read at the first picture" in as_text(facts)
    assert facts.report.ignored == ()
    facts = inspect_checkpoint(made["blind"], values=False)
    assert facts.vision.tensors == 0
    assert "no vision tower in it; to add it: mlx-mtp convert" in as_text(facts)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--vision-only", "--vision-only and --vision-path: give both or neither"),
        ("--vision-path a", "--vision-only and --vision-path: give both or neither"),
        ("--vision-only --vision-path a -q", "--quantize: not with --vision-only; the tower is copied unchanged"),
        ("--vision-only --vision-path a --mtp-only --mtp-path b", "--mtp-only: not with --vision-only"),
        ("--vision-only --vision-path a --dtype float16", "--dtype: not with --vision-only"),
        ("--vision-only --vision-path a", "vision_path=a: allowed are an existing directory, or a new file"),
    ],
)
def test_flags_that_do_not_fit(flags, words, made):
    result = call("convert", "--hf-path", made["released"], *flags.split())
    assert result.returncode
    assert words in result.stderr


def test_families_without_a_tower():
    model = load("demo")
    with pytest.raises(ValueError, match="model_type 'step3p5' reads no pictures here; supported are qwen3_5, "):
        vision_of(model)
    assert "vision" not in str(model.report)
    with pytest.raises(ValueError, match="vision_path=x: omit it; model_type 'step3p5' reads no pictures"):
        load("demo", vision_path="x")


def test_a_tower_or_picture_that_does_not_fit_into_memory_is_refused(made, monkeypatch, machine):
    vision = load(made["released"]).vision
    picture = vision.picture(open_image(PICTURE))
    for room, start in ((vision.nbytes - 1, "vision tower: "), (vision.nbytes, "a picture of 5 x 3 rows: ")):
        machine(room)
        if start.startswith("a picture"):
            monkeypatch.setattr(type(vision._tower), "scratch", lambda self, grid: vision.nbytes + 1)
        with pytest.raises(ValueError, match=f"{start}.* GB needed in addition to the model"):
            vision.features(picture)
    monkeypatch.undo()
    assert vision.features(picture).shape == (15, 32)
    assert vision._tower.scratch((1, 34, 60)) > 100 * vision._tower.scratch((1, 2, 3))


def test_a_picture_s_tokens_depend_on_the_tower(made, tmp_path):
    image, words = open_image(PICTURE), set()
    for i, at in enumerate([None, (0, 0), (96, 0)]):  # the first value of a matrix, and one in its middle
        shutil.copytree(made["converted"], path := tmp_path / str(i))
        weights = dict(mx.load(str(path / "vision.safetensors")))
        if at:
            weights[QKV][at] += 1
        mx.save_safetensors(str(path / "vision.safetensors"), weights)
        vision = load(path).vision
        words.add(vision.picture(image).words)
        assert vision.picture(image).words == load(path).vision.picture(image).words
    assert len(words) == 3


def test_tensors_that_are_computed_here_are_ignored(made, tmp_path):
    shutil.copytree(made["converted"], path := tmp_path / "more")
    weights = dict(mx.load(str(path / "vision.safetensors")))
    more = {f"model.visual.{name}": mx.ones(3) for name in ("rotary_pos_emb.inv_freq", "position_ids")}
    mx.save_safetensors(str(path / "vision.safetensors"), weights | more)
    assert np.array_equal(features(load(path)), features(load(made["converted"])))
