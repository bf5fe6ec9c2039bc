"""The lane of a model that was loaded without asking for one: the rule, what is measured, stored and agreed on."""

import math
import warnings
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from metal_cases import linux_only
from quantized_models import STEP, quantized

import mlx_mtp
from mlx_mtp.kernels import _matrix
from mlx_mtp.kernels.matrix_order import MatrixOrder
from mlx_mtp.layers.kernel_site import VERIFY_ROWS
from mlx_mtp.layers.products import Dense, VerifyRouter
from mlx_mtp.layers.runtime import Runtime
from mlx_mtp.tuning import ab_test, kernel_switch, lane, lane_costs, lane_sites, verdict_file
from mlx_mtp.tuning.ab_test import FAILS
from mlx_mtp.tuning.cost_file import RememberedCosts, shapes_of
from mlx_mtp.tuning.costs import Costs
from mlx_mtp.tuning.kernel_verdict import KernelVerdict, off
from mlx_mtp.tuning.lane import LaneChoice, PassDrafts, better_lane, chosen_lane, rows_to_measure
from mlx_mtp.tuning.lane_costs import LaneCosts, measured
from mlx_mtp.tuning.lane_sites import enter_matrix, in_matrix, leave_matrix

pytestmark = linux_only
CONFIG = {**tiny.CONFIG, **STEP, "quantization": {"group_size": 32, "bits": 4}}
PRODUCTS = [Dense(nn.Linear(8, 8))]
ON = KernelVerdict(True, True, reason="asked for")
MATRICES = {"verify_qmm": "matrix_qmm", "verify_glu": "matrix_glu", "verify_head": "matrix_head"}
EXACT_COSTS = {1: 1.0, 2: 1.1, 4: 1.6, 8: 2.9, 16: 5.4}
MATRIX_COSTS = {1: 1.01, 4: 1.4, 8: 1.5, 16: 2.3}


def costs(exact=EXACT_COSTS, matrix=MATRIX_COSTS, draft=0.0) -> LaneCosts:
    return LaneCosts({"exact": exact, "matrix": matrix}, {"exact": draft, "matrix": draft})


def drafting(share: float, most: int = 7, source: str = "block") -> PassDrafts:
    return PassDrafts(source, most, [share] * most)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("step"), CONFIG, quantized(tiny.random_weights(CONFIG)))


@pytest.fixture
def model(checkpoint, own_cache):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mlx_mtp.load_model(checkpoint, lazy=True, kernels="off")


@pytest.fixture
def on_metal(monkeypatch):
    monkeypatch.setattr(kernel_switch, "on_metal", lambda: True)


@pytest.fixture
def stub(own_cache):
    """A model with three heads, of which only what the choice depends on exists."""
    heads = {"mtp": [{"weight": mx.zeros(1)} for _ in range(3)]}
    more = {"runtime": Runtime(), "ranks": None, "drafter": None, "max_draft_tokens": 3}
    more["no_hidden"] = lambda: mx.zeros(1)
    return SimpleNamespace(**heads, **more, parameters=lambda: {"weight": mx.zeros(2), **heads})


