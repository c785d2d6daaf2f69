"""JSON files that describe a folder and end in the digest of all that they say: manifests."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import xxhash

from pyg_dist.errors import StoreError

FILE = "manifest.json"
M = TypeVar("M", bound="Signed")


@dataclass(frozen=True)
class Kind:
    """What a manifest is of."""

    what: str  # in words, such as "store"
    version: int  # of its format
    origin: str  # what makes one, for who has none
    remedy: str  # what to do about a damaged one
    most_bytes: int  # more than any has
    file: str = FILE  # its name


def digest_of(content: Mapping[str, object]) -> str:
    """Of a manifest's JSON, but for its last entry, which this is."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()))


class Signed(ABC):
    """What such a file says.

    Attributes:
        kind: of file.
    """

    kind: ClassVar[Kind]

    def content(self) -> dict[str, object]:
        """All of it, but for its digest, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "digest"}

    @classmethod
    @abstractmethod
    def of(cls: type[M], content: dict[str, object], digest: str) -> M:
        """The reverse of :meth:`content`; raises a ValueError, KeyError, TypeError or AttributeError."""

    def to_json(self) -> str:
        """The file; the last entry is the digest of all others."""
        whole = {"format": f"pyg_dist {self.kind.what}", "version": self.kind.version, **self.content()}
        return json.dumps(whole | {"digest": digest_of(whole)}, indent=1, sort_keys=False)

    @classmethod
    def load(cls: type[M], path: Path) -> M:
        """Read the one in the folder ``path``, with which what is made of it must agree to the letter.

        Raises:
            StoreError: There is none, it is of another version, it was altered, or contradicts itself.
        """
        file, kind = path / cls.kind.file, cls.kind
        try:
            if file.stat().st_size > kind.most_bytes:
                raise ValueError(f"{file.stat().st_size} bytes")
            text = file.read_text()
            content = json.loads(text)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError(f"Expected a {kind.what} in {file.parent} (got no {file.name}): {kind.origin}") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"Expected JSON in {file} (got: {error}): restore it, or {kind.remedy}") from error
        try:
            if content.pop("format") != f"pyg_dist {kind.what}":
                raise ValueError(f"no manifest of a {kind.what}")
            version = content.pop("version")
            if version != kind.version:
                raise StoreError(
                    f"Expected a {kind.what} of version {kind.version} in {file.parent} (got {version!r}): write it "
                    f"again"
                )
            digest = content.pop("digest")
            made = cls.of(content, digest)
            if made.to_json() != text:
                raise ValueError("it is not as it was written: it was altered")
            return made
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"Expected the manifest of a {kind.what} in {file} (got {type(error).__name__}: {error}): restore it, "
                f"or {kind.remedy}"
            ) from error
