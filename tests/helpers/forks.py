"""Forked processes for tests that need many processes.

The parent imports everything once, because the imports take longer than the work of a process. The parent must neither
train nor read data, because threads do not survive a fork.
"""

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from helpers.ports import free_ports

LONGEST = 120  # seconds after which processes count as hung


def get_ready(*modules: str) -> None:
    """Do once what each process would do again: load modules, and go through their objects to collect garbage."""
    for name in modules:
        import_module(name)
    with suppress(ImportError):  # takes half a second, and is kept
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("qwen3")
    gc.collect()
    gc.freeze()


def fork(work: Callable[[], object], log: Path, **environment: object) -> int:
    """Do `work` in a new process, append its output to `log` and return its process id."""
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
        os._exit(status)  # the threads of gloo sometimes abort an interpreter that exits the usual way


def wait(pids: Sequence[int], alone: bool = False) -> list[int]:
    """Wait for processes and return their exit codes, negative for a signal.

    If one of them hangs, all others are killed. The same if one fails, unless they have to end `alone`.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LONGEST
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if (any(codes.values()) and not alone) or time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def run_ranks(
    processes: int, work: Callable[[], object], log: Path, alone: bool = False, **environment: object
) -> list[int]:
    """Do `work` in each of some processes, in the environment that torchrun would set. Return their exit codes.

    `alone` is that of `wait`.
    """
    if processes > 1:
        environment |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {} for rank in range(processes)]
    return wait([fork(work, log, **environment, **rank) for rank in ranks], alone)
