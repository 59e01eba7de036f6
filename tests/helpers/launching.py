"""Run a script of recipes/launch with stand-ins for its programs, and record what it starts and what it leaves."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 60
KEYS = ("TEST_API_KEY", "TEST_SECRET")
KEPT = ("CUDA_VISIBLE_DEVICES", "VLLM_SERVER_DEV_MODE", "VLLM_HOST_IP", "SLURM_NODEID", *KEYS)
STAND_IN = '''#!{python} -S
"""Notes what it was called with; then does what the program of its name would do, as far as the scripts can tell."""
import json, os, signal, subprocess, sys, time
from pathlib import Path

name, folder = Path(sys.argv[0]).name, Path(os.environ["STAND_INS"])


def note(name, **more):
    kept = {{key: os.environ[key] for key in {kept} if key in os.environ}}
    line = json.dumps({{"name": name, "argv": sys.argv[1:], "env": kept, "pid": os.getpid(), **more}}) + "\\n"
    file = os.open(folder / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())


def worker(name, saves):
    """A child, as vLLM's engine or a training process. The latter repeats its signal to the script, as an init may."""
    script = os.getppid()
    if pid := os.fork():
        return pid
    def end(*_):
        print("the checkpoint is written", flush=True)
        note(name, got="SIGTERM")
        try:
            os.kill(script, signal.SIGTERM)
        finally:
            os._exit(0)
    if saves:
        signal.signal(signal.SIGTERM, end)
    note(name)
    (folder / f"{{name}}-{{os.getpid()}}").touch()
    while True:
        signal.pause()


if name != "curl":
    note(name)
if name == "vllm":
    port = sys.argv[sys.argv.index("--port") + 1]
    if os.environ.get("FAILS") == port:
        sys.exit("out of memory, of course")
    if os.environ.get("STOLEN") == port:  # the port is another server's, which answers once this one has ended
        parent = os.getpid()
        if os.fork():
            sys.exit("address already in use")
        while os.getppid() == parent:
            time.sleep(0.01)
        (folder / f"ready-{{port}}").write_text(json.dumps({{"data": [{{"id": sys.argv[2]}}]}}))
        os._exit(0)
    worker("engine", saves=False)
    (folder / f"ready-{{port}}").write_text(json.dumps({{"data": [{{"id": sys.argv[2]}}]}}))
    signal.pause()
elif name == "curl":
    ready = folder / f"ready-{{sys.argv[-1].rsplit(':', 1)[1].split('/')[0]}}"
    if not ready.exists() or (ready.read_text() == "401" and "--fail" in sys.argv):
        sys.exit(22 if ready.exists() else 7)
    if sys.argv[-1].endswith("/v1/models"):
        print(ready.read_text())
elif name == "trl":
    words = ["vllm", "serve", sys.argv[sys.argv.index("--model") + 1], *sys.argv[2:]]
    os.execvp("vllm", words)
elif name == "accelerate":
    signal.signal(signal.SIGTERM, lambda *_: (note("accelerate", got="SIGTERM"), os._exit(143)))
    if told := os.environ.get("LOSES_JUDGE"):  # as a training without its judge does, the first times
        lost = folder / f"lost-{{os.environ.get('SLURM_NODEID')}}"  # each node counts its own
        lost.write_text("x" * (1 + (len(lost.read_text()) if lost.exists() else 0)))
        if len(lost.read_text()) <= int(told):
            resume = " --resume_from_checkpoint true" * (lost.read_text() == "x")  # the others end before a step
            Path(os.environ["RANKBUFFER_STATUS_FILE"]).write_text(f"75{{resume}}\\n")
            sys.exit(1)
    if "TRAINS" in os.environ:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker("rank", saves=True), 0)[1]))
elif name == "python":
    checks = "generate_" in sys.argv[1] and sys.argv[-1] == "--dry_run"
    sys.exit(int(os.environ.get("REFUSES_OPTIONS" if checks else "REFUSES", 0)))
elif name == "scontrol" and sys.argv[1] == "show":
    last = int(os.environ["SLURM_JOB_NODELIST"].strip("n[]").split("-")[1])
    print(*(f"n{{i}}" for i in range(last + 1)), sep="\\n")
