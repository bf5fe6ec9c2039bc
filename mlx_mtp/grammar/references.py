"""Find the schemas to which the `$ref` of a document lead, by JSON pointers, `$id`s and `$anchor`s."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

DATA = ("const", "enum", "default", "examples", "example")  # keywords whose values are no schemas
ANCHORS = ("$anchor", "$dynamicAnchor")
ROOT = ""  # URI of a document without $id


class References:
    """The schemas of a document by their URIs."""

    def __init__(self, root: Mapping[str, Any]):
        self._resources: dict[str, Any] = {ROOT: root}
        self._anchors: dict[str, tuple[Any, str]] = {}
        for schema, base in _schemas(root):
            self._resources.setdefault(base, schema)
            for name in ANCHORS:
                self._anchors.setdefault(f"{base}#{schema.get(name)}", (schema, base))

    def target(self, reference: Any, base: str) -> tuple[Any, str, str]:
        """Return (schema, its base URI, its name) for a `$ref` in a schema with the URI `base`.

        Raises ValueError for a reference that is no text or leads out of the document.
        """
        if not isinstance(reference, str):
            raise ValueError(f"{repr(reference)[:80]} is no reference")
        uri, fragment = urldefrag(reference if reference.startswith("#") else urljoin(base, reference))
        uri = uri or base
        name = unquote(fragment)
        if f"{uri}#{name}" in self._anchors:
            return *self._anchors[f"{uri}#{name}"], name
        try:
            found, base = self._resources[uri], uri
            if name and not name.startswith("/"):
                raise KeyError(name)
            for part in name.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
                base = base_of(found, base)
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"{reference[:80]!r} leads to no schema of this document; none is fetched") from None
        return found, base, name.rpartition("/")[2] or "root"


def base_of(schema: Any, base: str) -> str:
    """Return the URI to which the references in a schema are relative. base: that of the schema around it."""
    own = schema.get("$id") if isinstance(schema, Mapping) else None
    return urldefrag(urljoin(base, own))[0] if isinstance(own, str) else base


def _schemas(root: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (object, its base URI) for each object of a document that may be a schema."""
    pending = [(root, ROOT)]
    while pending:
        each, base = pending.pop()
        if isinstance(each, Mapping):
            base = base_of(each, base)
            yield each, base
            pending += [(value, base) for name, value in each.items() if name not in DATA]
        elif isinstance(each, list):
            pending += [(value, base) for value in each]
