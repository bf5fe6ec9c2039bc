"""Prefix files are reused after a restart, and no content of a file changes or ends a response."""

import contextlib
import json

import families
import mlx.core as mx
import pytest
import tiny
from lanes import LANES, lanes_apart
from prefix_requests import LARGE, left, lines, prompts, restarted, serve, written
from prefix_requests import generate_two as generate
from sweep import sampled

import mlx_mtp
from mlx_mtp.cache.pieces import has_rows
from mlx_mtp.serve import chunk_file
from mlx_mtp.serve.job import DecodeRequest, Job, answer, prefill_next
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.prefixes import Chunking

HEADS = {"attention_other_setting": {**tiny.CONFIG["attention_other_setting"], "head_dim": 64}, "head_dim": 64}
KINDS = ["glm4_moe", "qwen3_5", "deepseek_v3"]  # keys and values, states, latents; the first model has windows
KV_FLAGS = [
    {},
    {"max_kv_size": 12},
    {"max_kv_size": 64},
    {"kv_bits": 8},
    {"kv_bits": 4},
    {"kv_bits": 8, "kv_group_size": 32},
    {"kv_bits": 8, "quantized_kv_start": 21},
    {"kv_bits": 8, "quantized_kv_start": 5000},
    {"mtp_kv_bits": 8},
    {"mtp_kv_bits": 8, "kv_group_size": 32},
    {"drafts": 1},
    {"drafts": 0},
]
pytestmark = pytest.mark.usefixtures("letters_as_tokenizer")
OTHER_FLAGS = [{"chunking": Chunking(8)}, {"chunking": Chunking(4, 2, frozenset({3}))}]


@pytest.fixture(scope="module", params=["step3p5", *sampled(KINDS[1:2], sorted(families.FAMILIES))])
def model(request, tmp_path_factory, tiny_models):
    if request.param == "step3p5":
        return tiny_models(vocab_size=40, **tiny.TWO_LAYERS, **HEADS)[0]
    return mlx_mtp.load_model(families.build(request.param, tmp_path_factory.mktemp("family"))[0])


def accepted(model):
    """Return the distinct cache layouts of a model; without a sweep only a few except for the first model."""
    found = {}
    for layout in [*KV_FLAGS, *OTHER_FLAGS]:
        with contextlib.suppress(ValueError):
            found.setdefault(serve(model, **layout).tree.identity, layout)
    every = list(found.values())
    few = [every[0], every[5], every[-3], every[-1]] if model.args.model_type == "step3p5" else [every[0], every[-1]]
    return sampled(few, every)


def test_only_files_of_the_same_layout_are_used_and_others_stay(model, tmp_path, caplog):
    """Each layout runs with the files of all others, then with its own; the text is always that of a new server."""
    first, second = prompts(model.vocab_size)
    layouts, own, within = accepted(model), {}, []
    for i, layout in enumerate(layouts):
        within.append(written(model, tmp_path, first, **layout))
        own[i] = set(tmp_path.iterdir()) - set().union(*own.values())
        assert own[i], layout
    names = {file.name for file in tmp_path.iterdir()}
    aside = tmp_path / "aside"
    for i, layout in enumerate(layouts):
        fresh = {text: generate(serve(model, **layout), prompt) for text, prompt in (("a", first), ("b", second))}
        aside.mkdir()
        for file in own[i]:
            file.rename(aside / file.name)
        assert generate(restarted(model, tmp_path, **layout), first) == fresh["a"], layout
        for file in own[i]:
            (aside / file.name).rename(file)
        aside.rmdir()
        again = generate(restarted(model, tmp_path, **layout), second)
        assert again == generate(within[i], second), layout
        assert again[0] == fresh["b"][0]
        assert again[1] > 0
    assert {file.name for file in tmp_path.iterdir()} == names
    assert not lines(caplog)


