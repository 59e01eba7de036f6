"""Where buffers live: the store, its SQLite file, its segments in checkpoints, its export."""

from .buffer_store import BufferStore
from .database import StoreError

__all__ = ["BufferStore", "StoreError"]
