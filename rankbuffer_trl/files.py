"""Write files so that a crash leaves the old file or the new one, and never a part of a file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
