"""Choose by trial how each op spells multiply-adds to get the bits of MLX's library, with few compilations."""

import json
import warnings
from types import SimpleNamespace

import mlx.core as mx
import pytest
from exact import draw, one_row
from metal_cases import linux_only
from sweep import sampled
from trial_cases import SHAPE, fails, off_by_one_bit, stock, trial

from mlx_mtp import emulator
from mlx_mtp.kernels import contraction, verify_qmm
from mlx_mtp.kernels.contraction import AS_COMPILED, EXPLICIT, KERNELS, SPELLINGS, spelling, take
from mlx_mtp.tuning import kernel_trials
from mlx_mtp.tuning.kernel_switch import ModelTrials
from mlx_mtp.tuning.kernel_trials import KernelTrial, decide
from mlx_mtp.tuning.kernel_verdict import KernelVerdict, in_words, off
from mlx_mtp.tuning.verdict_file import RememberedVerdicts, TrialFinding

OPS = list(KERNELS)
LANES = (None, "exact")


@pytest.fixture(autouse=True)
def undecided(monkeypatch, own_cache):
    monkeypatch.setattr(contraction, "_taken", {})
    monkeypatch.setattr(contraction, "_in_use", {})


class Compiled:
    """Toy kernels with MLX's bits in some spellings only. made: each (op, spelling) that was launched."""

    def __init__(self):
        self.made = {}

    def trial(self, op, *right, rows=3, shape=SHAPE):
        def ours(w):
            def run(x):
                self.made[op, spelling(op)] = None
                return (stock if spelling(op) in right else off_by_one_bit())(w)(x)

            return run

        return trial(ours, rows, op=op, shape=shape)


def decided(trials, lane=None, **how):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="kernel .* is wrong")
        return decide(trials, lane=lane, **{"timer": lambda _: 2.0, **how})


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("right", SPELLINGS)
def test_an_op_takes_the_spelling_that_has_the_bits(right, lane):
    kernels = Compiled()
    verdicts = decided([kernels.trial("verify_qmm", right, rows=rows) for rows in (2, 3)], lane)
    assert all(verdict.on and verdict.spelling == right for verdict in verdicts.values())
    assert spelling("verify_qmm") == spelling("verify_head") == spelling("verify_moe") == right
    assert len(kernels.made) == 1 + SPELLINGS.index(right)


@pytest.mark.parametrize("lane", LANES)
def test_where_the_compilers_agree_no_other_text_is_compiled(lane):
    kernels = Compiled()
    assert all(v.on for v in decided([kernels.trial(op, AS_COMPILED) for op in OPS], lane).values())
    assert [*kernels.made] == [(op, AS_COMPILED) for op in OPS]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("right", EXPLICIT)
def test_an_op_begins_with_what_the_last_one_took(right, lane):
    """All other ops then compile one text each, as if the compilers agreed."""
    kernels = Compiled()
    assert all(v.on for v in decided([kernels.trial(op, right) for op in OPS], lane).values())
    assert [op for op, _ in kernels.made].count(OPS[0]) == 1 + SPELLINGS.index(right)
    assert [op_and_spelling for op_and_spelling in kernels.made if op_and_spelling[0] != OPS[0]] == [
        (op, right) for op in OPS[1:]
    ]


@pytest.mark.parametrize("lane", LANES)
def test_each_op_has_its_own_spelling(lane):
    kernels = Compiled()
    wanted = dict(zip(OPS, ["FUSED", AS_COMPILED, "FUSED_ACROSS", "SEPARATE"], strict=False))
    verdicts = decided([kernels.trial(op, right) for op, right in wanted.items()], lane)
    assert {op: v.spelling for (op, *_), v in verdicts.items()} == wanted
    assert {op: spelling(op) for op in wanted} == wanted


@pytest.mark.parametrize("lane", LANES)
def test_a_kernel_that_was_right_by_chance_is_tried_again(lane):
    """In 16 bits few values differ, so a shape may also be right in a wrong spelling."""
    kernels = Compiled()
    by_chance = kernels.trial("verify_qmm", AS_COMPILED, "FUSED", rows=2, shape="a")
    first = kernels.trial("verify_qmm", AS_COMPILED, rows=2, shape="b")
    last = kernels.trial("verify_qmm", "FUSED", rows=3, shape="c")
    verdicts = decided([by_chance, first, last], lane)
    assert [v.on for v in verdicts.values()] == [True, False, True]
    assert {v.spelling for v in verdicts.values()} == {"FUSED"}


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    "op", ["verify_attention", "verify_head", "verify_qmm"], ids=["no spelling", "follows", "wrong in all"]
)
def test_a_kernel_that_is_wrong_in_all_spellings_is_off(op, lane):
    kernels = Compiled()
    ((verdict),) = decided([kernels.trial(op)], lane).values()
    assert not verdict.on
    assert "differs from one row alone" in verdict.reason
    assert len(kernels.made) == (len(SPELLINGS) if op in KERNELS else 1)
    assert spelling(op) == AS_COMPILED


def reads_all_rows(w):
    return lambda x: [y + 0 * x.sum() for y in stock(w)(x)]


