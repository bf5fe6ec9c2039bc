"""Format the results of `doctor` as a Markdown page, to paste into an issue, and as a one-line verdict."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..tuning.kernel_verdict import SPLIT, TOGETHER, contractions_in_words
from .doctor_summary import by_kernel, every_kernel
from .emulated_check import BITS, OWN_BITS
from .page import tables_of
from .profile_report import remarks

Result = dict[str, Any]
STATES = {"compiled": "no", "right": "WRONG"}  # the text of a state that does not hold
ALTERNATIVES = {"rows_split": SPLIT, "rows_together": TOGETHER}
NOT_SAID = "not known: not reported by the system"


def verdict(found: Result) -> tuple[bool, str]:
    """Return whether a report has no fault, and a line about what was checked and what was not."""
    kernels = every_kernel(found)
    wrong = {name_of(k) for k in kernels if k.get("wrong")}
    failed = {name_of(k) for k in kernels if "failed" in k} - wrong
    right = {name_of(k) for k in kernels} - wrong - failed
    parts, off = [name for name in PARTS if "failed" in found.get(name, ())], found.get("refused", ())
    texts = len(found.get("decode", {}).get("differences", ()))
    counted = f"{len(right)} kernels right, {len(wrong)} wrong" + (f", {len(failed)} failed" if failed else "")
    words = [found["kernels"].get("not_checked", counted)]
    words += [f"{len(off)} kernels were refused and are off"] if off else []
    words += [f"{texts} drafted texts differ from plain decoding's"] if texts else []
    words += [f"failed: {', '.join(PARTS[name] for name in parts)}"] if parts else []
    if not found["metal"]:
        left_out = "kernels' speed, compile times, Apple's own arithmetic"
        words.append(f"not checked without a Metal GPU: {left_out}")
    elif found.get("bits_only"):
        words.append("not checked: speed")
    missing = found["kernels"].get("types_not_supported")
    words += [f"not supported by this GPU: {', '.join(missing)}"] if missing else []
    return not (wrong or failed or off or parts or texts), "; ".join(words)


def name_of(kernel: Result) -> tuple[str, ...]:
    return kernel["op"], kernel.get("shape", kernel.get("of", ""))


PARTS = {
    "kernels": "kernels",
    "matrix_unit": "the matrix unit",
    "facts": "the model",
    "rows": "rows of a pass",
    "verify": "a verify of M rows",
    "decode": "decoding",
    "host": "a cycle by phase",
}


def page(found: Result) -> str:
    """Return a report of `examine` or `examine_bits` as a Markdown page."""
    good, words = verdict(found)
    well = "No fault found" if "not_checked" in found["kernels"] else "All well"
    lines = ["# mlx-mtp doctor", "", f"**{well if good else 'Something is wrong'}:** {words}.", ""]
    sections = {
        "Machine": ("environment", machine),
        "Kernels": ("kernels", kernels),
        "Every kernel": ("kernels", summary),
        "Matrix unit": ("matrix_unit", lambda found: iter([f"{matrix_unit(found['matrix_unit'])}."])),
        "Rows of a pass": ("rows", lambda found: iter([found["rows"]["words"]])),
        "Cost of a verify": ("verify", verify),
        "Decoding": ("decode", decoding),
        "A cycle by phase": ("host", host),
    }
    for title, (part, section) in sections.items():
        if part not in found:
            continue
        failed = found[part].get("failed")
        lines += [f"## {title}", "", *([f"Failed: {failed}"] if failed else section(found)), ""]
    return "\n".join(lines)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], sides: str) -> Iterator[str]:
    """Yield the lines of a table with aligned columns; sides: "<" or ">" per column, the last for the rest."""
    cells = [list(headers), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(headers))]
    sides = sides.ljust(len(headers), sides[-1])
    rule = ["-" * w if side == "<" else "-" * (w - 1) + ":" for w, side in zip(widths, sides, strict=True)]
    for line in (cells[0], rule, *cells[1:]):
        yield "| " + " | ".join(f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths, strict=True)) + " |"


def machine(found: Result) -> Iterator[str]:
    e, heat, model = found["environment"], found.get("thermal"), found.get("facts")
    commit = f" ({e['commit']})" if e["commit"] else ""
    facts = {
        "chip": e["chip"],
        "GPU cores": e.get("gpu_cores") or NOT_SAID,
        "memory": f"{e['memory_bytes'] / 2**30:.0f} GiB" if e["memory_bytes"] else NOT_SAID,
        "system": f"{e['os']}, Python {e['python']}",
        "MLX": f"{e['mlx']}, mlx-lm {e['mlx_lm']}, mlx-mtp {e['mlx_mtp']}{commit}",
        "runs on": "the GPU" if found["metal"] else f"the CPU, BLAS: {e['blas']}",
    }
    if heat:
        facts |= {f"heat {when}": heat[when] or NOT_SAID for when in ("before", "after")}
    if model:
        facts["model"] = model.get("name", f"failed: {model.get('failed')}")
    facts["examined"] = f"{found['date']} UTC, {found['seconds']:.0f} s"
    first, *others = facts.items()
    yield from table(first, others, "<")


def kernels(found: Result) -> Iterator[str]:
    if reason := found["kernels"].get("not_checked"):
        yield f"{reason[0].upper()}{reason[1:]}."
        return
    listed = every_kernel(found)
    if found["metal"]:
        yield "Compared with stock MLX on the GPU; a ratio is stock MLX's time over the kernel's.\n"
        headers = ("kernel", "shape", "verdict", *(f"M={m}" for m in range(1, 9)), "compile, s")
        yield from table(headers, _timed(listed), "<<<>")
        spellings = {k["op"]: k["spelling"] for k in listed if "spelling" in k and not k["wrong"]}
        yield from (f"\n{line[0].upper()}{line[1:]}." for line in contractions_in_words(spellings))
    else:
        yield "**Emulated** on the CPU, on small shapes: this machine has no Metal GPU. Counts are not times."
        yield f'Compared with: "{BITS}", each row of MLX\'s own kernels from the wheel, alone and emulated;'
        yield f'"{OWN_BITS}", for kernels with an arithmetic of their own; "error", with float32.\n'
        headers = ("kernel", "shape", "compared with", "verdict", "rows", "launches", "KiB asked", "asks per byte")
        yield from table(headers, map(_counted, listed), "<<<<>")
    yield from (f"\nWRONG: {k['op']} {k['shape']}, M={k['rows']}: {k['wrong']}" for k in listed if k.get("wrong"))
    yield from (f"\nFAILED: {k['op']}: {k['failed']}" for k in listed if "failed" in k)
    for k in listed:
        for name, why in k.get("refused", {}).items():
            yield f"\nREFUSED: {k['op']} {k['shape']}, M={k['rows']}, {name} (the other alternative runs): {why}"
    for kernel, rows, reason in found.get("refused", ()):
        yield f"\nOFF: {kernel}, M={', '.join(map(str, rows))}: {reason}"


def summary(found: Result) -> Iterator[str]:
    """Yield the lines of a table with a row per kernel, then what was not checked and for which kernels."""
    listed = by_kernel(found)
    headers = ("kernel", "checked as", "compiled", "right", "ratio", "alternative", "registers")
    yield "Ratio: the lowest and the highest of all shapes and rows. Empty cells are explained below.\n"
    yield from table(headers, map(_summed, listed), "<<<<<<<")
    yield "\nNot checked:\n"
    for reason in dict.fromkeys(why for k in listed for why in k["not_checked"]):
        names = [k["kernel"] for k in listed if reason in k["not_checked"]]
        names_shown = "all kernels" if len(names) == len(listed) else ", ".join(names)
        yield f"- {names_shown}: {reason}"


def matrix_unit(part: Result) -> str:
    """Return a line about this part of a report: how a simdgroup_matrix adds eight products, by type of operands."""
    if reason := part.get("not_read") or part.get("failed"):
        return f"Matrix unit: not read ({reason})"
    types: dict[str, list[str]] = {}
    for dtype, order in part["orders"].items():
        # Products of 16-bit operands are exact, so that whether they are rounded is seen in float32 alone.
        types.setdefault(_arithmetic(order, part["orders"]["float32"]["fused"]), []).append(dtype)
    ways = (f"{words} ({', '.join(names)})" for words, names in types.items())
    return f"Matrix unit: adds eight products {'; '.join(ways)}"


def _arithmetic(order: Result, fused: bool) -> str:
    products = "fused" if fused else "each rounded first"
    if order["rounding"] == "wide":
        return f"exactly, {products}, and rounds once"
    signature = " ".join(f"{x:g}" for x in order["signature"])
    name = f'in the order "{order["name"]}"' if order["name"] else f"in an unknown order with the sums {signature}"
    return f"{name}, {products}, {'truncated' if order['rounding'] == 'truncated' else 'rounded to nearest'}"


def _summed(k: Result) -> tuple[str, ...]:
    states = ({True: "yes", False: f"**{no}**", None: ""}[k[what]] for what, no in STATES.items())
    ratio = "-".join(dict.fromkeys(f"{r:.2f}" for r in k["ratio"] or ()))
    found = k["alternative"] or {}
    rows = [f"{words}: M={', '.join(map(str, found[name]))}" for name, words in ALTERNATIVES.items() if name in found]
    alternative = "; ".join(filter(None, [found.get("multiply_adds"), *rows]))
    registers = k["registers"]
    if isinstance(registers, dict):
        registers = f"for {'-'.join(map(str, dict.fromkeys(registers['most_threads_per_group'])))} threads"
    return f"`{k['kernel']}`", ", ".join(k["checked_as"]), *states, ratio, alternative, registers


def _counted(k: Result) -> tuple[Any, ...]:
    if "failed" in k:
        return k["op"], "", "", "**failed**", "", "", "", ""
    result = "**WRONG**" if k["wrong"] else "right"
    counts = k["rows"], k["launches"], f"{k['requested'] / 1024:.0f}", f"{k['reread']:.2f}"
    return k["op"], k["shape"], k["against"], result, *counts


def _timed(listed: Sequence[Result]) -> Iterator[tuple[Any, ...]]:
    for name in dict.fromkeys(map(name_of, listed)):
        of = [k for k in listed if name_of(k) == name]
        done = {k["rows"]: k for k in of if "failed" not in k}
        state = "right" if len(done) == len(of) else "**failed**"
        state = "**WRONG**" if any(k["wrong"] for k in done.values()) else state
        ratios = (done[m]["ratio"] if m in done else None for m in range(1, 9))
        seconds = sum(k["compile_seconds"] for k in done.values())
        yield *name, state, *("" if r is None else f"{r:.2f}" for r in ratios), f"{seconds:.1f}"


def verify(found: Result) -> Iterator[str]:
    where = "on the GPU" if found["metal"] else "on the CPU, whose products differ from a GPU's"
    yield f"Time of M rows over that of one, {where}.\n"
    yield from of_bench(found["verify"])


def decoding(found: Result) -> Iterator[str]:
    d = found["decode"]
    yield "Greedy texts of the same prompts in turn; per depth: the share of accepted drafts.\n"
    yield from of_bench(d)
    yield from (f"\nleft out: {name} ({why})" for name, why in d["left_out"].items())
    for x in d["differences"]:
        yield f"\nDIFFERENT TEXT: {x['contender']} on {x['category']}, token {x['position']}"


def host(found: Result) -> Iterator[str]:
    yield from of_bench(found["host"])
    yield from remarks(found["host"])


def of_bench(found: Result) -> Iterator[str]:
    """Yield the lines of the tables of a `bench` result, each between its title and its caption."""
    for made in tables_of(found):
        headers = [str(column.header).replace("/\n", "/").replace("\n", " ") for column in made.columns]
        sides = "".join("<" if column.justify == "left" else ">" for column in made.columns)
        yield f"{made.title}\n"
        yield from table(headers, zip(*(column.cells for column in made.columns), strict=True), sides)
        yield f"\n{made.caption}\n" if made.caption else ""
