"""Count what a generation did: cycles, drafts kept per depth, what the host waited for, where time went."""

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import mlx.core as mx

from .summary import paused, percentages, shares

TIMED_EVERY = 16
LARGEST, ASKED = (
    ("num_draft_tokens", "peak_memory"),
    ("phases", "max_tokens", "paused", "crowded", "whole"),
)  # fields that are not summed up


@dataclass
class Stats:
    """Counters of one generation; times in seconds.

    drafted, accepted: per depth, the heads' drafts verified and those that were right (with all before them).
    lookups:       cycles that verified drafts of prompt lookup; lookup_drafted, lookup_accepted: these drafts.
    lengths:       cycles by the number of drafts that they verified.
    waits:         host reads in cycles: one of each, and one more where the heads' confidence is read (p_min).
    built_late:    cycles that were built when the tokens of the one before had arrived, by the reason; the first one,
                   before which the prompt's token goes out, is not counted.
    compiled_cycles: cycles that were replayed; compiled_shapes: those recorded for that, each once.
    prefill_time:  until the first token had arrived, the heads' reading of the prompt included.
    decode_time:   spent in cycles after that; the caller's own time between two tokens is left out.
    wait_time:     the part of it in which the host waited for the device.
    peak_memory:   most bytes that MLX held, the weights included, since the generation began.
    paused:        why the next cycle does not draft although it might; "" where it does, or must not.
    phases:        set it to have `draft_time`: every 16th cycle is then computed in two halves, with a wait for each.
    crowded:       set it while others' cycles run in between, so that nothing is learned from the time of this one's.
    whole:         counters of several texts, of which this is one: cycles and drafts are counted there, too.
    """

    phases: bool = False
    num_draft_tokens: int = 0
    prompt_tokens: int = 0
    max_tokens: int = -1
    generation_tokens: int = 0
    cycles: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    lookups: int = 0
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    waits: int = 0
    built_late: Counter[str] = field(default_factory=Counter)
    compiled_cycles: int = 0
    compiled_shapes: int = 0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    wait_time: float = 0.0
    peak_memory: int = 0
    paused: str = ""
    crowded: bool = False
    whole: "Stats | None" = field(default=None, repr=False)
    _halves: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _began: float = 0.0
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
        return 1 + (sum(self.accepted) + self.lookup_accepted) / self.cycles if self.cycles else 0.0

    @property
    def drafts_per_cycle(self) -> float:
        """Drafts of the heads that a cycle verifies on average; fewer than num_draft_tokens where that pays."""
        return sum(self.drafted) / self.cycles if self.cycles else 0.0

    @property
    def by_depth(self) -> list[float | None]:
        """Per depth, the share of the heads' drafts that were accepted; None where nothing was drafted."""
        return shares(self.drafted, self.accepted)

    @property
    def acceptance(self) -> list[float]:
        """The same of the depths that were drafted alone, which are the first ones."""
        return [share for share in self.by_depth if share is not None]

    @property
    def summary(self) -> str:
        """What drafting did, in words: tokens per cycle, accepted drafts per depth, and why drafting is paused."""
        if not self.num_draft_tokens and not self.lookups:
            return "plain decoding"
        if not self.cycles:
            return "no cycles"
        words = [f"{self.tokens_per_cycle:.2f} tokens per cycle"]
        if self.num_draft_tokens:
            words.insert(0, f"{self.drafts_per_cycle:.1f} drafts per cycle (at most {self.num_draft_tokens})")
            words.append(f"accepted {percentages(self.by_depth)}")
        if self.lookups:
            words.append(f"{self.lookup_accepted} of {self.lookup_drafted} looked up")
        return "; ".join(filter(None, [", ".join(words), paused(self.paused)]))

    @property
    def host_ms(self) -> float:
        """Milliseconds of a cycle, on average, in which the host did not wait: it built and submitted graphs."""
        return 1000 * (self.decode_time - self.wait_time) / self.cycles if self.cycles else 0.0

    @property
    def draft_time(self) -> float:
        """The heads' part of `decode_time`, by the shares of the cycles that were timed in halves (see `phases`)."""
        return self.decode_time * self._halves[0] / (sum(self._halves) or 1.0)

    @property
    def verify_time(self) -> float:
        """The rest of `decode_time`: the target's pass, sampling and acceptance."""
        return self.decode_time - self.draft_time

    def add(self, other: "Stats") -> None:
        """Add another generation's counters; `paused` is the one that was added last."""
        self.paused = other.paused
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            if name in LARGEST:
                setattr(self, name, max(mine, theirs))
            elif isinstance(mine, list):
                setattr(self, name, [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)])
            elif name not in ASKED and not name.startswith("_"):
                setattr(self, name, mine + theirs)

    def start(self) -> None:
        self.drafted, self.accepted = [0] * self.num_draft_tokens, [0] * self.num_draft_tokens
        if self.whole is None:
            mx.reset_peak_memory()
        else:
            self.whole.num_draft_tokens = max(self.whole.num_draft_tokens, self.num_draft_tokens)
            self.whole._deepen(self.num_draft_tokens)
        self._began = time.perf_counter()

    def notes_memory(self) -> None:
        """Note what MLX holds at most, before another generation begins anew with that."""
        self.peak_memory = max(self.peak_memory, mx.get_peak_memory())

    def time_phases(self, run: Any) -> None:
        """Every so often compute a cycle here and now, drafts first, to learn what each half costs."""
        if not self._first_token or not self.num_draft_tokens or self.cycles % TIMED_EVERY:
            return
        for half, array in enumerate((run.drafts, run.packed)):
            tic = time.perf_counter()
            mx.eval(array)
            self._halves[half] += time.perf_counter() - tic

    def begins(self) -> None:
        """Note that the first token has arrived."""
        self._first_token = time.perf_counter()
        self.prefill_time = self._first_token - self._began

    def spends(self, seconds: float, waited: float) -> None:
        """Count a read for which the host waited, and a cycle's seconds; of several texts each has all of them."""
        self.waits += 1
        self.decode_time += seconds
        self.wait_time += waited

    def counts(self, drafted: int, accepted: int, source: str) -> None:
        """Count a cycle that verified so many drafts from `source`, and those that were right."""
        if self.whole is not None:
            self.whole.counts(drafted, accepted, source)
        self.cycles += 1
        self.lengths[drafted] += 1
        if source == "lookup":
            self.lookups += 1
            self.lookup_drafted += drafted
            self.lookup_accepted += accepted
            return
        self._deepen(drafted)
        for depth in range(drafted):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted

    def _deepen(self, depths: int) -> None:
        """Lengthen the counts to at least this many depths."""
        for counts in (self.drafted, self.accepted):
            counts += [0] * (depths - len(counts))

    def pauses(self, reason: str) -> None:
        """Note why the next cycle does not draft, "" where it may."""
        self.paused = reason
        if self.whole is not None:
            self.whole.pauses(reason)

    def replays(self, cycles: int, shapes: int = 0) -> None:
        """Count cycles that were replayed, or kinds of them that were recorded."""
        if self.whole is not None:
            self.whole.replays(cycles, shapes)
        self.compiled_cycles += cycles
        self.compiled_shapes += shapes

    def yields(self) -> None:
        """Note that a token goes to the caller."""
        self.generation_tokens += 1
        self.notes_memory()
