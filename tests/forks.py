"""Processes for tests that need many of them: forked from one parent that has imported everything, which takes longer
than what they do.

The parent must neither train nor read data, since threads do not survive a fork.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path


def fork(work: Callable[[], object], log: Path, **environment: object) -> int:
    """Do `work` in a new process, whose output goes to the end of `log`; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {name: str(value) for name, value in environment.items()}
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo's threads sometimes abort an interpreter that exits the usual way


def wait(pids: Sequence[int], timeout: float) -> list[int]:
    """Exit codes, negative for a signal. All are killed when one fails, or at the deadline."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
