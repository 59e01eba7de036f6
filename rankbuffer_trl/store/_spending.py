"""What the runs of a folder have spent on their judge: a record that only grows, beside the live store.

A resume takes the store back to a checkpoint, and its ledger too. A start without a checkpoint begins with an empty
store. The tokens were paid for nevertheless. So each reply is added here before anything else is done with it, and
every run of the folder goes on from here, until a person deletes the file. A kill at any moment loses the requests
that have no reply yet. A power cut can also lose the replies since the last commit, which waits for the disk.
"""

import hashlib
import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from ..judge import Totals, Usage
from . import history
from ._database import StoreError

logger = logging.getLogger(__name__)

# The run as a digest of its id, and the tokens: prompt, cached, completion.
# Of one length, because it is written over the last one. No run takes 10^19 tokens; one more digit could follow them.
LINE = re.compile(rb"[0-9a-f]{64} (0\d{19}) (0\d{19}) (0\d{19})\n")
WRITING = threading.Lock()  # two stores of a process may have one folder, and each has a judge's thread


class Spending:
    """The tokens that the replies of a judge have cost in a folder."""

    def __init__(self, live: Path):
        self.path = live.with_suffix(".spent")  # beside the store, which a resume takes back
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
        if not (match := LINE.fullmatch(content)):
            raise StoreError(f"{self.path} is damaged: delete it, and the run counts the calls of its ledger alone")
        return Usage(*map(int, match.groups()))

    def add(self, tokens: Usage) -> None:
        """Add the tokens of a reply."""
        with WRITING:
            if self._file is not None and not self._in_place(self._file):
                logger.warning("%s was replaced or deleted while this run used it: it is written again", self.path)
                self.close()
            if self._file is None:  # here and not at the start, so that reading a store makes no file
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            # Another store of this process may have added to it.
            match = LINE.fullmatch(os.pread(self._file, 200, 0))
            recorded = Usage(*map(max, self._recorded, map(int, match.groups()))) if match else self._recorded
            self._recorded, self._ledger = recorded + tokens, self._ledger + tokens
            counts = " ".join(f"{count:020d}" for count in self._recorded)
            os.pwrite(self._file, f"{self._run} {counts}\n".encode(), 0)  # from here on, a kill does not lose them

    def _in_place(self, file: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), self.path.stat())
        return False

    @property
    def totals(self) -> Totals:
        """The tokens so far, as totals of which the other fields are 0."""
        # A copied folder may have only one of the two.
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
