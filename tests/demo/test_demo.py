"""Check the demo's training: held-out texts stay out, the network equals the engine's, steps are seeded."""

import ast
import itertools
import random

import mlx.core as mx
import pytest
from mlx_lm.models.step3p5 import ModelArgs
from sweep import sweep

import mlx_mtp
from bench.train_demo import checkpoint, self_written
from bench.train_demo.config import DEPTHS, demo_config
from bench.train_demo.data import PHASES, epoch, load_corpus
from bench.train_demo.library import with_summaries
from bench.train_demo.network import build, foresight_loss, joint_loss
from bench.train_demo.train import batches, token_stream
from bench.train_demo.trainer import Trainer
from mlx_mtp.demo import demo_path

LENGTH = 64  # tokens of the comparison of logits


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@sweep
def test_held_out_texts_are_not_trained_on(corpus):
    held = {doc.text for doc in corpus["held_docs"]}
    assert len(held) > 50
    assert not held & {doc.text for doc in corpus["docs"]}
    assert not set(corpus["held_code"]) & set(corpus["code"])
    long = [text for text in held if len(text) > 100]
    code = "".join(corpus["code"])
    assert not [text for text in long if text.splitlines()[0] in code and text in code]


@sweep
def test_code_keeps_the_first_line_of_a_docstring(corpus):
    source = 'def f(x):\n    """Add one.\n\n    And more.\n    """\n    return x + 1\n\n\ndef g():\n    """Held."""\n'
    assert with_summaries(source, {"Held. And more"}) == (
        'def f(x):\n    """Add one."""\n    return x + 1\n\n\ndef g():\n    """Held."""\n'
    )
    withheld = with_summaries('def g():\n    """What is held back."""\n', {"What is held back."})
    assert withheld == "def g():\n    pass\n"
    for piece in corpus["code"]:
        ast.parse(piece)


@sweep
@pytest.mark.parametrize("phase", range(len(PHASES)))
def test_an_epoch_depends_on_its_seed_only(corpus, phase):
    first, again, other = (epoch(corpus, random.Random(seed), PHASES[phase]) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@sweep
def test_prompts_of_the_self_generated_text(corpus):
    drawn = [list(itertools.islice(self_written.prompts(corpus, random.Random(seed)), 30)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(drawn[0])
    assert sum(prompt.endswith("<|im_start|>assistant\n") for prompt in drawn[0]) == 10


def test_batches_overlap_so_that_every_token_is_predicted():
    rows = list(itertools.islice(batches(iter(range(1000)), rows=2, slots=10), 3))
    assert rows[0].shape == (2, 10 + DEPTHS + 1)
    starts = [row[0].item() for batch in rows for row in batch]
    assert starts == [0, 10, 20, 30, 40, 50]


def test_the_network_is_the_engines():
    """For trunk and every depth, teacher-forced, the training layers and the decoding port give the same logits."""
    network, engine = checkpoint.load(demo_path()), mlx_mtp.load_model(demo_path())
    mx.random.seed(0)
    tokens = mx.random.randint(0, engine.args.vocab_size, (1, LENGTH + DEPTHS + 1))
    trained = network.all_logits(tokens)
    cache = mlx_mtp.make_prompt_cache(engine)
    hidden = engine.hidden(tokens[:, :LENGTH], cache.layers)
    decoded, rows = [engine.logits(hidden)], engine.capture(hidden)
    for depth, (head, kv) in enumerate(zip(engine.mtp, cache.heads, strict=True)):
        kv.seek(depth, depth)
        rows = head(engine.embed(tokens[:, 1 + depth : 1 + LENGTH + depth], depth), rows, kv)
        decoded.append(engine.draft_logits(depth, rows))
    for ours, theirs in zip(decoded, trained, strict=True):
        assert mx.abs(ours - theirs).max().item() < 2e-2  # training's exp has an error up to 2e-5
        assert (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).mean().item() > 0.98


def a_run(loss, steps: int = 2) -> tuple[list[list[float]], dict]:
    model = build(ModelArgs.from_dict(demo_config(64)), 0, DEPTHS)
    trainer = Trainer(model, loss, steps=steps, peak=1e-3)
    data = batches(itertools.cycle(range(60)), rows=2, slots=64)
    losses = [trainer.step(i, tokens).tolist() for i, tokens in enumerate(itertools.islice(data, steps))]
    return losses, checkpoint.hub_weights(model)


@sweep
@pytest.mark.parametrize("loss", [joint_loss, foresight_loss])
def test_training_is_seeded_and_learns(loss):
    losses, weights = a_run(loss)
    assert losses[-1][0] < losses[0][0]
    again, same = a_run(loss)
    assert losses == again
    assert all(mx.array_equal(weights[name], same[name]) for name in weights)


@sweep
def test_the_token_stream_includes_text_generated_by_the_trunk(corpus):
    _, tokenizer = mlx_mtp.load(demo_path())
    small = {**corpus, "docs": corpus["docs"][:40], "code": corpus["code"][:8]}
    written = [[7] * 50 for _ in range(20)]
    stream = token_stream(small, tokenizer._tokenizer.backend_tokenizer, 0, PHASES[-1], written)
    ids = list(itertools.islice(stream, 20000))
    assert ids.count(7) > 900