RULE = {
    "eight rows pay": (costs(), drafting(0.8), "matrix", "M=8 costs 1.5 plain steps instead of 2.9; 4.2 tokens"),
    "sixteen rows pay": (costs(), drafting(0.95, 15), "matrix", "M=16 costs 2.3 plain steps instead of 5.4; 11.2"),
    "few are accepted": (costs(), drafting(0.1), "exact", "matrix is no faster: M="),
    "few are made": (costs(), drafting(0.8, 1), "exact", "matrix is no faster: M=2 costs 1.1 plain steps instead"),
    "a row of 2% more": (costs(matrix={**MATRIX_COSTS, 1: 1.02}), drafting(0.8), "matrix", "M=8"),
    "a row of 3% more": (costs(matrix={**MATRIX_COSTS, 1: 1.03}), drafting(0.8), "exact", "a row costs 1.030 plain"),
    "dear drafts": (costs(draft=0.5), drafting(0.8, source="heads"), "exact", "matrix is no faster"),
    "dear drafts, at once": (costs(draft=0.5), drafting(0.8), "matrix", "M=8"),
    "equal": (costs(matrix=EXACT_COSTS), drafting(0.8), "exact", "matrix is no faster"),
    "faster, below the margin": (
        costs(matrix={m: c / 1.01 for m, c in EXACT_COSTS.items()}), drafting(0.8), "exact", "matrix is no faster"
    ),
    "a kernel that fails": (costs(matrix={**MATRIX_COSTS, 8: math.inf}), drafting(0.8), "exact", "does not run"),
    "an op that fails": (costs({**EXACT_COSTS, 1: math.inf}), drafting(0.8), "exact", "does not run"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULE)
def test_the_rule(case):
    found, drafts, chosen, reason = RULE[case]
    choice = better_lane(found, drafts)
    assert choice.lane == chosen
    assert reason in str(choice)
    assert str(choice).startswith(f"lane {chosen}: ")


def test_each_lane_is_judged_at_its_best_number_of_drafts():
    """Eight rows are dear in the lane "exact", but it may verify three drafts as cheaply as matrices seven."""
    few = {1: 1.0, 2: 1.0, 4: 1.0, 8: 9.0}
    assert better_lane(costs(few, {1: 1.0, 4: 1.3, 8: 1.3}), drafting(0.6)).lane == "exact"
    assert better_lane(costs({**few, 2: 1.6, 4: 3.0}, {1: 1.0, 4: 1.3, 8: 1.3}), drafting(0.6)).lane == "matrix"


def test_rows_of_a_tile_cost_as_much():
    """Nine rows are multiplied as sixteen, so ten drafts do not pay although eight rows are cheap."""
    dear = {1: 1.0, 4: 1.0, 8: 1.0, 16: 9.0}
    choice = better_lane(costs(matrix=dear), drafting(0.99, 10))
    assert "M=8 costs 1.0 plain steps" in choice.reason


def test_without_a_twin_the_reason_names_it(monkeypatch):
    monkeypatch.setattr(_matrix, "_taken", [MatrixOrder("", True, "truncated")])
    choice = better_lane(costs(matrix=dict.fromkeys(MATRIX_COSTS, 1.4)), drafting(0.8))
    assert choice == ("exact", "a row costs 1.400 plain steps in the lane matrix; this GPU adds in an unknown order, "
                      "so few rows need matrices")  # fmt: skip


def test_rows_up_to_the_drafts_are_measured():
    counts = [rows_to_measure(drafts)[-1] for drafts in (1, 2, 3, 4, 7, 8, 15)]
    assert counts == [4, 4, 4, 8, 8, 16, 16]


def by_weights(same, rows, dtype, budget):
    """Time ops: a matrix takes half of what an exact op takes, and both grow with the rows; experts take 100 each."""
    weights = 100.0 if same[0].op == "verify_moe" else lane_costs._weights(same[:1])
    half = 0.5 if in_matrix(same[0]) else 1.0
    return {each: {m: weights * m * by for m in rows} for each, by in (("exact", 1.0), ("matrix", half))}


def test_a_pass_reads_each_weight_of_the_target_once(model):
    """MTP heads have own LM heads, which are not the target's; gate and up are those of the fused launch."""
    sites, timed = kernel_switch.place(model), []

    def timer(same, *given):
        timed.append(same[0])
        return by_weights(same, *given)

    found = measured(model, sites, (1, 2, 4), timer)
    products = [site for site in sites if site.op in ("verify_qmm", "verify_glu")]
    fused = {site.covers for site in products if site.op == "verify_glu"}
    heads = {id(model.unembedding(depth)) for depth in (None, 0, 1, 2)}
    stacks = [site.stack if site.op == "verify_glu" else site for site in products if site not in fused]
    linears = [m for stack in stacks for m in stack.modules if id(m) not in heads] + [model.unembedding()]
    weights = sum(m.scales.size * m.group_size for m in linears)
    routers = sum(isinstance(getattr(site, "module", None), VerifyRouter) for site in sites)
    experts = sum(site.op == "verify_moe" for site in sites)
    assert experts
    assert found.rows["exact"][1] == pytest.approx(weights + 100 * experts + routers)
    assert found.rows["matrix"][4] == pytest.approx(4 * (weights / 2 + 100 * experts + routers))
    assert {*found.rows["matrix"]} == {1, 2, 4}
    assert len({(s.op, s.shape) for s in timed}) == len(timed) <= 4


def test_real_ops_can_be_timed_in_both_lanes(model, monkeypatch):
    """Without Metal the kernels' references run."""
    monkeypatch.setattr(ab_test, "CHAINS", 1)
    monkeypatch.setattr(ab_test, "CHAIN_STEPS", (1, 1))
    found = measured(model, kernel_switch.place(model), (1, 2, 4, 8))
    assert all(0 < seconds < 10 for each in found.rows.values() for seconds in each.values())
    assert found.rows["matrix"].keys() == found.rows["exact"].keys() == {1, 2, 4, 8}


def test_drafts_cost_their_share_of_the_bytes_and_the_lm_head(model):
    sites = kernel_switch.place(model)
    found, report = measured(model, sites, (1, 2, 4), by_weights), model.report
    body = report.head_bytes / report.target_bytes / len(model.mtp)
    head = model.unembedding().weight.shape[0] * 64
    assert found.draft["exact"] == pytest.approx(head + body * found.rows["exact"][1])
    assert found.draft["matrix"] == pytest.approx(head / 2 + body * found.rows["matrix"][1])


@pytest.fixture
def measures(monkeypatch, on_metal):
    """The measurements of `chosen_lane`, which find eight rows cheap."""
    found = []

    def measure(model, sites, rows):
        found.append(rows)
        return costs(dict.fromkeys(EXACT_COSTS, 1.0) | {2: 3.0, 4: 5.0}, dict.fromkeys(MATRIX_COSTS, 1.0))

    monkeypatch.setattr(lane, "measured", measure)
    return found


def test_a_choice_is_stored(stub, measures):
    first = chosen_lane(stub, PRODUCTS)
    assert first == chosen_lane(stub, PRODUCTS)
    assert first.lane == "matrix"
    assert measures == [rows_to_measure(3)]


CHANGES = {
    "drafts": lambda model, patch: patch.setattr(lane, "default_draft_tokens", lambda model: 7),
    "drafter": lambda model, patch: setattr(model, "drafter", SimpleNamespace(source="block", usual=3, most=3)),
    "type": lambda model, patch: setattr(model, "no_hidden", lambda: mx.zeros(1, mx.float16)),
    "heads": lambda model, patch: model.mtp[0].update(norm=mx.zeros(1)),
    "mlx_mtp": lambda model, patch: patch.setattr(verdict_file, "__version__", "0"),
    "mlx": lambda model, patch: patch.setattr(verdict_file, "MLX_VERSION", "0"),
    "machine": lambda model, patch: patch.setattr(verdict_file, "machine", lambda: {"device_name": "other"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_drafter_version_or_machine_decides_anew(stub, measures, monkeypatch, change):
    chosen_lane(stub, PRODUCTS)
    CHANGES[change](stub, monkeypatch)
    chosen_lane(stub, PRODUCTS)
    chosen_lane(stub, PRODUCTS)
    assert len(measures) == 2


def test_a_damaged_file_decides_anew(stub, measures, own_cache):
    chosen_lane(stub, PRODUCTS)
    (file,) = (own_cache / "lanes").iterdir()
    file.write_text(file.read_text().replace('"matrix"', '"fast"'))
    assert chosen_lane(stub, PRODUCTS).lane == "matrix"
    assert len(measures) == 2


def test_without_drafts_the_lane_is_exact(stub, measures):
    stub.mtp, stub.max_draft_tokens = [], 0
    assert chosen_lane(stub, PRODUCTS) == ("exact", "nothing drafts")
    assert not measures


def test_learned_acceptance_counts(stub, own_cache):
    """Those of the newest file of this model with any kernels; another model's are not."""
    before = PassDrafts.of(stub, shapes_of(stub))
    assert before == ("heads", 3, [0.6] * 3)
    known = Costs()
    known.counts = {"heads": [[99.0, 100.0], [50.0, 100.0]], "lookup 3": [[1.0, 100.0]]}
    RememberedCosts("another", "auto").keep(known)
    assert PassDrafts.of(stub, shapes_of(stub)) == before
    RememberedCosts(shapes_of(stub), "with a kernel").keep(known)
    assert PassDrafts.of(stub, shapes_of(stub)).shares == pytest.approx([0.988, 0.502, 0.502], abs=0.001)
    stub.drafter = SimpleNamespace(source="block", usual=3, most=3)
    assert PassDrafts.of(stub, shapes_of(stub)) == ("block", 3, [0.75] * 3)


def test_without_products_the_lane_is_exact(stub, measures):
    assert chosen_lane(stub, [SimpleNamespace(module=None)]) == ("exact", "no product has a kernel")
    assert not measures


def test_a_failure_is_not_stored(stub, measures, monkeypatch, own_cache):
    monkeypatch.setattr(lane, "measured", lambda *_: 1 / 0)
    assert chosen_lane(stub, PRODUCTS) == (
        "exact",
        "timing both lanes fails with ZeroDivisionError: division by zero",
    )
    assert not [*own_cache.glob("lanes/*")]


class Ranks(SimpleNamespace):
    def broadcast(self, value):
        self.sent.append(value)
        return ["matrix", "of rank 0"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_use_the_choice_of_rank_0(stub, measures, rank):
    stub.ranks = Ranks(rank=rank, sent=[])
    assert chosen_lane(stub, PRODUCTS) == LaneChoice("matrix", "of rank 0")
    assert len(measures) == 1 - rank
    (sent,) = stub.ranks.sent
    assert (sent is None) == bool(rank)


def test_sites_change_their_lane_and_back(model):
    """No weights are copied; routers, experts, attention and norms stay."""
    sites = kernel_switch.place(model)
    arrays = [id(s.stacked.w) for s in sites if s.op == "verify_qmm"]
    kinds, ops, stack = [type(s) for s in sites], [s.op for s in sites], model.layers[0].self_attn.q_proj.site
    left = enter_matrix(model, sites)
    assert model.runtime.lane == "matrix"
    assert [s.op for s in sites] == [MATRICES.get(op, op) for op in ops]
    assert all(s.matrix == (s.op in MATRICES.values()) for s in sites)
    assert [id(s.stacked.w) for s in sites if s.op == "matrix_qmm"] == arrays
    assert model.layers[0].self_attn.q_proj.site is stack
    assert stack.own_bits
    assert 1 in stack.candidates
    leave_matrix(model, left)
    assert model.runtime.lane == "exact"
    assert [type(s) for s in sites] == kinds
    assert [s.op for s in sites] == ops
    assert not any(s.matrix for s in sites)


def switched(model, monkeypatch, asked, wrong=""):
    """Switch on a model's kernels, all right but those of `wrong`; return the report's lines and the calls."""
    calls = []

    def decide(trials, **how):
        calls.append((how["lane"], {trial.op for trial in trials}))
        found = off("row 2 of 4 differs from one row alone" if wrong == "matrix_glu" else f"{FAILS} out of memory")
        return {t.key: found if t.op in wrong and t.rows == 4 else ON for t in trials}

    monkeypatch.setattr(kernel_switch, "decide", decide)
    return kernel_switch.switch_on(model, asked)[0], calls


@pytest.mark.parametrize("asked", ["exact", "matrix"])
def test_a_requested_lane_is_not_measured(model, measures, monkeypatch, own_cache, asked):
    lines, calls = switched(model, monkeypatch, asked)
    assert lines[0] == f"lane {asked}: asked for"
    assert model.runtime.lane == asked
    assert ("matrix_qmm" in calls[0][1]) == (asked == "matrix")
    assert not measures
    assert not [*own_cache.glob("lanes/*")]


def test_products_of_the_chosen_lane_come_first_at_every_count(model, measures, monkeypatch):
    lines, calls = switched(model, monkeypatch, None)
    assert lines[0] == "lane matrix: M=4 costs 1.0 plain steps instead of 5.0; 2.2 tokens a pass"
    assert calls[0] == (None, {*MATRICES.values()})
    assert not calls[1][1] & {*MATRICES.values()}
    products = [site for site in model.runtime.sites if site.matrix]
    assert all(site.rows == {1, *VERIFY_ROWS} for site in products)
    assert model.runtime.trials.lane is None


@pytest.mark.parametrize("asked", [None, "matrix"])
@pytest.mark.parametrize(("wrong", "loads"), [("matrix_glu", 1), ("matrix_qmm", 2)])
def test_a_wrong_product_puts_the_whole_model_in_the_lane_exact(
    model, checkpoint, measures, monkeypatch, own_cache, asked, wrong, loads
):
    """Later loads choose it at once, unless memory was short; a requested lane is tried again."""
    reason = f"lane exact: matrix is wrong: {wrong}"
    with pytest.warns(UserWarning, match=reason):
        lines, calls = switched(model, monkeypatch, asked, wrong)
    assert lines[0].startswith(reason)
    assert model.runtime.lane == "exact"
    assert not any(site.matrix for site in model.runtime.sites)
    assert not any(line.startswith("matrix") for line in lines[1:])
    assert calls[-1][0] == (asked and "exact")
    kept = [file.read_text() for file in own_cache.glob("lanes/*")]
    assert ["matrix is wrong" in text for text in kept] == ([] if asked else [loads == 1])


@pytest.mark.parametrize("remembered", [True, False])
def test_a_product_found_wrong_later_ends_the_lane(model, measures, monkeypatch, remembered):
    """From then on no file has its rows; later loads choose "exact" unless they are to try the kernel again."""
    switched(model, monkeypatch, None)
    key = model.runtime.lane_key
    assert model.runtime.fits(key)
    found = model.runtime.trials
    trial = next(t for t in found.trials if t.op == "matrix_qmm" and t.rows == 8)
    found.reject(trial.key, "fails with no such function", remembered=False)
    kernel_switch.put_on(model, found, remembered=remembered)
    assert model.runtime.lane == "mixed"
    assert not any(map(model.runtime.fits, (key, "exact", model.runtime.lane_key)))
    assert str(found.choice).startswith("lane exact: matrix is wrong: matrix_qmm")
    assert chosen_lane(model, PRODUCTS).reason.startswith("matrix is wrong") == remembered


def test_ranks_whose_matrices_add_in_other_orders_have_the_lane_exact(monkeypatch):
    for orders in (["forward", "forward"], ["forward", "pairs"]):
        ranks = SimpleNamespace(gather_values=lambda own, orders=orders: orders)
        assert lane_sites.have_same_order(ranks) == (orders[0] == orders[1])


def test_an_order_that_cannot_be_read_is_unknown(monkeypatch):
    def refuse():
        raise RuntimeError("no bfloat16")

    before = _matrix._taken[0]
    monkeypatch.setattr(lane_sites, "matrix_orders", refuse)
    try:
        lane_sites.take_machine_order()
        assert not _matrix.has_twin()
        assert [_matrix.matrix_rows(m) for m in (1, 3, 9)] == [8, 8, 16]
    finally:
        _matrix.take_order(before)
