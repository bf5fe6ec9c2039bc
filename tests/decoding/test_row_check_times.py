"""When rows are checked, and for how long findings are used: later loads, other kernels, idle time."""

import json
import re
from types import SimpleNamespace

import families
import pytest
from dependent_rows import depending
from letter_chats import VOCAB, answer, make_session

import mlx_mtp
from mlx_mtp.cache.layer_cache import CONTEXTS
from mlx_mtp.cache.mlx_lm_caches import MlxLmCaches
from mlx_mtp.decoding import row_check
from mlx_mtp.decoding.row_check import RowCheck, prepare_rows
from mlx_mtp.tuning import verdict_file
from mlx_mtp.tuning.idle_trials import IdleTrials
from mlx_mtp.tuning.row_findings import RowFinding, recalled

NEAR = (0, 20)  # as few rows as wrap the window
RIGHT = RowFinding(16)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return families.build("mimo_v2_flash", tmp_path_factory.mktemp("mimo"))[0]


@pytest.fixture
def model(path):
    return mlx_mtp.load_model(path)


def test_findings_are_kept_for_later_loads(path, model, own_cache, tmp_path, monkeypatch):
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
    other = mlx_mtp.load_model(families.build("mimo_v2_flash", tmp_path, seed=1)[0])
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
