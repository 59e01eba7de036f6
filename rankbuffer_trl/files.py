"""Write files so that a crash leaves the old file or the new one, and never a part of a file. Tell files apart."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLE = 2**16  # bytes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, and replace `path` by the draft once all of the draft is on the disk.

    If the block raises, `path` stays as it was and the draft is deleted.

    Example:

    ```python
    with replacing(Path("summary.json")) as draft:
        draft.write_text("{}")
    ```
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> list[int | str]:
    """Return size and SHA-256 of a file as a list that JSON can hold. Of a large file, only samples are digested.

    The samples are 64 KiB at each sixteenth of the file and at its end, which tell the weights of two steps apart.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.sha256()
        for start in (*range(0, size, max(size // 16, SAMPLE)), max(size - SAMPLE, 0)):
            file.seek(start)
            found.update(file.read(SAMPLE))
        return [size, found.hexdigest()]
