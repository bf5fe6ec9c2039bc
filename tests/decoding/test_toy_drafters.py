"""Drafters written from CONTRIBUTING.md alone: tokens equal plain decoding, drafts equal those from scratch."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import block_drafters
import drafters
import families
import mlx.core as mx
import pytest
from plans import Listed, follow
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding.drafters import names_of
from mlx_mtp.decoding.drafters.block import Block
from mlx_mtp.decoding.drafters.drafter import Drafter
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts, rows_at
from mlx_mtp.models import dflash
from mlx_mtp.tuning.plan import Plan, Role

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
TOKENS = 16 if SWEEP else 9
PROMPTS = [[1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2], [3, 3, 1], [2, 1, 1, 0, 2, 3, 1]]


def written() -> type[Drafter]:
    """Return the drafter of the page, executed as written there."""
    (block,) = re.findall(r"```python\n(.*?class Successor.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    found: dict = {}
    exec(block, found)
    return found["Successor"]


class Small(Drafter):
    """One layer of attention over tokens, with random weights and a cache; later drafts follow its earlier ones."""

    source, most, windows = "small", 3, (None,)

    def __init__(self, model):
        size = model.no_hidden().shape[-1]
        self.weights = [mx.random.normal((size, size), key=mx.random.key(i)) / size**0.5 for i in range(3)]
        self.calls: list = []

    def layer(self, model, tokens, kv):
        """Return outputs [n, L, H] of tokens [n, L], appended to a cache; None: the whole sequence."""
        x = model.embed(tokens, None)
        q, k, v = ((x @ w)[:, None] for w in self.weights)
        mask = "causal" if kv is None else kv.make_mask(x.shape[1])
        k, v = (k, v) if kv is None else kv.update_and_fetch(k, v)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask)[:, 0]

    def choose(self, model, output):
        return mx.argmax(output @ model.embed(mx.arange(model.vocab_size), None).T, axis=-1).astype(mx.int32)

    def propose(self, frame, run, k):
        model, cache, kv = frame.model, frame.cache, frame.cache.heads[0]
        output, drafts = rows_at(self.layer(model, run.tokens, kv), run.last), []
        kv.seek(cache.layers[0].offset, kv.limit)  # after the accepted rows
        for depth in range(k):
            if depth:
                output = self.layer(model, drafts[-1], kv)
            drafts.append(self.choose(model, output))
        cache.heads_follow()
        if k:
            self.calls.append((cache.layers[0].offset, [*frame.members], mx.concatenate(drafts, axis=1)))
        return Drafts(mx.concatenate(drafts, axis=1)) if k else NO_DRAFTS

    def read_rows(self, model, cache, hidden, tokens, first):
        (kv,) = cache.heads
        kv.seek(first, first)
        self.layer(model, mx.array(tokens)[None], kv)

    def scratch(self, model, known: list[int], k: int) -> list[int]:
        """Return k drafts after known tokens; position i reads token i + 1."""
        tokens = known[1:]
        for _ in range(k):
            tokens = [*tokens, self.choose(model, self.layer(model, mx.array([tokens]), None)[:, -1:]).item()]
        return tokens[len(known) - 1 :]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Models by family, with or without heads."""
    found: dict = {}

    def make(name):
        if name not in found:
            path = tmp_path_factory.mktemp("toy")
            llama = {"model_type": "llama", **drafters.GQA}
            made = families.headless(path, llama) if name == "headless" else families.build(name, path)
            found[name] = made[0]
        return mlx_mtp.load_model(found[name])

    return make


def alone(model, prompt, k, n=TOKENS, **options):
    options = {"adaptive": False, **options}
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, **options)
    return [token for token, _, _ in steps]


def together(model, k, n=TOKENS, **options):
    texts = [[] for _ in PROMPTS]
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=k, adaptive=False, **options)
    batch.insert(PROMPTS, [n] * len(PROMPTS), seeds=[0, 1, 2])
    while responses := batch.next_generated():
        for response in responses:
            texts[response.uid].append(response.token)
    return texts


