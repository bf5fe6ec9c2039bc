"""Keep prefixes in files: they outlive the server, and no file changes or ends an answer, whatever is in it."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path

import families
import mlx.core as mx
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letters import Letters
from prefix_asks import ask as ask_for
from prefix_asks import left, prompts, serve
from sweep import sampled

import mlx_mtp
from mlx_mtp.cache.pieces import has_rows
from mlx_mtp.serve import chunk_file
from mlx_mtp.serve.job import Ask, Job, answer, reread
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.prefixes import Chunking

LARGE = 1 << 30
HEADS = {"attention_other_setting": {**tiny.CONFIG["attention_other_setting"], "head_dim": 64}, "head_dim": 64}
KINDS = ["glm4_moe", "qwen3_5", "deepseek_v3"]  # keys and values, states, latents; windows are the first model's
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
OTHER_FLAGS = [{"chunking": Chunking(8)}, {"chunking": Chunking(4, 2, frozenset({3}))}]


@pytest.fixture(autouse=True)
def wrapped(monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_mtp.generate"], "TokenizerWrapper", Letters)


@pytest.fixture(scope="module", params=["step3p5", *sampled(KINDS, sorted(families.FAMILIES))])
def model(request, tmp_path_factory, tiny_models):
    if request.param == "step3p5":
        return tiny_models(vocab_size=40, **HEADS)[0]
    return mlx_mtp.load_model(families.build(request.param, tmp_path_factory.mktemp("family"))[0])


@pytest.fixture(scope="module")
def small(tiny_models):
    return tiny_models(vocab_size=40)[0]


def ask(served, prompt, **more):
    """(a text of two tokens, tokens of the prompt that were remembered)."""
    return ask_for(served, prompt, 2, **more)


def written(model, directory, *texts, turns=(18,), **layout):
    """Answer prompts, and keep what is remembered of them in files."""
    served = serve(model, files=PrefixFiles(directory, LARGE), **layout)
    for text in texts:
        ask(served, text, turns=turns)
    served.files.save(served.tree)
    return served


def restarted(model, directory, limit=LARGE, **layout):
    return serve(model, files=PrefixFiles(directory, limit), **layout)


def accepted(model):
    """The layouts that a model's caches can have, each once; a few for all but the first model, unless in a sweep."""
    found = {}
    for layout in [*KV_FLAGS, *OTHER_FLAGS]:
        with contextlib.suppress(ValueError):
            found.setdefault(serve(model, **layout).tree.identity, layout)
    every = list(found.values())
    return every if model.args.model_type == "step3p5" else sampled([*every[:4], every[-1]], every)


def lines(caplog):
    return [record.message for record in caplog.records if record.name == "mlx_mtp.serve"]


def test_only_files_of_the_same_layout_are_read_and_others_are_left_alone(model, tmp_path, caplog):
    """Every layout with the files of all others, and then with its own: the text is a fresh server's each time."""
    first, second = prompts(model.vocab_size)
    layouts, own, within = accepted(model), {}, []
    for i, layout in enumerate(layouts):
        within.append(written(model, tmp_path, first, **layout))
        own[i] = set(tmp_path.iterdir()) - set().union(*own.values())
        assert own[i], layout
    names = {file.name for file in tmp_path.iterdir()}
    aside = tmp_path / "aside"
    for i, layout in enumerate(layouts):
        fresh = {text: ask(serve(model, **layout), prompt) for text, prompt in (("a", first), ("b", second))}
        aside.mkdir()
        for file in own[i]:
            file.rename(aside / file.name)
        assert ask(restarted(model, tmp_path, **layout), first) == fresh["a"], layout
        for file in own[i]:
            (aside / file.name).rename(file)
        aside.rmdir()
        again = ask(restarted(model, tmp_path, **layout), second)
        assert again == ask(within[i], second), layout
        assert again[0] == fresh["b"][0]
        assert again[1] > 0
    assert {file.name for file in tmp_path.iterdir()} == names
    assert not lines(caplog)


