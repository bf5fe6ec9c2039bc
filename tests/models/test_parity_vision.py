"""Compare features of whole pictures, from file to features, with transformers' processor and vision tower."""

import io

import mlx.core as mx
import numpy as np
import pytest
import seeing

import mlx_mtp
from mlx_mtp.pictures.image import open_image

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow: the extra vision, or test")
pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")

SIZES = [(8, 8), (24, 40), (100, 37), (3, 3), (1, 190), (200, 1), (128, 128)]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_features_are_those_of_transformers(moe, tmp_path):
    path, _ = seeing.build(tmp_path, moe=moe, num_position_embeddings=49)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval().model
    processor, vision = pil.Qwen2VLImageProcessorPil.from_pretrained(path), mlx_mtp.load_model(path, lazy=True).vision
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        inputs = processor(images=picture, return_tensors="pt")
        with torch.no_grad():
            found = theirs.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        expected = (found[0] if isinstance(found, list | tuple) else found).numpy()
        picture.save(file := io.BytesIO(), "PNG")
        features = vision.features(vision.picture(open_image(file.getvalue())))
        assert features.dtype == mx.float32
        assert np.abs(np.array(features) - expected).max() < 2e-6 * max(1, np.abs(expected).max())
