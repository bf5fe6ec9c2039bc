"""What a generation did: cycles, drafts kept per depth, and where the time went."""

import time
from dataclasses import dataclass, field

import mlx.core as mx

TIMED_EVERY = 16


@dataclass
class Stats:
    """Counters of one generation; times in seconds.

    drafted, accepted: per depth, the drafts verified and those that were right (with all before them).
    prefill_time: until the first token had arrived, the heads' reading of the prompt included.
    decode_time:  spent in cycles after that; the caller's own time between two tokens is left out.
    """

    num_draft_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cycles: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_time: float = 0.0
    decode_time: float = 0.0
    _halves: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _tic: float = 0.0
    _prompt_read: bool = False
    _first_token: float = 0.0

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second of wall time since the first token had arrived, the caller's time included."""
        elapsed = time.perf_counter() - self._first_token
        return self.generation_tokens / elapsed if self.generation_tokens else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that one verify yields on average, the target's own included; 1.0 is plain decoding."""
        return 1 + sum(self.accepted) / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per depth, the share of drafts that were kept."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def draft_time(self) -> float:
        """The heads' part of `decode_time`, by the shares of the cycles that were timed in two halves."""
        return self.decode_time * self._halves[0] / (sum(self._halves) or 1.0)

    @property
    def verify_time(self) -> float:
        """The rest of `decode_time`: the target's pass, sampling and acceptance."""
        return self.decode_time - self.draft_time

    def add(self, other: "Stats") -> None:
        """Count another generation in; both drafted alike, or one not at all."""
        for name in ("prompt_tokens", "generation_tokens", "cycles", "prefill_time", "decode_time"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_draft_tokens = max(self.num_draft_tokens, other.num_draft_tokens)
        for mine, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count
        self._halves = [a + b for a, b in zip(self._halves, other._halves, strict=True)]

    def start(self) -> None:
        self.drafted, self.accepted = [0] * self.num_draft_tokens, [0] * self.num_draft_tokens
        self._tic = time.perf_counter()

    def times_next(self) -> bool:
        """Whether the cycle about to be submitted is one of those timed in two halves."""
        return self._prompt_read and self.num_draft_tokens > 0 and self.cycles % TIMED_EVERY == 0

    def time_halves(self, drafts: mx.array, verified: mx.array) -> None:
        """Compute a cycle here and now, drafts first; lazy evaluation allows no cheaper way to tell them apart."""
        for half, array in enumerate((drafts, verified)):
            tic = time.perf_counter()
            mx.eval(array)
            self._halves[half] += time.perf_counter() - tic

    def arrived(self, accepted: int, drafted: int) -> None:
        """Note that the tokens of the prompt's run (first call) or of a cycle have been read."""
        now = time.perf_counter()
        if not self._prompt_read:
            self._prompt_read, self.prefill_time = True, now - self._tic
            self._first_token = now
        else:
            self.cycles += 1
            self.decode_time += now - self._tic
            for depth in range(drafted):
                self.drafted[depth] += 1
                self.accepted[depth] += depth < accepted
        self._tic = now

    def yields(self) -> None:
        """Stop the clock: a token goes to the caller."""
        self.generation_tokens += 1
        self.decode_time += time.perf_counter() - self._tic
        self._tic = time.perf_counter()

    def resumed(self) -> None:
        """Start the clock again."""
        self._tic = time.perf_counter()