@pytest.mark.parametrize("k", [0, 2])
def test_a_beginning_is_as_useful_as_within_a_process(model, tmp_path, k):
    """The end of a system prompt too: the same tokens are reused, and caches have the same bits."""
    first, second = prompts(model.vocab_size)
    served = written(model, tmp_path, first, drafts=k)
    again = restarted(model, tmp_path, drafts=k)
    assert len(again.files.known) == 1
    for prompt in ([*first[:17], 1, 2], second, first, [*first, *second]):
        assert ask(again, prompt, turns=(18,)) == ask(served, prompt, turns=(18,))
    assert served.tree.covered(second) == 24
    for a, b in zip(again.tree.take(second, 32).caches, served.tree.take(second, 32).caches, strict=True):
        assert a.start == b.start
        assert all(map(mx.array_equal, a.parts, b.parts))
        assert len(a.parts) == len(b.parts)


def test_files_outlive_the_server(small, tmp_path):
    first, second = prompts(40)
    fresh = ask(serve(small), second)
    assert len(written(small, tmp_path, first).files.known) == 1
    again = restarted(small, tmp_path)
    assert ask(again, first)[1] == 20
    assert ask(again, second) == (fresh[0], 16)
    again.files.save(again.tree)
    assert len(list(tmp_path.iterdir())) == 2
    again.files.limit = 0
    again.files.save(again.tree)
    assert not again.files.known
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_model_is_left_alone(small, tiny_models, tmp_path):
    first, _ = prompts(40)
    written(small, tmp_path, first)
    other = tiny_models(1, vocab_size=40)[0]
    assert ask(restarted(other, tmp_path), first)[1] == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_answers_that_were_decoded_are_reused_too(model, tmp_path):
    """Also by a tree that holds none itself: that rows are alike is a matter of the model and the machine."""
    prompt, _ = prompts(model.vocab_size)
    served = serve(model, files=PrefixFiles(tmp_path, LARGE))
    served.tree.decoded = True
    cache = left(answer(served, Job(Ask(prompt, (18,), 10), lambda event: None), lambda: False))
    text = [*cache.tokens, 1, 2, 3, 4, 5, 6]
    list(reread(served, text, cache))
    served.files.save(served.tree)
    for decoded in (True, False):
        again = restarted(model, tmp_path)
        again.tree.decoded = decoded
        assert ask(again, text) == ask(served, text)
        assert again.tree.covered(text) == 36


# What can become of a file.
def truncated(file):
    file.write_bytes(file.read_bytes()[:-9])


def emptied(file):
    file.write_bytes(b"")


def cut_within_the_header(file):
    file.write_bytes(file.read_bytes()[:100])


def changed_at_the_end(file):
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")


def changed_tokens(file):
    """A header that is well formed, of other tokens."""
    file.write_bytes(
        re.sub(rb'(tokens\\":\[)(\d)', lambda m: m[1] + (b"2" if m[2] == b"1" else b"1"), file.read_bytes())
    )


def no_numbers(file):
    file.write_bytes(re.sub(rb'(primed\\":)\d', lambda m: m[1] + b"[", file.read_bytes()))


def other_shapes(file):
    """Arrays of other shapes under the same names, by a program that knows nothing of what the file is."""
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), {name: mx.contiguous(array[..., :1]) for name, array in arrays.items()}, metadata)


def a_copy_of_another(file):
    other = next(each for each in file.parent.iterdir() if each != file)
    shutil.copy(other, file)


def a_directory(file):
    file.unlink()
    file.mkdir()


DAMAGES = [truncated, emptied, cut_within_the_header, changed_at_the_end, changed_tokens, no_numbers, other_shapes]


@pytest.fixture(scope="module")
def stored(small, tmp_path_factory):
    """(a directory with a file of each of two prompts, these, what a fresh server answers)."""
    texts, directory = prompts(40), tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["mlx_mtp.generate"], "TokenizerWrapper", Letters)
        written(small, directory, *texts)
        return directory, texts, [ask(serve(small), text)[0] for text in texts]


@pytest.mark.parametrize("before", [True, False], ids=["before the start", "after the start"])
@pytest.mark.parametrize("damage", [*DAMAGES, a_copy_of_another])
def test_a_file_that_cannot_be_used_is_removed_with_one_line(small, stored, tmp_path, caplog, damage, before):
    (source, texts, fresh), directory = stored, tmp_path / "files"
    shutil.copytree(source, directory)
    started = None if before else restarted(small, directory)
    file = max(PrefixFiles(directory, LARGE).known.items(), key=lambda item: len(item[1]))[0]
    damage(file)
    served = started or restarted(small, directory)
    assert [ask(served, text)[0] for text in texts] == fresh
    assert len(lines(caplog)) == 1
    assert not file.exists()
    assert len(list(directory.iterdir())) == 1
    assert served.tree.covered(texts[1]) == 24


