"""A trial splits a kernel's rows if that is faster, or if it does not run otherwise."""

from dataclasses import replace

import mlx.core as mx
import pytest
from trial_cases import WEIGHTS, fails, off_by_one_bit, stock, trial

from mlx_mtp.layers.kernel_site import Site
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.kernel_trials import decide
from mlx_mtp.tuning.verdict_file import RememberedVerdicts

pytestmark = pytest.mark.usefixtures("own_cache")
REFUSED = fails(RuntimeError("threadgroup is too large"))


def of_both(whole=stock, split=stock, rows=3, **more):
    return replace(trial(whole, rows=rows, **more), split=[split(w) for w in WEIGHTS])


def timer(whole, split):
    """Return a timer with the ratios of a kernel whose rows are not split, and are."""
    return lambda trial: whole if trial.split else split


def never(_):
    raise AssertionError("run")


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((1.2, 1.4), "on, 1.40x, rows split"),
        ((1.2, 1.21), "on, 1.20x"),  # within what timings differ by
        ((0.7, 1.3), "on, 1.30x, rows split"),
        ((0.5, 0.9), "off: slower, 0.90x, rows split"),
        ((1.2, 0.9), "on, 1.20x"),
    ],
)
def test_the_faster_of_both_is_chosen_and_remembered(ratios, words):
    one = of_both()
    verdict = decide([one], lane=None, timer=timer(*ratios), remembered=RememberedVerdicts("m"))[one.key]
    assert str(verdict) == words
    again = of_both(whole=lambda _: never, split=lambda _: never)
    assert decide([again], lane=None, timer=never, remembered=RememberedVerdicts("m"), budget=0) == {one.key: verdict}


@pytest.mark.parametrize("lane", [None, "exact"])
def test_a_kernel_that_the_gpu_refuses_is_split(lane):
    one = of_both(REFUSED)
    verdict = decide([one], lane=lane, timer=timer(never, 1.4))[one.key]
    assert (verdict.on, verdict.right, verdict.split) == (True, True, True)


@pytest.mark.filterwarnings("ignore:kernel double is wrong")
def test_neither_is_on_if_both_are_wrong():
    one = of_both(REFUSED, off_by_one_bit())
    assert not decide([one], lane=None, timer=never)[one.key].on


@pytest.mark.filterwarnings("ignore:kernel double is wrong")
def test_wrong_bits_do_not_lead_to_a_split():
    one = of_both(off_by_one_bit())
    assert not decide([one], lane=None, timer=never)[one.key].on


@pytest.mark.parametrize("split", [off_by_one_bit(), REFUSED])
def test_a_split_that_is_wrong_is_not_timed(split):
    one = of_both(split=split)
    assert str(decide([one], lane=None, timer=timer(1.2, never))[one.key]) == "on, 1.20x"


def test_rows_and_contexts_that_follow_split_like_the_timed_trial():
    six, five = of_both(rows=6), of_both(REFUSED, rows=5)
    long = replace(of_both(REFUSED, rows=6, shape="long"), base=six.key)
    found = decide([six, five, long], lane=None, timer=timer(1.1, 1.5))
    assert [(v.on, v.split) for v in found.values()] == [(True, True)] * 3


class Either(Site):
    """A site that can split three or more rows; its outputs show whether they are."""

    op, shape, width = "double", "16x16", 16

    def splits(self, rows):
        return rows > 2

    def computed(self, x, split):
        return [x + 1 if split else x]

    def stock(self, x):
        return [x]


def test_a_site_splits_by_its_verdicts():
    site = Either()
    trials = {t.rows: t for t in kernel_switch.trials([site], mx.float32)}
    assert [m for m, t in trials.items() if t.split] == [3, 4, 5, 6, 7, 8]
    found = decide(
        [replace(t, split=t.split and [site.stock]) for t in trials.values()], lane=None, timer=timer(1, 2)
    )
    kernel_switch.switch([site], found, mx.float32)
    assert site.rows == {*range(1, 9)}
    assert site.split == {*range(3, 9)}
    assert [site.ours(mx.zeros((m, 16)))[0].max().item() for m in (2, 3)] == [0, 1]
    assert trials[3].pairs[0][0](mx.zeros((3, 16)))[0].max().item() == 0
    assert trials[3].of_split().pairs[0][0](mx.zeros((3, 16)))[0].max().item() == 1
