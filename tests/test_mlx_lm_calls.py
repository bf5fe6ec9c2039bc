"""Programs that call mlx_lm run with the import changed, or fail with one line that states the change."""

import inspect
import itertools

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from sweep import sampled

import mlx_mtp
from mlx_mtp.decoding.options import default_chunk
from mlx_mtp.demo import demo_path

PROMPT = "def main("


@pytest.fixture(scope="module")
def demo():
    """In float32 everywhere, as on a CPU; (model, tokenizer, mlx-lm's model)."""
    options = {"tokenizer_config": {}, "model_config": {"max_position_embeddings": 777}, "trust_remote_code": True}
    model, tokenizer, config = mlx_mtp.load(str(demo_path()), return_config=True, **options)
    assert config["max_position_embeddings"] == model.args.max_position_embeddings == 777
    theirs, _ = mlx_lm.load(str(demo_path()), lazy=True)
    model.set_dtype(mx.float32)
    theirs.set_dtype(mx.float32)
    return model, tokenizer, theirs


def test_arguments_are_mlx_lms():
    """By position and by name; `stream` has no meaning here."""
    for name in ("load", "stream_generate", "generate", "batch_generate"):
        own, theirs = (inspect.signature(getattr(module, name)).parameters for module in (mlx_mtp, mlx_lm))
        names = [n for n in theirs if n not in ("draft_model", "stream", "kwargs")]
        assert [*own][: len(names)] == names, name
    assert "batch_generate" in dir(mlx_mtp) == sorted(mlx_mtp.__all__)
    for function in (mlx_mtp.generate_step, mlx_mtp.stream_generate, mlx_mtp.generate, mlx_mtp.batch_generate):
        options = [n for n in inspect.signature(mlx_mtp.generate_step).parameters if n not in ("prompt", "model")]
        assert not [n for n in options if n not in inspect.getdoc(function)], function


def test_verbose(demo, capsys):
    model, tokenizer, theirs = demo
    text = mlx_mtp.generate(model, tokenizer, PROMPT, verbose=True, max_tokens=6)
    ours = capsys.readouterr().out
    assert mlx_lm.generate(theirs, tokenizer, PROMPT, verbose=True, max_tokens=6) == text
    lines, expected = ours.splitlines(), capsys.readouterr().out.splitlines()
    assert lines[:-3] == expected[:-3]
    assert [line.split(":")[0] for line in lines[-3:]] == [line.split(":")[0] for line in expected[-3:]]