@pytest.mark.parametrize(("act", "count"), [(Path.unlink, 0), (a_directory, 1)])
def test_a_file_that_is_gone_or_cannot_be_read_changes_nothing(small, stored, tmp_path, caplog, act, count):
    (source, texts, fresh), directory = stored, tmp_path / "files"
    shutil.copytree(source, directory)
    served = restarted(small, directory)
    act(max(served.files.known, key=lambda file: len(served.files.known[file])))
    assert [ask(served, text)[0] for text in texts] == fresh
    assert len(lines(caplog)) == count
    shutil.rmtree(directory)
    served.files.save(served.tree)
    assert len(restarted(small, directory).files.known) == 2


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans(), st.booleans())
def test_a_byte_that_changes_never_changes_an_answer(small, stored, tmp_path, place, flip, header, before):
    (source, texts, fresh), directory = stored, tmp_path / "files"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    started = None if before else restarted(small, directory)
    file = max(PrefixFiles(directory, LARGE).known.items(), key=lambda item: len(item[1]))[0]
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little") if header else len(content)
    content[int(place * length)] ^= flip
    file.write_bytes(content)
    assert ask(started or restarted(small, directory), texts[1])[0] == fresh[1]


def odd(parts):
    return tuple(mx.concatenate([part, part], axis=-1) for part in parts)


def halved(parts):
    return tuple(part.astype(mx.float16) for part in parts)


@pytest.mark.parametrize("wrong", [odd, halved, lambda parts: parts[:-1], lambda parts: (*parts, parts[-1])])
def test_arrays_of_another_shape_are_not_used_though_their_digest_is_right(model, tmp_path, caplog, wrong):
    """Whatever of a chunk it is: rows, or the states and windows that are noted at its end."""
    first, _ = prompts(model.vocab_size)
    fresh = ask(serve(model), first)[0]
    for i, place in enumerate(("rows", "whole", "kept", "backlog")):
        caplog.clear()
        served = serve(model, files=PrefixFiles(tmp_path / str(i), LARGE))
        ask(served, first, turns=(18,))
        chunk = next(chunk for leaf in served.tree.leaves() for chunk in leaf.path() if chunk.moment)
        if place == "rows":
            chunk.rows = [parts and wrong(parts) for parts in chunk.rows]
        elif place == "whole":
            for at, parts in chunk.moment.whole.items():
                chunk.moment.whole[at] = parts and wrong(parts)
        elif held := getattr(chunk.moment, place):
            held[:] = wrong(tuple(held))
        if not (chunk.rows if place == "rows" else getattr(chunk.moment, place)):
            continue
        served.files.save(served.tree)
        assert ask(restarted(model, tmp_path / str(i)), first)[0] == fresh, place
        assert len(lines(caplog)) == 1, place


