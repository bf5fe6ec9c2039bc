"""Any plan follows any plan: the text is the target's, drafts are exact, and a stop anywhere leaves whole caches."""

import functools

import drafters
import families
import mlx.core as mx
import pytest
import test_drafter
import tiny
from plans import Listed, Script, Spy, follow
from test_families import drafts_from_scratch

import mlx_mtp
from mlx_mtp import cycle, decode
from mlx_mtp import prefill as reading
from mlx_mtp.controller import Plan
from mlx_mtp.draft import Run
from mlx_mtp.lookup import Text
from mlx_mtp.prompt_cache import PromptCache
from mlx_mtp.sampling import Picker
from mlx_mtp.stats import Stats

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]


class Subject:
    """A tiny model with its cacheless truths. name: "step3p5", a family, or "eagle" (three layers' rows, recycled)."""

    def __init__(self, name: str, tiny_models, path):
        self.name = name
        if name == "step3p5":
            self.model, self.plain = tiny_models(2, vocab_size=5)
        elif name == "eagle":
            directory, self.plain = families.headless(path / "target", test_drafter.HEADLESS["llama_sliding"], 0)
            self.weights = drafters.weights(drafters.CONFIG, families.H)
            drafter = tiny.save(path / "drafter", drafters.CONFIG, self.weights)
            self.model = mlx_mtp.load_model(directory, draft_model=drafter)
        else:
            directory, _, self.plain = families.build(name, path)
            self.model = mlx_mtp.load_model(directory)
        self.k = min(3, self.model.max_draft_tokens)
        self.truth = functools.cache(self._truth)
        self.read = functools.cache(self._read)

    def _truth(self, prompt: tuple[int, ...], n: int = 60) -> list[int]:
        return tiny.greedy(self.plain, list(prompt), n)

    def _read(self, tokens: tuple[int, ...]) -> PromptCache:
        """A cache that has read these tokens and nothing else."""
        cache = mlx_mtp.make_prompt_cache(self.model)
        list(mlx_mtp.generate_step(list(tokens), self.model, prompt_cache=cache, max_tokens=0, num_draft_tokens=0))
        return cache

    def scratch(self, known: list[int], k: int) -> list[int]:
        """k drafts after known tokens, without a cache."""
        if self.name == "eagle":
            options = {"layer": "midlayer", "counts": self.model.spec.capture, "new": False}
            return test_drafter.drafts_from_scratch(self.plain, self.weights, known, k, **options)
        return drafts_from_scratch(self.model, self.plain, known, k)

    def assert_drafts(self, spy: Spy, text: list[int], least: int = 1, most: int = 10**9) -> None:
        """Of the calls that a spy saw, up to `most` spread over all of them."""
        found = spy.drafts(text)
        assert len(found) >= least
        for known, drafts in found[:: -(-len(found) // most)]:
            assert drafts == self.scratch(text[:known], len(drafts)), f"{known} tokens"


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return functools.cache(lambda name: Subject(name, tiny_models, tmp_path_factory.mktemp("subject")))


def steps(model, prompt, k, **options):
    options = {"max_tokens": 60, "draft_p_min": 0.25, "prompt_lookup": True} | options
    return mlx_mtp.generate_step(prompt, model, num_draft_tokens=k, **options)


def text_of(model, prompt, k, **options) -> list[int]:
    return [token for token, _, _ in steps(model, prompt, k, **options)]


# The window is 8: it wraps in the prompt of 30, while 60 tokens are generated, and inside verifies.
@pytest.mark.parametrize(("length", "seed"), [(1, 0), (7, 1), (30, 2), (30, 3)])
def test_any_plan_follows_any_plan(subject, monkeypatch, length, seed):
    s = subject("step3p5")
    mx.random.seed(length)
    prompt = mx.random.randint(0, 5, (length,)).tolist()
    script, spy, stats = Script(seed, max_drafts=3, p_min=True), Spy(monkeypatch), Stats()
    follow(monkeypatch, script)
    text = text_of(s.model, prompt, 3, prefill_step_size=(5, 2048)[seed % 2], stats=stats)
    assert text == s.truth(tuple(prompt))
    s.assert_drafts(spy, prompt + text, least=5, most=8)
    kinds = [(c.plan.source, c.plan.p_min, c.plan.k > 0) for c in script.cycles]
    assert {(source, k) for source, _, k in kinds} == {("heads", True), ("heads", False), ("lookup", True)}
    assert len(set(zip(kinds, kinds[1:], strict=False))) >= 8
    assert any(c.caught_up for c in script.cycles)


NAMES = ["qwen3_5", "qwen3_next", "glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared", "mimo"]
NAMES += ["mimo_v2_flash", "nemotron_h_latent", "eagle"]
OTHERS = [name for name in families.FAMILIES if name not in NAMES]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_family(subject, monkeypatch, name):
    s = subject(name)
    script, spy = Script(len(name), max_drafts=s.k, p_min=True), Spy(monkeypatch)
    follow(monkeypatch, script)
    text = text_of(s.model, PROMPT, s.k, max_tokens=30, prefill_step_size=4)
    assert text == s.truth(tuple(PROMPT), 30)
    s.assert_drafts(spy, PROMPT + text, least=3, most=4)
    assert any(c.caught_up for c in script.cycles)
