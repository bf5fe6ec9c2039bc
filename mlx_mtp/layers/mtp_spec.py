"""Describe the inputs and the chaining of a family's MTP heads, and their tensor names in checkpoints."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

# Fields that `mtp_overrides` may set, and their values.
OVERRIDABLE = {
    "topology": ("chain", "target_each", "recycle"),
    "capture": ("pre", "post"),
    "feedback": ("pre", "post"),
    "fuse": ("eh", "he"),
    "head": ("own", "shared", "shared_or_own"),
}


@dataclass(frozen=True)
class MTPSpec:
    """Everything about a family's MTP heads that is not a module; the defaults are the most common values.

    tensors:  pairs (module's name in the checkpoint, its path inside the head).
    topology: "chain" = a module per depth, each reads the previous one's output; "target_each" = a module per depth,
              all read the target's hidden states; "recycle" = one module that reads its own output.
    capture:  the hidden state of the target that a head reads: before ("pre") or after ("post") the final norm, or
              the residual stream after these numbers of layers, e.g. (2, 16, 29), concatenated.
    feedback: the output that the next draft reads: before or after the head's own norm (not for "target_each").
    fuse:     order of the concatenation before `eh_proj`: embedding-hidden or hidden-embedding.
    head:     each depth's LM head: its "own", the target's ("shared"), or its own if the checkpoint has one that
              differs from the target's ("shared_or_own").
    embedding: each depth's embedding, likewise.
    prefix:   regex of the text before a head tensor's own name; its group, if any, is the depth's number.
    numbered: whether that number is counted from the target's number of layers ("trunk") or from "zero".
    draft_vocab: number of tokens that a head drafts with rows of the target's LM head, listed in `d2t`; 0 for all.
    """

    tensors: tuple[tuple[str, str], ...]
    topology: Literal["chain", "target_each", "recycle"] = "recycle"
    capture: Literal["pre", "post"] | tuple[int, ...] = "post"
    feedback: Literal["pre", "post"] = "post"
    fuse: Literal["eh", "he"] = "eh"
    head: Literal["own", "shared", "shared_or_own"] = "shared"
    embedding: Literal["own", "shared", "shared_or_own"] = "shared"
    prefix: str = r"model\.layers\.(\d+)\."
    numbered: Literal["trunk", "zero"] = "trunk"
    draft_vocab: int = 0

    def locate(self, name: str, num_hidden_layers: int) -> tuple[int, str] | None:
        """Return the (depth, path inside the head) of a checkpoint tensor; None if it belongs to no MTP head."""
        match = re.match(self.prefix, name)
        if match is None:
            return None
        depth = int(match[1]) if match.lastindex else 0
        depth -= num_hidden_layers if self.numbered == "trunk" else 0
        own = name[match.end() :]
        paths = (path + own[len(stored) :] for stored, path in self.tensors if f"{own}.".startswith(f"{stored}."))
        found = next(paths, None) if depth >= 0 else None
        return None if found is None else (depth, found)

    def place(self, num_hidden_layers: int) -> str:
        """Describe, for messages, the names of the MTP heads' tensors in a checkpoint."""
        if self.numbered == "trunk":
            return f"from layer {num_hidden_layers} on"
        made_of = ", ".join(stored for stored, _ in self.tensors)
        return f"under {self._prefix('#')} made of {made_of}"

    def before(self, name: str | None, depth: int, num_hidden_layers: int) -> str:
        """Return the prefix of a depth's tensor names, in the style of tensor `name`, else the family's usual one."""
        number = str(depth + (num_hidden_layers if self.numbered == "trunk" else 0))
        match = re.match(self.prefix, name or "")
        if match is None or not match[0]:
            return self._prefix(number)
        start, end = match.span(1) if match.lastindex else (match.end(), match.end())
        return match[0][:start] + (number if match.lastindex else "") + match[0][end:]

    def stored(self, path: str) -> str | None:
        """Return the checkpoint name, without prefix, of a tensor at a path inside the head; None if it has none."""
        names = (name + path[len(inside) :] for name, inside in self.tensors if f"{path}.".startswith(f"{inside}."))
        return next(names, None)

    def name(self, depth: int, path: str, num_hidden_layers: int) -> str:
        """Return the usual checkpoint name of the tensor that `locate` finds at (depth, path), which must exist."""
        return f"{self.before(None, depth, num_hidden_layers)}{self.stored(path)}"

    def _prefix(self, number: str) -> str:
        """Return the prefix without its optional parts; a prefix that is optional as a whole is kept."""
        usual = re.sub(r"\(\?:[^()]*\)[*?]", "", self.prefix.replace(r"(\d+)", number))
        return re.sub(r"\(\?:|\)\?", "", usual).replace(r"\.", ".")

    def may_repeat(self, module: str) -> bool:
        """Return whether this module is "shared_or_own": the target's in checkpoints whose heads lack it."""
        return {"head": self.head, "embed_tokens": self.embedding}.get(module) == "shared_or_own"

    def resolve(self, paths: Collection[str]) -> "MTPSpec":
        """Return a copy in which "shared_or_own" is "own" if the checkpoint's head tensors (paths) have the module.

        Otherwise it is "shared".
        """
        found = {
            field: "own" if any(path.startswith(f"{module}.") for path in paths) else "shared"
            for field, module in (("head", "head"), ("embedding", "embed_tokens"))
            if getattr(self, field) == "shared_or_own"
        }
        return replace(self, **found)  # type: ignore[arg-type]

    def override(self, changes: dict[str, Any]) -> "MTPSpec":
        """Return a copy with changed fields of OVERRIDABLE; ValueError names the allowed values."""
        for name, value in changes.items():
            if name not in OVERRIDABLE:
                raise ValueError(f"mtp_overrides: {name!r} is unknown; allowed are {', '.join(OVERRIDABLE)}")
            if value not in OVERRIDABLE[name]:
                raise ValueError(f"mtp_overrides: {name}={value!r}; allowed are {', '.join(OVERRIDABLE[name])}")
        if changes.get("head") == "own" and not any(inside == "head" for _, inside in self.tensors):
            raise ValueError("mtp_overrides: head='own'; this family's heads have no own LM head; use 'shared'")
        return replace(self, **changes)


def pairs(names: str) -> tuple[tuple[str, str], ...]:
    """Return pairs from text such as "a=x b": (("a", "x"), ("b", "b"))."""
    return tuple((a, b or a) for a, _, b in (name.partition("=") for name in names.split()))


def checked_layers(capture: Any, num_hidden_layers: int) -> tuple[int, ...]:
    """Return the numbers of layers after which an external drafter reads the target, as a tuple.

    ValueError for none, and for numbers outside 0 to num_hidden_layers.
    """
    found = tuple(capture) if isinstance(capture, list | tuple) else (capture,)
    if not found or not all(type(i) is int and 0 <= i <= num_hidden_layers for i in found):
        meaning = "the numbers of layers after which the target is read"
        raise ValueError(f"capture={found}: {meaning}; allowed are integers from 0 to {num_hidden_layers}")
    return found
