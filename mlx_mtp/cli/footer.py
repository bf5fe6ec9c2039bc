"""The lines of figures in a chat: one under each answer, and the totals."""

from dataclasses import dataclass, field

from ..decoding.stats import Stats
from ..generate import GenerationResponse
from ..session import ChatSession, Turn


def footer(turn: Turn, last: GenerationResponse) -> str:
    """What one answer cost, in one line of 80 columns as long as its figures are not extreme."""
    stats, speed = turn.stats, "" if last.generation_tokens < 2 else f", {_short(last.generation_tps)}/s"
    parts = [
        f"{last.generation_tokens} tok{speed}",
        f"prompt {_short(turn.prompt_tps)}/s, {turn.reused}/{turn.prompt_tokens} reused",
        f"{_short(stats.peak_memory / 1e9)} GB",
    ]
    if stats.cycles and stats.num_draft_tokens:
        rates = "/".join(f"{100 * rate:.0f}" for rate in stats.acceptance)
        parts.insert(2, f"{stats.tokens_per_cycle:.2f}/cycle {rates}%")
    return " · ".join(parts)


def mtp_state(session: ChatSession) -> str:
    """Whether the next answer will be drafted."""
    k = session.num_draft_tokens
    most = "up to " if session.options.get("adaptive", True) else ""
    return f"MTP on, {most}{_count(k, 'draft')} per cycle" if k else "MTP off"


@dataclass
class Totals:
    """Sums over the turns of a conversation; `drafting` counts only turns that drafted."""

    turns: int = 0
    tokens: int = 0
    decode_time: float = 0.0
    prompt_tokens: int = 0
    reused: int = 0
    peak_memory: int = 0
    drafting: Stats = field(default_factory=Stats)

    def add(self, turn: Turn) -> None:
        self.turns += 1
        self.tokens += turn.stats.generation_tokens
        self.decode_time += turn.stats.decode_time
        self.prompt_tokens += turn.prompt_tokens
        self.reused += turn.reused
        self.peak_memory = max(self.peak_memory, turn.stats.peak_memory)
        if turn.stats.num_draft_tokens:
            self.drafting.add(turn.stats)

    def lines(self, session: ChatSession) -> list[str]:
        """The text of /stats."""
        speed = [f"{self.tokens / self.decode_time:.1f} tok/s"] if self.decode_time else []
        reading = f"prompts {self.prompt_tokens:,} tokens, {self.reused:,} of them reused"
        drafting = [mtp_state(session), *_drafting(self.drafting)]
        caches = f"caches {session.cache.offset:,} tokens, {session.cache.nbytes / 1e6:.1f} MB"
        return [
            " · ".join([_count(self.turns, "turn"), _count(self.tokens, "token"), *speed, reading]),
            " · ".join(drafting),
            " · ".join([caches, f"peak {self.peak_memory / 1e9:.2f} GB"]),
        ]


def _drafting(stats: Stats) -> list[str]:
    if not stats.cycles:
        return []
    rates = " / ".join(f"{rate:.0%}" for rate in stats.acceptance)
    made = f"{stats.drafts_per_cycle:.1f} verified"
    return [made, f"{stats.tokens_per_cycle:.2f} tokens per cycle", f"accepted {rates}"]


def _short(number: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