def block(model):
    """A block drafter as released, of two layers, with random weights."""
    width, vocab = model.no_hidden().shape[-1], model.vocab_size
    config = {**block_drafters.DFLASH2, "hidden_size": width, "vocab_size": vocab}
    names = block_drafters.weights(config)
    spec = dflash.make_spec(config, names, model.args.num_hidden_layers, {})
    net = dflash.make_head(replace(spec, capture=(1, 2)), config, names, width)
    net.load_weights([(spec.locate(name, 0)[1], tensor) for name, tensor in names.items()])
    return Block(net)


KINDS = {"written": lambda model: written()(), "small": Small, "block": block}
NAMES = ["glm4_moe_untied", "headless", *sorted({*families.FAMILIES} - {"glm4_moe_untied"})]


@pytest.mark.parametrize(
    ("kind", "draws"),
    sampled([("written", [{}]), ("small", [{"temp": 1.0}])], ((k, [{}, {"temp": 1.0}]) for k in KINDS)),
)
@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_the_text_is_that_of_plain_decoding(made, kind, draws, name):
    model = made(name)
    for options in draws:
        seeds = [options and {"seed": i} for i in range(3)]
        plain = [alone(model, p, 0, **options, **seed) for p, seed in zip(PROMPTS, seeds, strict=True)]
        model.drafter = KINDS[kind](model)
        assert model.max_draft_tokens == model.drafter.most
        stats = mlx_mtp.Stats()
        drafted = [alone(model, p, 3, stats=stats, **options, **s) for p, s in zip(PROMPTS, seeds, strict=True)]
        assert drafted == plain
        assert stats.drafted[0] > 0
        for replay in (False, True):
            assert together(model, 3, compile_cycles=replay, **options) == plain
            assert alone(model, PROMPTS[0], 2, compile_cycles=replay, **options, **seeds[0]) == plain[0]
        model.drafter = None


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_drafts_of_one_with_a_cache_are_those_from_scratch(made, monkeypatch, name):
    """Alone, after pauses and in a pool, after any rejected drafts."""
    model = made(name)
    model.drafter = small = Small(model)
    follow(monkeypatch, Listed([Plan("small", 3), Plan("small", 1), Plan(), Plan(), Plan("lookup", 2)]))
    text = PROMPTS[0] + alone(model, PROMPTS[0], 3, 40, prompt_lookup=True)
    lone = [(text, offset.item(), drafts.tolist()[0]) for offset, _, drafts in small.calls]
    small.calls.clear()
    texts = [p + t for p, t in zip(PROMPTS, together(model, 3, 16), strict=True)]
    pooled = [
        (texts[member.uid], position, row)
        for offset, members, drafts in small.calls
        for member, position, row in zip(members, offset.tolist(), drafts.tolist(), strict=True)
        if hasattr(member, "uid")
    ]
    for found in (lone, pooled):
        found = [(known[: position + 1], drafts) for known, position, drafts in found if position < len(known)]
        assert len(found) > 8
        for known, drafts in found:
            assert drafts == small.scratch(model, known, len(drafts))
    model.drafter = None


@pytest.mark.parametrize("name", sampled(["headless"], ["glm4_moe_untied", "headless"]))
def test_a_conversation_stops_and_continues(made, tmp_path, name):
    """With the same cache, and with its copy from a file."""
    model = made(name)
    truth, model.drafter = alone(model, PROMPTS[0], 0, 16), Small(model)
    for n in sampled((1, 9), (1, 4, 9)):
        cache = mlx_mtp.make_prompt_cache(model)
        first = alone(model, PROMPTS[0], 3, n, prompt_cache=cache)
        mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
        for each in (cache, mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)):
            model.drafter.calls.clear()
            rest = alone(model, first[-1:], 3, 7, prompt_cache=each)
            assert first + rest == truth[: n + 7]
            known = (PROMPTS[0] + truth)[: model.drafter.calls[0][0].item() + 1]
            assert model.drafter.calls[0][2].tolist()[0] == model.drafter.scratch(model, known, 3)
    model.drafter = None


@pytest.mark.parametrize("role", [Role.COPY, Role.GRAMMAR])
def test_a_role_that_no_drafter_of_a_model_has_is_refused(role):
    drafter = SimpleNamespace(source="copies", role=role)
    with pytest.raises(ValueError, match=f"drafter 'copies': its role is {role.name}; allowed is MODEL"):
        names_of(SimpleNamespace(drafter=drafter))
