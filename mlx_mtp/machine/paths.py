"""Expand the home directory in paths that a user wrote."""

from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return a path whose leading "~" or "~user" is replaced by the home directory.

    Raises ValueError if that directory is unknown, as for a user that does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = Path(path).parts[0]
        raise ValueError(f"{path}: {home} is no known home directory; write the directory itself") from None
