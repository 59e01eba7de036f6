"""What a run has spent on its judge: a record that only grows, beside the live store.

A resume takes the store back to a checkpoint, and its ledger too. The tokens were paid for nevertheless. So each reply
is added here before anything else is done with it. A kill at any moment loses the requests that have no reply yet. A
power cut can also lose the replies since the last commit, which waits for the disk.
"""

import hashlib
import os
import re
from pathlib import Path

from ..judge import Totals, Usage
from . import numbers
from .database import StoreError

LINE = re.compile(rb"([0-9a-f]{64}) (\d{20}) (\d{20}) (\d{20})\n")  # of one length: it is written over the last one


class Spending:
    """The tokens that the replies of a run's judge have cost.

    Args:
        live (`Path`):
            The live store. The record beside it has one line: the run, as a digest of its id, and the tokens (prompt,
            cached, completion).
    """

    def __init__(self, live: Path):
        self.path = live.with_suffix(".spent")
        self._run = ""
        self._tokens = Usage()
        self._file: int | None = None

    def begin(self, store: numbers.Readable) -> "Spending":
        """Go on with the run whose rows a store holds: from its record, and at least from its ledger.

        Raises:
            [`StoreError`]: if the record is damaged.
        """
        # An id may come from elsewhere and be any text.
        self._run = hashlib.sha256(numbers.run_id(store).encode()).hexdigest()
        total = numbers.totals(store, "train") + numbers.totals(store, "eval")
        ledger = (total.spent_prompt_tokens, total.spent_cached_tokens, total.spent_completion_tokens)
        self._tokens = Usage(*map(max, self._recorded(), ledger))
        return self

    def _recorded(self) -> Usage:
        """Return what the file records for this run: nothing if there is no file, or it is that of another run."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        if not content:  # made by a run that was killed in that moment
            return Usage()
        if not (found := LINE.fullmatch(content)):
            raise StoreError(f"{self.path} is damaged: delete it, and the run counts the calls of its ledger alone")
        return Usage(*map(int, found.groups()[1:])) if found[1].decode() == self._run else Usage()

    def forget(self) -> None:
        """Count from 0, for a new run."""
        self._tokens = Usage()

    def add(self, tokens: Usage) -> None:
        """Add the tokens of a reply. When this returns, a kill of the process does not lose them."""
        self._tokens += tokens
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        counts = " ".join(f"{count:020d}" for count in self._tokens)
        os.pwrite(self._file, f"{self._run} {counts}\n".encode(), 0)

    @property
    def totals(self) -> Totals:
        """The tokens so far, as totals of which the other fields are 0."""
        prompt, cached, completion = self._tokens
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
