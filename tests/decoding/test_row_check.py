"""Rows of one pass are compared with the same rows alone: a module that depends on their number limits the drafts."""

import importlib
import json
import re

import families
import mlx.core as mx
import portless
import pytest
from letter_chats import VOCAB, answer, make_session
from masked import of_letters, ours
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.cache.layer_cache import CONTEXTS
from mlx_mtp.cache.mlx_lm_caches import MlxLmCaches
from mlx_mtp.decoding import row_check
from mlx_mtp.decoding.row_check import LM_HEAD, OPERATIONS, TAKE_BACK, RowCheck, prepare_rows
from mlx_mtp.tuning import module_calls, verdict_file
from mlx_mtp.tuning.idle_trials import IdleTrials
from mlx_mtp.tuning.module_calls import calls_of
from mlx_mtp.tuning.row_findings import NUMBERS, RowFinding, recalled

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2, 2, 1, 3, 0]
NEAR = (0, 20)  # as few rows as wrap the window
RIGHT = RowFinding(16)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function that returns the path of a family's checkpoint, which it writes at the first call."""
    paths = {}

    def path_of(name, **changes):
        key = name, *changes.items()
        if key not in paths:
            paths[key] = families.build(name, tmp_path_factory.mktemp(name), **changes)[0]
        return paths[key]

    return path_of


@pytest.fixture
def model(checkpoints):
    return mlx_mtp.load_model(checkpoints("mimo_v2_flash"))