@pytest.mark.parametrize("wrong", [fails(RuntimeError("no")), reads_all_rows])
def test_other_spellings_are_tried_only_for_wrong_bits(wrong):
    made = set()

    def ours(w):
        return lambda x: made.add(spelling("verify_qmm")) or wrong(w)(x)

    (verdict,) = decided([trial(ours, op="verify_qmm")]).values()
    assert not verdict.on
    assert made == {AS_COMPILED}


def test_a_spelling_is_remembered_with_the_verdict(own_cache):
    kernels, remembered = Compiled(), RememberedVerdicts("m")
    first = decided([kernels.trial("verify_glu", "FUSED", rows=m) for m in (2, 3)], remembered=remembered)
    (file,) = own_cache.iterdir()
    assert json.loads(file.read_text())["spellings"] == {"verify_glu": "FUSED"}
    contraction._taken.clear()
    contraction._in_use.clear()
    again = Compiled()
    later = [again.trial("verify_glu", "FUSED", rows=m) for m in (2, 3)]
    assert decided(later, remembered=RememberedVerdicts("m"), timer=fails(AssertionError())(0)) == first
    assert {used for _, used in again.made} <= {"FUSED"}
    assert spelling("verify_glu") == "FUSED"


def test_stored_findings_of_another_spelling_are_tried_again():
    """As if another model of this process needs that spelling."""
    found = {("verify_glu", SHAPE, 3): TrialFinding(None, 0.5)}
    RememberedVerdicts("m").keep(found)
    take("verify_glu", "FUSED")
    kernels = Compiled()
    (verdict,) = decided([kernels.trial("verify_glu", "FUSED")], remembered=RememberedVerdicts("m")).values()
    assert (verdict.on, verdict.ratio) == (True, 2.0)
    assert RememberedVerdicts("m").recall() == {key: TrialFinding(None, 2.0, "FUSED") for key in found}


def test_a_report_lists_spelled_out_ops():
    kernels = Compiled()
    trials = [kernels.trial(op, right) for op, right in zip(OPS[:3], (AS_COMPILED, "FUSED", "SEPARATE"), strict=True)]
    *_, line = in_words(decided(trials))
    assert line == (
        "multiply-adds spelled out, as the compiler's differ from those of MLX's library: "
        f"{OPS[1]} fused, {OPS[2]} separate"
    )
    assert len(in_words(decided(trials[:1]))) == 1


def of_model(trials, gather=None):
    """Return the trials of a loaded model. gather: replaces `Ranks.gather_values`."""
    found = object.__new__(ModelTrials)
    ranks = gather and SimpleNamespace(gather_values=gather)
    vars(found).update(trials=trials, lane=None, remembered=None, model=SimpleNamespace(ranks=ranks))
    found.verdicts = {trial.key: off("not tried yet") for trial in trials}
    return found


def test_a_later_trial_repeats_earlier_ones_of_another_spelling():
    """Trials that were not made yet are left for later."""
    kernels = Compiled()
    by_chance = kernels.trial("verify_qmm", AS_COMPILED, "FUSED", rows=2)
    later, last = (kernels.trial("verify_qmm", "FUSED", rows=rows) for rows in (3, 4))
    found = of_model([by_chance, later, last])
    for one in (by_chance, later):
        found.decide([one], timer=lambda _: 2.0)
    assert [(v.on, v.spelling) for v in found.verdicts.values()] == [(True, "FUSED")] * 2 + [(False, AS_COMPILED)]
    assert found.has_untried([last])


def test_ranks_use_rank_0s_spelling():
    (one,) = trials = [Compiled().trial("verify_qmm", "FUSED")]
    facts = vars(KernelVerdict(True, True, 2.0, "", "FUSED"))
    found = of_model(trials, lambda own: [json.loads(json.dumps([(one.key, facts)]))])
    found.agree()
    assert found.verdicts[one.key].on
    assert spelling("verify_qmm") == "FUSED"


# MLX's own kernel, and ours in the emulator, each compiled with a contraction.


def emulated_trial(theirs, own):
    _, w = draw("affine", 4, 64, (24, 320), 3, mx.float32)
    options = emulator.Options(fp_contract=theirs)

    def ours(x):
        with emulator.emulated(emulator.Options(fp_contract=own, traffic=False)):
            return verify_qmm(x, w)

    pairs = [(ours, lambda x: [one_row(x, w, options)])]
    return KernelTrial("verify_qmm", "24x320", 3, pairs, 320, mx.float32, draws=2)


CONTRACTIONS = {"off": "SEPARATE", "on": "FUSED", "fast": "FUSED_ACROSS"}


@linux_only
@pytest.mark.parametrize("theirs", CONTRACTIONS)
@pytest.mark.parametrize("own", sampled(["off"], CONTRACTIONS))
@pytest.mark.parametrize("lane", sampled([None], LANES))
def test_a_kernel_is_on_however_mlx_was_compiled(theirs, own, lane):
    (verdict,) = decided([emulated_trial(theirs, own)], lane).values()
    assert (verdict.on, verdict.spelling) == (True, AS_COMPILED if theirs == own else CONTRACTIONS[theirs])


@linux_only
def test_without_another_spelling_it_would_be_off(monkeypatch):
    monkeypatch.setattr(kernel_trials, "others", lambda op: [])
    (verdict,) = decided([emulated_trial("on", "off")]).values()
    assert (verdict.on, verdict.reason) == (False, "row 1 of 3 differs from one row alone")
