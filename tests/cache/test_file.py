"""Save and load prompt caches: generation continues with the same tokens, and a damaged file is refused."""

import itertools
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
import tiny
from cache_files import rewritten, sealed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.cache import file as cache_file
from mlx_mtp.cache.file import fingerprint, save_prompt_cache
from mlx_mtp.cache.prompt_prefix import PromptPrefix
from mlx_mtp.decoding.prompt_file import load_prompt_cache

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]
TEXT = 24 if SWEEP else 18
LAYOUTS = {
    "plain": {},
    "quantized": {"kv_bits": 8, "mtp_kv_bits": 4, "kv_group_size": 32},
    "quantized later": {"kv_bits": 4, "quantized_kv_start": 14, "kv_group_size": 32},
    "rotating": {"max_kv_size": 6},
}


def tokens_of(model, prompt, n, k, **options):
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, **options)
    return [token for token, _, _ in steps]


def parameters(model) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(2, head_dim=32, vocab_size=5)[0]


class Content(bytes):
    """Bytes with a short representation in hypothesis' messages."""

    def __repr__(self):
        return f"{len(self)} bytes"


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """Return the file of a short conversation, and its bytes."""
    file = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    cache = mlx_mtp.make_prompt_cache(model)
    tokens_of(model, PROMPT, 6, 3, prompt_cache=cache)
    cache.prefix = PromptPrefix("a text", "a system prompt", template_config={"x": 1})
    save_prompt_cache(file, cache)
    return file, Content(file.read_bytes())


def check_resumed(model, tmp_path, before, after, lengths=(0, 5, 13), **layout):
    """Check that a run which was saved and loaded after n tokens gives the tokens of an uninterrupted run."""
    whole = tokens_of(model, PROMPT, TEXT, 0, **layout)
    for n in lengths:  # at 0, 5 and 13 the window of 8 is not full, wraps, has wrapped
        cache = mlx_mtp.make_prompt_cache(model, **layout)
        file = tmp_path / f"{n}.any-name"
        first = tokens_of(model, PROMPT[:-1] if n == 0 else PROMPT, n, before, prompt_cache=cache)
        save_prompt_cache(file, cache)
        again = load_prompt_cache(file, model)
        assert again.tokens == cache.tokens
        assert again.layout == cache.layout
        assert first + tokens_of(model, (PROMPT + first)[-1:], TEXT - n, after, prompt_cache=again) == whole, n


CASES = [
    ("plain", (3, 3), (0, 13)),
    ("quantized", (0, 2), (5,)),
    ("quantized later", (2, 0), (0, 5)),
    ("rotating", (3, 3), (13,)),
]


@pytest.mark.parametrize(
    ("layout", "counts", "lengths"),
    sampled(CASES, itertools.product(LAYOUTS, [(3, 3), (0, 2), (2, 0)], [(0, 5, 13)])),
)
def test_the_text_is_that_of_one_run(model, tmp_path, layout, counts, lengths):
    before, after = counts
    check_resumed(model, tmp_path, before, after, lengths, **LAYOUTS[layout])


@pytest.mark.parametrize(
    "name",
    sampled(
        ["qwen3_5", "glm_moe_dsa_shared"],
        ["qwen3_5", "deepseek_v3", "nemotron_h", "glm_moe_dsa_shared", "mimo_v2_flash"],
    ),
)
def test_the_text_is_that_of_one_run_in_every_family(name, tmp_path):
    """Check recurrent states, latent rows, an indexer's keys, and recycled heads."""
    model = mlx_mtp.load_model(families.build(name, tmp_path)[0])
    check_resumed(model, tmp_path, min(2, model.max_draft_tokens), 1, sampled((13,), (0, 5, 13)))


