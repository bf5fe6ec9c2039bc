"""The runtime's faults as sentences that name kernel, thread, address and source line."""

import re
from dataclasses import dataclass
from pathlib import Path

from .launch import MAX_BUFFERS, THREADGROUP, Fault, Memory, Outcome
from .line_table import find_line

(OUT_OF_BOUNDS, WILD, UNINITIALISED, RACE, INPUT_WRITE, DIVERGENT) = range(1, 7)
(BARRIER, ENDLESS, STACK, ARITHMETIC, COLLECTIVE, OTHER, INDEX) = range(7, 14)


@dataclass(frozen=True)
class Explainer:
    """Puts a fault into words, for one launch."""

    kernel: str
    library: Path
    source: str
    outcome: Outcome
    memories: list[Memory]
    group_size: tuple[int, int, int]
    max_steps: int

    def where(self, site: int) -> str:
        """`file:line`, with the line's text where it is in the kernel's own source."""
        found = find_line(self.library, site - self.outcome.image_low - 1) if site else None
        if found is None:
            return "an unknown line"
        file, line = found
        lines = self.source.split("\n")
        own = file == f"{self.kernel}.metal" and 0 < line <= len(lines)
        return f"{Path(file).name}:{line}" + (f" `{lines[line - 1].strip()}`" if own else "")

    def thread(self, index: int, group) -> str:
        x, y, _ = self.group_size
        position = (index % x, index // x % y, index // x // y)
        return f"thread {position} of threadgroup {tuple(group)}"

    def place(self, memory: Memory, offset: int, size: int) -> str:
        element = offset // memory.itemsize
        kind = "threadgroup array " if memory.kind == THREADGROUP else ""
        total = memory.counts["size"]
        return (
            f"{kind}{memory.name}[{element}] (bytes {offset} to {offset + size - 1}; "
            f"{memory.name} has {total // memory.itemsize} elements, {total} bytes)"
        )

    def what(self, f: Fault) -> str:
        action = "writes" if f.writes else "reads"
        memory = self.memories[f.buffer] if f.buffer < MAX_BUFFERS else None
        if memory is not None:
            place = self.place(memory, f.offset, f.size)
            if f.kind == OUT_OF_BOUNDS:
                return f"out of bounds: {action} {place}"
            if f.kind == UNINITIALISED:
                return f"uninitialised: reads {place}, which no thread has written"
            if f.kind == INPUT_WRITE:
                return f"writes the input {place}"
            if f.kind == RACE:
                return f"race: {action} {place}, which {self.other(f)} without a barrier that orders them"
        if f.kind == WILD:
            return f"out of bounds: {action} {f.size} bytes at {f.address:#x}, which are in no buffer"
        return self.about_control(f)

    def other(self, f: Fault) -> str:
        action = "wrote" if f.other_writes else "read"
        who = self.thread(f.other_thread, f.group) if f.other_group_known else "a thread of another threadgroup"
        return f"{who} {action} at {self.where(f.other_site)}"

    def about_control(self, f: Fault) -> str:
        text = re.sub(r"@(\d+)", lambda m: f" ({self.where(int(m[1]))})", f.text.decode())
        if f.kind == DIVERGENT:
            return f"divergent simdgroup: {text}; all its threads must meet at the same call"
        if f.kind == BARRIER:
            return f"divergent barrier: {text}; every thread of the threadgroup must reach the same barrier"
        if f.kind == ENDLESS:
            return f"does not end: one thread has run {self.max_steps} blocks of code"
        if f.kind == STACK:
            return "a thread's stack is used up: its own arrays are too large, or it calls itself"
        if f.kind == INDEX:
            return f"out of bounds: index {f.offset} of an array that has no such element"
        if f.kind == COLLECTIVE:
            lane = "there is no such lane" if f.other_writes else "it takes no part"
            return f"{text} reads lane {f.offset}, but {lane}"
        return text

    def message(self, f: Fault) -> str:
        """One sentence about the fault, and one about what came before it and may follow from it."""
        text = f"kernel {self.kernel}, {self.thread(f.thread, f.group)}, {self.where(f.site)}: {self.what(f)}"
        before = self.outcome.earlier
        if before is None:
            return text
        who = f"{self.thread(before.thread, before.group)}, {self.where(before.site)}"
        return f"{text}. Before it, {who}: {self.what(before)}"


def unwritten(kernel: str, memory: Memory) -> str | None:
    """A sentence about the output's elements that nobody wrote, or None."""
    missing = (memory.touched & 2) == 0
    if not missing.any():
        return None
    elements = missing.reshape(-1, memory.itemsize).any(axis=1).nonzero()[0]
    first = ", ".join(str(i) for i in elements[:8])
    return (
        f"kernel {kernel}: unwritten: {len(elements)} of {missing.size // memory.itemsize} elements of {memory.name} "
        f"that nobody wrote: {first}{', ...' if len(elements) > 8 else ''}"
    )
