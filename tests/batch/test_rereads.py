"""A pool whose states cannot step back reads accepted rows again only for sequences that continue."""

import pytest
import stateful
from oracle_drafts import OracleDrafts

import mlx_mtp

PROMPT, DRAFTS, ENDS = [3, 4, 5, 6, 7, 8, 3, 4, 5], 4, [13, 7, 3, 20, 22]


@pytest.mark.parametrize("replay", [False, True])
def test_a_sequence_that_ends_within_accepted_drafts_costs_no_pass(monkeypatch, replay, recorded_at_once, own_cache):
    """Also in a recorded cycle with a free slot."""
    model, read = stateful.loaded("mamba"), []
    text = [token for token, *_ in mlx_mtp.generate_step(PROMPT, model, max_tokens=30, num_draft_tokens=0)]
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, set()))
    hidden = type(model).hidden
    monkeypatch.setattr(type(model), "hidden", lambda m, ids, *more: read.append(ids.shape) or hidden(m, ids, *more))
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=DRAFTS, adaptive=False, compile_cycles=replay)
    batch.insert([PROMPT] * len(ENDS), ENDS)
    found = [[] for _ in ENDS]
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found == [text[:n] for n in ENDS]
    passes = {rows for sequences, rows in read if sequences > 1}
    assert passes == {1 + DRAFTS}
