"""Make ports of mlx-lm's own models: drafts with mlx-lm's text, and models that the probe refuses."""

import gc

import block_drafters
import drafters
import families
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from letter_chats import make_session
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_lm_steps
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models import starcoder2
from oracle_drafts import OracleDrafts
from portless import CONFIGS

import mlx_mtp
from mlx_mtp.cache.growing import LinearKVCache
from mlx_mtp.cache.layer_cache import LayerCache
from mlx_mtp.checkpoint.probe import probe
from mlx_mtp.checkpoint.tuned import write_heads
from mlx_mtp.layers.made import Made, Plain
from mlx_mtp.layers.noted import NotedCalls
from mlx_mtp.training import heads

PROMPT = [1, 2, 3, 4, 5, 6] * 3 + [1, 2]
TOKENS = 40


@pytest.fixture(scope="module", params=["starcoder2", "gpt_oss"])
def made(request, tmp_path_factory):
    """(loaded by us, mlx-lm's greedy text after PROMPT)"""
    path, reference = families.headless(tmp_path_factory.mktemp("made"), CONFIGS[request.param])
    steps = mlx_lm_steps(mx.array(PROMPT), reference, max_tokens=TOKENS)
    return mlx_mtp.load_model(path, mtp=False), [int(token) for token, _ in steps]


def text_of(model, prompt=PROMPT, n=TOKENS, **options):
    return [token for token, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=n, **options)]


@pytest.mark.parametrize("wrong", [set(), {3}, {4, 5, 9}, set(range(0, 200, 2)), set(range(200))])
def test_drafts_do_not_change_the_text(made, monkeypatch, wrong):
    model, text = made
    stats = mlx_mtp.Stats()
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, wrong))
    assert text_of(model, num_draft_tokens=7, adaptive=False, stats=stats) == text
    assert sum(stats.drafted) > TOKENS // 8


def test_copies_small_models_and_files(made, monkeypatch, tmp_path):
    model, text = made
    stats = mlx_mtp.Stats()
    assert text_of(model, prompt_lookup=True, adaptive=False, stats=stats) == text
    assert stats.lookup_drafted >= stats.lookup_accepted > 0
    cache = mlx_mtp.make_prompt_cache(model)
    assert text_of(model, n=9, prompt_lookup=True, prompt_cache=cache) == text[:9]
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    for kept in (cache, mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)):
        assert text_of(model, text[8:9], TOKENS - 9, prompt_lookup=True, prompt_cache=kept) == text[9:]


def test_copies_in_sessions_and_batches(made):
    """Without a drafter the default number of drafts, 0, does not exclude prompt lookup."""
    model, text = made
    stats = mlx_mtp.Stats()
    options = {"prompt_lookup": True, "adaptive": False, "stats": stats}
    generator = mlx_mtp.BatchGenerator(model, max_tokens=TOKENS, stop_tokens=[], **options)
    generator.insert([PROMPT])
    found = []
    while responses := generator.next_generated():
        found += [each.token for each in responses]
    generator.close()
    assert found == text
    assert stats.lookup_drafted > 0
    texts = []
    for lookup in (True, False):
        session = make_session(model, prompt_lookup=lookup)
        texts.append([response.token for response in session.ask("abcabcabc")])
    assert texts[0] == texts[1] != []


def test_report_and_levels(made):
    model, _ = made
    assert isinstance(model, Made)
    assert "port       made of mlx-lm's model: tokens, streams; no kv_bits: heads of" in str(model.report)


def test_a_small_model_of_a_family_without_a_port(tmp_path):
    target, reference = families.headless(tmp_path / "target", CONFIGS["starcoder2"])
    small, _ = families.headless(tmp_path / "small", CONFIGS["gpt_oss"])
    model = mlx_mtp.load_model(target, draft_model=small)
    steps = mlx_lm_steps(mx.array(PROMPT), reference, max_tokens=TOKENS)
    assert text_of(model, num_draft_tokens=3, adaptive=False) == [int(token) for token, _ in steps]
    assert "gpt_oss of 4 layers" in str(model.report)


class ReadsAnInt(starcoder2.Attention):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) * (1 + int(cache.offset) % 2)


