"""What was loaded, in words: so that "is MTP even on?" has an answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The facts of one load. `str(report)` is the text that `--report` prints.

    heads: depths found; declared: what config.json says; source: file or directory the heads came from.
    """

    family: str
    layers: int
    target_bytes: int
    target_quantization: str
    heads: int
    declared: int | None
    head_bytes: int
    head_quantization: str
    source: str
    norms: str
    lm_head: str
    ignored: tuple[str, ...] = ()
    expanded: bool = False

    def __str__(self) -> str:
        found = (
            str(self.heads) if self.declared in (None, self.heads) else f"{self.heads} of {self.declared} declared"
        )
        rows = [
            ("family", f"{self.family}, {self.layers} layers"),
            ("target", f"{_size(self.target_bytes)}, {self.target_quantization}"),
            ("MTP heads", f"{found}, {self.source}"),
        ]
        if self.heads:
            rows += [
                ("heads", f"{_size(self.head_bytes)}, {self.head_quantization}"),
                ("LM heads", self.lm_head),
            ]
        rows.append(("norms", self.norms))
        if self.expanded:
            rows.append(("precision", "expanded to float32: MLX multiplies experts on a CPU in nothing else"))
        if self.ignored:
            rows.append(("not used", ", ".join(self.ignored)))
        return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"
