"""Give every query of a data set rubrics, written by a model from its ranked responses.

    python recipes/generate_rubrics.py --dataset_name data/nectar_1000_no_rubrics.jsonl \
        --output_file data/nectar_1000.jsonl --judge_url https://api.deepseek.com/v1 --judge_model deepseek-chat \
        --judge_api_key_env DEEPSEEK_API_KEY

Any OpenAI-compatible endpoint will do. Killed at any moment, the same command goes on without asking again for what is
there. Queries that fail are listed, and the exit code is 1. Queries that have rubrics keep them.
"""

from dataclasses import dataclass, field

from rankbuffer_trl.data.asking import ask_resumably, cost_line, set_fields
from rankbuffer_trl.data.files import beside, check_output, read_report, source_name
from rankbuffer_trl.data.queries import DataError, checked, load_queries
from rankbuffer_trl.data.recipe import finish, run
from rankbuffer_trl.data.rubrics import GENERIC, MAX_TOKENS, TEMPERATURE, rubric_chat
from rankbuffer_trl.judge.config import JudgeConfig


@dataclass
class RubricsConfig(JudgeConfig):
    r"""
    Configuration of rubric generation. It adds the parameters below to those of [`JudgeConfig`], which say whom to
    ask; those of verdicts and training steps (`judge_decoding`, `judge_free_tokens`, `judge_guard`,
    `judge_step_timeout`, `judge_max_failures`) have no effect here.

    Parameters:
        dataset_name (`str`):
            A data set with `query_id`, `prompt` and `responses` from worst to best: a `.jsonl`, `.json` or `.parquet`
            file, or on the Hub.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Its split.
        output_file (`str`):
            The data set to write, `.jsonl` or `.parquet`. Answers are kept beside it in `<output_file>.answers.jsonl`.
        generic (`bool`, *optional*, defaults to `False`):
            Give every query the same generic rubrics. Nobody is asked, and no responses are needed.
        temperature (`float`, *optional*, defaults to `0.2`):
            Of the model (paper: 0.2).
        max_tokens (`int`, *optional*, defaults to `1024`):
            Tokens of an answer (paper: 1,024). A model that thinks needs more.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Data set with ranked responses."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the Hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Its split."})
    output_file: str | None = field(default=None, metadata={"help": "The .jsonl or .parquet file to write."})
    generic: bool = field(default=False, metadata={"help": "Give every query the same generic rubrics; ask nobody."})
    temperature: float = field(default=TEMPERATURE, metadata={"help": "Of the model that writes rubrics."})
    max_tokens: int = field(default=MAX_TOKENS, metadata={"help": "Tokens of an answer."})

    def __post_init__(self):
        super().__post_init__()
        if not self.dataset_name:
            raise ValueError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
        if not self.generic and not self.judge_url:
            raise ValueError(
                "judge_url is not set: say where the model is that writes rubrics, or take the generic ones with"
                " --generic true"
            )


def main(config: RubricsConfig) -> int:
    """Read, ask, write; gives the exit code."""
    path = check_output(config.output_file, config.dataset_name)
    dataset = load_queries(config.dataset_name, config.dataset_config, config.dataset_train_split)
    rows = list(checked(dataset, rubrics_needed=False))
    todo = [row for row in rows if not row.get("rubrics")]
    step = {"step": "rubrics", "dataset_name": source_name(config.dataset_name), "queries_without": len(todo)}
    failures = {}
    if config.generic:
        for row in todo:
            row["rubrics"] = [{"text": rubric.text, "weight": rubric.weight} for rubric in GENERIC]
        step |= {"generic": True}
    else:
        failures, made = ask_for_rubrics(config, todo)
        step |= made
    finished = [row for row in rows if row.get("rubrics")]
    step |= {"queries_failed": len(failures)}
    return finish(path, finished, failures, [*read_report(config.dataset_name), step])


def ask_for_rubrics(config: RubricsConfig, rows: list[dict]) -> tuple[dict[str, str], dict]:
    """Put rubrics into `rows`. Gives the causes of failure by query, and what there is to report."""
    request = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    for row in rows:
        if len(row.get("responses") or ()) < 2:
            raise DataError(
                f"query {row['query_id']!r} has no responses to tell apart, and rubrics are written from two at"
                " least: sample some with recipes/generate_responses.py, or take the generic rubrics with"
                " --generic true"
            )
    chats = {
        row["query_id"]: rubric_chat(row["query_id"], row["prompt"], row["responses"], row.get("models"), request)
        for row in rows
    }
    log = beside(check_output(config.output_file), "answers.jsonl")
    answers = ask_resumably(config, chats, log, "writing rubrics")
    for row in rows:
        row["rubrics"] = answers.values.get(row["query_id"])
    print(f"rubrics for {len(answers.values):,} of {len(rows):,} queries: {cost_line(config, answers.totals)}")
    made = {"model": config.judge_model, **request, **set_fields(config), "cost": answers.totals.as_dict()}
    return answers.failures, made


if __name__ == "__main__":
    run(RubricsConfig, main)
