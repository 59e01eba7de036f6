"""The order in which a judge sees candidates: random, but the same in every rerun.

"Candidate presentation order is randomized with a deterministic hash of the global seed, query, training step, and
candidate identifiers" (paper, appendix "Baseline Implementation Details").
"""

import hashlib
from collections.abc import Iterable

from ..groups import RolloutGroup


def shuffle(ids: Iterable[object], seed: int, group: RolloutGroup, purpose: object = "") -> list:
    """Return `ids` in the order of the hashes of (seed, query, step, purpose, id).

    Args:
        purpose (*optional*):
            A name for the shuffle. Two shuffles of the same candidates with different purposes differ.
    """
    common = f"{seed}/{group.query.id}/{group.step}/{purpose}"
    return sorted(ids, key=lambda i: hashlib.sha256(f"{common}/{i}".encode()).digest())