@pytest.mark.parametrize("k", sampled([2], [0, 2]))
def test_a_prefix_from_a_file_equals_one_in_memory(model, tmp_path, k):
    """The same tokens are reused, also after a system prompt only, and the caches are equal bitwise."""
    first, second = prompts(model.vocab_size)
    served = written(model, tmp_path, first, drafts=k)
    again = restarted(model, tmp_path, drafts=k)
    assert len(again.files.known) == 1
    for prompt in ([*first[:17], 1, 2], second, first, [*first, *second]):
        assert generate(again, prompt, turns=(18,)) == generate(served, prompt, turns=(18,))
    assert served.tree.covered(second) == 24
    for a, b in zip(again.tree.take(second, 32).caches, served.tree.take(second, 32).caches, strict=True):
        assert a.start == b.start
        assert all(map(mx.array_equal, a.parts, b.parts))
        assert len(a.parts) == len(b.parts)


def test_files_are_used_after_a_restart(small, tmp_path):
    first, second = prompts(40)
    fresh = generate(serve(small), second)
    assert len(written(small, tmp_path, first).files.known) == 1
    again = restarted(small, tmp_path)
    assert generate(again, first)[1] == 20
    assert generate(again, second) == (fresh[0], 16)
    again.files.save(again.tree)
    assert len(list(tmp_path.iterdir())) == 2
    again.files.limit = 0
    again.files.save(again.tree)
    assert not again.files.known
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_model_stays_unused(small, tiny_models, tmp_path):
    first, _ = prompts(40)
    written(small, tmp_path, first)
    other = tiny_models(1, vocab_size=40, **tiny.TWO_LAYERS)[0]
    assert generate(restarted(other, tmp_path), first)[1] == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_of_another_lane_stay_unused(small, tiny_models, tmp_path):
    """In files and in memory; each lane's text is that of a new server, and files of both lanes stay."""
    (first, second), fresh, cached = prompts(40), {}, {True: 16, False: 0}
    other = tiny_models(1, vocab_size=40, **tiny.TWO_LAYERS)[0]
    with lanes_apart(small, other):
        for lane in LANES:
            small.runtime.lane = other.runtime.lane = lane
            fresh[lane] = generate(serve(small), second)[0]
        assert fresh["exact"] != fresh["matrix"]
        for made, turned in (LANES, LANES[::-1]):
            small.runtime.lane = made
            served = written(small, tmp_path / made, first)
            for used in (turned, made):
                small.runtime.lane = other.runtime.lane = used
                found = generate(restarted(small, tmp_path / made), second)
                assert found == (fresh[used], cached[used == made]), (made, used)
                assert generate(restarted(other, tmp_path / made), second)[1] == 0
            small.runtime.lane = turned
            assert generate(served, second) == (fresh[turned], 0)
            served.files.save(served.tree)
            assert len(list((tmp_path / made).iterdir())) == 2
            assert generate(restarted(small, tmp_path / made), second)[1] == 24


def test_decoded_rows_in_files_are_reused(model, tmp_path):
    """A tree without decoded rows reuses them too, because the comparison depends on model and machine only."""
    prompt, _ = prompts(model.vocab_size)
    served = serve(model, files=PrefixFiles(tmp_path, LARGE))
    served.tree.decoded = True
    cache = left(answer(served, Job(DecodeRequest(prompt, (18,), 10), lambda event: None), lambda: False))
    text = [*cache.tokens, 1, 2, 3, 4, 5, 6]
    list(prefill_next(served, text, cache))
    served.files.save(served.tree)
    for decoded in (True, False):
        again = restarted(model, tmp_path)
        again.tree.decoded = decoded
        assert generate(again, text) == generate(served, text)
        assert again.tree.covered(text) == 36


def odd(parts):
    return tuple(mx.concatenate([part, part], axis=-1) for part in parts)


def halved(parts):
    return tuple(part.astype(mx.float16) for part in parts)


WRONG = [odd, halved, lambda parts: parts[:-1], lambda parts: (*parts, parts[-1])]
PLACES = ("rows", "whole", "kept", "backlog")


