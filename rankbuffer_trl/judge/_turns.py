"""Turns at a server: as many requests are in flight as it answers in time."""

import asyncio
import logging
import math
import time

logger = logging.getLogger(__name__)

LATE = 4  # a round with more than one late answer in so many is too much for the server
MOST_ROUNDS = 16  # in time, before as many are in flight again as were too much the last time
LINE_SECONDS = 60.0  # between two lines in the log


class Turns:
    """A limit of what is in flight. It falls to half after a round of late answers, and grows after one in time.

    A round is as many answers as may be in flight.

    Args:
        most (`int`):
            Requests that may be in flight at once.
        name (`str`, *optional*):
            What the log calls the server.
    """

    def __init__(self, most: int, name: str = "the server"):
        self.most = self.now = most
        self.name = name
        self.cuts = 0
        self._slots = asyncio.Semaphore(most)
        self._debt = 0  # slots that are in use and not free afterwards
        self._late = self._answers = self._rounds = 0  # the first two of this round; the rounds in time since a change
        self._too_many, self._needed, self._grown = most, 1, False
        self._logged_at = -math.inf

    async def __aenter__(self) -> None:
        await self._slots.acquire()

    async def __aexit__(self, *error: object) -> None:
        if self._debt:
            self._debt -= 1
        else:
            self._slots.release()

    async def again(self) -> None:
        """Wait for a new turn before a request is sent again, if too many are in flight."""
        if self._debt:
            self._debt -= 1
            try:
                await self._slots.acquire()
            except BaseException:  # there is no slot to give back
                self._debt += 1
                raise

    def ended(self, cuts: int, late: bool) -> None:
        """Count an answer, or that none came in time. `cuts` is the number of `cuts` when the request was sent."""
        if cuts != self.cuts:  # it was sent before the last cut, so it says nothing of the new limit
            return
        self._late, self._answers = self._late + late, self._answers + 1
        if self._late * LATE > self.now > 1:
            self._cut()
        elif self._answers >= self.now:
            self._rounds += not self._late
            self._late = self._answers = 0
            if self._rounds and self.now >= self._too_many:
                self._needed = 1
            more = min(self.now + max(1, self.most // 16), self.most)
            if more > self.now and self._rounds >= (self._needed if more >= self._too_many else 1):
                for _ in range(more - self.now):
                    self._slots.release()
                self.now, self._rounds, self._grown = more, 0, True

    def _cut(self) -> None:
        if self._grown:
            # Each attempt at what was too much waits twice as long.
            self._needed, self._grown = min(2 * self._needed, MOST_ROUNDS), False
        self.cuts, self._too_many, before = self.cuts + 1, self.now, self.now
        self.now = max(1, before // 2)
        self._debt += before - self.now
        self._late = self._answers = self._rounds = 0
        if time.monotonic() >= self._logged_at + LINE_SECONDS:
            self._logged_at = time.monotonic()
            text = "%s does not answer %d requests at once in time: at most %d are in flight now, more again later"
            logger.warning(text, self.name, before, self.now)
