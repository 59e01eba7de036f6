"""The buffers of a run on disk: the store, its SQLite file, where a run keeps it, and its export."""

from ._buffer_store import STORE_FILE, BufferStore
from ._database import StoreError
from ._places import COMPARE_FILE, DUEL_FILE, FOLDER, LIVE_STORE, copy_live, read_store, report_folder
