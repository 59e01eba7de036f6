"""Change one thing in a file at a time, and tell which changes the tests notice: how much do shorter tests still hold?

    make mutants FILE=rankbuffer_trl/buffer.py TESTS=tests/test_buffer.py
    python checks/mutants.py rankbuffer_trl/buffer.py --tests tests/test_buffer.py --sample 40 --seed 1

A mutant is one change: a comparison turned, `and` for `or`, a number one higher or lower, a text changed, a condition
forced, a `return` without its value, a `raise` left out. It is killed if a test fails or hangs. The tests run in a
copy of the repository, so the file itself is never touched. A mutant that survives is a missing test, or a change
that means the same.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
}  # fmt: skip
LIBRARIES = (
    "torch",
    "transformers",
    "datasets",
    "trl",
    "trl.trainer.grpo_trainer",
    "hypothesis",
    "openai",
    "aiohttp.web",
)
SKIPPED = ("node_modules", ".git", "runs", ".venv*", "__pycache__", ".*_cache", ".hypothesis")


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the changes of one node: a description and the changed node."""

    def changed(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=[operator]) if type(operator) in TURNED:
            yield "comparison", changed(ops=[TURNED[type(operator)]()])
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in TURNED:
            yield "operator", changed(op=TURNED[type(operator)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not left out", operand
        case ast.Constant(value=bool(value)):
            yield "truth value", changed(value=not value)
        case ast.Constant(value=int(value)):
            yield "number + 1", changed(value=value + 1)
            yield "number - 1", changed(value=value - 1)
        case ast.Constant(value=float(value)):
            yield "number doubled", changed(value=2 * value + 0.1)
        case ast.Constant(value=str(value)) if value:
            yield "text", changed(value=value + "XX")
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Constant):
            yield "condition False", changed(test=ast.Constant(False))
            yield "condition True", changed(test=ast.Constant(True))
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "returns None", changed(value=ast.Constant(None))
        case ast.Raise():
            yield "raise left out", ast.copy_location(ast.Pass(), node)


class Replace(ast.NodeTransformer):
    """Put one node of a tree in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def read_only(tree: ast.AST) -> set[int]:
    """Return the ids of nodes that are not worth a change: docstrings, annotations, texts of errors."""
    found: set[int] = set()
    for node in ast.walk(tree):
        unread: list[ast.AST | None] = []
        match node:
            case ast.Expr(value=ast.Constant()):
                unread = [node]
            case ast.AnnAssign() | ast.arg():
                unread = [node.annotation]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                unread = [node.returns]
            case ast.Raise(exc=ast.Call(args=arguments)):
                unread = list(arguments)
            case ast.JoinedStr():
                unread = [value for value in node.values if isinstance(value, ast.Constant)]
        found.update(id(part) for each in unread if each is not None for part in ast.walk(each))
    return found


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Return the line, the description and the text of every mutant of a module."""
    tree, made = ast.parse(source), []
    skipped = read_only(tree)
    for node in [node for node in ast.walk(tree) if id(node) not in skipped]:
        for description, changed in changes(node):
            Replace(node, changed).visit(tree)
            made.append((node.lineno, description, ast.unparse(ast.fix_missing_locations(tree))))
            Replace(changed, node).visit(tree)
    return made


def load_libraries() -> None:
    """Load what the tests load of others, so that a forked run does not: seconds for each mutant."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def why_failed(tests: list[str], folder: Path, timeout: float) -> str | None:
    """Run the tests in a folder, in a fork. Return the end of their output if they fail, `None` if they pass."""
    log = folder / "mutants.log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            with log.open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.chdir(folder)
            sys.path[:0] = paths = [str(folder), str(folder / "tests")]
            os.environ["PYTHONPATH"] = ":".join(paths)
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *tests]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + timeout
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # what the tests have started, too
        os.killpg(child, signal.SIGKILL)
    if not done[0]:
        os.waitpid(child, 0)
        return f"they took more than {timeout:g} s"
    return log.read_text(errors="replace")[-3000:] if done[1] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the module to change")
    parser.add_argument("--tests", nargs="+", required=True, help="files or ids for pytest")
    parser.add_argument("--sample", type=int, default=40, help="number of mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a run counts as killed")
    arguments = parser.parse_args()
    path = arguments.file.resolve().relative_to(ROOT)
    source = (ROOT / path).read_text()
    every = mutants(source)
    drawn = random.Random(arguments.seed).sample(every, min(arguments.sample, len(every)))
    load_libraries()
    with tempfile.TemporaryDirectory() as scratch:
        copied = Path(scratch) / "repository"
        shutil.copytree(ROOT, copied, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
        if failure := why_failed(arguments.tests, copied, arguments.timeout):
            sys.exit(f"{failure}\nthe tests fail without a change")
        survived = 0
        for line, description, text in sorted(drawn):
            (copied / path).write_text(text)
            lives = why_failed(arguments.tests, copied, arguments.timeout) is None
            survived += lives
            print(f"{'SURVIVED' if lives else 'killed  '} {path}:{line} {description}", flush=True)
        print(f"{len(drawn) - survived} of {len(drawn)} killed ({len(every)} possible)")


if __name__ == "__main__":
    main()
