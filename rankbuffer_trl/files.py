"""Write files so that a crash leaves the old file or the new one. Tell files apart, and lock them."""

import errno
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import SettingsError

SAMPLED_BYTES = 2**16  # bytes
ABANDONED = 3600  # seconds since the last write of a draft
FLOCK = "hhqqi0q"  # a lock of a whole file, as C has it: 0q fills up the end


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
    for abandoned in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - abandoned.stat().st_mtime > ABANDONED:  # a killed program has left it
                abandoned.unlink()
    # One of its own: two programs that write at once leave the whole file of one of them.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        sync(draft)  # else a power cut after the rename could leave an empty file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        # A lone surrogate of a model becomes a question mark.
        draft.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems of a network take none for a folder; what they have written is a matter of their server.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> list[int | str]:
    """Return size and SHA-256 of a file as a list that JSON can hold. Of a large file, only samples are digested."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        # 64 KiB at each sixteenth and at the end, which tell the weights of two steps apart.
        for start in (*range(0, size, max(size // 16, SAMPLED_BYTES)), max(size - SAMPLED_BYTES, 0)):
            file.seek(start)
            digest.update(file.read(SAMPLED_BYTES))
        return [size, digest.hexdigest()]


def refuse_file(key: str, folder: str | os.PathLike | None) -> None:
    """Refuse a setting that names a folder, and holds a file or what lies below one.

    Raises:
        [`SettingsError`]: naming the setting.
    """
    path = Path(folder or ".")
    with suppress(PermissionError):  # of a folder that nobody but its owner sees into
        if any(each.is_file() for each in (path, *path.parents)):
            raise SettingsError(f"{key} {folder} is a file or lies below one: name a folder")


def free_space(folder: str | os.PathLike) -> str:
    """Return how much is free on the disk of a folder, for messages."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB"
    except OSError as error:
        return f"an unknown number of bytes ({error.strerror})"


def lock_descriptor(descriptor: int) -> None:
    """Lock an open file until it is closed in all processes that have this descriptor, or these have ended.

    Raises:
        `OSError`: `BlockingIOError` or `PermissionError`, by the system, if another has the lock.
    """
    # It works on most network file systems, and outlives a second opening of the file by this process, such as a copy
    # of the folder. The usual POSIX lock would be lost then.
    if sys.platform == "linux":  # macOS has such locks too, in another layout
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
