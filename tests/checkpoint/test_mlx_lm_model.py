"""Decode families without a port plainly, as with lazy weights: mlx-lm's tokens, without drafts, and a warning."""

import families
import mlx.core as mx
import pytest
import tiny
from mlx_lm.generate import generate_step as mlx_lm_steps
from portless import CONFIGS
from sweep import sampled

import mlx_mtp


@pytest.fixture(scope="module", params=CONFIGS)
def plain(request, tmp_path_factory):
    """(loaded by us, mlx-lm's model)"""
    path, reference = families.headless(tmp_path_factory.mktemp("plain"), CONFIGS[request.param])
    with pytest.warns(UserWarning, match=f"model_type '{request.param}' has no MTP port; decoding plainly"):
        model = mlx_mtp.load_model(path, lazy=True)  # which is not probed
    return model, reference


def ours(model, prompt, n, **options):
    return [token for token, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=n, **options)]


def theirs(model, prompt, n):
    return [token for token, _ in mlx_lm_steps(mx.array(prompt), model, max_tokens=n)]


@pytest.mark.parametrize("length", [1, 2, 20])
def test_tokens_are_mlx_lms(plain, length):
    model, reference = plain
    prompt, n = [i % 13 for i in range(1, length + 1)], 10 if length > 2 else 4
    expected = theirs(reference, prompt, n)
    assert ours(model, prompt, n) == expected
    if length > 2:
        assert ours(model, prompt, n, prefill_step_size=3) == expected


@pytest.mark.parametrize("stop", sampled([1, 7], [1, 3, 12]))
def test_stop_save_and_continue(plain, tmp_path, stop):
    model, reference = plain
    prompt = [1, 2, 3, 4, 5, 6, 7]
    n = stop + 4
    expected = theirs(reference, prompt, n)
    cache = mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step(prompt, model, prompt_cache=cache, max_tokens=n)
    text = [token for _, (token, _, _) in zip(range(stop), steps, strict=False)]
    steps.close()
    assert (text, cache.tokens) == (expected[:stop], prompt + text[:-1])
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    copy = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)
    assert copy.tokens == cache.tokens
    for kept in (cache, copy):
        assert ours(model, text[-1:], 4, prompt_cache=kept) == expected[stop:]


def test_an_interrupted_step_is_noticed(plain, monkeypatch):
    model, _ = plain
    cache = mlx_mtp.make_prompt_cache(model)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours(model, [1, 2, 3], 5, prompt_cache=cache)
    with pytest.raises(ValueError, match="interrupted in the middle of a step, or not trimmable; make a new one"):
        ours(model, [1, 2, 3], 5, prompt_cache=cache)


def test_sampling_and_stats(plain):
    model, _ = plain
    stats = mlx_mtp.Stats()
    texts = [ours(model, [1, 2, 3], 14, temp=1.0, seed=3, stats=stats) for _ in range(2)]
    assert texts[0] == texts[1]
    assert (stats.num_draft_tokens, stats.tokens_per_cycle) == (0, 1.0)
    assert len(set(texts[0])) > 2


def test_options_that_need_a_port_are_refused_by_name(plain, tmp_path):
    model, _ = plain
    for options in ({"kv_bits": 8}, {"max_kv_size": 64}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*not with a family that has no port"):
            ours(model, [1], 2, **options)
    with pytest.raises(ValueError, match="num_draft_tokens=1: allowed is 0, because the model has no drafter"):
        ours(model, [1], 2, num_draft_tokens=1)
    path, _ = families.headless(tmp_path, CONFIGS["starcoder2"])
    with pytest.raises(ValueError, match=r"model_type 'starcoder2' has no port with heads; supported are .*qwen3"):
        mlx_mtp.load_model(path, mtp_overrides={"fuse": "he"})
    with pytest.raises(ValueError, match="mtp_path=x: a family without a port drafts only with a file of tune-heads"):
        mlx_mtp.load_model(path, mtp_path="x")
    with pytest.raises(
        ValueError, match=r"draft_model=.*: omit it; model_type 'starcoder2' decodes plainly: its wei"
    ):
        mlx_mtp.load_model(path, draft_model=path, lazy=True)


def test_report(plain):
    text = str(plain[0].report)
    assert "MTP heads  0, model_type" in text
    assert "has no MTP port" in text
    assert "port       none: decoded plainly, its weights are lazy, and a probe would read them" in text


def test_tensors_too_many_and_too_few(tmp_path):
    path, _ = families.headless(tmp_path, CONFIGS["starcoder2"])
    weights = dict(mx.load(str(path / "model.safetensors")))
    tiny.save(path, CONFIGS["starcoder2"], weights | {"mtp.fc.weight": mx.zeros((2, 2))})
    model = mlx_mtp.load_model(path, mtp=False)
    assert "mtp.fc.weight" in str(model.report)
    del weights["model.layers.1.mlp.c_fc.weight"]
    tiny.save(path, CONFIGS["starcoder2"], weights)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.c_fc\.weight is missing"):
        mlx_mtp.load_model(path)
    tiny.save(path, CONFIGS["starcoder2"], weights | {"model.layers.1.mlp.c_fc.weight": mx.full((48, 32), mx.nan)})
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.c_fc\.weight holds NaN"):
        mlx_mtp.load_model(path)


def test_a_vocabulary_size_from_the_weights(tmp_path):
    config = {name: value for name, value in CONFIGS["starcoder2"].items() if name != "vocab_size"}
    path, _ = families.headless(tmp_path, {**config, "hidden_size": 8, "intermediate_size": 8})
    model = mlx_mtp.load_model(path, mtp=False)
    assert model.vocab_size == 49152  # mlx-lm's default
    with pytest.raises(ValueError, match="49152 is not a token id between 0 and 49151"):
        ours(model, [49152], 1)
