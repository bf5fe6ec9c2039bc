"""Fetch the JavaScript libraries of the chat page from npm, unmodified: `python docs/vendored.py`.

`mlx_mtp/serve/page/vendor/vendored.json` has each package's version, licence, and its files with their checksums.
After a change of a version the script prints the new checksums, to be entered there once the files were read.
"""

import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parents[1] / "mlx_mtp" / "serve" / "page" / "vendor"
REGISTRY = "https://registry.npmjs.org"


def packages() -> list[dict[str, Any]]:
    """Return the packages, each {"name", "version", "licence", "files": {file here: {"from", "sha256"}}}."""
    return json.loads((VENDOR / "vendored.json").read_text())


def fetched(package: dict[str, Any]) -> dict[str, bytes]:
    """Return the contents of a package's files by their names here."""
    url = f"{REGISTRY}/{package['name']}/-/{package['name']}-{package['version']}.tgz"
    with urllib.request.urlopen(url, timeout=60) as response:
        packed = io.BytesIO(response.read())
    with tarfile.open(fileobj=packed) as archive:
        files = {name: archive.extractfile(f"package/{file['from']}") for name, file in package["files"].items()}
        return {name: file.read() for name, file in files.items() if file}


def main() -> None:
    """Write the files of all packages; if one has another checksum, write none and exit with code 1."""
    found = [(package, fetched(package)) for package in packages()]
    wrong = [
        f"{package['name']} {package['version']}: {name} has the checksum {total}"
        for package, contents in found
        for name, content in contents.items()
        if (total := hashlib.sha256(content).hexdigest()) != package["files"][name]["sha256"]
    ]
    if wrong:
        sys.exit("\n".join(wrong))
    for _, contents in found:
        for name, content in contents.items():
            (VENDOR / name).write_bytes(content)


if __name__ == "__main__":
    main()
