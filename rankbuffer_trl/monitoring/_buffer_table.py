"""The export of buffers as a table that `datasets.load_dataset("parquet", data_files=...)` opens.

The table has one row per anchor of each query's newest buffer. Rows follow the query ids, and within a query the rank:

| column | type | what it is |
|---|---|---|
| `query_id` | string | the query |
| `rank` | int32 | place in the buffer, from 0 (worst) |
| `size` | int32 | how many anchors the buffer has |
| `text` | string | the response |
| `source` | string | where it came from: `initial`, `bootstrap`, `left`, `right`, `refine`, `selected`, `candidate` |
| `epoch` | int32 | the epoch in which it became an anchor, from 0 |
| `inactive` | int32 | `h`: epochs in a row in which no rollout was placed next to it |
| `anchor_id` | string | unique within the query: `initial-<i>`, or `<step>-<rollout>` |
| `visits` | int32 | how many groups of the query have been ranked |
"""

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet

from ..files import replacing
from ..store._buffer_store import BufferStore
from ..store._database import StoreError
from ._non_fatal import non_fatal

TABLE_FILE = "buffers.parquet"
BUFFER_COLUMNS = ("query_id", "rank", "size", "text", "source", "epoch", "inactive", "anchor_id", "visits")
INTEGER_COLUMNS = ("rank", "size", "epoch", "inactive", "visits")
TABLE_SCHEMA = pyarrow.schema(
    [(name, pyarrow.int32() if name in INTEGER_COLUMNS else pyarrow.string()) for name in BUFFER_COLUMNS]
)
QUERIES = 1000  # in memory at once


@non_fatal(TABLE_FILE)
def write_table(store: BufferStore, folder: Path) -> None:
    """Write the table of the buffers into a folder, if the method has any."""
    (folder / TABLE_FILE).unlink(missing_ok=True)  # else the table of an earlier step would pass for this one
    if store.query_ids(limit=1):
        export_buffers(store, folder / TABLE_FILE)


def export_buffers(store: BufferStore, path: str | os.PathLike) -> int:
    """Write all buffers to a Parquet file and return the number of rows.

    It reads every buffer, so it is meant for the end of a run and for pushes.

    Raises:
        [`StoreError`]: if the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    try:
        with replacing(path) as draft, pyarrow.parquet.ParquetWriter(draft, TABLE_SCHEMA, compression="zstd") as file:
            last = ""
            while ids := store.query_ids(after=last, limit=QUERIES):
                rows = [row for id in ids for row in buffer_rows(store, id)]
                file.write_table(pyarrow.Table.from_pylist(rows, schema=TABLE_SCHEMA))
                written += len(rows)
                last = ids[-1]
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return written


def buffer_rows(store: BufferStore, query_id: str) -> list[dict]:
    buffer = store.load(query_id)
    if buffer is None:
        return []
    rows = (
        (query_id, rank, len(buffer), anchor.text, anchor.source, anchor.epoch, anchor.h, anchor.id, buffer.visits)
        for rank, anchor in enumerate(buffer.anchors)
    )
    return [dict(zip(BUFFER_COLUMNS, row, strict=True)) for row in rows]
