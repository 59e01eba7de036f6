"""What the runs of a folder have spent on their judge: a record that only grows, beside the live store.

A resume takes the store back to a checkpoint, and its ledger too. A start without a checkpoint begins with an empty
store. The tokens were paid for nevertheless. So each reply is added here before anything else is done with it, and
every run of the folder goes on from here, until a person deletes the file. A kill at any moment loses the requests
that have no reply yet. A power cut can also lose the replies since the last commit, which waits for the disk.
"""

import hashlib
import os
import re
from pathlib import Path

from ..judge import Totals, Usage
from . import history
from .database import StoreError

LINE = re.compile(rb"[0-9a-f]{64} (\d{20}) (\d{20}) (\d{20})\n")  # of one length: it is written over the last one


class Spending:
    """The tokens that the replies of a judge have cost in a folder.

    Args:
        live (`Path`):
            The live store. The record beside it has one line: the run that wrote it, as a digest of its id, and the
            tokens (prompt, cached, completion).
    """

    def __init__(self, live: Path):
        self.path = live.with_suffix(".spent")
        self._run = ""
        self._recorded = self._ledger = Usage()
        self._file: int | None = None

    def begin(self, store: history.Readable | None) -> "Spending":
        """Go on from the record, and at least from the ledger of a store. `None` is a run that has no store yet.

        Raises:
            [`StoreError`]: if the record is damaged.
        """
        self._recorded, self._ledger = self._read(), Usage()
        if store is not None:
            # An id may come from elsewhere and be any text.
            self._run = hashlib.sha256(history.run_id(store).encode()).hexdigest()
            total = history.totals(store, "train") + history.totals(store, "eval")
            self._ledger = Usage(total.spent_prompt_tokens, total.spent_cached_tokens, total.spent_completion_tokens)
        return self

    def _read(self) -> Usage:
        content = self.path.read_bytes() if self.path.is_file() else b""
        if not content:  # made by a run that was killed in that moment
            return Usage()
        if not (found := LINE.fullmatch(content)):
            raise StoreError(f"{self.path} is damaged: delete it, and the run counts the calls of its ledger alone")
        return Usage(*map(int, found.groups()))

    def add(self, tokens: Usage) -> None:
        """Add the tokens of a reply."""
        self._recorded, self._ledger = self._recorded + tokens, self._ledger + tokens
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        counts = " ".join(f"{count:020d}" for count in self._recorded)
        os.pwrite(self._file, f"{self._run} {counts}\n".encode(), 0)  # from here on, a kill does not lose them

    @property
    def totals(self) -> Totals:
        """The tokens so far, as totals of which the other fields are 0."""
        prompt, cached, completion = map(max, self._recorded, self._ledger)
        return Totals(spent_prompt_tokens=prompt, spent_cached_tokens=cached, spent_completion_tokens=completion)

    def sync(self) -> None:
        """Wait until the record is on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
