"""Finds what the documents show as code: commands and fenced blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted((ROOT / "overlap_probe" / "docs").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Every `overlap_probe ...`, as words: in indented lines, in fenced blocks and in running text."""
    lines = re.findall(r"^(?: {4,}|\$ |\s*(?:- )?run: )(overlap_probe .*)$", text, re.MULTILINE)
    spans = re.findall(r"`(overlap_probe [a-z]+ [^`]+)`", text)
    return [shlex.split(line, comments=True) for line in (*lines, *spans)]
