"""Draft trees with block drafters: the most probable paths of one pass's lattice, and the target's text."""

import heapq

import block_drafters
import drafters
import families
import mlx.core as mx
import numpy as np
import pytest
from block_scratch import drafts as from_scratch
from forced_drafts import ForcedBlock
from plans import Listed, follow
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.block_drafter import set_drafter
from mlx_mtp.decoding import tree_levels
from mlx_mtp.decoding.drafters.block_choice import SHARPNESS, BlockChoice
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.sampling import Picker, Sampling
from mlx_mtp.tuning.plan import Plan

V, H = block_drafters.V, block_drafters.H
KINDS = {
    **block_drafters.KINDS,
    "rnn": {**block_drafters.DSPARK, "markov_head_type": "rnn"},
    "gated": {**block_drafters.DSPARK, "markov_head_type": "gated"},
}
DRAWS = {"greedy": Sampling(), "sampled": Sampling(temp=0.7), "filtered": Sampling(temp=1.5, top_k=5)}
TREES = [Plan("block", 7, tree=True), Plan("block", 4), Plan("block", 3, tree=True), Plan(), Plan("block", 2)]
TREES += [Plan("block", 15, tree=True)]
PROMPTS = [np.random.default_rng(n).integers(0, V, n).tolist() for n in (37, 5, 11)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(model with a drafter of a kind, mlx-lm's plain target, tensors, config)"""
    found: dict = {}

    def make(kind):
        if kind not in found:
            path, config = tmp_path_factory.mktemp("block"), KINDS[kind]
            directory, plain = families.headless(path / "target", drafters.HEADLESS["qwen3"])
            weights = markov_parts(config) | block_drafters.weights(config)
            drafter = block_drafters.tiny.save(path / "drafter", config, weights)
            found[kind] = mlx_mtp.load_model(directory, draft_model=drafter), plain, weights, config
        return found[kind]

    return make


def markov_parts(config) -> dict[str, mx.array]:
    """The tensors of gated and recurrent Markov heads."""
    rank, kind = config.get("markov_rank", 0), config.get("markov_head_type")
    sizes = {"gated": ("gate_proj", rank, H + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + H)}
    if kind not in sizes:
        return {}
    name, out, given = sizes[kind]
    mx.random.seed(4)
    parts = {"weight": mx.random.normal((out, given)), "bias": mx.random.normal((out,))}
    return {f"markov_head.{name}.{part}": value for part, value in parts.items()}


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.logaddexp.reduce(x)


class Lattice:
    """The log-probabilities of a row's tokens after one path of one sequence, each from the tensors themselves."""

    sharpness = 1.0

    def __init__(self, model, w, config, rows, newest, first, picker, allowed=None):
        self.net, self.w, self.c = model.drafter.net, w, block_drafters.options(config)
        self.rows, self.newest, self.first, self.picker, self.allowed = rows, newest, first, picker, allowed
        head = w.get("lm_head.weight")
        self.logits = np.array(rows @ head.T if head is not None else model.unembedding()(rows))
        self.logits *= self.c.get("output_multiplier", 1.0)
        if cap := self.c.get("final_logit_softcapping"):
            self.logits = cap * np.tanh(self.logits / cap)

    def __call__(self, path: tuple[int, ...]) -> np.ndarray:
        before, at, c = (self.newest, *path), len(path), self.c
        x = self.logits[at]
        ids = np.arange(len(x)) + np.array(self.w.get("d2t", 0))
        if "markov_rank" in c:
            state = None
            for i, token in enumerate(before):
                embedded = self.w["markov_head.markov_w1.weight"][token][None]
                bias, state = self.net.markov_head(embedded, self.rows[i][None], state)
            x = x + np.array(bias[0])
        if "selector_rank" in c:
            ids = np.argsort(-x)[: c["selector_top_k"]]
            parts = ("predecessor_codebook", "hidden_projection.weight", "successor_codebook")
            predecessor, projection, successor = (np.array(self.w[f"candidate_selector.{p}"]) for p in parts)
            x = x[ids] + successor[ids] @ (predecessor[before[-1]] * (projection @ np.array(self.rows[at])))
        whole = np.full(V, -np.inf)
        whole[ids] = x
        if self.allowed is not None:
            whole[[not self.allowed[at] >> token & 1 for token in range(V)]] = -np.inf
        return self.with_noise(whole, self.first + at)

    def with_noise(self, x: np.ndarray, position: int) -> np.ndarray:
        options = self.picker.options
        with np.errstate(invalid="ignore"):
            if options.temp:
                x = log_softmax(x)
                if options.top_k:
                    x = np.where(x >= np.sort(x)[-options.top_k], x, -np.inf)
                key = mx.random.split(self.picker.key + mx.array([0, position], mx.uint32))[1]
                x = x / options.temp + np.array(mx.random.gumbel((V,), key=key))
            return log_softmax(self.sharpness * x)


def best_paths(lattice, k: int, levels: int) -> dict[tuple[int, ...], float]:
    """The k most probable paths, or all that are possible, and their probabilities: best first."""
    waiting, found = [(0.0, ())], {}
    while waiting and len(found) <= k:
        value, path = heapq.heappop(waiting)
        found[path] = np.exp(-value)
        if len(path) < levels:
            scores = lattice(path)
            for token in np.flatnonzero(np.isfinite(scores)).tolist():
                heapq.heappush(waiting, (value - scores[token], (*path, token)))
    return {path: chance for path, chance in found.items() if path}


def paths_of(drafts, sequence: int) -> dict[tuple[int, ...], float]:
    """The paths of a tree's possible drafts, and their probabilities."""
    tokens, parents, chances = (x.tolist()[sequence] for x in (drafts.tokens, drafts.parents, drafts.confidence))
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return {path: chance for path, chance in zip(paths[1:], chances, strict=True) if chance}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", [False, True])
def test_trees_are_the_most_probable_paths(made, monkeypatch, kind, masks):
    """Of several sequences, each with its own options; with masks, also where few or no tokens are possible.

    Without noise the scores are sharper.
    """
    model, _, w, config = made(kind)
    rng, levels = np.random.default_rng(len(kind)), 4
    for k, names in ((1, [*DRAWS]), (3, [*DRAWS]), (7, ["greedy", "greedy"]), (7, [*DRAWS]), (15, [*DRAWS])):
        monkeypatch.setattr(Lattice, "sharpness", SHARPNESS if names[-1] == "greedy" else 1.0)
        monkeypatch.setattr(tree_levels, "SHAPES", {1: (levels, k, 1.0)})  # as wide as the tree: exact
        n = len(names)
        pickers = [Picker(DRAWS[name], key=mx.array([3, i], mx.uint32)) for i, name in enumerate(names)]
        rows = mx.array(rng.standard_normal((n, levels, H)).astype(np.float32))
        newest, first = rng.integers(0, V, n), rng.integers(5, 90, n)
        allowed = rng.integers(1, 2**V, (levels, n)) & rng.integers(0, 2**V, (levels, n)) if masks else None
        words = None if allowed is None else mx.array(allowed.astype(np.int32))[..., None]
        given = [Single(picker) for picker in pickers], mx.array(newest[:, None], mx.int32), mx.array(first, mx.int32)
        drafts = BlockChoice(model, model.drafter.net, *given, words, confidence=False).tree(
            rows[:, : min(k, levels)], k
        )
        chain = BlockChoice(model, model.drafter.net, *given, words, confidence=False)(rows).tokens
        assert drafts.tokens.shape == drafts.parents.shape == (n, k)
        for i, picker in enumerate(pickers):
            mask = None if allowed is None else allowed[:, i].tolist()
            lattice = Lattice(model, w, config, rows[i], int(newest[i]), int(first[i]), picker, mask)
            best, found = best_paths(lattice, k, min(k, levels)), paths_of(drafts, i)
            assert found.keys() == best.keys(), (k, names[i])
            assert [found[path] for path in best] == pytest.approx([*best.values()], abs=1e-5)
            if found:  # the likeliest first draft is that of a chain
                assert max(found, key=lambda path: (-len(path), found[path])) == (chain.tolist()[i][0],)


def ours(model, prompt, n, k=0, **options):
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, **options)
    return [token for token, _, _ in steps]


@pytest.mark.parametrize(
    ("kind", "replay"),
    sampled(
        [("dflash2", True), ("dspark", False), ("dflash", False)],
        [(kind, replay) for kind in block_drafters.KINDS for replay in (False, True)],
    ),
)
def test_cycles_of_trees_leave_what_chains_leave(made, monkeypatch, kind, replay):
    """The text is plain, and drafts after trees are those from scratch, wherever paths end."""
    model, plain, w, config = made(kind)
    own, prompt, n = model.drafter, PROMPTS[0], 48
    text = prompt + ours(model, prompt, n)
    forced = ForcedBlock(own.net).force(V, text, {*range(0, 99, 6), *range(0, 99, 9)})
    set_drafter(model, forced)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    control, stats = Listed(TREES), mlx_mtp.Stats()
    follow(monkeypatch, control)
    assert ours(model, prompt, n, 15, compile_cycles=replay, stats=stats) == text[len(prompt) :]
    set_drafter(model, own)
    assert bool(stats.compiled_cycles) == replay
    trees = [call for call in forced.calls if call.drafts.parents is not None and call.at.item() < len(text)]
    chains = [call for call in forced.calls if call.drafts.parents is None and call.at.item() < len(text)]
    assert min(len(trees), len(chains)) > 3
    assert len({c.accepted for c in control.cycles if c.plan.tree}) > 3
    for call in chains:
        known = text[: call.at.item() + 1]
        assert call.drafts.tokens.tolist()[0] == from_scratch(plain, w, config, known, call.drafts.k)[0]
    for call in trees:
        found = paths_of(call.drafts, 0)
        likeliest = max(found, key=lambda path: (-len(path), found[path]))
        known, levels = text[: call.at.item() + 1], call.drafts.levels
        assert [*likeliest] == from_scratch(plain, w, config, known, levels)[0][:1]


@pytest.mark.parametrize("kind", sampled(["rnn", "speculators"], KINDS))
@pytest.mark.parametrize("options", [{}, {"temp": 0.8, "seed": 5}, {"temp": 1.0, "seed": 2, "top_k": 4}])
def test_the_text_is_plain_alone_and_in_a_pool(made, monkeypatch, kind, options):
    model = made(kind)[0]
    plain = [ours(model, prompt, 20, **options) for prompt in PROMPTS]
    control = Listed(TREES)
    with monkeypatch.context() as patch:
        follow(patch, control)
        assert [ours(model, prompt, 20, 15, **options) for prompt in PROMPTS] == plain
    monkeypatch.setattr("mlx_mtp.decoding.control.Controls.control", lambda *_: control)
    batch, found = mlx_mtp.BatchGenerator(model, **options), [[] for _ in PROMPTS]
    batch.insert(PROMPTS, [20, 12, 16])
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found == [plain[0], plain[1][:12], plain[2][:16]]
    assert sum(c.accepted for c in control.cycles if c.plan.tree)