def depending(module, first, size=0.05, before=False):
    """Make a module's result, or its input, depend on whether it gets at least `first` rows."""
    kind = type(module)

    def call(self, x, *args, **kwargs):
        factor = 1 + size * (x.shape[-2] >= first)
        return (
            kind.__call__(self, x * factor, *args, **kwargs)
            if before
            else _scaled(kind, self, x, args, kwargs, factor)
        )

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _scaled(kind, self, x, args, kwargs, factor):
    made = kind.__call__(self, x, *args, **kwargs)
    return (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor


def found_in(model, path):
    return dict(model.named_modules())[path]


def text(model, **options):
    return [token for token, *_ in mlx_mtp.generate_step(PROMPT, model, max_tokens=16, **options)]


def most_rows(model, monkeypatch):
    """Return a list that gets the number of rows of each pass at a device position, of all sequences together."""
    sizes, hidden = [], type(model).hidden

    def noted(self, tokens, cache, *rows):
        if not isinstance(cache[0].offset, int):
            sizes.append(tokens.size)
        return hidden(self, tokens, cache, *rows)

    monkeypatch.setattr(type(model), "hidden", noted)
    return sizes


KINDS = ["mimo_v2_flash", "qwen3_5", "deepseek_v32", "nemotron_h", "qwen3_next", "glm4_moe", "mimo"]


@pytest.mark.parametrize(("name", "exact"), paired(sampled(KINDS[:3], KINDS), [True, False]))
def test_rows_of_ports_are_right(checkpoints, name, exact):
    """Windows that wrap, recurrent states and sparse attention: also after some rows were taken back."""
    model = mlx_mtp.load_model(checkpoints(name))
    assert mlx_mtp.check_rows(model, PROMPT, contexts=(0, 40), exact=exact) == {1: RIGHT, 40: RIGHT}
    assert model.runtime.rows is None
    how = "bit for bit" if exact else "within rounding"
    assert model.report.rows.startswith(
        f"up to 16 of a pass equal the same rows alone, {how}, at context 1, 40; not "
    )


@pytest.mark.parametrize("layout", [{"kv_bits": 8}, {"kv_bits": 4, "quantized_kv_start": 10}, {"max_kv_size": 12}])
def test_rows_of_other_caches_are_right(tiny_models, layout, monkeypatch):
    model, _ = tiny_models(0, head_dim=32)
    monkeypatch.setattr(model, "runtime", type(model.runtime)(report=model.report))
    found = mlx_mtp.check_rows(model, PROMPT, contexts=NEAR, exact=True, kv_group_size=32, **layout)
    assert found == {1: RIGHT, 20: RIGHT}


PLACES = [
    ("model.layers.1.self_attn.q_proj", False, "model.layers.1.self_attn.q_proj"),
    ("model.layers.0.mlp.down_proj", False, "model.layers.0.mlp.down_proj"),
    ("model.layers.1.self_attn.o_proj", True, "model.layers.1.self_attn.o_proj"),
    ("model.embed_tokens", False, "model.embed_tokens"),
    ("lm_head", False, "lm_head"),
    ("model.layers.1", False, "model.layers.1"),
]


@pytest.mark.parametrize(("place", "first"), paired(sampled(PLACES[:4], PLACES), [3, 2, 16, 5]))
def test_a_module_that_depends_on_the_number_of_rows_is_found(model, place, first):
    path, before, named = place
    if path == "model.embed_tokens":
        embed, kind = found_in(model, path), type(found_in(model, path))
        embed.__class__ = type("E", (kind,), {"__call__": lambda s, x: kind.__call__(s, x) * (1 + (x.size >= first))})
    else:
        depending(found_in(model, path), first, before=before)
    found = mlx_mtp.check_rows(model, PROMPT, contexts=[20], exact=first % 2 > 0)
    wrong = next(n for n in NUMBERS if n >= first)
    passed = max(n for n in NUMBERS if n < wrong)
    assert found == {20: RowFinding(passed, named)}
    assert model.runtime.rows == passed
    assert f"up to {passed} of a pass" in model.report.rows
    assert f"(with {wrong} rows {named} differs)" in model.report.rows
    plain = text(model, num_draft_tokens=0)
    assert text(model, adaptive=False, prompt_lookup=True) == plain


def test_operations_outside_of_modules_are_attributed_to_what_contains_them(model, monkeypatch):
    attention = model.layers[1].self_attn
    norm = importlib.import_module(type(attention).__module__)
    plain = norm.scaled_dot_product_attention

    def odd(q, *args, **kwargs):
        return plain(q, *args, **kwargs) * (1 + 0.1 * (q.shape[2] > 2))

    monkeypatch.setattr(norm, "scaled_dot_product_attention", odd)
    found = mlx_mtp.check_rows(model, PROMPT, contexts=[20])
    assert found == {20: RowFinding(2, "model.layers.0.self_attn")}


def test_arrays_of_all_positions_are_not_kept(model, monkeypatch):
    """As keys and values that a module makes of a latent cache: they would be kept for every row."""
    monkeypatch.setattr(module_calls, "MOST", 40)
    depending(model.layers[1].self_attn.q_proj, 2)
    cache = mlx_mtp.make_prompt_cache(model, num_draft_tokens=0).layers
    modules = {path: module for path, module in model.named_modules() if path.startswith("model.layers.1")}
    _, calls = calls_of(modules, 2, lambda: model.hidden(mx.array([[1, 2]]), cache))
    arrays = [array for call in calls for array in (*call.given, *call.made)]
    assert any(array is None for array in arrays)
    assert all(array is None or array.size <= 80 for array in arrays)
    found = mlx_mtp.check_rows(model, PROMPT, contexts=[20])
    assert found == {20: RowFinding(1, "model.layers.1.self_attn.o_proj")}  # the next one whose arrays are kept


def test_what_is_no_module_is_named(model, monkeypatch):
    hidden, logits = type(model).hidden, type(model).logits
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "logits", lambda self, x: logits(self, x) * (1 + (x.shape[1] > 4)))
        assert mlx_mtp.check_rows(model, contexts=[9]) == {9: RowFinding(4, LM_HEAD)}
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", lambda self, t, c, *r: hidden(self, t, c, *r) * (1 + (t.shape[1] > 8)))
        assert mlx_mtp.check_rows(model, contexts=[9]) == {9: RowFinding(8, OPERATIONS)}


def test_a_position_on_the_device_and_a_take_back_are_checked(model, monkeypatch):
    hidden = type(model).hidden

    def at_device(self, tokens, cache, *rows):
        wrong = not isinstance(cache[0].offset, int)
        return hidden(self, tokens, cache, *rows) * (1 + wrong)

    def after_take_back(self, tokens, cache, *rows):
        offset, limit = cache[0].offset, cache[0].limit
        wrong = not isinstance(offset, int) and limit > 20 and tokens.size == 1
        return hidden(self, tokens, cache, *rows) * (1 + wrong)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", at_device)
        assert mlx_mtp.check_rows(model, contexts=[20]) == {20: RowFinding(0, OPERATIONS)}
        assert model.runtime.rows == 1
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", after_take_back)
        assert mlx_mtp.check_rows(model, contexts=[20]) == {20: RowFinding(1, TAKE_BACK)}


