"""Make the tables that a command printed again, of its result."""

from collections.abc import Iterator

from rich.table import Table

from .decode_tables import by_category, overall
from .kernels import Asked, Compared, speed_table, traffic_table
from .panels import Found
from .profile import Profile, Timer
from .profile_report import Bandwidth, lines, phase_table
from .result import named
from .roofline import tables
from .rows import categories, settings
from .verify import Curve, curve_table


def tables_of(found: Found) -> Iterator[Table]:
    """Make them in the order that the command has them."""
    makers = {"decode": _decode, "verify": _verify, "kernels": _kernels, "profile": _profile, "model": tables.tables}
    return makers[found["bench"]](found)


def _decode(found: Found) -> Iterator[Table]:
    for setting in settings(found):
        yield overall(found, setting)
        if len(categories(found)) > 1:
            yield by_category(found, setting)


def _verify(found: Found) -> Iterator[Table]:
    for side in dict.fromkeys(side for curve in found["curves"] for side in curve["seconds"]):
        curves = [
            Curve(curve["name"], curve["context"], {side: {int(m): s for m, s in curve["seconds"][side].items()}})
            for curve in found["curves"]
        ]
        yield curve_table(curves, side, f"T(M)/T(1), {named(found['model'])}, {side}")


def _kernels(found: Found) -> Iterator[Table]:
    if found["options"]["emulate"]:
        yield traffic_table([Asked(**line) for line in found["found"]])
    else:
        yield speed_table([Compared(**line) for line in found["found"]])


def _profile(found: Found) -> Iterator[Table]:
    timers = [
        Timer({name: s[i] for name, s in found["seconds"].items()}, [0] * found["tokens"], found["cycles"], wall)
        for i, wall in enumerate(found["wall"])
    ]
    made = lines(Profile(timers, found["undisturbed"]), found["operations"], found["bytes"])
    title = f"{named(found['model'])}, {found['options']['k']} drafts per cycle"
    yield phase_table(made, Bandwidth(**found["bandwidth"]), title)
