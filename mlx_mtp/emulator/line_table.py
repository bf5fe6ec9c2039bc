"""Address to source line, from the DWARF line table (versions 4 and 5, section 6.2) of a 64-bit ELF file."""

import bisect
import functools
import struct
from pathlib import Path


class _Reader:
    def __init__(self, data: bytes, at: int = 0):
        self.data, self.at = data, at

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if self.data[self.at - 1] & 64 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


def _sections(elf: bytes) -> dict[str, bytes]:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    table = headers[names][4]
    return {
        _Reader(elf, table + header[0]).string(): elf[header[4] : header[4] + header[5]]
        for header in headers
        if header[1] != 8  # NOBITS
    }


def _entries(r: _Reader, sections: dict[str, bytes]) -> list[str]:
    """One of DWARF 5's tables of names, of directories or of files."""
    formats = [(r.uleb(), r.uleb()) for _ in range(r.take("B"))]
    names = []
    for _ in range(r.uleb()):
        name = ""
        for content, form in formats:
            if form == 0x08:
                value = r.string()
            elif form in (0x0E, 0x1F):  # strp, line_strp
                table = sections[".debug_str" if form == 0x0E else ".debug_line_str"]
                value = _Reader(table, r.take("I")).string()
            elif form == 0x1E:  # data16
                r.at += 16
                value = ""
            else:
                value = {0x0B: lambda: r.take("B"), 0x05: lambda: r.take("H"), 0x0F: r.uleb}[form]()
            if content == 1:
                name = str(value)
        names.append(name)
    return names


def _names_4(r: _Reader) -> list[str]:
    while r.data[r.at]:
        r.string()
    r.at += 1
    names = [""]
    while r.data[r.at]:
        names.append(r.string())
        for _ in range(3):
            r.uleb()
    r.at += 1
    return names


class _Program:
    """The state machine of one line program; `rows` are (address, file, line), a line of -1 ends a sequence."""

    def __init__(self, r: _Reader, end: int, header: dict, files: list[str]):
        self.r, self.end, self.header, self.files = r, end, header, files
        self.rows: list[tuple[int, str, int]] = []
        self.reset()

    def reset(self) -> None:
        self.address, self.file, self.line = 0, 1, 1

    def emit(self, line: int | None = None) -> None:
        name = self.files[self.file] if self.file < len(self.files) else "?"
        self.rows.append((self.address, name, self.line if line is None else line))

    def extended(self) -> None:
        size = self.r.uleb()
        after = self.r.at + size
        code = self.r.take("B")
        if code == 1:
            self.emit(-1)
            self.reset()
        elif code == 2:
            self.address = self.r.take("Q")
        self.r.at = after

    def standard(self, code: int) -> None:
        r, h = self.r, self.header
        if code == 1:
            self.emit()
        elif code == 2:
            self.address += r.uleb() * h["minimum"]
        elif code == 3:
            self.line += r.sleb()
        elif code == 4:
            self.file = r.uleb()
        elif code == 8:
            self.address += (255 - h["base"]) // h["range"] * h["minimum"]
        elif code == 9:
            self.address += r.take("H")
        else:
            for _ in range(h["lengths"][code - 1]):
                r.uleb()

    def run(self) -> None:
        h = self.header
        while self.r.at < self.end:
            code = self.r.take("B")
            if code == 0:
                self.extended()
            elif code < h["base"]:
                self.standard(code)
            else:
                self.address += (code - h["base"]) // h["range"] * h["minimum"]
                self.line += h["line_base"] + (code - h["base"]) % h["range"]
                self.emit()


def _unit(r: _Reader, sections: dict[str, bytes]) -> list[tuple[int, str, int]]:
    length = r.take("I")
    end = r.at + length
    version = r.take("H")
    if version >= 5:
        r.at += 2
    program = r.take("I")
    program += r.at
    header: dict = {"minimum": r.take("B")}
    r.at += 2
    header |= {"line_base": r.take("b"), "range": r.take("B"), "base": r.take("B")}
    header["lengths"] = [r.take("B") for _ in range(header["base"] - 1)]
    if version >= 5:
        _entries(r, sections)
        files = _entries(r, sections)
    else:
        files = _names_4(r)
    r.at = program
    machine = _Program(r, end, header, files)
    machine.run()
    r.at = end
    return machine.rows


@functools.lru_cache(maxsize=8)
def _rows(path: Path) -> list[tuple[int, str, int]]:
    sections = _sections(path.read_bytes())
    r = _Reader(sections.get(".debug_line", b""))
    rows: list[tuple[int, str, int]] = []
    while r.at < len(r.data):
        rows += _unit(r, sections)
    return sorted(rows, key=lambda row: (row[0], row[2] >= 0))


def find_line(path: Path, address: int) -> tuple[str, int] | None:
    """File name and line of an address in the library's image, or None."""
    rows = _rows(path)
    i = bisect.bisect_right(rows, address, key=lambda row: row[0]) - 1
    # Code that the optimiser made of several lines has line 0: the line before is the nearest there is.
    while i >= 0 and rows[i][2] == 0:
        i -= 1
    return (rows[i][1], rows[i][2]) if i >= 0 and rows[i][2] > 0 else None
