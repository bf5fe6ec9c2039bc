"""Load a block drafter next to MTP heads: what is loaded, reported, counted and refused."""

import json
import re
import warnings

import block_drafters
import families
import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.load import load_model
from mlx_mtp.decoding.drafters.block import Block
from mlx_mtp.decoding.drafters.heads_and_block import HeadsAndBlock
from mlx_mtp.decoding.graph_memory import nbytes


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """(target's directory, drafter's directory)"""
    path = tmp_path_factory.mktemp("glm")
    directory = families.build("glm4_moe_untied", path / "target", head_dim=32)[0]
    model = load_model(directory, mtp=False)
    width, vocab = model.no_hidden().shape[-1], model.vocab_size
    return directory, block_drafters.save_for(path / "drafter", "dflash", width, vocab)


def text(model, **options):
    steps = mlx_mtp.generate_step([1, 2, 3], model, max_tokens=8, **options)
    return [token for token, *_ in steps]


def test_heads_stay_next_to_a_block_drafter_unless_mtp_is_false(glm):
    directory, drafter = glm
    both, alone, heads = (
        load_model(directory, **o) for o in ({"draft_model": drafter}, {"draft_model": drafter, "mtp": False}, {})
    )
    assert type(both.drafter) is HeadsAndBlock
    assert type(alone.drafter) is Block
    assert len(both.mtp) == len(heads.mtp) == 1
    assert not alone.mtp
    assert both.report.head_bytes == alone.report.head_bytes + heads.report.head_bytes
    assert both.report.head_bytes == nbytes([both.mtp, both.drafter.net])
    assert text(both, num_draft_tokens=3) == text(alone, num_draft_tokens=3) == text(heads, num_draft_tokens=0)


def test_the_report_names_both(glm):
    directory, drafter = glm
    lines = str(load_model(directory, draft_model=drafter).report).splitlines()
    (of_drafter,), (of_heads,) = (
        [line for line in lines if line.startswith(name)] for name in ("drafter ", "MTP heads ")
    )
    assert re.search(r"DFlash, 2 layers, .*drafter, reading the target after layers 1, 2$", of_drafter)
    assert of_heads.split(maxsplit=2)[2] == "1, in the model's shards"
    assert any(line.startswith("drafting ") for line in lines)
    alone = str(load_model(directory, draft_model=drafter, mtp=False).report)
    assert "MTP heads" not in alone
    assert "DFlash" in alone


def test_a_checkpoint_without_heads_has_the_block_drafter_alone(tmp_path):
    config = families.FAMILIES["glm4_moe_untied"].config
    target, *_ = families.headless(tmp_path / "target", {**config, "num_nextn_predict_layers": 0})
    plain = load_model(target, mtp=False)
    width, vocab = plain.no_hidden().shape[-1], plain.vocab_size
    drafter = block_drafters.save_for(tmp_path / "drafter", "dflash", width, vocab)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(target, draft_model=drafter)
    assert type(model.drafter) is Block


def test_broken_heads_leave_the_block_drafter_alone(glm, tmp_path):
    """With a line that states what is wrong; in a file that the user names they are an error."""
    directory, drafter = glm
    config, name = json.loads((directory / "config.json").read_text()), "model.layers.2.eh_proj.weight"
    weights = mx.load(str(directory / "model.safetensors"))
    broken = tiny.save(tmp_path, config, {n: w for n, w in weights.items() if n != name})
    with pytest.warns(UserWarning, match=rf"tensor {re.escape(name)} is missing.*; the block drafter drafts without"):
        model = load_model(broken, draft_model=drafter)
    assert type(model.drafter) is Block
    for options in ({}, {"draft_model": drafter, "mtp_path": broken}):
        with pytest.raises(ValueError, match=rf"tensor {re.escape(name)} is missing"):
            load_model(directory if options else broken, **options)
    trunk = {n: w for n, w in weights.items() if n != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        load_model(tiny.save(tmp_path / "trunk", config, trunk), draft_model=drafter)


def test_heads_of_another_file(glm, tmp_path):
    directory, drafter = glm
    other = families.build("glm4_moe_untied", tmp_path, seed=5, head_dim=32)[0]
    model = load_model(directory, draft_model=drafter, mtp_path=other)
    theirs, own = load_model(directory, mtp_path=other), load_model(directory)
    same = [
        all((a == b).all().item() for (_, a), (_, b) in zip(*map(tree_flatten, (model.mtp, m.mtp)), strict=True))
        for m in (theirs, own)
    ]
    assert same == [True, False]
    assert type(model.drafter) is HeadsAndBlock


def test_options_of_both(glm):
    directory, drafter = glm
    with pytest.raises(ValueError, match=r"mtp_path=x: not together with mtp=False"):
        load_model(directory, draft_model=drafter, mtp_path="x", mtp=False)
    for mtp in (True, False):
        model = load_model(directory, draft_model=drafter, mtp_overrides={"capture": (0, 2)}, mtp=mtp)
        assert model.taps == (0, 2)
    with pytest.raises(ValueError, match="block drafters have no 'fuse'"):
        load_model(directory, draft_model=drafter, mtp_overrides={"fuse": "he"})


def test_the_memory_check_counts_both(glm, machine):
    """A byte less than the target, its heads and the block drafter need is refused before weights are read."""
    directory, drafter = glm
    needed = nbytes(load_model(directory, draft_model=drafter, lazy=True).parameters())
    machine(needed - 1)
    with pytest.raises(ValueError, match=r"needed, .*a test"):
        load_model(directory, draft_model=drafter)
    load_model(directory, draft_model=drafter, mtp=False)
    machine(needed)
    assert load_model(directory, draft_model=drafter).drafter


def test_quantized_caches_of_both_have_one_format(glm, tmp_path):
    directory, drafter = glm
    model = load_model(directory, draft_model=drafter)
    with pytest.raises(ValueError, match="kv_group_size=32: allowed for the head size 16"):
        mlx_mtp.make_prompt_cache(model, mtp_kv_bits=8, kv_group_size=32)
    latent = families.build("deepseek_v3", tmp_path / "latent")[0]
    other = load_model(latent, mtp=False)
    of_latent = block_drafters.save_for(tmp_path / "drafter", "dflash", other.no_hidden().shape[-1], other.vocab_size)
    with pytest.raises(ValueError, match="mtp_kv_bits=8: not with multi-head latent"):
        mlx_mtp.make_prompt_cache(load_model(latent, draft_model=of_latent), mtp_kv_bits=8)