@pytest.mark.parametrize(
    ("positions", "bases", "passed"),
    sampled(
        [(1, [1], 0), (8, [1], 4), (30, [1, 14], 16)],
        [(2, [1], 1), (17, [1], 16), (36, [1, 20], 16), (None, [1, 20], 16)],
    ),
)
def test_rows_stay_within_the_positions_of_the_model(model, monkeypatch, positions, bases, passed):
    ends, hidden = [], type(model).hidden

    def noted(self, tokens, cache, *rows):
        ends.append(cache[0].limit + tokens.shape[1])
        return hidden(self, tokens, cache, *rows)

    monkeypatch.setattr(type(model), "hidden", noted)
    check = RowCheck(model, {}, NEAR, False, recalls=False)
    check.positions = positions
    while check.step():
        pass
    assert [*check.found] == bases
    assert min(finding.passed for finding in check.found.values()) == passed
    assert model.runtime.rows == (None if passed == 16 else max(1, passed))
    assert positions is None or max(ends) <= positions
    assert set(check.left_out) == {context for context in CONTEXTS if context > bases[-1]}
    assert (
        bool(positions and positions < 36) == (f"the maximum is {positions:,} positions" in model.report.rows)
        if positions
        else True
    )


def test_a_context_without_memory_is_left_out(model, machine, monkeypatch):
    machine(0)
    monkeypatch.setattr("mlx_mtp.decoding.memory_needs.UNCHECKED", 30)
    assert mlx_mtp.check_rows(model, contexts=NEAR) == {1: RIGHT}
    assert "; not covered: context 20 (prompt: 19 tokens" in model.report.rows
    assert model.runtime.rows is None


def test_a_model_that_must_be_checked_drafts_only_then(model):
    model.runtime.rows = 1
    check = model.runtime.row_check = RowCheck(model, {}, NEAR, True, recalls=False)
    assert model.report.rows == row_check.UNPROVEN
    stats = mlx_mtp.Stats()
    plain = text(model, adaptive=False, prompt_lookup=True, stats=stats)
    assert not sum(stats.drafted) + stats.lookup_drafted
    while not check.found:
        assert check.step()
    assert model.runtime.rows == 1  # not before the last context
    while check.step():
        pass
    assert model.runtime.rows is None
    stats = mlx_mtp.Stats()
    assert text(model, adaptive=False, prompt_lookup=True, stats=stats) == plain
    assert sum(stats.drafted) + stats.lookup_drafted


@pytest.mark.filterwarnings("ignore::mlx_mtp.checkpoint.cure.NeverDrafts")
def test_a_made_port_drafts_on_a_gpu_after_its_check(tmp_path):
    """Of mlx-lm's model one linear layer depends on the number of rows: it is named, and nothing is drafted."""
    path, _ = families.headless(tmp_path / "made", portless.CONFIGS["starcoder2"])
    model = mlx_mtp.load_model(path)
    prepare_rows(model, {}, exact=False)
    assert model.runtime.row_check is model.runtime.rows is None
    prepare_rows(model, {}, exact=True)
    assert model.runtime.rows == 1
    assert model.runtime.row_check.due
    assert mlx_mtp.check_rows(model, PROMPT, contexts=[20], exact=True) == {20: RIGHT}
    assert model.runtime.rows is None
    plain, stats = text(model, num_draft_tokens=0), mlx_mtp.Stats()
    assert text(model, prompt_lookup=True, adaptive=False, stats=stats) == plain
    assert stats.lookup_drafted
    depending(model.model.layers[2].mlp.c_proj, 2)
    found = mlx_mtp.check_rows(model, [*PROMPT, -1, *PROMPT], contexts=[20], exact=True)
    assert found == {20: RowFinding(1, "model.layers.2.mlp.c_proj")}
    plain, stats = text(model, num_draft_tokens=0), mlx_mtp.Stats()
    assert text(model, prompt_lookup=True, adaptive=False, stats=stats) == plain
    assert not stats.lookup_drafted
    assert model.runtime.row_check.before == model.runtime.rows == 1


