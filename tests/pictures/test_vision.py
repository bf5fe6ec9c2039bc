"""Patches are prepared in another thread, and the iterator of stages yields until they are ready."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.pictures.image import Image
from mlx_mtp.pictures.vision import Vision

IMAGE = Image(np.zeros((2, 2, 3), np.uint8), b"digest")


class Pixels:
    """`begun` has the thread of each preparation, which ends once `ready` is set, with `error` if there is one."""

    def __init__(self):
        self.ready, self.begun, self.error = threading.Event(), [], None

    def grid(self, height, width, most=None):
        return 1, 1, 1

    def patches(self, pixels, grid):
        self.begun.append(threading.current_thread())
        assert self.ready.wait(5)
        if self.error:
            raise self.error
        return pixels


class Tower:
    def scratch(self, grid):
        return 0

    def stages(self, patches, grid):
        yield mx.zeros((1, 4))


@pytest.fixture
def pixels():
    found = Pixels()
    yield found
    found.ready.set()


@pytest.fixture
def vision(pixels):
    return Vision(1, 0, "", open_pixels=lambda: pixels, read=Tower, fingerprint=str)


def test_stages_yield_nothing_until_the_patches_are_ready(vision, pixels):
    steps = vision.stages(vision.picture(IMAGE))
    assert [next(steps) for _ in range(3)] == [None] * 3
    pixels.ready.set()
    found = [step for step in steps if step is not None]
    assert [rows.shape for rows in found] == [(1, 4)]
    assert threading.current_thread() not in pixels.begun


def test_a_closed_iterator_prepares_nothing_more(vision, pixels):
    first, second = (vision.stages(vision.picture(IMAGE)) for _ in range(2))
    assert next(first) is next(second) is None
    second.close()
    pixels.ready.set()
    assert list(first)[-1].shape == vision.features(vision.picture(IMAGE)).shape == (1, 4)
    third = vision.stages(vision.picture(IMAGE))
    assert list(third)[-1].shape == (1, 4)
    assert len(pixels.begun) == 2


def test_an_error_of_the_preparation_is_raised_to_the_caller(vision, pixels):
    pixels.error = ValueError("damaged")
    pixels.ready.set()
    with pytest.raises(ValueError, match="damaged"):
        vision.features(vision.picture(IMAGE))
