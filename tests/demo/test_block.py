"""Check the demo's block drafter, its text and its drafts, and that it is trained on the target's text."""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest
from sweep import SWEEP, sampled, sweep

import mlx_mtp
from bench.train_demo import block, block_anchors, block_network, checkpoint, written_streams
from bench.train_demo.block_network import DRAFTS, TAPS, WINDOW, Anchors, Frozen
from bench.train_demo.trainer import Trainer
from bench.train_demo.written_streams import Streams
from mlx_mtp.demo import demo_block_path, demo_path

PROMPTS = (
    "class LineReader:\n    def __init__(self, stream, limit):\n        self.stream = stream\n",
    "    try:\n        with open(filename) as f:\n            text = f.read()\n    except OSError as err:\n",
    "def read_lines(path):\n",
)
FLOOR = 3.6  # tokens per cycle; the three heads yield less


@pytest.fixture(scope="module")
def drafter():
    return mlx_mtp.load(demo_path(), draft_model="demo-block")


@pytest.fixture(scope="module")
def target():
    return checkpoint.load(demo_path())


@pytest.fixture(scope="module")
def config():
    return json.loads((demo_path() / "config.json").read_text())


def frozen(target) -> Frozen:
    return Frozen(target.model.embed_tokens.weight, target.lm_head.weight, target.model.norm)


