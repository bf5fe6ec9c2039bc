"""Write the limits of numbers so that llguidance, which computes with 64-bit floats, enforces them exactly."""

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LARGEST = 2**53  # up to here each integer is a float
MOST = 2**63 - 1
DIGITS, PLACES = 15, 22  # llguidance reads a decimal number exactly if it has no more digits, and no more places
MOST_MULTIPLE = 2**32 - 1
MOST_REMAINDERS = 5000  # of `multipleOf` without its factors 2 and 5: the time to compile grows with its square


def write_numbers(schema: dict[str, Any], path: str) -> None:
    """Write a schema's limits of numbers, and check its constants; the schema is changed.

    Raises ValueError, with the keyword's path, for a number that llguidance would round.
    """
    for name in ("const", "enum"):
        for value in _numbers_in(schema.get(name)):
            if not _is_exact(value):
                raise ValueError(f"{path}.{name}: {_shown(value)} would be rounded; {_allowed()}")
    types = schema.get("type")
    integers = "number" not in types and types != [] if isinstance(types, list) else types == "integer"
    for name in (*LOWER, *UPPER):
        if _is_number(value := schema.get(name)) and not _is_exact_limit(value, integers, name):
            raise ValueError(f"{path}.{name}: {_shown(value)} would be rounded; {_allowed()}")
    (_write_integers if integers else _write_exclusive)(schema)
    if "multipleOf" in schema:
        _write_multiple(schema, path, integers)


def _allowed() -> str:
    return f"allowed are integers up to 2**53 in magnitude, and numbers of at most {DIGITS} digits"


def _shown(value: int | float) -> str:
    return repr(value) if isinstance(value, float) or abs(value) < 10**40 else "an integer of more than 40 digits"


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(each)
    elif _is_number(value):
        yield value


def _is_exact(value: int | float) -> bool:
    """Return whether llguidance reads and writes exactly this number."""
    if not abs(value) <= LARGEST:
        return isinstance(value, int) and abs(value) < MOST and int(float(value)) == value
    number = Decimal(repr(value)).normalize().as_tuple()
    return isinstance(value, int) or (len(number.digits) <= DIGITS and int(number.exponent) >= -PLACES)


def _is_exact_limit(value: int | float, integers: bool, name: str) -> bool:
    if integers:
        return _is_exact(value) or (value == MOST and name == "maximum")
    return abs(value) <= LARGEST and _is_exact(value)


def _write_integers(schema: dict[str, Any]) -> None:
    """Replace limits of integers by the least and the greatest integer within them."""
    for (closed, open), sign in ((LOWER, 1), (UPPER, -1)):
        limits = [math.ceil(sign * schema[closed])] if _is_number(schema.get(closed)) else []
        limits += [math.floor(sign * schema.pop(open)) + 1] if _is_number(schema.get(open)) else []
        if limits:
            schema[closed] = sign * max(limits)


def _write_exclusive(schema: dict[str, Any]) -> None:
    """Replace exclusive limits that are integers by close decimal numbers, where llguidance may accept the limit.

    It does so if the other limit has the same digits before the decimal point.
    """
    for (closed, open), sign in ((LOWER, 1), (UPPER, -1)):
        limit, other = schema.get(open), schema.get(closed)
        if not _is_number(limit) or limit % 1 or sign * limit < 0:
            continue
        places = PLACES if limit == 0 else DIGITS - len(str(abs(int(limit))))
        if places > 0:
            limit = float(Decimal(int(limit)) + sign * Decimal(1).scaleb(-places))
            schema[closed] = sign * max(sign * limit, sign * other) if _is_number(other) else limit
            del schema[open]


def _write_multiple(schema: dict[str, Any], path: str, integers: bool) -> None:
    """Check `multipleOf`; of integers it is replaced by the least integer that is a multiple of it.

    Raises ValueError if llguidance would round it, or no multiple is within the schema's limits.
    """
    given = schema["multipleOf"]
    if not _is_number(given) or not 0 < given < math.inf:
        raise ValueError(f"{path}.multipleOf: {repr(given)[:80]}; allowed are numbers above 0")
    wanted = Fraction(Decimal(repr(given)))
    if integers:
        schema["multipleOf"], wanted = wanted.numerator, Fraction(wanted.numerator)
    value, exponent = float(wanted), 0
    while value % 1 and exponent < 20:
        value, exponent = value * 10, exponent + 1
    if value > MOST_MULTIPLE or Fraction(value) / 10**exponent != wanted:
        limit = "with at most 9 digits, whose product with a power of 10 is exact in binary"
        raise ValueError(f"{path}.multipleOf: {_shown(given)} would be rounded; allowed are numbers {limit}")
    rest = wanted.numerator
    while (factor := math.gcd(rest, 10)) > 1:
        rest //= factor
    if rest > MOST_REMAINDERS:
        limit = f"whose digits, without factors 2 and 5, are at most {MOST_REMAINDERS}"
        raise ValueError(f"{path}.multipleOf: {_shown(given)} takes too long to compile; allowed are numbers {limit}")
    low, high = schema.get("minimum"), schema.get("maximum")
    if _is_number(low) and _is_number(high):
        first = math.ceil(Fraction(Decimal(repr(low))) / wanted) * wanted
        if first > Fraction(Decimal(repr(high))):
            raise ValueError(f"{path}.multipleOf: no multiple of {_shown(given)} is within the limits")