def leftovers(directory, name="0" * 32):
    """What a killed process of this version and of earlier ones leaves."""
    names = (f".{name}.prefix.safetensors-{'ab' * 16}.safetensors", f"{name}.prefix.safetensors.partial")
    files = [directory / each for each in names]
    for file in files:
        file.write_bytes(bytes(1000))
    return files


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    old, new = leftovers(tmp_path)
    others = [tmp_path / name for name in ("notes.txt", "model.safetensors", "a.prefix.safetensors", ".hidden")]
    for file in others:
        file.write_bytes(b"mine")
    with new.open("rb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        PrefixFiles(tmp_path, 0)
        assert new.exists()
        assert not old.exists()
    PrefixFiles(tmp_path, 0)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_another_server_is_writing_stays_and_counts(small, tmp_path, monkeypatch):
    """Two servers share a directory: one starts, and stores a prompt, while the other is in the middle of a file."""
    monkeypatch.setattr(chunk_file, "PIECE", 1000)
    first, second = prompts(40)
    one = serve(small, files=PrefixFiles(tmp_path, LARGE))
    ask(one, first, turns=(18,))
    assert all(one.files.step(one.tree) for _ in range(5))
    (partial,) = tmp_path.iterdir()
    other = restarted(small, tmp_path)
    ask(other, second)
    other.files.save(other.tree)
    (whole,) = other.files.known
    other.files.limit = whole.stat().st_size + partial.stat().st_size - 1
    other.files.save(other.tree)
    assert not whole.exists()
    one.files.save(one.tree)
    assert ask(other, first)[1] == 20  # it finds what the first one has written since
    assert not partial.exists()
    one.files.limit = 0
    one.files.save(one.tree)
    assert ask(other, [*first, 1])[1] == 20
    assert ask(restarted(small, tmp_path), first)[1] == 0


def test_a_conversation_has_one_file_that_grows(model, tmp_path):
    first, second = prompts(model.vocab_size)
    served = serve(model, files=PrefixFiles(tmp_path, LARGE))
    for n in (9, 14, 23):
        ask(served, first[:n], turns=(8,))
        served.files.save(served.tree)
        served.files.save(served.tree)
        assert [len(own) for own in served.files.known.values()] == [(n - 1) // 4 * 4]
    again = restarted(model, tmp_path)
    ask(again, first[:9])
    ask(again, first[:14])
    again.files.save(again.tree)
    assert [len(own) for own in again.files.known.values()] == [20]  # which holds the shorter ones, too
    other = restarted(model, tmp_path, chunking=Chunking(5))
    ask(other, [*first, *second])
    other.files.save(other.tree)
    assert sorted(len(own) for own in other.files.known.values()) == [20, 50]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_overtaken_is_given_up(small, tmp_path, monkeypatch):
    """Between two pieces answers go on: what the conversation has become meanwhile is written instead."""
    monkeypatch.setattr(chunk_file, "PIECE", 1000)
    first, second = prompts(40)
    served = serve(small, files=PrefixFiles(tmp_path, LARGE))
    ask(served, first)
    assert all(served.files.step(served.tree) for _ in range(5))
    ask(served, [*first, *second])
    served.files.save(served.tree)
    assert [len(own) for own in served.files.known.values()] == [48]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_least_recently_used_files_are_removed_and_there_are_never_more_bytes(small, tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_file, "PIECE", 1000)
    texts = [prompts(40, seed)[0] for seed in range(5)]
    size = sum(file.stat().st_size for file in written(small, tmp_path / "one", texts[0]).files.known)
    served = serve(small, files=PrefixFiles(tmp_path / "few", int(3.5 * size)))
    for text in texts[:4]:
        ask(served, text, turns=(18,))
    ask(served, texts[0])
    while served.files.step(served.tree):
        assert sum(file.stat().st_size for file in (tmp_path / "few").iterdir()) <= served.files.limit
    assert held(small, tmp_path / "few", texts) == [True, False, True, True, False]
    ask(served, texts[2])
    ask(served, texts[4], turns=(18,))
    served.files.save(served.tree)
    assert held(small, tmp_path / "few", texts) == [True, False, True, False, True]
    tight = restarted(small, tmp_path / "few", limit=size // 2)
    ask(tight, texts[1])
    tight.files.save(tight.tree)
    assert not tight.files.known


def held(model, directory, texts):
    tokens = [own.tokens for own in PrefixFiles(directory, LARGE).known.values()]
    return [text[:20] in tokens for text in texts]


def test_a_full_disk_is_one_line_and_nothing_is_left(small, tmp_path, monkeypatch, caplog):
    served = serve(small, files=PrefixFiles(tmp_path, LARGE))
    ask(served, prompts(40)[0])
    for broken in ("fsync", "rename"):
        caplog.clear()

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, broken, full)
            served.files.save(served.tree)
        assert len(lines(caplog)) == 1
        assert "No space left" in lines(caplog)[0]
        assert not list(tmp_path.iterdir())
    served.files.save(served.tree)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_header_is_that_of_a_safetensors_file(small, tmp_path):
    served = written(small, tmp_path, prompts(40)[0])
    (file,) = served.files.known
    arrays, metadata = mx.load(str(file), return_metadata=True)
    assert json.loads(metadata["mlx_mtp"])["format"] == chunk_file.FORMAT
    assert sum(array.nbytes for array in arrays.values()) == served.tree.nbytes
    assert has_rows(served.tree.blank.caches[0])
    with pytest.raises(ValueError, match="not a prompt cache"):
        mlx_mtp.load_prompt_cache(file, small)
