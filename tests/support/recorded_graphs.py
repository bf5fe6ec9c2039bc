"""Count the primitives of recorded graphs."""

from collections import Counter

import mlx.core as mx


def recorded(fn, x) -> Counter:
    """The primitives of a graph that compute, by name."""
    names = []

    def note(event):
        if event["type"] == "primitive":
            names.append(event["name"])

    mx.export_function(note, fn, x)
    free = (
        "Broadcast",
        "Reshape",
        "Slice",
        "Split",
        "ExpandDims",
        "Squeeze",
        "Flatten",
        "Unflatten",
        "Transpose",
        "Full",
    )
    return Counter(name for name in names if name not in free)