@pytest.mark.parametrize("wrong", sampled(WRONG[::2], WRONG))
def test_arrays_of_a_wrong_shape_with_a_right_digest_are_not_used(model, tmp_path, caplog, wrong):
    """Applies to rows and to each part of a checkpoint."""
    first, _ = prompts(model.vocab_size)
    fresh = generate(serve(model), first)[0]
    at = WRONG.index(wrong)
    for i, place in sampled([(at, PLACES[at]), (at + 1, PLACES[at - 3])], enumerate(PLACES)):
        caplog.clear()
        served = serve(model, files=PrefixFiles(tmp_path / str(i), LARGE))
        generate(served, first, turns=(18,))
        chunk = next(chunk for leaf in served.tree.leaves() for chunk in leaf.path() if chunk.checkpoint)
        if place == "rows":
            chunk.rows = [parts and wrong(parts) for parts in chunk.rows]
        elif place == "whole":
            for at, parts in chunk.checkpoint.whole.items():
                chunk.checkpoint.whole[at] = parts and wrong(parts)
        elif held := getattr(chunk.checkpoint, place):
            held[:] = wrong(tuple(held))
        if not (chunk.rows if place == "rows" else getattr(chunk.checkpoint, place)):
            continue
        served.files.save(served.tree)
        assert generate(restarted(model, tmp_path / str(i)), first)[0] == fresh, place
        assert len(lines(caplog)) == 1, place


def test_a_conversation_has_one_file_that_grows(model, tmp_path):
    first, second = prompts(model.vocab_size)
    served = serve(model, files=PrefixFiles(tmp_path, LARGE))
    for n in (9, 14, 23):
        generate(served, first[:n], turns=(8,))
        served.files.save(served.tree)
        served.files.save(served.tree)
        assert [len(own) for own in served.files.known.values()] == [(n - 1) // 4 * 4]
    again = restarted(model, tmp_path)
    generate(again, first[:9])
    generate(again, first[:14])
    again.files.save(again.tree)
    assert [len(own) for own in again.files.known.values()] == [20]  # which includes the shorter ones
    other = restarted(model, tmp_path, chunking=Chunking(5))
    generate(other, [*first, *second])
    other.files.save(other.tree)
    assert sorted(len(own) for own in other.files.known.values()) == [20, 50]
    assert len(list(tmp_path.iterdir())) == 2


def test_writing_stops_when_the_conversation_grows(small, tmp_path, small_pieces):
    """A response between two pieces extends the conversation, which is then written instead."""
    first, second = prompts(40)
    served = serve(small, files=PrefixFiles(tmp_path, LARGE))
    generate(served, first)
    assert all(served.files.step(served.tree) for _ in range(5))
    generate(served, [*first, *second])
    served.files.save(served.tree)
    assert [len(own) for own in served.files.known.values()] == [48]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_least_recently_used_files_are_removed_before_the_limit_is_exceeded(small, tmp_path, small_pieces):
    texts = [prompts(40, seed)[0] for seed in range(5)]
    size = sum(file.stat().st_size for file in written(small, tmp_path / "one", texts[0]).files.known)
    served = serve(small, files=PrefixFiles(tmp_path / "few", int(3.5 * size)))
    for text in texts[:4]:
        generate(served, text, turns=(18,))
    generate(served, texts[0])
    while served.files.step(served.tree):
        assert sum(file.stat().st_size for file in (tmp_path / "few").iterdir()) <= served.files.limit
    assert held(small, tmp_path / "few", texts) == [True, False, True, True, False]
    generate(served, texts[2])
    generate(served, texts[4], turns=(18,))
    served.files.save(served.tree)
    assert held(small, tmp_path / "few", texts) == [True, False, True, False, True]
    tight = restarted(small, tmp_path / "few", limit=size // 2)
    generate(tight, texts[1])
    tight.files.save(tight.tree)
    assert not tight.files.known


def held(model, directory, texts):
    tokens = [own.tokens for own in PrefixFiles(directory, LARGE).known.values()]
    return [text[:20] in tokens for text in texts]


def test_the_header_is_that_of_a_safetensors_file(small, tmp_path):
    served = written(small, tmp_path, prompts(40)[0])
    (file,) = served.files.known
    arrays, metadata = mx.load(str(file), return_metadata=True)
    assert json.loads(metadata["mlx_mtp"])["format"] == chunk_file.FORMAT
    assert sum(array.nbytes for array in arrays.values()) == served.tree.nbytes
    assert has_rows(served.tree.blank.caches[0])
    with pytest.raises(ValueError, match="not a prompt cache"):
        mlx_mtp.load_prompt_cache(file, small)
