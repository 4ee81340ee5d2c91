"""UTF-8 only, whatever the locale says; other encodings are named, content is never shown."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedlora.errors import DataError

BOM: Final = b"\xef\xbb\xbf"
_UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")


def decode(raw: bytes) -> str:
    """Return UTF-8 bytes as text.

    Raises:
        ValueError: saying what is wrong, without the bytes.
    """
    if b"\x00" in raw:
        raise ValueError("has NUL bytes (a UTF-16 or binary file?); convert the file to UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError("is not valid UTF-8; convert the file to UTF-8") from fault


def check_start(path: Path, start: bytes) -> None:
    """Refuse a file that starts with a UTF-16 mark.

    Raises:
        DataError: with the command that converts it.
    """
    if start.startswith(_UTF16_MARKS):
        raise DataError(f"{path}: is UTF-16; convert the file to UTF-8 (iconv -f UTF-16 -t UTF-8)")
