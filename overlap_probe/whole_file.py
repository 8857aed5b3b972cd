"""Writes a file whole or not at all: the one way in which this package replaces a file.

The idea: the content goes to a temporary folder beside the file and is renamed when it is complete, so a reader never
sees half a file, and a failure leaves what was there before. Only a regular file can be replaced: a link keeps pointing
to the file that is, and what is none (a pipe, a terminal, a device) stays and gets the complete content written to it.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, in an empty folder; what is there when the block ends becomes the content of ``path``.

    What else the block puts into that folder goes with it.

    A process that is killed leaves that folder: see `remove_unfinished`.

    Raises OSError where that cannot be; then, as when the block raises, ``path`` is as it was.
    """
    target = Path(path)
    stays = target.exists() and not target.is_file()
    real = Path(os.path.realpath(target))
    with tempfile.TemporaryDirectory(prefix=f".{real.name[:100]}.", dir=None if stays else real.parent) as folder:
        unfinished = Path(folder) / "unfinished"
        yield unfinished
        if stays:
            with unfinished.open("rb") as content, target.open("wb") as out:
                shutil.copyfileobj(content, out)
        else:
            os.replace(unfinished, real)


def remove_unfinished(path: Path) -> None:
    """Remove what a process that was killed while it wrote ``path`` has left beside it."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*"):
        shutil.rmtree(folder, ignore_errors=True)
