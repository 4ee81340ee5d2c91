"""Ready-made factory sources (`data.source.kind: factory`) for text in well-known forms."""

from __future__ import annotations

import re
from pathlib import Path

from fedlora.data.rows import Row
from fedlora.errors import DataError

_SPEAKER = re.compile(r"^([^\n:]{1,80}):[ \t]*$", flags=re.MULTILINE)


def speaker_blocks(path: str, min_speeches: int = 1, part: str = "all", test_every: int = 10) -> list[Row]:
    """Read a play in `SPEAKER:` blocks as records with the columns text, speaker and speech.

    Args:
        path: UTF-8 text; each block is a line with the name and a colon, then the words.
        min_speeches: leave out speakers with fewer.
        part: "train", "test" (each speaker's every `test_every`-th speech) or "all".
        test_every: see `part`.

    Raises:
        DataError: if the file is missing, has no blocks, or `part` is unknown.
    """
    if part not in ("train", "test", "all"):
        raise DataError(f"speaker_blocks: part must be train, test or all, not {part!r}")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({type(fault).__name__})") from None
    pieces = _SPEAKER.split(text)
    speeches: dict[str, list[str]] = {}
    for name, words in zip(pieces[1::2], pieces[2::2], strict=True):
        if words.strip():
            speeches.setdefault(name.strip(), []).append(words.strip())
    if not speeches:
        raise DataError(f"{path}: no 'SPEAKER:' blocks found")
    rows: list[Row] = []
    for speaker, words_of in sorted(speeches.items()):
        if len(words_of) < min_speeches:
            continue
        for number, words in enumerate(words_of, start=1):
            is_test = number % test_every == 0
            if part == "all" or is_test == (part == "test"):
                rows.append({"text": words, "speaker": speaker, "speech": number})
    return rows
