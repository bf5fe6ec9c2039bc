"""Test a load's report: one line for each fact that applies."""

from dataclasses import replace

import pytest

from mlx_mtp.checkpoint.report import USUAL_AGREEMENT, Report

BARE = Report(
    family="f",
    layers=2,
    target_bytes=0,
    target_quantization="4-bit",
    heads=0,
    declared=None,
    head_bytes=3_000_000,
    head_quantization="8-bit",
    source="nowhere",
    norms="ones",
    lm_head="shared",
)
ALWAYS = {"family": "f, 2 layers", "port": "written", "MTP heads": "0, nowhere", "norms": "ones"}
GUESSES = "the first head agrees with the target on {} of words"
LESS = "from 7 of 2,048 tokens, 1.00 MB less"
MORE = "from 7 of 2,048 tokens, 1.00 MB more for a copy of their rows"


def facts(report: Report) -> dict[str, str]:
    """Return the report's lines by name."""
    return {line[:10].rstrip(): line[11:] for line in str(report).splitlines()}


@pytest.mark.parametrize(("change", "lines"), [
    ({}, {}),
    ({"target_bytes": 200_000_000}, {"target": "0.20 GB, 4-bit"}),
    ({"heads": 2}, {"MTP heads": "2, nowhere", "heads": "3.00 MB, 8-bit", "LM heads": "shared"}),
    ({"declared": 3}, {"MTP heads": "0 of 3 declared, nowhere"}),
    ({"declared": 0}, {}),
    ({"agreement": (("words", USUAL_AGREEMENT),)}, {"self-test": GUESSES.format("40%")}),
    ({"untested": True}, {"self-test": "before the first draft, when the heads' weights are read and checked"}),
    ({"drafted_from": (7, 2048), "saved_bytes": 1_000_000}, {"drafts": LESS}),
    ({"drafted_from": (7, 2048), "saved_bytes": -1_000_000}, {"drafts": MORE}),
    ({"ranks": 2}, {"ranks": "2, each with its part of the target's layers and whole heads"}),
    ({"port": "none: decoded plainly"}, {"port": "none: decoded plainly"}),
    ({"rows": "up to 8"}, {"rows": "up to 8"}),
    ({"expanded": True}, {"precision": "expanded to float32: MLX multiplies experts on a CPU in nothing else"}),
    ({"kernels": ("gemv: on",)}, {"kernels": "gemv: on"}),
    ({"prefill_chunk": 1024}, {"prefill": "1,024 tokens of a prompt at a time"}),
    ({"not_exact": ("a", "b")}, {"not exact": "a, b: bits may depend on the number of rows"}),
    ({"ignored": tuple("abcdefgh")}, {"not used": "a, b, c, d, e, f, g, h"}),
    ({"ignored": tuple("abcdefghij")}, {"not used": "a, b, c, d, e, f, g, h and 2 more"}),
])  # fmt: skip
def test_a_fact_has_its_line_and_no_other_changes(change, lines):
    assert facts(replace(BARE, **change)) == {**ALWAYS, **lines}


def test_low_agreement_on_the_last_kind_of_text_adds_advice():
    few, enough = USUAL_AGREEMENT - 0.01, USUAL_AGREEMENT + 0.01
    for shares, advised in (((few, enough), False), ((enough, few), True)):
        report = replace(BARE, agreement=tuple(zip(("random tokens", "words"), shares, strict=True)))
        assert ("mlx-mtp verify-lossless" in facts(report)["self-test"]) == advised
