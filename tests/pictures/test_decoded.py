"""A file that is opened again is not decoded again, and the memory for pixels is limited."""

import numpy as np
import pytest
from picture_requests import noise

from mlx_mtp.pictures import decoded
from mlx_mtp.pictures.decoded import DecodedFiles
from mlx_mtp.pictures.image import open_image

FILES = [noise(seed, 8, 4 + seed) for seed in range(5)]
SIZE = 3 * 8 * 8  # bytes of the largest picture's pixels


@pytest.fixture
def opened(monkeypatch):
    """The files that are decoded."""
    found = []
    monkeypatch.setattr(decoded, "open_image", lambda data, *more: found.append(data) or open_image(data, *more))
    return found


@pytest.mark.parametrize("limit", [0, SIZE, 2 * SIZE, 10**6])
def test_pictures_are_those_of_their_files_within_the_limit(limit, opened):
    files = DecodedFiles(limit)
    for data in (*FILES, FILES[0], FILES[3]):
        image, expected = files.open(data), open_image(data)
        assert (image.size, image.digest) == (expected.size, expected.digest)
        assert files.nbytes <= limit
    assert opened == FILES
    for data in (FILES[4], FILES[4], FILES[0]):
        assert np.array_equal(files.open(data).pixels, open_image(data).pixels)
    assert len(opened) == len(FILES) + {0: 3, SIZE: 2, 2 * SIZE: 2, 10**6: 1}[limit]


def test_pixels_are_dropped_when_they_are_taken(opened):
    files = DecodedFiles()
    image = files.open(FILES[0])
    assert files.nbytes == image.pixels.nbytes
    assert files.nbytes == 0


def test_a_refused_file_is_refused_again_by_its_number(opened):
    files = DecodedFiles()
    for number in (1, 2):
        with pytest.raises(ValueError, match=f"picture {number}"):
            files.open(FILES[0][:40], number)


def test_the_number_of_files_is_limited(opened, monkeypatch):
    monkeypatch.setattr(decoded, "FILES", 2)
    files = DecodedFiles()
    for data in (FILES[0], FILES[1], FILES[0], FILES[2], FILES[0], FILES[1]):
        files.open(data)
    assert opened == [FILES[0], FILES[1], FILES[2], FILES[1]]
