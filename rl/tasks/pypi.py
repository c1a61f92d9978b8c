"""Source distributions from the package index: which there are, and their files. Nothing of them is run here."""

import hashlib
import io
import os
import re
import tarfile
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import httpx

from rl.environments.sandbox import SandboxError

MAX_BYTES = 64 << 20


class RegistryError(SandboxError):
    """The index does not answer, or has no such file: nobody's reward."""


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


class Registry:
    """An index (PEP 503) and a directory that keeps what was downloaded. The index is pip's: PIP_INDEX_URL, or pypi.org."""

    def __init__(self, directory: str | Path, index: str | None = None):
        self.directory = Path(directory)
        self.index = (index or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple").rstrip("/") + "/"
        self._found: dict[str, dict[str, tuple[str, str]]] = {}

    def sdists(self, package: str) -> dict[str, tuple[str, str]]:
        """version: (address, sha256) of its .tar.gz, as the index lists them."""
        package = normalized(package)
        if package not in self._found:
            page = self._get(urljoin(self.index, f"{package}/"))
            found = {}
            for link in re.findall(r'href="([^"]+)"', page.decode()):
                address, fragment = urldefrag(urljoin(urljoin(self.index, f"{package}/"), link.replace("&amp;", "&")))
                name, _, version = address.rsplit("/", 1)[-1].removesuffix(".tar.gz").rpartition("-")
                if address.endswith(".tar.gz") and normalized(name) == package and fragment.startswith("sha256="):
                    found[version] = (address, fragment.removeprefix("sha256="))
            self._found[package] = found
        return self._found[package]

    def sdist(self, package: str, version: str, sha256: str | None = None) -> tuple[dict[str, bytes], str]:
        """(files by path, sha256) of a source distribution; RegistryError unless it has the hash that is given."""
        kept = self.directory / f"{normalized(package)}-{version}.tar.gz"
        if kept.exists():
            data = kept.read_bytes()
        else:
            if version not in self.sdists(package):
                raise RegistryError(f"{package} {version}: the index has no .tar.gz of it")
            address, listed = self.sdists(package)[version]
            data = self._get(address)
            if hashlib.sha256(data).hexdigest() != listed:
                raise RegistryError(f"{package} {version}: the file is not the one that the index lists")
            self.directory.mkdir(parents=True, exist_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(kept)
        found = hashlib.sha256(data).hexdigest()
        if sha256 not in (None, found):
            raise RegistryError(f"{package} {version}: expected the file with sha256 {sha256}, got {found}")
        return unpacked(data), found

    def _get(self, address: str) -> bytes:
        try:
            answer = httpx.get(address, timeout=60, follow_redirects=True, headers={"Accept": "text/html,*/*"})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise RegistryError(f"{address}: {type(error).__name__}: {error}") from None
        return answer.content


def unpacked(data: bytes) -> dict[str, bytes]:
    """The regular files of an archive without its top directory."""
    files, size = {}, 0
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            path = os.path.normpath(member.name).partition("/")[2]
            if member.isreg() and path and not path.startswith((".", "/")):
                size += member.size
                if size > MAX_BYTES:
                    raise RegistryError(f"an archive with more than {MAX_BYTES} bytes")
                files[path] = archive.extractfile(member).read()
    return files
