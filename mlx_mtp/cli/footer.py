"""Write the lines of figures in a chat: one under each answer, and the totals."""

from dataclasses import dataclass, field

from ..decoding.stats import Stats
from ..generate import GenerationResponse
from ..session import ChatSession, Turn


def footer(turn: Turn, last: GenerationResponse) -> str:
    """Say what one answer cost, in a line of 80 columns as long as its figures are not extreme.

    A second line says why its last cycles were plain, if drafts were allowed.
    """
    stats, speed = turn.stats, "" if last.generation_tokens < 2 else f", {_short(last.generation_tps)}/s"
    parts = [f"{last.generation_tokens} tok{speed}"]
    parts.append(f"prompt {_short(turn.prompt_tps)}/s, {turn.reused}/{turn.prompt_tokens} reused")
    if stats.cycles and stats.num_draft_tokens:
        rates = "/".join(f"{100 * rate:.0f}" for rate in stats.acceptance)
        parts.append(f"{stats.tokens_per_cycle:.2f}/cycle {rates}%")
    line = " · ".join([*parts, f"{_short(stats.peak_memory / 1e9)} GB"])
    return f"{line}\ndrafting paused: {stats.paused}" if stats.paused else line


def mtp_state(session: ChatSession) -> str:
    """Say if the next answer will be drafted."""
    k = session.num_draft_tokens
    most = "up to " if session.options.get("adaptive", True) else ""
    return f"MTP on, {most}{_count(k, 'draft')} per cycle" if k else "MTP off"


@dataclass
class Totals:
    """Sums over the turns of a conversation; `drafting` counts only turns that drafted."""

    turns: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    stats: Stats = field(default_factory=Stats)
    drafting: Stats = field(default_factory=Stats)

    def add(self, turn: Turn) -> None:
        self.turns += 1
        self.prompt_tokens += turn.prompt_tokens
        self.reused += turn.reused
        self.stats.add(turn.stats)
        if turn.stats.num_draft_tokens:
            self.drafting.add(turn.stats)

    def lines(self, session: ChatSession) -> list[str]:
        """Write the text of /stats."""
        every, drafting = self.stats, self.drafting
        turns = [_count(self.turns, "turn"), _count(every.generation_tokens, "token")]
        if every.decode_time:
            turns.append(f"{every.generation_tokens / every.decode_time:.1f} tok/s")
        turns.append(f"prompts {self.prompt_tokens:,} tokens, {self.reused:,} of them reused")
        drafts = [mtp_state(session)]
        if drafting.cycles:
            rates = " / ".join(f"{rate:.0%}" for rate in drafting.acceptance)
            drafts += [
                f"{drafting.drafts_per_cycle:.1f} verified",
                f"{drafting.tokens_per_cycle:.2f} tokens per cycle",
            ]
            drafts.append(f"accepted {rates}")
        caches = [f"caches {session.cache.offset:,} tokens, {session.cache.nbytes / 1e6:.1f} MB"]
        caches.append(f"peak {every.peak_memory / 1e9:.2f} GB")
        return [" · ".join(parts) for parts in (turns, drafts, caches)]


def _short(number: float) -> str:
    """Write three digits, or all that are before the point."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
