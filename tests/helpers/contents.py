"""What a store holds, in a form that tests compare."""

from collections.abc import Collection, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import read_store

TABLES = ("responses", "buffers", "groups", "calls")


def contents(
    store: BufferStore | Path, tables: Iterable[str] = TABLES, without: Collection[str] = ("seconds",)
) -> dict[str, list[tuple]]:
    """Return the rows of a store by table, sorted: all that a second run must reproduce.

    Args:
        store (`BufferStore` or `Path`):
            An open store, or anything that `read_store` takes.
        tables (`Iterable[str]`, *optional*, defaults to all):
            The tables to read.
        without (`Collection[str]`, *optional*, defaults to `("seconds",)`):
            Columns to leave out. The seconds of a call differ between two runs and agree between two copies.
    """
    if isinstance(store, Path):
        with closing(read_store(store)) as reading:
            return contents(reading, tables, without)
    found = {}
    for table in tables:
        columns = [row[1] for row in store.rows(f"PRAGMA table_info({table})")]
        kept = ",".join(column for column in columns if column not in without)
        found[table] = sorted(store.rows(f"SELECT {kept} FROM {table}"))
    return found


everything = partial(contents, without=())
