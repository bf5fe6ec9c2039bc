"""Wording of a generation's summary: accepted shares, depths without drafts, and why drafting is paused."""

from types import SimpleNamespace

import pytest

from mlx_mtp.cli.chat_figures import footer, totals
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.decoding.summary import percentages, shares
from mlx_mtp.session import Turn

REASON = "costs 3.8 plain steps, gains 3.6 tokens"


def stats_of(drafted, accepted, **counts) -> Stats:
    return Stats(num_draft_tokens=len(drafted), drafted=drafted, accepted=accepted, cycles=10, **counts)


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        (stats_of([], []), "plain decoding"),
        (Stats(num_draft_tokens=1, drafted=[0], accepted=[0]), "no cycles"),
        (
            stats_of([10, 10, 10], [9, 5, 0]),
            "3.0 drafts per cycle (at most 3), 2.40 tokens per cycle, accepted 90% / 50% / 0%",
        ),
        (
            stats_of([10, 5, 0], [9, 3, 0]),
            "1.5 drafts per cycle (at most 3), 2.20 tokens per cycle, accepted 90% / 60% / not drafted",
        ),
        (
            stats_of([0, 0], [0, 0]),
            "0.0 drafts per cycle (at most 2), 1.00 tokens per cycle, accepted none (nothing drafted)",
        ),
        (
            stats_of([0, 0], [0, 0], paused=REASON),
            "0.0 drafts per cycle (at most 2), 1.00 tokens per cycle, accepted none (nothing drafted); "
            f"drafting paused: {REASON}",
        ),
        (
            stats_of([4, 0], [2, 0], paused=REASON, lookups=2, lookup_drafted=9, lookup_accepted=5),
            "0.4 drafts per cycle (at most 2), 1.70 tokens per cycle, accepted 50% / not drafted, 5 of 9 looked up; "
            f"drafting paused: {REASON}",
        ),
        (
            stats_of([], [], lookups=2, lookup_drafted=9, lookup_accepted=5),
            "1.50 tokens per cycle, 5 of 9 looked up",
        ),
        (
            stats_of([0, 0], [0, 0], trees=10, tree_drafted=70, tree_accepted=16),
            "7.0 drafts per cycle, 2.60 tokens per cycle, 16 of 70 drafts of trees, 2.60 tokens per tree",
        ),
        (
            stats_of([4, 2], [3, 1], trees=5, tree_drafted=35, tree_accepted=6, trees_paused="trees do not pay"),
            "4.1 drafts per cycle, 2.00 tokens per cycle, accepted 75% / 50%, 6 of 35 drafts of trees, "
            "2.20 tokens per tree; trees do not pay",
        ),
    ],
)
def test_the_summary_of_a_generation(stats, words):
    assert stats.summary == words


@pytest.mark.parametrize(
    ("drafted", "accepted", "found"),
    [([4, 2, 0], [3, 0, 0], [0.75, 0.0]), ([0, 0, 0], [0, 0, 0], []), ([], [], [])],
)
def test_acceptance_has_no_share_of_depths_that_were_never_drafted(drafted, accepted, found):
    stats = stats_of(drafted, accepted)
    assert stats.acceptance == found
    assert stats.by_depth == found + [None] * (len(drafted) - len(found))


def test_shares_in_a_table():
    found = shares([8, 4, 0], [6, 0, 0])
    assert percentages(found, decimals=1, separator="/", missing="-") == "75.0%/0.0%/-"
    assert percentages([]) == ""


@pytest.mark.parametrize(
    ("drafted", "accepted", "words"),
    [
        ([5, 5, 5], [5, 4, 0], "1.90/cycle 100/80/0%"),
        ([5, 5, 0], [5, 4, 0], "1.90/cycle 100/80/-%"),
        ([0, 0, 0], [0, 0, 0], "1.00/cycle, nothing drafted"),
    ],
)
def test_the_chats_footer(drafted, accepted, words):
    turn = Turn(prompt_tokens=3, stats=stats_of(drafted, accepted))
    last = type("Last", (), {"generation_tokens": 9, "generation_tps": 5.0})
    assert f" · {words} · " in footer(turn, last)


def test_a_tree_is_counted_by_itself_and_in_the_whole():
    whole = Stats()
    stats = Stats(whole=whole)
    stats.count_cycle(7, 3, "heads", tree=True)
    stats.count_cycle(2, 1, "heads")
    for counts in (stats, whole):
        assert (counts.trees, counts.tree_drafted, counts.tree_accepted) == (1, 7, 3)
        assert (counts.drafted, counts.accepted, counts.lengths) == ([1, 1], [1, 0], {7: 1, 2: 1})
        assert counts.every_draft == (9, 4)
        assert counts.tokens_per_cycle == 3.0


def test_the_chats_footer_has_the_drafts_of_trees():
    turn = Turn(prompt_tokens=3, stats=stats_of([0], [0], trees=10, tree_drafted=70, tree_accepted=16))
    last = type("Last", (), {"generation_tokens": 9, "generation_tps": 5.0})
    assert " · 2.60/cycle, trees 16/70 · " in footer(turn, last)


def test_counters_that_are_added_keep_the_last_pause():
    total = Stats()
    total.add(stats_of([3], [2], paused="earlier"))
    total.add(stats_of([3], [2], paused=REASON))
    assert total.paused == REASON
    total.add(stats_of([3], [2]))
    assert total.paused == ""


def test_totals_have_the_drafts_of_trees():
    counts = stats_of([0, 0], [0, 0], trees=10, tree_drafted=70, tree_accepted=16)
    session = SimpleNamespace(num_draft_tokens=2, options={}, cache=SimpleNamespace(offset=3, nbytes=5))
    _, drafts, _ = totals(session, [Turn(prompt_tokens=3, stats=counts)])
    assert drafts.endswith("2.60 tokens per cycle · 16 of 70 drafts of trees, 2.60 tokens per tree")
