"""Format the figures of a chat: an answer's footer, the totals of /stats, the state of drafting."""

from ..decoding.stats import Stats
from ..decoding.summary import kept_of_trees, paused, percentages
from ..generate import GenerationResponse
from ..session import ChatSession, Turn

LEGEND = (
    "Below an answer: its tokens and their speed; the speed of reading the prompt, and the number of its tokens that "
    "were still in the caches; tokens per pass of the model, the accepted share of first/second/... drafts, and the "
    "accepted and all drafts of trees; tokens of the conversation and their maximum; peak memory."
)


def footer(turn: Turn, last: GenerationResponse, context: str = "") -> str:
    """Return an answer's figures as text: one line, and a second one with the reason if drafting is paused.

    context: as `context_used` returns it, left out if it is empty.
    """
    stats, speed = turn.stats, "" if last.generation_tokens < 2 else f", {_short(last.generation_tps)}/s"
    reused = f"{turn.reused}/{turn.prompt_tokens} reused"
    parts = [f"{last.generation_tokens} tok{speed}", f"prompt {_short(turn.prompt_tps)}/s, {reused}"]
    if stats.cycles and stats.num_draft_tokens:
        accepted = "/".join("-" if share is None else f"{100 * share:.0f}" for share in stats.by_depth)
        accepted = f" {accepted}%" if stats.acceptance else "" if stats.trees else ", nothing drafted"
        trees = f", trees {stats.tree_accepted}/{stats.tree_drafted}" if stats.trees else ""
        parts.append(f"{stats.tokens_per_cycle:.2f}/cycle{accepted}{trees}")
    line = " · ".join([*parts, *filter(None, [context]), f"{_short(stats.peak_memory / 1e9)} GB"])
    return "\n".join(filter(None, [line, paused(stats.paused)]))


def context_used(session: ChatSession) -> str:
    """Return the number of tokens in the caches, and the maximum if the model states one, as text."""
    held, most = session.cache.offset, session.positions
    return f"context {held:,}/{most:,}" if most else f"context {held:,}"


def mtp_state(session: ChatSession) -> str:
    """Return, as text, whether the next answer will use drafts, and their number, or maximum, per cycle."""
    k = session.num_draft_tokens
    most = "up to " if session.options.get("adaptive", True) else ""
    return f"MTP on, {most}{count(k, 'draft')} per cycle" if k else "MTP off"


def totals(session: ChatSession, turns: list[Turn]) -> list[str]:
    """Return the three lines of /stats: answers, drafts (only of turns that could draft), caches and memory."""
    every, drafting = Stats(), Stats()
    for turn in turns:
        every.add(turn.stats)
        if turn.stats.num_draft_tokens:
            drafting.add(turn.stats)
    answers = [count(len(turns), "turn"), count(every.generation_tokens, "token")]
    if every.decode_time:
        answers.append(f"{every.generation_tokens / every.decode_time:.1f} tok/s")
    prompts, reused = sum(turn.prompt_tokens for turn in turns), sum(turn.reused for turn in turns)
    answers.append(f"prompts {prompts:,} tokens, {reused:,} of them reused")
    drafts = [mtp_state(session)]
    if drafting.cycles:
        drafts += [f"{drafting.drafts_per_cycle:.1f} verified", f"{drafting.tokens_per_cycle:.2f} tokens per cycle"]
        accepted = f"accepted {percentages(drafting.by_depth)}" if drafting.acceptance or not drafting.trees else ""
        trees = kept_of_trees(drafting) if drafting.trees else ""
        drafts += filter(None, [accepted, trees, paused(drafting.paused) or drafting.trees_paused])
    caches = [f"caches {session.cache.offset:,} tokens, {session.cache.nbytes / 1e6:.1f} MB"]
    caches.append(f"peak {every.peak_memory / 1e9:.2f} GB")
    return [" · ".join(parts) for parts in (answers, drafts, caches)]


def _short(number: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def count(n: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
