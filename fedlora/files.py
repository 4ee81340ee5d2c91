"""Small files of a run folder that others read while they are written."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write UTF-8 text under another name, then move it into place: a reader sees the old file or the new one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
