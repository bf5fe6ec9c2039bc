"""Kernels for 9 to 16 rows are decided on when an answer may have more than seven drafts, or a batch is made."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tiny
from metal_cases import linux_only
from quantized_models import STEP, quantized

import mlx_mtp
from mlx_mtp.bench import verify
from mlx_mtp.decoding.control import MOST_ON_GPU, Controls
from mlx_mtp.layers.kernel_site import TOGETHER_ROWS
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.kernel_switch import switch_on_for_batches, switch_on_for_drafts
from mlx_mtp.tuning.kernel_verdict import KernelVerdict

pytestmark = linux_only
CONFIG = {**tiny.CONFIG, **STEP, "quantization": {"group_size": 32, "bits": 4}}
ON = KernelVerdict(True, True, reason="asked for")
MORE = {*TOGETHER_ROWS}
EIGHT = {*range(1, 9)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("step"), CONFIG, quantized(tiny.random_weights(CONFIG)))


@pytest.fixture
def decided(monkeypatch):
    """A list of the row counts of each call of `decide` and whether its trials stop at once; all kernels are on."""
    found = []

    def decide(trials, *, lane, remembered, stop=lambda: False):
        found.append(({trial.rows for trial in trials}, stop()))
        return {} if stop() else {trial.key: ON for trial in trials}

    monkeypatch.setattr(kernel_switch, "decide", decide)
    return found


@pytest.fixture
def load(checkpoint, decided, monkeypatch):
    def loaded(lane):
        model = mlx_mtp.load_model(checkpoint, lazy=True, kernels="off")
        monkeypatch.setattr(kernel_switch, "on_metal", lambda: True)
        kernel_switch.switch_on(model, lane)
        return model

    return loaded


def rows_of(model) -> set[int]:
    return set().union(*(site.rows for site in model.runtime.sites))


@pytest.mark.parametrize("lane", ["exact", "matrix"])
def test_in_a_lane_an_answer_decides_on_them_once(load, decided, lane):
    model = load(lane)
    before, found = len(decided), model.runtime.trials
    switch_on_for_drafts(model, 7)
    assert decided[before:] == []
    assert rows_of(model) == EIGHT
    lines = found.apply()[1]
    for _ in range(2):
        switch_on_for_drafts(model, 8)
    switch_on_for_batches(model)
    assert [rows for rows, _ in decided[before:]] == [MORE]
    asked = [site for site in model.runtime.sites if site.asked]
    products = {"verify_qmm", "verify_head"} if lane == "exact" else {"matrix_qmm", "matrix_head"}
    assert {site.op for site in asked} >= {*products, "verify_attention", "norm_rope", "verify_moe"}
    assert all(site.rows >= MORE for site in asked)
    assert found.apply()[1] == lines


@pytest.mark.parametrize("earlier", [True, False])
def test_by_trial_they_come_last(load, decided, earlier):
    """Stored verdicts are used at once; others are timed if no trial of fewer rows is left, or in idle time."""
    model = load(None)
    found = model.runtime.trials
    if not earlier:
        found.try_rest(lambda: False)
    assert found.has_untried(found.needed()) is earlier
    del decided[:]
    switch_on_for_drafts(model, 15)
    assert decided == [(MORE, earlier)]
    assert (rows_of(model) >= MORE) is not earlier
    left = {trial.rows for trial in found.needed() if found.has_untried([trial])}
    assert left == ({*range(5, 17)} if earlier else set())
    inexact = f"7 layers' verify_attention at M=5, 6, 7, 8, {', '.join(map(str, TOGETHER_ROWS))}"
    assert (inexact in found.apply()[1]) is earlier
    found.try_rest(lambda: False)
    assert not found.has_untried(found.needed())
    assert inexact not in found.apply()[1]
    del decided[:]
    switch_on_for_batches(model)
    assert decided == []


def test_a_batch_tries_those_that_an_answer_left(load, decided):
    model = load(None)
    switch_on_for_drafts(model, 15)
    del decided[:]
    switch_on_for_batches(model)
    assert decided == [(MORE, False)]
    assert rows_of(model) >= MORE


class Ranks(SimpleNamespace):
    def gather_values(self, values):
        return [self.first, values]


def test_ranks_use_the_verdicts_of_rank_0(load, decided):
    model = load("exact")
    trials = kernel_switch.more_trials(model.runtime.sites, model.no_hidden().dtype)
    first = {**model.runtime.trials.verdicts, **{t.key: replace(ON, on=t.rows < 14) for t in trials}}
    model.runtime.ranks = Ranks(rank=1, first=[(key, vars(verdict)) for key, verdict in first.items()])
    switch_on_for_drafts(model, 15)
    assert decided[-1] == (MORE, False)
    assert rows_of(model) == {*range(1, 14)}


def test_without_trials_nothing_happens():
    switch_on_for_drafts(SimpleNamespace(runtime=SimpleNamespace(trials=None)), 15)


CHAINS = {"prompt_lookup": False, "tree": 0}


@pytest.mark.parametrize(
    ("options", "most"), [({}, 15), (CHAINS, 3), (CHAINS | {"tree": 8}, 7), ({"num_draft_tokens": 0}, 0)]
)
def test_an_answer_asks_for_its_longest_drafts(monkeypatch, checkpoint, options, most):
    model, asked = mlx_mtp.load_model(checkpoint, lazy=True), []
    module = importlib.import_module("mlx_mtp.generate")  # in the package its name is the function's
    monkeypatch.setattr(module, "switch_on_for_drafts", lambda model, drafts: asked.append(drafts))
    list(mlx_mtp.generate_step([1, 2, 3], model, max_tokens=1, **options))
    assert asked == [most]


@pytest.mark.parametrize(("most", "counts"), [(8, EIGHT), (16, EIGHT | MORE)])
def test_a_benchmark_tries_those_that_it_measures(monkeypatch, checkpoint, most, counts):
    tried = []
    monkeypatch.setattr(verify, "on_metal", lambda: True)
    monkeypatch.setattr(verify, "decide", lambda trials, lane: tried.extend(trials) or {})
    verify.Kernels(mlx_mtp.load_model(checkpoint, lazy=True, kernels="off"), "exact", most)
    assert {trial.rows for trial in tried} == counts


def test_sequences_of_a_pool_share_sixteen_rows_on_a_gpu(monkeypatch):
    model = SimpleNamespace(drafter=None, mtp=(), windows=list)
    monkeypatch.setattr("mlx_mtp.decoding.control.learned", lambda model: SimpleNamespace(together={}, growth=None))
    for device, most in ((mx.cpu, 15), (mx.gpu, MOST_ON_GPU)):
        monkeypatch.setattr(mx, "default_device", lambda device=device: mx.Device(device))
        controls = Controls(model, adaptive=True)
        for sequences, longest in ((1, 15), (2, most)):
            control = controls.control(sequences, 15, 15)
            assert control.own["heads"][-1].k == control.lookups[-1].k == longest
    assert Controls(model, adaptive=False).control(2, 15, 15).k == 15