class Counts(starcoder2.Attention):
    def __call__(self, x, mask=None, cache=None):
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        return super().__call__(x, mask, cache) * self.calls


class OneRowDiffers(starcoder2.Attention):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) * (1.5 if x.shape[1] == 1 else 1)


class ReadsAPromptAtOnce(starcoder2.Attention):
    def __call__(self, x, mask=None, cache=None):
        later = x.shape[1] > 1 and isinstance(cache.offset, int) and cache.offset > 0
        return super().__call__(x, mask, cache) * (1.5 if later else 1)


class NotANumber(starcoder2.Attention):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) * mx.nan


class Cache(mlx_lm_caches.KVCache):
    pass


class OwnCache:
    def make_cache(self):
        return [Cache() for _ in self.layers]


class WiderMask:
    def __call__(self, inputs, cache=None):
        for c in cache or ():
            if c is not None:
                c.make_mask(inputs.shape[1], return_array=False, window_size=7)
        return super().__call__(inputs, cache)


class MixesRows:
    def __call__(self, inputs, cache=None):
        return super().__call__(inputs, cache) + self.model.embed_tokens(inputs).sum()


class AddsLater:
    """What the outer forward adds depends on the tokens: the inner module's rows do not make the logits."""

    def __call__(self, inputs, cache=None):
        return super().__call__(inputs, cache) + 0.1 * self.model.embed_tokens(inputs).sum(axis=-1, keepdims=True)


def lying(outer=None, attention=None):
    """Return a tiny starcoder2, loaded as `Plain`, with a mixin of its Model or another class of its attention."""
    arguments = starcoder2.ModelArgs.from_dict(CONFIGS["starcoder2"])
    mixins = (Plain, outer, starcoder2.Model) if outer else (Plain, starcoder2.Model)
    mx.random.seed(1)
    model = type("Model", mixins, {})(arguments)
    weights = [(n, mx.random.normal(w.shape) * 0.3 if w.ndim > 1 else w) for n, w in tree_flatten(model.parameters())]
    model.load_weights(weights)
    for module in model.modules() if attention else ():
        if type(module) is starcoder2.Attention:
            module.__class__ = attention
    model.vocab_size = arguments.vocab_size
    return model


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"attention": ReadsAnInt}, "its forward reads a position, or another array, on the host"),
        ({"attention": Counts}, "differ"),
        ({"attention": OneRowDiffers}, "logits differ in a pass of one row"),
        ({"attention": ReadsAPromptAtOnce}, "logits differ in a pass of a prompt in chunks"),
        ({"attention": NotANumber}, "logits differ"),
        ({"outer": OwnCache}, "its layers need a Cache, whose rows cannot be taken back"),
        ({"outer": WiderMask}, "its masks see 7 positions, its cache holds all"),
        ({"outer": MixesRows}, "differ"),
    ],
)
def test_a_model_that_lies_decodes_plainly(lie, why):
    model = lying(**lie)
    assert why in probe(model)
    assert not isinstance(model, Made)
    assert not any(isinstance(module, NotedCalls) for module in model.modules())


def test_logits_that_the_rows_do_not_make_are_the_rows():
    model = lying(outer=AddsLater)
    assert probe(model) is None
    assert model.form.inner is None
    assert model.no_hidden().shape[-1] == model.vocab_size


def test_a_model_that_does_not_lie():
    model = lying()
    assert probe(model) is None
    assert isinstance(model.form.inner, starcoder2.Starcoder2Model)
    assert model.form.no_streams is None


class ManyRowsApart(starcoder2.Attention):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) * (1.5 if x.shape[0] > 3 else 1)


@pytest.mark.parametrize("name", ["keep_path", "flush"])
def test_a_tree_whose_path_is_not_kept_is_refused(name, monkeypatch):
    model = lying()
    monkeypatch.setattr(LayerCache if name == "keep_path" else LinearKVCache, name, lambda *_: None)
    assert probe(model) is None
    assert model.form.no_trees == "logits differ in a pass after a tree"


def test_trees_are_refused_alone():
    assert probe(model := lying(attention=ManyRowsApart)) is None
    assert model.form.no_trees == "logits differ in a pass of a tree"
    assert probe(model := lying()) is None
    assert model.form.no_trees is None


