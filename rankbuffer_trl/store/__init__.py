"""The buffers of a run on disk: the store, its SQLite file, where a run keeps it, and its export."""

from .buffer_store import BufferStore
from .database import StoreError

__all__ = ["BufferStore", "StoreError"]