@settings(max_examples=200 if SWEEP else 80, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_refused(model, saved, data):
    """Flip bits in any region, cut or extend the file, or leave out a part that was not written."""
    file, content = saved
    header = 8 + struct.unpack("<Q", content[:8])[0]
    regions = {
        "length": (0, 8),
        "header": (8, header),
        "state": (header - 900, header),
        "data": (header, len(content)),
    }
    kind = data.draw(st.sampled_from([*regions, "cut", "longer", "zeros"]))
    damaged = bytearray(content)
    if kind == "cut":
        del damaged[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "longer":
        damaged += data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "zeros":
        start = data.draw(st.integers(0, header))
        damaged[start : start + 600] = bytes(600)
    else:
        first, end = regions[kind]
        place = data.draw(st.integers(first, end - 1))
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    assume(damaged != content)
    bad = file.with_name("damaged.safetensors")
    bad.write_bytes(damaged)
    for read in (lambda: load_prompt_cache(bad, model), lambda: cache_file.saved_prefix(bad)):
        with pytest.raises(ValueError, match=r"damaged\.safetensors: .*(damaged|of an? \w+ format)") as e:
            read()
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("format"), r"of an older format \(1\), this version reads 2 to 4; make it again"),
        (lambda s: s.update(format=5), r"of a newer format \(5\)"),
        (lambda s: s.update(model="0" * 64), "made with another model"),
        (lambda s: s.update(model_heads="0" * 64), "made with other MTP heads"),
        (lambda s: s["layers"].pop(), "damaged"),
        (lambda s: s["layers"].append({"window": None, "start": 0}), "damaged"),
        (lambda s: s.update(heads=s["heads"] * 2), "damaged"),
        (lambda s: s["layers"][0].update(window=4), "damaged"),
        (
            lambda s: s["layers"].__setitem__(0, {"window": "recurrent"}),
            r"damaged \(its layers are not the model's\)",
        ),
        (lambda s: s["layers"][0].update(window="plain", classes=["os"], state=[]), "damaged"),
        (lambda s: s.update(tokens=[*range(99)]), "damaged"),
        (lambda s: s.update(tokens="abc"), "damaged"),
        (lambda s: s.update(primed=10**6), "damaged"),
        (lambda s: s.update(quantizing={"start": 1}), "damaged"),
        (lambda s: s.update(quantizing=False), "damaged"),
        (lambda s: s.update(quantized={"start": 1, "bits": 4}), "damaged"),
        (lambda s: s.update(quantizing={"start": 1, "bits": "4", "group_size": 32}), "damaged"),
        (lambda s: s.update(reach="x"), "damaged"),
        (lambda s: s["layers"][0].update(start=-1), "damaged"),
        (lambda s: s.update(opening={"prompt": 7}), "damaged"),
        (lambda s: s.update(opening={"text": "x"}), "damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(model, saved, tmp_path, change, message):
    """Check each field of the state with a right checksum."""
    file = sealed(tmp_path / "made.safetensors", rewritten(saved[1], change))
    with pytest.raises(ValueError, match=rf"made\.safetensors: {message}") as e:
        load_prompt_cache(file, model)
    assert "\n" not in str(e.value)


def test_a_snapshot_restores_the_start_of_the_heads_windows(model):
    cache = mlx_mtp.make_prompt_cache(model)
    tokens_of(model, PROMPT, 6, 3, prompt_cache=cache)
    snapshot, starts = cache.snapshot(), [c.start for c in cache.heads]
    for c in cache.heads:
        c.start += 5  # as if the heads had restarted after rows beyond their windows
    cache.rewind(snapshot)
    assert [c.start for c in cache.heads] == starts


def test_other_files_are_refused(model, tmp_path):
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"a": mx.zeros(3)}, {"model": "x"})
    for name, content in {"empty": b"", "text": b"{}" * 99, "deep": struct.pack("<Q", 40000) + b"[" * 40000}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    for name in ("other", "empty", "text", "deep"):
        with pytest.raises(ValueError, match=rf"{name}\.safetensors: not a prompt cache of mlx_mtp"):
            load_prompt_cache(tmp_path / f"{name}.safetensors", model)
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "none", model)


def test_another_finetune_is_another_model(tmp_path):
    """Change any trained tensor of the target, or a configuration that affects only positions."""
    config = {**tiny.CONFIG, **tiny.SHORTER}
    weights = tiny.random_weights(config)
    model = mlx_mtp.load_model(tiny.save(tmp_path / "own", config, weights))
    own = {heads: fingerprint(model, heads=heads) for heads in (False, True)}
    before = parameters(model)
    for name, array in before.items():
        model.load_weights([(name, array * 1.01 + 0.001)], strict=False)
        changed = {heads: fingerprint(model, heads=heads) != own[heads] for heads in (False, True)}
        head = name.startswith("mtp.")
        assert changed == {False: not head, True: head and ".head." not in name}, name
        model.load_weights([(name, array)], strict=False)
    longer = {**config, "rope_theta": [1e6, *tiny.CONFIG["rope_theta"][1:]]}
    other = mlx_mtp.load_model(tiny.save(tmp_path / "longer", longer, weights))
    assert fingerprint(other, heads=False) != own[False]
    again = mlx_mtp.load_model(tmp_path / "own")
    assert {heads: fingerprint(again, heads=heads) for heads in (False, True)} == own