elif name == "srun":
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("--"))
    given = dict(option.split("=", 1) for option in options[: first - 1] if "=" in option)
    command, nodes = sys.argv[first:], given["--nodelist"].split(",")
    if command[0] == "hostname":
        print(os.environ.get("ADDRESS", "10.0.0.") + nodes[0][1:])
        sys.exit()
    tasks = [
        subprocess.Popen(command, env=os.environ | {{"SLURM_NODEID": str(i), "SLURM_NNODES": str(len(nodes))}})
        for i in range(len(nodes))
    ]
    signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])  # as a real one does
    signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
    sys.exit(max(task.wait() for task in tasks))
'''


@dataclass
class Call:
    """The start of a stand-in."""

    name: str
    argv: list[str]
    env: dict[str, str]
    pid: int
    got: str = ""

    def value(self, option: str) -> str:
        """Return the value of an option."""
        return self.argv[self.argv.index(option) + 1]


@dataclass
class Launch:
    """The outcome of a script: exit status, output, starts in order, processes that are left."""

    status: int
    output: str
    calls: list[Call]
    left: list[Call]

    def of(self, name: str) -> list[Call]:
        """Return the starts of one program."""
        return [call for call in self.calls if call.name == name and not call.got]


def alive(pid: int) -> bool:
    """Tell whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_calls(folder: Path) -> list[Call]:
    path = folder / "calls"
    return [Call(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def launch(
    folder: Path,
    script: str,
    *arguments: str,
    then: Callable[[list[Call]], bool] | None = None,
    there: Mapping[int, str] = {},
    sent: int = signal.SIGTERM,
    piped: bool = False,
    without: tuple[str, ...] = (),
    cwd: Path = ROOT,
    **environment: str,
) -> Launch:
    """Run a script of recipes/launch to its end, with stand-ins, notes and logs in a new folder below `folder`.

    When `then` holds for the calls so far, the script's process group gets the signal `sent`. With `piped`, the
    program that reads the output ends just before. `there` has the models of servers that answer already, by port.
    The commands `without` are not there.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))
    commands = folder / "bin"
    commands.mkdir()
    names = {"vllm", "curl", "accelerate", "python", "srun", "scontrol", "hf", "trl", "rankbuffer-data"}
    for name in names - {*without}:
        (commands / name).write_text(STAND_IN.format(python=sys.executable, kept=KEPT))
        (commands / name).chmod(0o755)
    for port, model in there.items():
        (folder / f"ready-{port}").write_text("401" if model == "401" else json.dumps({"data": [{"id": model}]}))
    settings = {"LOGS": str(folder / "logs"), "POLL_SECONDS": "0.1", "START_SECONDS": "30", "STOP_SECONDS": "20"}
    settings |= {"STAND_INS": str(folder), "PATH": f"{commands}:{os.environ['PATH']}"} | environment
    with (folder / "output").open("w") as output:
        reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output)
        run = subprocess.Popen(
            ["/usr/bin/env", "--default-signal=INT,HUP", "bash", ROOT / "recipes" / "launch" / script, *arguments],
            env=os.environ | settings, cwd=cwd, stdin=subprocess.DEVNULL, stdout=reader.stdin if piped else output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        reader.stdin.close()
    deadline = time.monotonic() + SECONDS
    try:
        while then and not then(read_calls(folder)):
            assert run.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.05)
        if then:
            reader.kill()
            reader.wait()
            os.killpg(run.pid, sent)
        run.wait(timeout=max(deadline - time.monotonic(), 1))
        if sent == signal.SIGKILL:  # the rest ends after the script
            while any(alive(call.pid) for call in read_calls(folder)) and time.monotonic() < deadline:
                time.sleep(0.05)
        calls = read_calls(folder)
        left = [call for call in calls if alive(call.pid)]
    finally:
        for pid in {run.pid, *(call.pid for call in read_calls(folder))}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.wait()
        reader.kill()
        reader.wait()
    return Launch(run.returncode, (folder / "output").read_text(), calls, left)