@pytest.mark.parametrize("kind", ["eagle3", *block_drafters.KINDS])
@pytest.mark.parametrize("family", ["starcoder2", "gpt_oss"])
def test_drafters_that_read_streams(family, kind, tmp_path):
    target, reference = families.headless(tmp_path / "target", CONFIGS[family])
    if kind == "eagle3":
        drafter = drafters.save(tmp_path / "drafter", drafters.CONFIG, 32)
    else:
        drafter = block_drafters.save_for(tmp_path / "drafter", kind, 32, 13)
    model, stats = mlx_mtp.load_model(target, draft_model=drafter), mlx_mtp.Stats()
    text = [int(token) for token, _ in mlx_lm_steps(mx.array(PROMPT), reference, max_tokens=TOKENS)]
    assert text_of(model, num_draft_tokens=3, adaptive=False, stats=stats) == text
    assert sum(stats.drafted) > TOKENS // 2
    hidden = model.hidden(mx.array(PROMPT)[None], mlx_mtp.make_prompt_cache(model).layers)
    assert mx.allclose(hidden[..., 32:], streams(reference, PROMPT, model.taps), 1e-4, 1e-4)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("vocab", [None, list(range(8))])
def test_a_new_head_drafts_from_its_file(bits, vocab, tmp_path):
    target, reference = families.headless(tmp_path / "target", CONFIGS["starcoder2"])
    model, file = mlx_mtp.load_model(target, kernels="off", mtp=False), tmp_path / "new.safetensors"
    model.mtp = heads.new(model, vocab, 2, bits, mx.float32).finished()
    write_heads(model, file, {})
    loaded, stats = mlx_mtp.load_model(target, mtp_path=file), mlx_mtp.Stats()
    text = [int(token) for token, _ in mlx_lm_steps(mx.array(PROMPT), reference, max_tokens=TOKENS)]
    for each in (model, loaded):
        assert text_of(each, num_draft_tokens=3, adaptive=False, stats=stats) == text
        assert sum(stats.drafted) > TOKENS // 2
    stored, found = mx.load(str(file)), dict(tree_flatten(loaded.mtp[0].parameters()))
    assert all(mx.array_equal(found[name.removeprefix("tuned_mtp.0.")], w) for name, w in stored.items())


def test_a_head_is_refused_where_no_layer_can_be_in_it(tmp_path, monkeypatch):
    target, _ = families.headless(tmp_path / "target", CONFIGS["starcoder2"])
    model = mlx_mtp.load_model(target, kernels="off", mtp=False)
    monkeypatch.setattr(starcoder2.TransformerBlock, "__call__", lambda self, x, cache=None, mask=None: x)
    with pytest.raises(ValueError, match=r"its layers are not called as \(x, mask, cache\)"):
        model.like_last_layer()
    other = tiny.save(tmp_path / "other", CONFIGS["starcoder2"], {"mtp.0.norm.weight": mx.ones(32)})
    with pytest.raises(ValueError, match="a family without a port drafts only with a file of tune-heads --new"):
        mlx_mtp.load_model(target, mtp_path=other / "model.safetensors")


class Recording(nn.Module):
    """A layer that records what it reads and returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __call__(self, x, *given, **options):
        object.__setattr__(self, "read", x)
        object.__setattr__(self, "returned", self.layer(x, *given, **options))
        return self.returned


def streams(reference, tokens, taps):
    """Return the residual stream before the first layer (0) and after each layer, at `taps`, of mlx-lm's model."""
    caches = mlx_lm_caches.make_prompt_cache(reference)
    reference.model.layers = [Recording(layer) for layer in reference.model.layers]
    reference(mx.array(tokens)[None], cache=caches)
    layers = reference.model.layers
    found = [layers[0].read, *(layer.returned for layer in layers)]
    return mx.concatenate([found[i] for i in taps], axis=-1)


def test_a_probe_leaves_no_arrays_of_its_caches():
    gc.collect()
    model = lying()
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    gc.disable()
    try:
        assert probe(model) is None
        assert mx.get_active_memory() - before < 20_000  # outputs of layers; one cache has more
    finally:
        gc.enable()
