"""Write `docs/configuration.md` from the dataclasses and their docstrings.

    python docs/make_configuration.py

`tests/test_docs.py` fails if the page differs from the output of this program.
"""

import dataclasses
import inspect
import re
from pathlib import Path

from rankbuffer_trl.judge.config import (
    BudgetConfig,
    ClientConfig,
    FailureLimit,
    ServersConfig,
    VerdictConfig,
)
from rankbuffer_trl.rewards import find_method, method_names
from rankbuffer_trl.settings import described
from rankbuffer_trl.training import RankBufferConfig

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "configuration.md"
ENTRY = re.compile(r"^(\w+) \(`([^)]*)\):\n((?:    .*\n|\n)+)", re.MULTILINE)
JUDGE = (ServersConfig, ClientConfig, VerdictConfig, FailureLimit, BudgetConfig)
TRL = "https://huggingface.co/docs/trl/v{version}/en"
HEAD = """# Configuration

`python docs/make_configuration.py` writes this page from the dataclasses. Do not edit it by hand.

Every key can be set in a YAML file (`--config run.yaml`) or on the command line of `rankbuffer-train`, which is also
`recipes/train_rankbuffer.py`. The command line takes precedence. A file can name another file as its `base`, which is
looked up beside it, then in `recipes/`. An unknown key or a value out of range is an error before anything is loaded.
`rankbuffer-train --help` shows the keys of this page, and `--help_all` those of TRL, too.

A run also takes the keys of three classes of TRL: [`GRPOConfig`]({trl}/grpo_trainer#trl.GRPOConfig) (rollouts, batch,
objective, log, checkpoints, Hub), [`ScriptArguments`]({trl}/script_utils#trl.ScriptArguments) (data set) and
[`ModelConfig`]({trl}/model_utils#trl.ModelConfig) (policy, LoRA, quantisation). Their defaults are unchanged.
`recipes/base.yaml` has the values of the paper's runs, with the source of each value.
"""
METHODS = """## Reward methods

`method` is one of these names, or the dotted path of your own class ([how to write one](extending.md)). `method_args`
holds the arguments of the method. A method with an argument `seed` gets the `seed` of the run.
"""
NONE = ("No arguments.", "No further arguments.")


def fields(cls: type) -> list[dataclasses.Field]:
    """Return the fields that `cls` itself declares and that are arguments."""
    return [f for f in dataclasses.fields(cls) if f.init and f.name in inspect.get_annotations(cls)]


def default(field: dataclasses.Field) -> str:
    """Format the default of a field as in YAML."""
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "" if value in (None, dataclasses.MISSING) else f"`{value}`"


def table(*classes: type) -> str:
    """Build a table of the fields that classes declare."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for cls in classes:
        texts = described(cls)
        for field in fields(cls):
            kind, text = texts[field.name]
            kind = kind.split("`, ")[0].replace("`", "")
            rows.append(f"| `{field.name}` | {kind} | {default(field)} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def method_sections() -> list[str]:
    """Build a section per reward method, with its arguments in `method_args`."""
    sections = []
    for name in sorted(method_names()):
        method = find_method(name)
        summary = re.split(r"\n+(?=Args:|Raises:)", inspect.cleandoc(method.__doc__))[0]
        arguments = table(method) if fields(method) else NONE[bool(dataclasses.fields(method))]
        sections.append(f"### `method: {name}`\n\n{summary}\n\n{arguments}\n")
    return sections


def page() -> str:
    """Build the whole page."""
    version = re.search(r"^trl==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    parts = [
        HEAD.format(trl=TRL.format(version=version)),
        f"## The reward, prompts and answers, the start\n\n{table(RankBufferConfig)}\n",
        f"## The judge\n\n[`docs/judge.md`](judge.md) helps to choose.\n\n{table(*JUDGE)}\n",
        METHODS,
        *method_sections(),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