def test_with_and_without_heads(tmp_path):
    config = {**tiny.CONFIG, **tiny.SHORTER}
    path = tiny.save(tmp_path / "own", config, tiny.random_weights(config))
    models = {mtp: mlx_mtp.load_model(path, mtp=mtp) for mtp in (True, False)}
    whole = tokens_of(models[False], PROMPT, TEXT, 0)
    for made, used in itertools.product((True, False), repeat=2):
        cache = mlx_mtp.make_prompt_cache(models[made])
        first = tokens_of(models[made], PROMPT, 7, None, prompt_cache=cache)
        save_prompt_cache(tmp_path / "cache", cache)
        again = load_prompt_cache(tmp_path / "cache", models[used])
        assert len(again.heads) == (3 if made and used else 0)
        assert first + tokens_of(models[used], first[-1:], TEXT - 7, None, prompt_cache=again) == whole
    assert max(len(load_prompt_cache(tmp_path / "cache", m).backlog) for m in models.values()) == 0


@pytest.mark.parametrize("where", ["save_safetensors", "fsync", "replace", "full"])
def test_an_interrupted_write_leaves_the_old_file(model, saved, tmp_path, monkeypatch, where):
    file = tmp_path / "cache.safetensors"
    file.write_bytes(saved[1])
    cache = load_prompt_cache(file, model)
    tokens_of(model, [1], 3, 0, prompt_cache=cache)
    write = mx.save_safetensors

    def interrupted(*arguments):
        if where == "save_safetensors":
            write(*arguments)
        if where == "full":
            raise RuntimeError("[write] Unable to write")
        raise KeyboardInterrupt

    place = mx if where in ("save_safetensors", "full") else os
    monkeypatch.setattr(place, "save_safetensors" if place is mx else where, interrupted)
    expected = (OSError, re.escape(str(file))) if where == "full" else (KeyboardInterrupt, None)
    with pytest.raises(expected[0], match=expected[1]):
        save_prompt_cache(file, cache)
    monkeypatch.undo()
    monkeypatch.setattr(cache_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(file))}'$"):
        save_prompt_cache(file, cache)
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == saved[1]


def test_a_file_that_is_replaced_while_it_is_read(model, saved, tmp_path, monkeypatch):
    """The content that was checked is the content that is loaded, even if the file is replaced in between."""
    file, longer = tmp_path / "cache", mlx_mtp.make_prompt_cache(model)
    file.write_bytes(saved[1])
    tokens_of(model, PROMPT[::-1], 6, 3, prompt_cache=longer)
    load = mx.load

    def late(f, **options):
        save_prompt_cache(file, longer)
        return load(f, **options)

    monkeypatch.setattr(mx, "load", late)
    found = load_prompt_cache(file, model)
    monkeypatch.undo()
    expected, other = load_prompt_cache(saved[0], model), load_prompt_cache(file, model)
    assert found.tokens == expected.tokens != other.tokens
    assert all(mx.array_equal(a, b) for a, b in zip(found.arrays, expected.arrays, strict=True))


def test_writers_and_readers_at_the_same_time(model, tmp_path):
    """Each reader finds one writer's whole file."""
    file, caches = tmp_path / "cache", [mlx_mtp.make_prompt_cache(model) for _ in range(3)]
    for n, cache in enumerate(caches):
        tokens_of(model, PROMPT[n:], 6, 3, prompt_cache=cache)
    mx.eval([cache.arrays for cache in caches])
    save_prompt_cache(file, caches[0])
    with ThreadPoolExecutor(6) as pool:
        written = [pool.submit(save_prompt_cache, file, cache) for cache in caches * 4]
        read = [pool.submit(load_prompt_cache, file, model) for _ in range(8)]
    assert [f.result() for f in written] == [None] * 12
    assert {tuple(f.result().tokens) for f in read} <= {tuple(cache.tokens) for cache in caches}
    assert [f.name for f in tmp_path.iterdir()] == ["cache"]


def test_a_cache_too_large_for_memory_is_refused(model, saved, machine):
    machine(len(saved[1]) - 1)
    with pytest.raises(
        ValueError, match=r"cache\.safetensors: 0\.\d+ GB needed in addition to the model, .* \(a test\); set MLX"
    ):
        load_prompt_cache(saved[0], model)
    load_prompt_cache(saved[0], model, check_memory=False)


def test_only_files_are_replaced(model, tmp_path):
    cache = mlx_mtp.make_prompt_cache(model)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="not a file"):
            save_prompt_cache(place, cache)
    assert [f.name for f in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("made", [{}, *LAYOUTS.values()])
def test_the_layout_is_restored(model, made):
    expected = {name: made.get(name) for name in ("kv_bits", "mtp_kv_bits", "kv_group_size", "max_kv_size")}
    cache = mlx_mtp.make_prompt_cache(model, **made)
    for c in (cache, cache.like_new()):
        assert c.layout == expected
        tokens_of(model, PROMPT, 5, 2, prompt_cache=c)
        assert c.layout == expected
