"""MTPSpec: everything about a family's draft heads that is not a module."""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MTPSpec:
    """How a family's heads are fed, chained and named.

    topology: "chain" = one module per depth, depth k reads the output of depth k-1.
    capture:  the target's hidden state that depth 0 reads, before ("pre") or after ("post") the final norm.
    feedback: the head's output that the next depth reads, before or after the head's own norm.
    fuse:     order of the concatenation in front of `eh_proj`: embedding-hidden or hidden-embedding.
    own_head: each depth has its own LM head; otherwise the target's is used.
    tensors:  regex over a tensor's name (after its layer number) -> module path inside the head; first match wins.
    """

    topology: Literal["chain"]
    capture: Literal["pre", "post"]
    feedback: Literal["pre", "post"]
    fuse: Literal["eh", "he"]
    own_head: bool
    tensors: tuple[tuple[str, str], ...]

    def locate(self, name: str, num_hidden_layers: int) -> tuple[int, str] | None:
        """(depth, path inside the head) of a checkpoint tensor; None where it is not a head's."""
        match = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None or int(match[1]) < num_hidden_layers:
            return None
        for pattern, replacement in self.tensors:
            path, hits = re.subn(rf"^{pattern}", replacement, match[2])
            if hits:
                return int(match[1]) - num_hidden_layers, path
        return None
