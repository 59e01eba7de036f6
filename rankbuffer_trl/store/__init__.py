"""The buffers of a run on disk: the store, its SQLite file, where a run keeps it, and its export."""

from .buffer_store import STORE_FILE, BufferStore
from .database import StoreError
from .places import DUEL_FILE, FOLDER, LIVE_STORE, copy_live, read_store, report_folder
