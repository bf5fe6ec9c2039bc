"""Compare Step-3.7's tiles, features and texts after pictures with transformers'."""

import mlx.core as mx
import numpy as np
import pytest
import seeing_step

import mlx_mtp
from mlx_mtp.models.vision.step_tiles import FEATURE, Pixels
from mlx_mtp.pictures.image import open_image

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow: the extra vision, or test")
N = 12
SIZES = [(24, 24), (10, 10), (40, 24), (24, 40), (60, 50), (100, 20), (200, 190), (10, 90), (31, 24)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path, _ = seeing_step.build(tmp_path_factory.mktemp("step"))
    parts = {"text_config": dict(seeing_step.TEXT), "vision_config": dict(seeing_step.VISION)}
    config = transformers.Step3p7Config(**parts, image_token_id=seeing_step.VOCAB["<im_patch>"])
    load, given = transformers.Step3p7ForConditionalGeneration.from_pretrained, {"dtype": torch.float32}
    theirs, info = load(path, config=config, output_loading_info=True, **given)
    assert not any(info.values())
    theirs.generation_config.eos_token_id = None
    return theirs.eval(), mlx_mtp.load_model(path), Pixels(seeing_step.PREPROCESSOR, seeing_step.CONFIG, path)


def inputs(views):
    tiles = [torch.tensor(view.transpose(2, 0, 1)) for view in views.pixels]
    found = {"pixel_values": tiles.pop()[None]}
    return found | ({"pixel_values_local": torch.stack(tiles), "num_local_patches": [len(tiles)]} if tiles else {})


def picture_of(height, width):
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def test_features_are_those_of_transformers(models):
    theirs, ours, pixels = models
    for size in SIZES:
        picture = picture_of(*size)
        views = pixels.patches(picture, pixels.grid(*size))
        with torch.no_grad():
            found = theirs.model.get_image_features(**inputs(views)).pooler_output
        expected = torch.cat(list(found)).reshape(-1, 32).numpy()
        features = np.array(ours.vision.features(ours.vision.picture(open_image(Image.fromarray(picture)))))
        marks = np.array(views.tokens) != FEATURE
        assert np.abs(features[~marks] - expected).max() < 2e-6 * np.abs(expected).max()
        assert np.array_equal(features[marks], ours.embedded(mx.array(views.tokens)[mx.array(np.where(marks)[0])]))


def test_tiles_are_planned_as_transformers_plans_them(models):
    kind = pytest.importorskip("transformers.models.step3p7.image_processing_step3p7").Step3p7ImageProcessor
    released = Pixels.__new__(Pixels)
    released._size, released._tile, released._largest = 728, 504, 3024
    for pixels, planner in ((models[2], (96, 24, 16)), (released, (3024, 728, 504))):
        own = object.__new__(kind)
        object.__setattr__(own, "max_image_size", planner[0])
        for seed in range(300):
            height, width = np.random.default_rng(seed).integers(1, 4 * planner[1], 2).tolist()
            plan = pixels._plan(width, height)
            found = (plan.overview, plan.cut, plan.side, plan.across, plan.down, plan.square)
            assert found == kind._plan_patches(own, width, height, *planner[1:])


@pytest.mark.parametrize("size", [(24, 24), (40, 24)])
def test_texts_after_pictures_are_those_of_transformers(models, size):
    theirs, ours, pixels = models
    image = picture_of(*size)
    views = pixels.patches(image, pixels.grid(*size))
    picture = ours.vision.picture(open_image(Image.fromarray(image)))
    mark, before, after = ours.vision.mark, [5, 6, 7], [8, 9]
    ids = [*before, *(mark if token == FEATURE else token for token in views.tokens), *after]
    with torch.no_grad():
        given = {"input_ids": torch.tensor([ids]), **inputs(views)}
        expected = theirs.generate(**given, max_new_tokens=N, do_sample=False)[0, len(ids) :].tolist()
    prompt = [*before, *picture.tokens, *after]
    for k, chunk in ((0, 2048), (3, 7)):
        options = {"num_draft_tokens": k, "adaptive": False, "prefill_step_size": chunk, "pictures": [picture]}
        found = [token for token, *_ in mlx_mtp.generate_step(prompt, ours, max_tokens=N, **options)]
        assert found == expected, (k, chunk)