def random_streams(rows: int = 12, slots: int = 128, document: int = 40) -> Streams:
    """Random tokens and states in documents of the same length, a quarter of each a prompt."""
    rng = np.random.default_rng(0)
    place = np.tile(np.arange(slots), (rows, 1))
    tokens = rng.integers(0, 50, (rows, slots)).astype(np.int32)
    states = rng.standard_normal((rows, slots, 128 * len(TAPS))).astype(np.float16)
    starts = (place // document * document).astype(np.int32)
    return Streams(tokens, starts, place % document >= document // 4, states)


def tokens_of(model, tokenizer, prompt: str, k: int) -> tuple[list[int], float]:
    stats, given = mlx_mtp.Stats(), tokenizer.encode(prompt)
    options = {"max_tokens": 32 if SWEEP else 24, "num_draft_tokens": k, "adaptive": False, "stats": stats}
    tokens = [token for token, *_ in mlx_mtp.generate_step(given, model, **options)]
    return tokens, stats.tokens_per_cycle


def test_its_text_is_plain_and_its_cycles_yield_more_than_the_heads(drafter):
    model, tokenizer = drafter
    heads = mlx_mtp.load_model(demo_path())
    yields = []
    for prompt in sampled(PROMPTS[1:], PROMPTS):
        plain, _ = tokens_of(heads, tokenizer, prompt, 0)
        (same, by_heads), (text, by_block) = (
            tokens_of(heads, tokenizer, prompt, 3),
            tokens_of(model, tokenizer, prompt, 7),
        )
        assert plain == same == text
        yields.append((by_heads, by_block))
    by_heads, by_block = np.mean(yields, axis=0)
    assert by_heads < FLOOR < by_block


def test_its_file_is_small_and_its_name_is_documented():
    files = {file.name: file.stat().st_size for file in demo_block_path().iterdir()}
    assert sum(files.values()) < 2_000_000
    assert "--draft-model demo-block" in (demo_block_path() / "README.md").read_text()


def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-block").mkdir()
    with pytest.raises(ValueError, match=r"^demo-block/config\.json: not found"):
        mlx_mtp.load_model(demo_path(), draft_model="demo-block")


def test_training_drafts_what_the_engine_drafts(drafter, target, config, monkeypatch):
    """On text that the target wrote, each block of the engine has the training forward's drafts up to a wrong one."""
    model, tokenizer = drafter
    prompt = tokenizer.encode(PROMPTS[2])
    streams = written_streams.write(target, itertools.repeat(prompt), TAPS, streams=1, slots=block_anchors.STRETCH)
    known = block_anchors.drafts_known(streams)
    ((_, batch),) = block_anchors.every_slot(streams, known, 1)
    scores = block_network.logits(block_network.load(demo_block_path(), config), frozen(target), batch)
    best, right = np.array(scores.argmax(axis=-1))[0], np.array(batch.tokens)[0, :, 1:]
    engine = {}
    propose = type(model.drafter).propose

    def recorded(self, frame, run, k):
        drafts = propose(self, frame, run, k)
        engine[int(np.array(frame.cache.layers[0].offset).item())] = np.array(drafts.tokens)[0]
        return drafts

    monkeypatch.setattr(type(model.drafter), "propose", recorded)
    count = int((streams.starts[0] == 0).sum() - len(prompt))
    text = [
        token
        for token, *_ in mlx_mtp.generate_step(
            prompt, model, max_tokens=count, num_draft_tokens=DRAFTS, adaptive=False
        )
    ]
    assert text == streams.tokens[0, len(prompt) : len(prompt) + count].tolist()
    compared = 0
    for slot, drafts in engine.items():
        if slot < known.shape[1] and known[0, slot, -1]:
            same = int(np.cumprod(best[slot] == right[slot]).sum()) + 1
            assert drafts[:same].tolist() == best[slot][:same].tolist()
            compared += 1
    assert compared > 3


def test_streams_are_what_plain_decoding_writes(drafter, target):
    engine, tokenizer = drafter
    given = [tokenizer.encode(prompt) for prompt in ("    return x\n", "Hello", "User: Hi\n", PROMPTS[2])]
    streams = written_streams.write(target, itertools.cycle(given), TAPS, streams=2, slots=48)
    assert streams.starts.max() > 0
    for tokens, starts, written in zip(streams.tokens, streams.starts, streams.written, strict=True):
        for start in sorted(set(starts)):
            document = starts == start
            prompt, answer = tokens[document & ~written].tolist(), tokens[document & written].tolist()
            plain = mlx_mtp.generate_step(prompt, engine, max_tokens=max(1, len(answer)), num_draft_tokens=0)
            assert answer == [token for token, *_ in plain][: len(answer)]


def test_anchors_are_of_one_document():
    streams = random_streams()
    known, data = (
        block_anchors.drafts_known(streams),
        block_anchors.batches([streams], np.random.default_rng(1), 4, 20, 9),
    )
    for batch in itertools.islice(data, 5):
        at, since, _, weight = (np.array(x) for x in batch[1:])
        assert batch.states.shape[:2] == (4, WINDOW + block_anchors.STRETCH + block_anchors.BEHIND)
        assert (since <= at).all()
        assert (at - since < 40).all()
        assert weight.max() == 1
    (slots, every), *_ = block_anchors.every_slot(streams, known, 12)
    right = np.lib.stride_tricks.sliding_window_view(streams.tokens[slots], 1 + DRAFTS, axis=1)
    chosen = np.array(every.weight)[:, : right.shape[1], -1] == 1  # whole blocks
    assert (np.array(every.tokens)[:, : right.shape[1]][chosen] == right[chosen]).all()
    starts = streams.starts[slots][:, : right.shape[1]][chosen]
    assert (starts == streams.starts[slots][:, DRAFTS:][:, : right.shape[1]][chosen]).all()


def test_cycles_of_right_drafts():
    usable = np.array([[True] * 6 + [False] + [True] * 3])
    assert block_anchors.cycles(np.zeros_like(usable, int), usable) == 9
    assert block_anchors.cycles(np.array([[2, 0, 0, 1, 0, 0, 5, 2, 0, 0]]), usable) == 4


def begun(target, config, streams: Streams):
    net = block_network.network(block_network.block_config(config), config, 0)
    known = frozen(target)
    block_network.prepare(net, known, mx.array(streams.states[0], mx.float32))
    return net, known, block_anchors.batches([streams], np.random.default_rng(0), 4, 8, 9)


def test_a_shorter_block_has_the_same_drafts(target, config):
    net, known, streams = block_network.load(demo_block_path(), config), frozen(target), random_streams()
    whole = next(block_anchors.batches([streams], np.random.default_rng(0), 4, 8, 9))
    part = whole._replace(tokens=whole.tokens[..., :4], weight=whole.weight[..., :3])
    short, long = (block_network.logits(net, known, batch) for batch in (part, whole))
    assert mx.allclose(short, long[:, :, :3], atol=1e-4)


@sweep
def test_training_is_seeded_and_learns(target, config):
    runs = []
    for _ in range(2):
        net, known, data = begun(target, config, random_streams())
        batch, losses = next(data), []
        trainer = Trainer(
            net,
            lambda net, *arrays, known=known: block_network.loss(net, known, Anchors(*arrays)),
            steps=6,
            peak=block.PEAK_LEARNING_RATE,
            optimizer=block.MuonAndAdam(),
        )
        for step in range(6):
            losses.append(block_network.loss(net, known, batch)[0].item())
            trainer.step(step, *batch)
        runs.append(losses)
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0]
