"""Make a training set of Nectar's queries and ranked responses, without rubrics.

    python recipes/prepare_nectar.py --tokenizer Qwen/Qwen3-8B --output_file data/nectar_1000_no_rubrics.jsonl

docs/data.md says which queries are taken and why others are not. Run `generate_rubrics.py` next.
"""

import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import track

from rankbuffer_tools.batch.output import check_output, source_name
from rankbuffer_tools.batch.script import finish, run_script
from rankbuffer_tools.data import nectar
from rankbuffer_tools.data.tokens import TokenCounter
from rankbuffer_trl.data import DataError, iterate, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.settings import check_at_least, check_own_fields, documented


@documented
@dataclass
class NectarConfig:
    r"""
    Configuration of the preparation of Nectar.

    Parameters:
        dataset_name (`str`, *optional*, defaults to `"berkeley-nest/Nectar"`):
            Nectar on the Hub, or a `.jsonl` or `.parquet` file with its schema.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        streaming (`bool`, *optional*, defaults to `False`):
            Keep no copy of Nectar on disk. The same queries are taken.
        queries (`int`, *optional*, defaults to `1000`):
            Number of queries to take (paper: 1,000). 0 takes all usable ones.
        seed (`int`, *optional*, defaults to `42`):
            Seed of the random order (paper: 42).
        shuffle (`bool`, *optional*, defaults to `False`):
            Take the rows in the order of `datasets`' own `shuffle(seed=seed)`. The sample then depends on the order of
            Nectar's files.
        tokenizer (`str`, *optional*):
            Name or path of the policy's tokenizer. It counts the tokens of a prompt in its chat template. Without
            one, 3 characters count as a token.
        max_prompt_length (`int`, *optional*, defaults to `4096`):
            Tokens that a prompt may have (paper: 4,096).
        output_file (`str`):
            The data set to write, `.jsonl` or `.parquet`.
    """

    dataset_name: str = "berkeley-nest/Nectar"
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    streaming: bool = False
    queries: int = 1000
    seed: int = 42
    shuffle: bool = False
    tokenizer: str | None = None
    max_prompt_length: int = 4096
    output_file: str | None = None

    def __post_init__(self):
        check_own_fields(self, NectarConfig)
        check_at_least(self, queries=0, max_prompt_length=1)
        if self.shuffle:
            check_at_least(self, seed=0)  # numpy takes no other
        if self.shuffle and self.streaming:
            raise SettingsError("shuffle needs all rows at once: set streaming to false")


def main(config: NectarConfig) -> int:
    """Load Nectar, take queries, write them, and return the exit code."""
    path = check_output(config.output_file, config.dataset_name)
    tokens = TokenCounter(config.tokenizer)

    def fault(row: dict) -> str | None:
        too_long = tokens.chat(row["prompt"]) > config.max_prompt_length
        return f"the prompt has more than {config.max_prompt_length} tokens" if too_long else None

    raws = load_queries(
        config.dataset_name, config.dataset_config, config.dataset_train_split, streaming=config.streaming
    )
    rows = track(
        iterate(raws.shuffle(seed=config.seed) if config.shuffle else raws),
        "reading Nectar",
        total=None if config.streaming else len(raws),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    # Shuffled rows keep their order.
    sample = nectar.sample_rows(rows, config.queries or None, None if config.shuffle else config.seed, fault)
    if not sample.rows:
        raise DataError(f"none of the {sample.read} rows of {config.dataset_name} can be used: {sample.dropped}")
    dropped = ", ".join(f"{count:,} because {reason}" for reason, count in sample.dropped.items())
    print(f"{sample.read:,} rows read, {sample.looked_at:,} looked at, {len(sample.rows):,} taken")
    print(f"left out: {dropped or 'none'}; tokens: {tokens.name}")
    if len(sample.rows) < config.queries:
        print(f"note: {config.queries:,} queries were asked for, and no more can be used", file=sys.stderr)
    settings = {key: value for key, value in asdict(config).items() if key != "output_file"}
    step = {
        "step": "nectar",
        **settings,
        "dataset_name": source_name(config.dataset_name),
        "tokenizer": config.tokenizer and source_name(config.tokenizer),
        "tokens": source_name(tokens.name),
        "rows_read": sample.read,
        "rows_looked_at": sample.looked_at,
        "queries_taken": len(sample.rows),
        "left_out": sample.dropped,
    }
    return finish(path, sample.rows, {}, [step])


if __name__ == "__main__":
    run_script(NectarConfig, main)
