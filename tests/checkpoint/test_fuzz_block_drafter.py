"""Damage block drafters' directories at random: one line of error, or the target's own text."""

import shutil
import warnings

import block_drafters
import damage
import drafters
import families
import pytest
from fuzzing import Files, profile
from hypothesis import given
from hypothesis import strategies as st

import mlx_mtp

KINDS = list(block_drafters.KINDS)
PROMPT = [1, 2, 3, 0, 2]


def text(model, k):
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=6, num_draft_tokens=k, adaptive=False)
    return [token for token, _, _ in steps]


def loaded(directory, drafter):
    """The model, or None and why it does not load."""
    try:
        return mlx_mtp.load_model(directory, draft_model=drafter), ""
    except ValueError as e:
        return None, str(e)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(directory, its text)"""
    directory = families.headless(tmp_path_factory.mktemp("target"), drafters.HEADLESS["qwen3"])[0]
    with warnings.catch_warnings(action="ignore"):
        return directory, text(mlx_mtp.load_model(directory), 0)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    made = {kind: block_drafters.save(folder / kind, config) for kind, config in block_drafters.KINDS.items()}
    return Files((kind, {f.name: f.read_bytes() for f in path.iterdir()}) for kind, path in made.items())


@profile(14)
@given(data=st.data())
def test_damage_is_said_in_one_line_or_does_no_harm(target, bases, tmp_path_factory, data):
    directory, expected = target
    folder, files = tmp_path_factory.mktemp("case"), dict(bases[data.draw(st.sampled_from(KINDS))])
    kinds = data.draw(st.lists(st.sampled_from(["config_entry", *sorted(damage.KINDS)]), min_size=1, max_size=2))
    for kind in kinds:
        damage.KINDS[kind](data.draw, files)
    path = damage.put(folder / "drafter", files)
    with warnings.catch_warnings(action="ignore"):
        model, error = loaded(directory, path)
        if model is None:
            assert "\n" not in error
            assert str(path) in error
        else:
            assert text(model, min(3, model.max_draft_tokens)) == expected
    shutil.rmtree(folder)
