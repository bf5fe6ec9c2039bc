"""Rows of one pass are compared with the same rows alone: a module that depends on their number limits the drafts."""

import importlib

import families
import mlx.core as mx
import portless
import pytest
from dependent_rows import depending
from masked import of_letters, ours
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.cache.layer_cache import CONTEXTS
from mlx_mtp.decoding import row_check
from mlx_mtp.decoding.row_check import LM_HEAD, OPERATIONS, TAKE_BACK, RowCheck, prepare_rows
from mlx_mtp.tuning import module_calls
from mlx_mtp.tuning.module_calls import calls_of
from mlx_mtp.tuning.row_findings import NUMBERS, RowFinding

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


@pytest.mark.filterwarnings("ignore::mlx_mtp.checkpoint.cure.NeverDrafts")
def test_a_made_port_on_several_gpus_does_not_draft(tmp_path, monkeypatch):
    """The check does not run there, and the report states the reason."""
    model = mlx_mtp.load_model(families.headless(tmp_path, portless.CONFIGS["starcoder2"])[0])
    monkeypatch.setattr(model.runtime, "ranks", type("Ranks", (), {"size": 2})())
    prepare_rows(model, {}, exact=True)
    assert model.runtime.most_drafts() == 0
    assert "rows       not checked on several ranks, so nothing is drafted" in str(model.report)


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