@pytest.mark.parametrize(
    ("rows", "options"), paired([1, 4, 8, 2], [{}, {"compile_cycles": True}, {"prompt_lookup": True}])
)
def test_sequences_of_a_batch_have_no_more_rows_together(model, monkeypatch, rows, options):
    model.runtime.rows = rows
    sizes = most_rows(model, monkeypatch)
    batch = mlx_mtp.BatchGenerator(model, adaptive=False, max_tokens=9, **options)
    uids = batch.insert([PROMPT, PROMPT[2:], PROMPT[5:]], [9, 4, 12])
    texts = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for response in responses:
            texts[response.uid].append(response.token)
    batch.close()
    alone = 4 if options.get("compile_cycles") else 3  # rows without drafts, free slots included
    assert max(sizes) <= max(rows, alone)
    model.runtime.rows = None
    for uid, prompt, n in zip(uids, (PROMPT, PROMPT[2:], PROMPT[5:]), (9, 4, 12), strict=True):
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=0)
        assert texts[uid] == [token for token, *_ in steps]


def test_forced_drafts_are_limited_as_well(tiny_models, monkeypatch):
    model, _ = tiny_models(2)
    monkeypatch.setattr(model, "runtime", type(model.runtime)(report=model.report))
    sizes, text_of = most_rows(model, monkeypatch), of_letters("((a|b)abcabc)+")
    expected = ours(model, 16, text_of, 3, grammar_drafts=15)[0]
    assert max(sizes) > 4
    for rows in (4, 1):
        sizes.clear()
        model.runtime.rows = rows
        assert ours(model, 16, text_of, 3, grammar_drafts=15)[0] == expected
        assert max(sizes, default=1) <= rows


def test_interrupted_checks_leave_other_caches_as_they_are(model):
    whole = mlx_mtp.check_rows(model, PROMPT, contexts=[20])
    expected = text(model, num_draft_tokens=2, adaptive=False)
    check = RowCheck(model, {}, [20], False, recalls=False)
    check.tokens, tokens = PROMPT, []
    for i, (token, *_) in enumerate(mlx_mtp.generate_step(PROMPT, model, max_tokens=16, num_draft_tokens=2)):
        check.step()
        if i == 12:
            check.pause()
        tokens.append(token)
    assert tokens == expected
    while check.step():
        pass
    assert check.found == whole


def test_a_large_prompt_releases_the_caches_of_a_check(model, machine):
    check = model.runtime.row_check = RowCheck(model, {}, NEAR, False, recalls=False)
    check.step()
    assert check._passes
    machine(1e12)
    steps = mlx_mtp.generate_step([1] * 5000, model, max_tokens=1)
    assert check._passes is None
    steps.close()


def test_findings_are_kept_for_later_loads(checkpoints, own_cache, monkeypatch):
    path = checkpoints("mimo_v2_flash")
    model = mlx_mtp.load_model(path)
    assert model.runtime.row_check is None
    model.runtime.row_check = check = RowCheck(model, {}, CONTEXTS, None, recalls=True)
    check.found |= {1: RowFinding(4, "model.layers.1"), 1024: RIGHT}
    check.file.keep(found=check.found)
    later = mlx_mtp.load_model(path)
    assert later.runtime.rows == 4
    assert "(with 8 rows model.layers.1 differs)" in later.report.rows
    assert later.runtime.row_check.found == check.found
    with monkeypatch.context() as patch:
        patch.setattr(verdict_file, "MLX_VERSION", "0.0.1")
        assert mlx_mtp.load_model(path).runtime.rows is None
    depending(model.layers[1].self_attn.q_proj, 2)  # the same weights in a module of another class
    prepare_rows(model, {})
    assert model.runtime.row_check.found == {}
    prepare_rows(later, {"kv_bits": 8})
    assert later.runtime.row_check.found == {}
    other = mlx_mtp.load_model(checkpoints("mimo_v2_flash", seed=1))
    assert other.runtime.rows is None


