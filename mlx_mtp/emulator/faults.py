"""Describe the runtime's faults in sentences that name kernel, thread, address and source line.

The line comes from the DWARF 4 line table (section 6.2) of the kernel's 64-bit ELF library.
"""

import bisect
import functools
import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .buffers import THREADGROUP, KernelBuffer
from .launch import MAX_BUFFERS, Fault, Outcome, Triple

# Sentences by kind, numbered as in native/runtime/state.h; other kinds use `text`, as do these without a buffer.
IN_BUFFER = {
    1: "out of bounds: {action} {place}",
    3: "uninitialised: reads {place}, which no thread has written",
    4: "race: {action} {place}, which {other} without a barrier that orders them",
    5: "writes the input {place}",
}
ELSEWHERE = {
    2: "out of bounds: {action} {f.size} bytes at {f.address:#x}, which are in no buffer",
    6: "divergent simdgroup: {text}; all its threads must meet at the same call",
    7: "divergent barrier: {text}; every thread of the threadgroup must reach the same barrier",
    8: "does not end: one thread has run {max_steps} blocks of code (option max_steps)",
    9: "a thread's stack is used up: its own arrays are too large, or it calls itself",
    11: "{text} reads lane {f.offset}, but {lane}",
    13: "out of bounds: index {f.offset} of an array that has no such element",
}
LINE = re.compile(r'#line (\d+)(?: "(.*)")?')
SourceLine = tuple[str, int]  # a file's name without folders, and a line number


def numbered(file: str, text: str) -> dict[SourceLine, str]:
    """Return a text's lines, stripped, by (file, line): from line 1 of `file`, or as `#line` directives state."""
    found, number = {}, 1
    for line in text.split("\n"):
        if directive := LINE.match(line):
            number, file = int(directive[1]), Path(directive[2] or file).name
        else:
            found[file, number] = line.strip()
            number += 1
    return found