def test_batches(demo):
    model, tokenizer, theirs = demo
    prompts = [tokenizer.encode(text) for text in (PROMPT, "class A:\n")]
    options = {"return_prompt_caches": True, "return_token_ids": True, "return_logprobs": True}
    ours = mlx_mtp.batch_generate(model, tokenizer, prompts, max_tokens=[5, 8], prefill_batch_size=1, **options)
    expected = mlx_lm.batch_generate(theirs, tokenizer, prompts, max_tokens=[5, 8], **options)
    assert (ours.texts, ours.token_ids) == (expected.texts, expected.token_ids)
    for a, b in zip(ours.logprobs, expected.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert ours.stats.generation_tokens == expected.stats.generation_tokens == 13
    held = [cache.tokens for cache in ours.caches]
    more = [[ids[-1]] for ids in ours.token_ids]
    again = [mlx_mtp.batch_generate(model, tokenizer, more, ours.caches, 6).texts for _ in range(2)]
    assert again[0] == again[1]
    assert [cache.tokens for cache in ours.caches] == held
    assert again[0][0] == mlx_mtp.generate(model, tokenizer, held[0] + more[0], max_tokens=6)


SAMPLERS = [
    {"temp": 1.0},
    {"temp": 0.8, "top_p": 0.95, "top_k": 40},
    {"temp": 1.0, "min_p": 0.02, "xtc_probability": 0.5},
]


@pytest.mark.parametrize("options", sampled(SAMPLERS[2:], SAMPLERS))
def test_a_seed_gives_a_samplers_text_for_every_k(tiny_models, options):
    """Also if cycles are built ahead, and after processors; the thread's own draws are unaffected."""
    model, _ = tiny_models(0)
    options = {"sampler": make_sampler(**options), "logits_processors": make_logits_processors(None, 1.1)}

    def draw(k, before=7, **more):
        mx.random.seed(before)
        steps = mlx_mtp.generate_step([1, 2, 3], model, max_tokens=10, num_draft_tokens=k, **{**options, **more})
        found = tuple(token for token, *_ in steps)
        return found, mx.random.uniform().item()

    found = {draw(k, adaptive=False) for k in (0, 1, 3, 3)} | {draw(2)}
    assert len(found) == 1
    assert len({draw(k, logits_processors=None) for k in (0, 3)}) == 1
    assert len({draw(k, before, seed=3)[0] for k, before in ((0, 1), (3, 2))}) == 1
    assert draw(0, 8) not in found


def test_caches_of_mlx_lms_making(demo):
    """An empty list receives one cache of ours, which mlx_lm's functions accept; a list with content is refused."""
    model, tokenizer, theirs = demo
    caches = mlx_lm_caches.make_prompt_cache(model)
    mlx_mtp.generate(model, tokenizer, PROMPT, max_tokens=12, prompt_cache=caches)
    (cache,) = caches
    held = list(cache.tokens)
    for each in (cache, mlx_mtp.make_prompt_cache(model)):
        with pytest.raises(ValueError, match=r"^n=-1: allowed is 0 or more"):
            each.trim(-1)
        assert each.trim(0) == 0
    for n in (2, 9):
        assert mlx_lm_caches.can_trim_prompt_cache(caches)
        assert mlx_lm_caches.trim_prompt_cache(caches, n) == n
        held = held[:-n]
        assert cache.tokens == held
        options = {"max_tokens": 6, "num_draft_tokens": 3, "adaptive": False}
        text = mlx_mtp.generate(model, tokenizer, [9], prompt_cache=cache.copy(), **options)
        assert text == mlx_mtp.generate(model, tokenizer, [*held, 9], max_tokens=6, num_draft_tokens=0)
    with pytest.raises(ValueError, match=r"mlx_mtp\.save_prompt_cache"):
        mlx_lm_caches.save_prompt_cache("x", caches)
    full = mlx_lm_caches.make_prompt_cache(theirs)
    theirs(mx.array([[1, 2]]), cache=full)
    with pytest.raises(ValueError, match=r"^prompt_cache: mlx_lm's caches hold tokens"):
        mlx_mtp.generate(model, tokenizer, PROMPT, prompt_cache=full)
    with pytest.raises(ValueError, match=r"^prompt_cache: made for another model"):
        mlx_mtp.generate(model, tokenizer, PROMPT, prompt_cache=[mlx_lm_caches.KVCache()])


def test_a_wrapped_window_is_not_trimmed(tiny_models):
    model, _ = tiny_models(0)
    cache = mlx_mtp.make_prompt_cache(model)
    list(mlx_mtp.generate_step([1] * 60, model, prompt_cache=cache, max_tokens=0))
    assert not mlx_lm_caches.can_trim_prompt_cache(cache)
    assert mlx_lm_caches.trim_prompt_cache(cache, 2) == 0
    assert cache.offset == 60


def test_what_is_done_elsewhere(demo):
    model, tokenizer, theirs = demo
    with pytest.raises(ValueError, match=r"^model: mlx_mtp did not load it.*mlx_mtp\.load"):
        mlx_mtp.generate(theirs, tokenizer, PROMPT)
    for name in ("draft_model", "stream", "input_embeddings", "formatter"):
        with pytest.raises(ValueError, match=rf"^{name}: not taken here"):
            mlx_mtp.generate(model, tokenizer, PROMPT, **{name: theirs})
    assert mlx_mtp.generate(model, tokenizer, PROMPT, max_tokens=1, formatter=None)  # as LangChain calls it
    with pytest.raises(ValueError, match=r"^upload_repo='a/b': not taken here"):
        mlx_mtp.convert(demo_path(), quantize=True, upload_repo="a/b")


def test_mlx_lm_does_not_read_our_caches(demo):
    """The error names our function, for a model of either package, also if our cache replaced a list's members."""
    model, tokenizer, theirs = demo
    cache = mlx_mtp.make_prompt_cache(model)
    for loaded, given in itertools.product((model, theirs), (cache, [cache])):
        with pytest.raises(ValueError, match=r"^prompt_cache: mlx_mtp's.*mlx_mtp\.generate"):
            mlx_lm.generate(loaded, tokenizer, PROMPT, prompt_cache=given)
    assert [*cache] == [cache[0]] == [cache[-1]] == [cache]


def test_defaults_are_those_of_the_command_line(demo):
    """Keys and values of heads of 32 are quantized, and the prefill chunk size depends on the device."""
    from mlx_mtp.cli.generate import generate as command

    model, tokenizer, _ = demo
    cache = mlx_mtp.make_prompt_cache(model, kv_bits=8)
    assert cache.layout["kv_group_size"] == 32
    assert mlx_mtp.generate(model, tokenizer, PROMPT, kv_bits=8, quantized_kv_start=0, max_tokens=4)
    parameters = inspect.signature(mlx_mtp.generate_step).parameters
    flags = {flag.name: flag.default for flag in command.params if flag.name in parameters}
    for name in ("model", "prompt", "max_tokens"):  # a command's text is shorter, as mlx_lm's
        del flags[name]
    assert flags == {name: parameters[name].default for name in flags}
    assert len(flags) > 20
    seen = []
    note = lambda done, total: seen.append(done)  # noqa: E731
    n = default_chunk(model) + 40
    list(mlx_mtp.generate_step([1] * n, model, max_tokens=0, prompt_progress_callback=note))
    assert seen == [0, n - 40, n]
