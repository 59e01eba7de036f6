"""Give every query of a data set rubrics, written by a model from its ranked responses.

    python recipes/generate_rubrics.py --dataset_name data/nectar_1000_no_rubrics.jsonl \
        --output_file data/nectar_1000.jsonl --judge_url https://api.deepseek.com/v1 --judge_model deepseek-v4-flash \
        --judge_api_key_env DEEPSEEK_API_KEY

The paper's rubrics are written by DeepSeek-V4-Flash. Any OpenAI-compatible endpoint works. After a kill, run the same
command again: it asks only what has no answer yet. Failed queries are listed, and the exit code is then 3, or 1 if all
failed. Queries that have rubrics keep them. `--dry_run` checks the settings and the queries, and asks nothing.
"""

import asyncio
import hashlib
from dataclasses import dataclass

from rankbuffer_tools.batch.ask import ask_many
from rankbuffer_tools.batch.output import beside, check_output, read_provenance, source_name, try_write, write_rows
from rankbuffer_tools.batch.script import cost_line, finish, run_script
from rankbuffer_tools.data.check import plain_text
from rankbuffer_tools.data.rubrics import MAX_TOKENS, TEMPERATURE, rubric_chat
from rankbuffer_trl.data import GENERIC_RUBRICS, DataError, checked_rows, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge.config import ClientConfig
from rankbuffer_trl.settings import check_at_least, documented


@documented
@dataclass
class RubricsConfig(ClientConfig):
    r"""
    Configuration of rubric generation.

    It adds the parameters below to those of [`ClientConfig`] and [`ServersConfig`], which describe the model that
    writes rubrics.

    Parameters:
        dataset_name (`str`):
            A data set with `query_id`, `prompt` and `responses` from worst to best: a `.jsonl`, `.json` or `.parquet`
            file, or on the Hub.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        output_file (`str`):
            The data set to write, `.jsonl` or `.parquet`. Answers are kept in `<output_file>.answers.jsonl`.
        generic (`bool`, *optional*, defaults to `False`):
            Give every query the same generic rubrics. This needs neither a model nor responses.
        keep_apart (`int`, *optional*, defaults to `0`):
            Number of prompts, drawn by a hash of their texts, whose queries go into `<output_file>_kept_apart` and not
            into the training set, so that `rankbuffer-compare` can ask about prompts that the policy was not trained
            on. Two that differ in white space alone are one prompt.
        temperature (`float`, *optional*, defaults to `0.2`):
            Sampling temperature of the model (paper: 0.2).
        max_tokens (`int`, *optional*, defaults to `1024`):
            Tokens that an answer may have (paper: 1,024). A model that thinks needs more.
        dry_run (`bool`, *optional*, defaults to `False`):
            Whether to end after the checks that need no server, and to say how many requests would be made.
    """

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    output_file: str | None = None
    generic: bool = False
    keep_apart: int = 0
    temperature: float = TEMPERATURE
    max_tokens: int = MAX_TOKENS
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, temperature=0, max_tokens=1, keep_apart=0)
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
        if not (self.generic or self.judge_url or self.judge_client):
            raise SettingsError(
                "judge_url is not set: name the server of the model that writes rubrics, or take the generic ones with"
                " --generic true"
            )


def main(config: RubricsConfig) -> int:
    """Read the queries, ask for rubrics, write the result, and return the exit code."""
    path = check_output(config.output_file, config.dataset_name)
    dataset = load_queries(config.dataset_name, config.dataset_config, config.dataset_train_split)
    rows = list(checked_rows(dataset, rubrics_needed=False))
    try_write(path, rows)  # before answers for these rows are paid for
    prompts = {row["query_id"]: plain_text(Query.from_row(row)) for row in rows}
    # Each prompt once: no second one stays in the training set.
    drawn = sorted(set(prompts.values()), key=lambda text: hashlib.sha256(text.encode()).digest())
    if config.keep_apart >= len(drawn):
        raise SettingsError(
            f"keep_apart={config.keep_apart} leaves none of {len(drawn)} different prompts to train on"
        )
    kept = set(drawn[: config.keep_apart])
    todo = [row for row in rows if not row.get("rubrics")]
    if config.dry_run:
        asked = "no request" if config.generic else f"at most {len(todo):,} requests"
        what = f"rubrics for {len(todo):,} of {len(rows):,} queries, {config.keep_apart:,} prompts kept apart"
        print(f"dry run: {what}, {asked}")
        return 0
    step = {"step": "rubrics", "dataset_name": source_name(config.dataset_name), "queries_without": len(todo)}
    failures = {}
    if config.generic:
        for row in todo:
            row["rubrics"] = [{"text": rubric.text, "weight": rubric.weight} for rubric in GENERIC_RUBRICS]
        step |= {"generic": True}
    else:
        failures, made = ask_for_rubrics(config, todo)
        step |= made
    finished = [row for row in rows if row.get("rubrics") and prompts[row["query_id"]] not in kept]
    if apart := [row for row in rows if row.get("rubrics") and prompts[row["query_id"]] in kept]:
        write_rows(file := path.with_stem(f"{path.stem}_kept_apart"), apart)
        print(f"{len(apart):,} queries in {file}, which no training reads: compare policies on them")
        step |= {"kept_apart": len(apart)}
    step |= {"queries_failed": len(failures)}
    return finish(path, finished, failures, [*read_provenance(config.dataset_name), step])


def ask_for_rubrics(config: RubricsConfig, rows: list[dict]) -> tuple[dict[str, str], dict]:
    """Put rubrics into `rows`. Return the causes of failure by query, and the record of this step."""
    request = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    for row in rows:
        if len(row.get("responses") or ()) < 2:
            raise DataError(
                f"query {row['query_id']!r} has no responses to tell apart, and rubrics are written from at least"
                " two: sample some with recipes/generate_responses.py, or take the generic rubrics with --generic true"
            )
    chats = {
        row["query_id"]: rubric_chat(row["query_id"], row["prompt"], row["responses"], row.get("models"), request)
        for row in rows
    }
    log = beside(check_output(config.output_file), "answers.jsonl")
    answers = asyncio.run(ask_many(config.judge(), chats, log, "writing rubrics"))
    for row in rows:
        row["rubrics"] = answers.values.get(row["query_id"])
    endpoint = config.endpoint
    print(f"rubrics for {len(answers.values):,} of {len(rows):,} queries: {cost_line(endpoint, answers.totals)}")
    rubrics = {
        "model": config.judge_model or config.judge_client,
        **request,
        **endpoint.request,
        "cost": answers.totals.as_dict(),
    }
    return answers.failures, rubrics


if __name__ == "__main__":
    run_script(RubricsConfig, main)
