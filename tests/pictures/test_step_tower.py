"""Step-3.7's tiles cover a picture, its tokens frame them, and its tower reads every layout."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
import seeing_step

import mlx_mtp
from mlx_mtp.models.vision import step
from mlx_mtp.models.vision.step_tiles import FEATURE, MARKS, Pixels
from mlx_mtp.pictures.image import open_image

pytest.importorskip("PIL", reason="needs Pillow: the extra vision, or test")
from PIL import Image

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 24, 3), np.uint8)
IDS = {name: seeing_step.VOCAB[name] for name in MARKS}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return seeing_step.build(tmp_path_factory.mktemp("step"))[0]


def features(path, **options):
    vision = mlx_mtp.load_model(path, lazy=True, **options).vision
    return np.array(vision.features(vision.picture(open_image(Image.fromarray(PICTURE)))))


def test_rows_of_released_models(path):
    """An overview is 169 rows and a tile 81, each with two marks; lines of tiles but the last have one more."""
    pixels = Pixels(None, {"vision_config": {}}, path)
    assert pixels.grid(728, 728) == (1, 1, 171)
    assert pixels.grid(1080, 1920) == (1, 1, 4 * 2 * 83 + 1 + 171)
    assert pixels.grid(3024, 3024) == pixels.grid(5000, 5000) == (1, 1, 36 * 83 + 5 + 171)
    assert pixels.grid(1080, 1920, 512 * 512) == (1, 1, 171)
    assert pixels.grid(504, 400) == (1, 1, 171)


def test_tokens_frame_the_views(path):
    pixels = Pixels(seeing_step.PREPROCESSOR, seeing_step.CONFIG, path)
    views = pixels.patches(PICTURE, pixels.grid(40, 24))
    begin, end, newline, overview, overview_end = (IDS[name] for name in MARKS)
    tile = [begin, *[FEATURE] * 4, end]
    assert views.tokens == [*tile * 2, newline, *tile * 2, newline, *tile * 2, overview, *[FEATURE] * 9, overview_end]
    assert [view.shape for view in views.pixels] == [(16, 16, 3)] * 6 + [(24, 24, 3)]


def test_tiles_are_the_picture_line_by_line(path):
    """With tiles of the picture's own scale, pixels are those of the picture."""
    pixels = Pixels(
        seeing_step.PREPROCESSOR | {"image_mean": [0] * 3, "image_std": [1] * 3}, seeing_step.CONFIG, path
    )
    picture = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    *tiles, _ = pixels.patches(picture, pixels.grid(32, 48)).pixels
    lines = [np.concatenate(tiles[at : at + 3], axis=1) for at in (0, 3)]
    assert np.allclose(np.concatenate(lines) * 255, picture, atol=1e-3)


def test_marks_have_the_language_model_s_embeddings(path):
    model = mlx_mtp.load_model(path, lazy=True)
    pixels = Pixels(seeing_step.PREPROCESSOR, seeing_step.CONFIG, path)
    tokens = np.array(pixels.patches(PICTURE, pixels.grid(40, 24)).tokens)
    found, marks = features(path), tokens != FEATURE
    assert np.array_equal(found[marks], np.array(model.embedded(mx.array(tokens[marks]))))


def test_mlx_s_layout_has_the_same_features(path, tmp_path):
    shutil.copytree(path, other := tmp_path / "other")
    weights = dict(mx.load(str(path / "model.safetensors")))
    named = {}
    for name, w in weights.items():
        if name.startswith("vision_model."):
            name = name.replace("transformer.resblocks.", "transformer.").replace("in_proj_", "in_proj.")
            w = w.transpose(0, 2, 3, 1) if w.ndim == 4 else w
        named[name] = w
    mx.save_safetensors(str(other / "model.safetensors"), named)
    assert np.array_equal(features(other), features(path))


def test_the_tower_is_kept_and_found_elsewhere(path, tmp_path):
    mlx_mtp.convert(path, tmp_path / "converted")
    expected = features(path)
    assert np.array_equal(features(tmp_path / "converted"), expected)
    (tmp_path / "converted" / "vision.safetensors").unlink()
    assert mlx_mtp.load_model(tmp_path / "converted", lazy=True).vision is None
    assert np.array_equal(features(tmp_path / "converted", vision_path=path), expected)


@pytest.mark.parametrize("change", [{"use_cls_token": True}, {"hidden_act": "gelu"}, {"use_ln_post": True}])
def test_towers_of_another_kind_are_refused(change):
    config = seeing_step.CONFIG | {"vision_config": seeing_step.VISION | change}
    with pytest.raises(ValueError, match=f"vision_config: {next(iter(change))} is "):
        step.Tower(config)


def test_a_tokenizer_without_the_marks_is_refused(path, tmp_path):
    shutil.copytree(path, other := tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<patch_end>"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    vision = mlx_mtp.load_model(other, lazy=True).vision
    with pytest.raises(ValueError, match=r"tokenizer\.json: no token <patch_end>, which pictures need"):
        vision.grid(10, 10)