@pytest.mark.parametrize(
    "found", [{"1": [3, ""]}, {"1": [True, ""]}, {"x": [4, ""]}, {"1": [4]}, {"1": [4, 0]}, {"1": 4}, [], None]
)
def test_a_damaged_file_has_no_findings(model, own_cache, found):
    check = RowCheck(model, {}, NEAR, None, recalls=True)
    check.file.keep(found={1: RIGHT})
    assert recalled(check.file) == {1: RIGHT}
    (file,) = (own_cache / "rows").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "found": found}))
    assert recalled(check.file) == ({1: RowFinding(4)} if found == {"1": [4]} else {})


def test_other_kernels_begin_the_check_again(model, monkeypatch):
    from types import SimpleNamespace

    check = RowCheck(model, {}, NEAR, True, recalls=False)
    for _ in range(30):
        check.step()
    assert check.found
    check.renew()
    assert check.found
    site = SimpleNamespace(op="qmm", shape="8x8", rows={2}, split=set(), rows_of_context={})
    monkeypatch.setattr(model.runtime, "sites", [site])
    check.renew()
    assert check.found == {}
    assert check.step()


def test_idle_time_is_used_and_interrupted(model):
    model.runtime.rows = 1
    check = RowCheck(model, {}, NEAR, True, recalls=False)
    with IdleTrials(model, check) as idle:
        idle.thread.join(60)
    assert model.runtime.rows is None
    with IdleTrials(model, check) as idle:
        assert idle.thread is None
    again = RowCheck(model, {}, NEAR, True, recalls=False)
    with IdleTrials(model, again):
        pass
    assert not again.done
    with IdleTrials(model, RowCheck(model, {}, NEAR, False, recalls=False)) as idle:
        assert idle.thread is None  # not on a CPU


def test_an_error_ends_a_check_with_a_warning(model, monkeypatch):
    model.runtime.rows = 1
    check = RowCheck(model, {}, NEAR, True, recalls=False)
    monkeypatch.setattr(row_check, "evaluated", lambda *_: [][1])
    with pytest.warns(UserWarning, match=r"^rows are not checked: IndexError"), IdleTrials(model, check) as idle:
        idle.thread.join()
    assert check.done
    assert model.runtime.rows == 1
    assert model.report.rows.startswith("not covered: context 1, 20 (IndexError: list index out of range); ")


def test_a_chat_checks_rows_after_its_first_answer(tiny_models, monkeypatch):
    model, _ = tiny_models(2, vocab_size=len(VOCAB))
    monkeypatch.setattr(model, "runtime", type(model.runtime)(report=model.report))
    model.runtime.row_check = check = RowCheck(model, {}, NEAR, True, recalls=False)
    session = make_session(model)
    with session.idle() as idle:
        assert idle.thread is None
    first = answer(session, "abc")
    with session.idle() as idle:
        assert idle.thread
    assert check.tokens == session.cache.tokens
    other = make_session(tiny_models(2, vocab_size=len(VOCAB))[0])
    assert [first, answer(session, "d")] == [answer(other, "abc"), answer(other, "d")]


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([99], {}, "prompt: 99 is not a token id between 0 and 12"),
        ([1.5], {}, "prompt: an array of float64; expected token ids, which are integers"),
        ([], {"contexts": []}, "contexts=[]: allowed are one or more numbers of tokens"),
        ([], {"contexts": (-1, 3)}, "contexts=(-1, 3): allowed are one or more numbers of tokens"),
        ([], {"kv_bits": 7}, "kv_bits=7: "),
    ],
)
def test_wrong_arguments_are_refused(model, tokens, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mlx_mtp.check_rows(model, tokens, **options)


def test_what_has_no_rows_to_check(model, monkeypatch):
    monkeypatch.setattr(model, "windows", lambda: [MlxLmCaches])
    assert mlx_mtp.check_rows(model) == {}
    prepare_rows(model, {}, exact=True)
    assert model.runtime.row_check is None


def test_ranks_are_refused(model, monkeypatch):
    monkeypatch.setattr(model.runtime, "ranks", type("Ranks", (), {"size": 2})())
    with pytest.raises(ValueError, match=r"^check_rows: not on 2 ranks$"):
        mlx_mtp.check_rows(model)
