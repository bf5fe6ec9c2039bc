"""Find the source line of an address, in the DWARF 4 line table (section 6.2) of a kernel's 64-bit ELF library."""

import bisect
import functools
import struct
from collections.abc import Iterator
from pathlib import Path


class _Reader:
    """Little-endian values, one after the other."""

    def __init__(self, data: bytes, at: int = 0):
        self.data, self.at = data, at

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def uleb(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start, value = self.at, self.uleb()
        return value - (1 << 7 * (self.at - start)) if self.data[self.at - 1] & 64 else value

    def string(self) -> str:
        start, end = self.at, self.data.index(b"\0", self.at)
        self.at = end + 1
        return self.data[start:end].decode(errors="replace")


def _section(elf: bytes, wanted: str) -> bytes:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    for name, _, _, _, start, length in headers:
        if _Reader(elf, headers[names][4] + name).string() == wanted:
            return elf[start : start + length]
    return b""


def _unit(r: _Reader) -> Iterator[tuple[int, str, int]]:
    """Read a unit's rows (address, file, line); a line of -1 ends a sequence."""
    size, _, header_size = r.take("IHI")
    end, program = r.at - 6 + size, r.at + header_size
    step, _, _, line_base, line_range, first_special = r.take("BBBbBB")
    operands = r.take(f"{first_special - 1}B")
    while r.string():  # directories
        pass
    files = [""]
    while name := r.string():
        files.append(name)
        _ = r.uleb(), r.uleb(), r.uleb()
    r.at, start = program, (0, 1, 1)
    address, file, line = start
    while r.at < end:
        (code,) = r.take("B")
        if code == 0:
            after, (code,) = r.uleb() + r.at, r.take("B")
            if code == 1:
                yield address, files[file], -1
                address, file, line = start
            elif code == 2:
                (address,) = r.take("Q")
            r.at = after
        elif code == 1 or code >= first_special:
            if code > 1:
                address += (code - first_special) // line_range * step
                line += line_base + (code - first_special) % line_range
            yield address, files[file], line
        elif code == 2:
            address += r.uleb() * step
        elif code == 3:
            line += r.sleb()
        elif code == 4:
            file = r.uleb()
        elif code == 8:
            address += (255 - first_special) // line_range * step
        elif code == 9:
            address += r.take("H")[0]
        else:
            for _ in range(operands[code - 1]):
                r.uleb()


@functools.lru_cache(maxsize=8)
def _rows(path: Path) -> list[tuple[int, str, int]]:
    r = _Reader(_section(path.read_bytes(), ".debug_line"))
    rows: list[tuple[int, str, int]] = []
    while r.at < len(r.data):
        rows += _unit(r)
    return sorted(rows, key=lambda row: (row[0], row[2] >= 0))


def find_line(path: Path, address: int) -> tuple[str, int] | None:
    """Find file name and line of an address in the library's image; None where there is none."""
    rows = _rows(path)
    i = bisect.bisect_right(rows, address, key=lambda row: row[0]) - 1
    # Code that the optimiser made of several lines has line 0: the line before is the nearest there is.
    while i >= 0 and rows[i][2] == 0:
        i -= 1
    return (rows[i][1], rows[i][2]) if i >= 0 and rows[i][2] > 0 else None