@dataclass(frozen=True)
class Explainer:
    """Describes the faults of one launch in sentences; `message` is the text of a KernelFault."""

    kernel: str
    library: Path
    code: Mapping[SourceLine, str]  # the lines of the kernel's header and source
    outcome: Outcome
    group_size: Triple
    max_steps: int

    def where(self, site: int) -> str:
        """Return `file:line` of a code address, and the code if the kernel's text has it; or that it is unknown."""
        found = find_line(self.library, site - self.outcome.image_low - 1) if site else None
        if found is None:
            return "an unknown line"
        place = file, line = Path(found[0]).name, found[1]
        code = self.code.get(place)
        return f"{file}:{line}" + (f" `{code}`" if code else "")

    def thread(self, index: int, group) -> str:
        x, y, _ = self.group_size
        position = (index % x, index // x % y, index // x // y)
        return f"thread {position} of threadgroup {tuple(group)}"

    def place(self, f: Fault) -> str:
        b = self.outcome.buffers[f.buffer]
        name, total = f"threadgroup array {b.name}" if b.kind == THREADGROUP else b.name, b.counts["size"]
        has = f"{b.name} has {total // b.itemsize} elements, {total} bytes"
        return f"{name}[{f.offset // b.itemsize}] (bytes {f.offset} to {f.offset + f.size - 1}; {has})"

    def other(self, f: Fault) -> str:
        action = "wrote" if f.other_writes else "read"
        thread = self.thread(f.other_thread, f.group) if f.other_group_known else "a thread of another threadgroup"
        return f"{thread} {action} at {self.where(f.other_site)}"

    def what(self, f: Fault) -> str:
        known = f.buffer < MAX_BUFFERS
        sentences = ELSEWHERE | IN_BUFFER if known else ELSEWHERE
        return sentences.get(f.kind, "{text}").format(
            f=f,
            action="writes" if f.writes else "reads",
            place=self.place(f) if known else "",
            other=self.other(f),
            text=re.sub(r"@(\d+)", lambda m: f" ({self.where(int(m[1]))})", f.text.decode()),
            lane="there is no such lane" if f.other_writes else "it takes no part",
            max_steps=self.max_steps,
        )

    def event(self, f: Fault) -> str:
        return f"{self.thread(f.thread, f.group)}, {self.where(f.site)}: {self.what(f)}"

    def message(self) -> str:
        """Return sentences about the launch's fault and, if any, an earlier fault that may cause it."""
        assert self.outcome.fault is not None
        text, before = f"kernel {self.kernel}, {self.event(self.outcome.fault)}", self.outcome.earlier
        return text if before is None else f"{text}. Before it, {self.event(before)}"


def unwritten(kernel: str, buffer: KernelBuffer) -> str | None:
    """Return a sentence about the output's elements that no thread wrote; None if there are none."""
    missing = (buffer.touched & 2) == 0
    if not missing.any():
        return None
    elements = missing.reshape(-1, buffer.itemsize).any(axis=1).nonzero()[0]
    first = ", ".join(str(i) for i in elements[:8]) + (", ..." if len(elements) > 8 else "")
    of = f"{len(elements)} of {missing.size // buffer.itemsize} elements of {buffer.name}"
    return f"kernel {kernel}: unwritten: {of} that no thread wrote: {first}"


class _LittleEndian(io.BytesIO):
    """Reads consecutive little-endian values."""

    def take(self, form: str) -> tuple[int, ...]:
        return struct.unpack(f"<{form}", self.read(struct.calcsize(f"<{form}")))

    def leb(self, *, signed: bool = False) -> int:
        value, shift, byte = 0, 0, 128
        while byte & 128:
            (byte,) = self.read(1)
            value |= (byte & 127) << shift
            shift += 7
        return value - (1 << shift) if signed and byte & 64 else value

    def string(self) -> str:
        return b"".join(iter(functools.partial(self.read, 1), b"\0")).decode(errors="replace")


def _section(elf: bytes, wanted: bytes) -> bytes:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    for name, _, _, _, start, length in headers:
        if elf.startswith(wanted + b"\0", headers[names][4] + name):
            return elf[start : start + length]
    return b""


def _unit(r: _LittleEndian) -> Iterator[tuple[int, str, int]]:
    """Yield the rows (address, file, line) of one unit of a line table; line -1 ends a sequence of addresses."""
    (size,) = r.take("I")
    end = r.tell() + size
    _, header_size = r.take("HI")
    program = r.tell() + header_size
    step, _, _, line_base, line_range, first_special = r.take("BBBbBB")
    operands = r.take(f"{first_special - 1}B")
    while r.string():  # directories
        pass
    files = [""]
    while name := r.string():
        files.append(name)
        _ = r.leb(), r.leb(), r.leb()
    r.seek(program)
    start = address, file, line = 0, 1, 1
    while r.tell() < end:
        (code,) = r.take("B")
        if code == 0:
            after, (code,) = r.leb() + r.tell(), r.take("B")
            if code == 1:
                yield address, files[file], -1
                address, file, line = start
            elif code == 2:
                (address,) = r.take("Q")
            r.seek(after)
        elif code == 1 or code >= first_special:
            if code > 1:
                address += (code - first_special) // line_range * step
                line += line_base + (code - first_special) % line_range
            yield address, files[file], line
        elif code == 2:
            address += r.leb() * step
        elif code == 3:
            line += r.leb(signed=True)
        elif code == 4:
            file = r.leb()
        elif code == 8:
            address += (255 - first_special) // line_range * step
        elif code == 9:
            address += r.take("H")[0]
        else:
            for _ in range(operands[code - 1]):
                r.leb()


@functools.lru_cache(maxsize=8)
def _rows(path: Path) -> list[tuple[int, str, int]]:
    section, rows = _section(path.read_bytes(), b".debug_line"), []
    reader = _LittleEndian(section)
    while reader.tell() < len(section):
        rows += _unit(reader)
    return sorted(rows, key=lambda row: (row[0], row[2] >= 0))


def find_line(path: Path, address: int) -> tuple[str, int] | None:
    """Return the file name and line of an address in the library's image; None if unknown."""
    rows = _rows(path)
    i = bisect.bisect_right(rows, address, key=lambda row: row[0]) - 1
    # Code merged from several lines has line 0: the line before it is the nearest.
    while i >= 0 and rows[i][2] == 0:
        i -= 1
    return (rows[i][1], rows[i][2]) if i >= 0 and rows[i][2] > 0 else None
