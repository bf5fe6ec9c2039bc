"""A picture fits its box within the limits; a header that is cut has no size; other shapes are one line."""

from types import SimpleNamespace

import numpy as np
import pytest

from mlx_mtp.pictures import prompt
from mlx_mtp.pictures.header import Head, read_head
from mlx_mtp.pictures.image import LIMITS, Image
from mlx_mtp.pictures.prompt import fitted, fitted_size


@pytest.mark.parametrize("enlarge", [False, True])
def test_a_scaled_size_fills_the_box_and_keeps_to_the_limit(enlarge):
    for height, width, *box in np.random.default_rng(0).integers(1, 3000, (2000, 4)).tolist():
        height, width = min(height, LIMITS.ratio * width), min(width, LIMITS.ratio * height)
        found = fitted_size(height, width, tuple(box), enlarge=enlarge)
        assert all(1 <= side <= most for side, most in zip(found, box, strict=True))
        assert max(found) <= LIMITS.ratio * min(found)
        assert found[0] == box[0] or found[1] == box[1] or (found == (height, width) and not enlarge)


def test_every_size_near_the_limit_of_ratios_stays_within():
    for short in range(1, 12):
        for long in range(199 * short, 200 * short + 1, 3):
            for box in range(1, 2400, 97):
                height, width = fitted_size(long, short, (box, box))
                assert height <= box
                assert width <= box
                assert max(height, width) <= LIMITS.ratio * min(height, width)


def test_a_scaled_picture_beyond_the_limits_is_named_before_it_is_made(monkeypatch):
    monkeypatch.setattr(prompt, "pillow", lambda: pytest.fail("scaled"))
    vision = SimpleNamespace(limits=LIMITS, picture=lambda image: image)
    large, small = (Image(np.zeros((*size, 3), np.uint8), b"") for size in ((12000, 60), (1, 1)))
    with pytest.raises(ValueError, match=r"^picture 2: 12000 x 12000 pixels; allowed are 50,000,000 in all"):
        prompt._opened(vision, [large, small], (12000, 12000))


def test_a_narrow_picture_is_scaled_down():
    pytest.importorskip("PIL", reason="needs Pillow: the extra vision, or test")
    assert fitted(Image(np.zeros((1990, 10, 3), np.uint8), b""), (1900, 1900)).size == (1900, 10)


HEADS = {
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\2\3\0\2\3\4",
    "GIF": b"GIF89a\1\2\3\4",
    "JPEG": b"\xff\xd8\xff\xe0\0\4ab\xff\xc2\0\x11\x08\1\2\3\4",
    "WEBP": b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\1\2\3\4\5\6",
    "WEBP, lossless": b"RIFF\0\0\0\0WEBPVP8L\x0a\0\0\0\x2f\1\2\3\4",
    "WEBP, lossy": b"RIFF\0\0\0\0WEBPVP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a\1\2\3\4",
}


@pytest.mark.parametrize("form", HEADS)
def test_a_header_without_its_last_byte_has_no_size(form):
    whole = HEADS[form]
    assert isinstance(read_head(whole), Head)
    assert [read_head(whole[:end]) for end in range(len(whole))] == [None] * len(whole)


OTHERS = [5.5, "5", "55", b"ab", True, 0, -1, (1, 2, 3), [], (1, "2"), (1.0, 2), [None], {1: 2}, object, 1 << 17]


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="expected a number or") as raised:
        prompt._box(shape)
    assert "\n" not in str(raised.value)
