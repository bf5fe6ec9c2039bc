"""Compare the cost model's instructions in the lane `matrix` with those of the kernels' texts, and its figures."""

from itertools import product

import pytest
from metal_cases import linux_only
from sweep import sampled

from bench import instructions
from mlx_mtp.bench.roofline import cost, phases
from mlx_mtp.bench.roofline.chips import fitted_chips
from mlx_mtp.bench.roofline.cost import PassShape
from mlx_mtp.bench.roofline.models import MODELS
from mlx_mtp.bench.roofline.ops import LinearOp
from mlx_mtp.kernels._matrix import SIDE, TWIN_ROWS

CASES = [(name, m) for name in cost.MATRIX_LANE for m in instructions.ROWS]


@linux_only
@pytest.mark.parametrize(("name", "m"), sampled([("affine 4", 1), ("affine 4", 8)], CASES))
def test_the_cost_model_has_the_instructions_of_the_texts(name, m):
    """Each weight is multiplied once with each row, so that no part of a loop is missed or counted twice."""
    found = instructions.of_matrix(instructions.FORMATS[name], m)
    assert found.arithmetic == pytest.approx(cost.MATRIX_LANE[name][instructions.ROWS.index(m)], abs=0.02)
    decoding = 4 if name == "iq4_xs" else 0  # a polynomial
    terms, twin = (found.fma - decoding, found.products), m <= TWIN_ROWS - (name == "bfloat16")
    assert terms == pytest.approx((m, 0) if twin else (0, max(m, SIDE)), abs=m / 15)  # the terms of groups


LISTING = """
registers:                              ; @registers
; %bb.0:
	v_mov_b32_e32 v1, 0
	s_branch .LBB0_3
.LBB0_1:                                ;   in Loop: Header=BB0_4 Depth=2
	v_add_f32_e32 v1, v1, v2
	s_cbranch_scc1 .LBB0_4
; %bb.2:                                ;   in Loop: Header=BB0_3 Depth=1
	v_dual_fmac_f32 v1, v2, v3 :: v_dual_add_f32 v4, v4, v5
	s_cbranch_scc1 .LBB0_5
.LBB0_3:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_4 Depth 2
	s_add_u32 s2, s2, 4
	s_addc_u32 s3, s3, 0
	global_load_b32 v2, v[16:17], off
.LBB0_4:                                ;   Parent Loop BB0_3 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	s_waitcnt vmcnt(0)
	;;#ASMSTART
	; simd_shuffle_xor v3, v2, v46
	;;#ASMEND
	;;#ASMSTART
	; simdgroup_multiply_accumulate v[12:13], v[55:56], v[57:58]
	;;#ASMEND
	v_add_co_u32 v16, vcc_lo, v0, v23
	s_branch .LBB0_1
.LBB0_5:                                ; =>This Loop Header: Depth=1
	v_fmac_f32_e32 v1, v2, v3
	v_fmac_f32_e32 v1, v2, v3
	s_cbranch_scc1 .LBB0_5
; %bb.6:
	global_store_b32 v[1:2], v1, off
.Lfunc_end0:
	v_fmac_f32_e32 v1, v2, v3
"""


def test_loops_count_as_often_as_they_run():
    found = instructions.counted(LISTING, (1, 10), 2)
    assert found == instructions.Instructions((2 + 20) / 2, (2 + 10) / 2, (1 + 20) / 2, 1 / 2, 10 * 16 / 2)
    assert found.total == sum(found[:3])


# Passes in plain steps of the lane `exact`: the most that drafting can afford at 8 and 16 rows, and at one row.
MOST = {"M3 Ultra": {1: 1.02, 8: 1.6, 16: 2.4}, "M5 Max 40c": {1: 1.02, 8: 1.9, 16: 3.0}}


@pytest.mark.parametrize("chip", instructions.CHIPS)
def test_many_rows_are_cheap_in_the_lane_matrix(chip):
    for m, most in MOST[chip].items():
        assert instructions.plain_steps(chip, m, cost.MATRIX_LANE) <= most


WEIGHTS = {
    "affine 4": LinearOp("down", 64, 128),
    "bfloat16": LinearOp("lm_head", 64, 128, 16, None),
    "iq4_xs": LinearOp("lm_head", 64, 128, 4, 102.4, packed=True),
    "q6_k": LinearOp("down", 64, 128, 6, 512 / 9, packed=True),
}


def test_both_lanes_are_predicted_by_rows():
    model, chip = MODELS["Qwen3.6-27B"], fitted_chips()["M3 Ultra"]
    found = {(line["lane"], line["rows"]): line["seconds"] for line in phases.lanes(model, chip, 4096)}
    assert set(found) == set(product(("exact", "matrix"), (1, 2, 4, 8, 16)))
    verifies = phases.shown_times(phases.predicted(model, chip, 4096, (2, 4, 8)))
    for rows in (2, 4, 8):
        assert found["exact", rows] == verifies[phases.OURS, phases.VERIFY, rows]
    for rows in (1, 8, 16):
        steps = instructions.plain_steps("M3 Ultra", rows, cost.MATRIX_LANE)
        assert found["matrix", rows] == pytest.approx(steps * found["exact", 1])


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_follow_the_lane_by_octets_of_rows(name):
    """Twins up to TWIN_ROWS rows; then octets with the rate of products, two of them per request of the weights."""
    chip, of = fitted_chips()["M3 Ultra"], cost.MATRIX_LANE[name]
    for rows in range(1, 50):
        found = cost.cost(WEIGHTS[name], PassShape(rows, cost.ALL, lane="matrix"), chip)
        requests = -(-rows // 16)
        products = of[-1] + 16 / cost.MATRIX * chip.issue if rows > 8 else of[-2] + 8 / cost.MATRIX * chip.issue
        each = of[rows - 1] if rows <= TWIN_ROWS - (name == "bfloat16") else requests * products
        assert (found.nbytes, found.requests) == (WEIGHTS[name].nbytes, requests)
        assert found.instructions == pytest.approx(64 * 128 * each)
    for on in (frozenset(), frozenset({"attention", "experts"})):  # stock MLX has no lane
        assert len({cost.cost(WEIGHTS[name], PassShape(8, on, lane=lane), chip) for lane in cost.LANES}) == 1
