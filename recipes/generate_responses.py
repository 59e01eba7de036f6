"""Sample responses to queries of your own and put them in order, worst to best.

    python recipes/generate_responses.py --dataset_name my_queries.jsonl --output_file data/mine_no_rubrics.jsonl \
        --sampler_url http://127.0.0.1:8002/v1 --sampler_model Qwen/Qwen3-8B \
        --judge_url http://127.0.0.1:8001/v1 --judge_model Qwen/Qwen3-30B-A3B-Instruct-2507

The sampler may be any OpenAI-compatible endpoint: the policy itself, served by `vllm serve`, or a better model. The
judge then puts each query's responses in order: by the means of scores under its token probabilities, or by one list
if its server gives none. After a kill, run the same command again: it asks only what has no answer yet. Failed queries
are listed, and the exit code is then 3, or 1 if all failed. Queries that have responses keep them. `--dry_run` checks
the settings and the queries, says how many requests will be made, and makes none.

With `--audit_queries 50 --responses 8`, the responses are samples for `rankbuffer-audit`. They come from 50 queries,
also from those that have responses, and no judge orders them.
"""

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rankbuffer_tools.batch.ask import PILOT, Answers, ask_many
from rankbuffer_tools.batch.output import beside, check_output, read_provenance, source_name, try_write
from rankbuffer_tools.batch.script import cost_line, finish, run_script
from rankbuffer_tools.batch.server_check import check_judge
from rankbuffer_tools.data.responses import (
    cut_thoughts,
    order_by_scores,
    order_question,
    orders_as_shown,
    sample_chats,
    score_questions,
)
from rankbuffer_trl.data import checked_rows, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import Call, Endpoint, Judge, JudgeError, tag_fault
from rankbuffer_trl.judge.config import Servers, VerdictConfig, parse_object
from rankbuffer_trl.rewards import check_format, read_answer
from rankbuffer_trl.settings import check_at_least, documented


@documented
@dataclass
class ResponsesConfig(VerdictConfig):
    r"""
    Configuration of sampled responses.

    It adds the parameters below to those of [`VerdictConfig`], which describe the judge that ranks the responses.
    Without `judge_url`, the embedded rubric judge ranks them. `judge_wait`, `judge_max_retries`, `judge_max_attempts`
    and `judge_concurrency` also apply to the sampler.

    Parameters:
        dataset_name (`str`):
            A data set with `query_id` and `prompt`: a `.jsonl`, `.json` or `.parquet` file, or on the Hub.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        output_file (`str`):
            The data set to write, `.jsonl` or `.parquet`. Answers are kept in `<output_file>.samples.jsonl` and
            `<output_file>.orders.jsonl`.
        sampler_url (`str`):
            Base URL of the OpenAI-compatible server that answers the queries.
        sampler_model (`str`):
            Name under which that server serves the model.
        sampler_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the key of the sampler, if it needs one.
        sampler_request (`dict`, *optional*):
            Fields to set in every request to the sampler, as JSON on the command line, such as `{"top_k": 20}` on
            vLLM. `null` leaves a field out, such as `{"seed": null}` for an endpoint without seeds.
        sampler_timeout (`float`, *optional*, defaults to `3600`):
            Seconds for one response. Responses are not streamed: the sampler sends nothing before the end.
        responses (`int`, *optional*, defaults to `7`):
            Responses per query, at least 2. The paper's rubric prompt speaks of seven.
        least_responses (`int`, *optional*, defaults to `4`):
            Number of different responses below which a query counts as failed (paper: K0 is 4).
        temperature (`float`, *optional*, defaults to `0.6`):
            Sampling temperature (paper: 0.6 for the policy).
        top_p (`float`, *optional*, defaults to `0.95`):
            Nucleus of the sampling (paper: 0.95 for the policy).
        max_tokens (`int`, *optional*, defaults to `4096`):
            Tokens that a response may have (paper: 4,096 for the policy).
        seed (`int`, *optional*, defaults to `42`):
            Seed of the samples.
        format_check (`str`, *optional*):
            Where the answer stands in what follows the thinking: a regular expression with a group `answer`, or
            `"none"` for all of it. Default: all of it, unless most responses begin with a tag that is not known.
        order_by (`"scores"` or `"list"`, *optional*):
            What orders the responses to a query: the mean of a score from 0 to 9 under the judge's token
            probabilities, one question a response, or one list of all of them, the question of the paper's bootstrap.
            Default: scores if the server gives probabilities, because a list can mean nothing where the scores do.
        audit_queries (`int`, *optional*):
            Number of queries, drawn at random, to sample for `rankbuffer-audit`. Their responses replace those of the
            data set and stay in the order of sampling. No judge is asked.
        dry_run (`bool`, *optional*, defaults to `False`):
            Whether to end after the checks that need no server, and to say how many requests would be made.
    """

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    output_file: str | None = None
    sampler_url: str | None = None
    sampler_model: str | None = None
    sampler_api_key_env: str = "OPENAI_API_KEY"
    sampler_request: dict | str | None = None
    sampler_timeout: float = 3600
    responses: int = 7
    least_responses: int = 4
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 4096
    seed: int = 42
    format_check: str | None = None
    order_by: Literal["scores", "list"] | None = None
    audit_queries: int | None = None
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
        if not self.sampler_url or not self.sampler_model:
            raise SettingsError(
                "sampler_url and sampler_model must be set: name the server and the model that write responses"
            )
        if not 2 <= self.least_responses <= self.responses:
            raise SettingsError(
                f"least_responses must be in 2..responses={self.responses}, got {self.least_responses}"
            )
        check_at_least(self, audit_queries=1, temperature=0, max_tokens=1)
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.format_check is not None:
            check_format(self.format_check)
        if self.format_check == "think":
            raise SettingsError("format_check: think is what is done without it: leave it out")
        self.sampler()  # raises for a wrong URL or request

    def sampler(self) -> Endpoint:
        """Describe the model that writes responses. It shares the judge's limits."""
        return replace(
            self.endpoint,
            role="sampler",
            urls=(self.sampler_url,),
            model=self.sampler_model,
            api_key_env=self.sampler_api_key_env,
            request=parse_object("sampler_request", self.sampler_request) or {},
            timeout=self.sampler_timeout,
            headers={},  # those of the judge, and its prices, are not the sampler's
            prompt_price=None,
            completion_price=None,
            cached_price=None,
        )


def main(config: ResponsesConfig) -> int:
    """Read the queries, sample responses, rank them, write the result, and return the exit code."""
    path = check_output(config.output_file, config.dataset_name)
    dataset = load_queries(config.dataset_name, config.dataset_config, config.dataset_train_split)
    rows = list(checked_rows(dataset, rubrics_needed=False))
    try_write(path, rows)  # before answers for these rows are paid for
    todo = {row["query_id"]: row for row in rows if not row.get("responses")}
    if config.dry_run:
        audited = config.audit_queries
        queries = len(todo) if audited is None else min(audited, len(rows))
        samples = queries * config.responses
        asked = f"{queries:,} to {samples:,} questions" if audited is None else "no question"
        print(f"dry run: at most {samples:,} responses to {queries:,} queries are sampled; the judge gets {asked}")
        return 0
    if config.audit_queries is not None:
        return sample_for_audit(config, path, rows)
    if todo:
        check_judge(config.judge())  # before samples are paid for
    texts, failures, sampled = sample_responses(config, todo)

    how, order, orders = put_in_order(config, [Query.from_row(todo[id]) for id in texts], texts)
    print(f"order of {len(order):,} queries' responses by {how}: {cost_line(config.endpoint, orders.totals)}")
    causes = {name.rpartition("/score ")[0] or name: cause for name, cause in orders.failures.items()}
    alike = "the judge gives all of them the same score: take another judge, or set order_by to list"
    failures |= {id: f"no order of its responses: {causes.get(id, alike)}" for id in texts if id not in order}
    for query_id, indices in order.items():
        todo[query_id]["responses"] = [texts[query_id][i] for i in indices]
        todo[query_id]["models"] = [config.sampler_model] * len(indices)

    finished = [row for row in rows if row["query_id"] not in failures]
    step = {
        "step": "responses",
        "dataset_name": source_name(config.dataset_name),
        "queries_without": len(todo),
        "ranked_by": config.judge_client or config.judge_model or "embedded rubric judge",
        "ranking": how,
        "ranking_request": config.endpoint.request or None,
        "ranking_cost": orders.totals.as_dict(),
        "queries_failed": len(failures),
    }
    return finish(path, finished, failures, [*read_provenance(config.dataset_name), step | sampled])


def put_in_order(
    config: ResponsesConfig, queries: list[Query], texts: dict[str, list[str]]
) -> tuple[str, dict[str, list[int]], Answers]:
    """Return `scores` or `list`, the order of each query's responses by index, worst to best, and the answers.

    Raises:
        [`JudgeError`]: if scores were asked for, and the judge's server gives no probabilities.
    """
    log = beside(check_output(config.output_file), "orders.jsonl")
    by_query = [each for q in queries if (each := score_questions(q, texts[q.id]))]
    scores = {name: question for each in by_query for name, question in each.items()}
    failed: list[Call] = []
    if scores and config.order_by != "list":
        # These tell whether the server gives probabilities. One alone may be refused for its text.
        first = dict(next(iter(each.items())) for each in by_query[:PILOT])
        tried = asyncio.run(ask_many(config.judge(), first, log, "asking for probabilities"))
        if tried.values:
            answers = asyncio.run(ask_many(config.judge(), scores, log, "scoring responses"))
            order, tied = order_by_scores(texts, answers.values)
            if tied:
                print(f"{tied:,} pairs of responses have equal scores and stand in the order of sampling")
            return "scores", order, answers
        cause, *_ = tried.failures.values()
        failed = [*tried.asked.values()]  # the try was paid, too
        if config.order_by:
            raise JudgeError(f"order_by: scores needs token probabilities: {cause}", passing=False)
        print(f"one list orders the responses to a query, because the judge gives no probabilities: {cause}")
    lists = {query.id: order_question(query, texts[query.id]) for query in queries}
    answers = asyncio.run(ask_many(config.judge(), lists, log, "ranking responses"))
    if (shown := orders_as_shown(answers.values.values())) > max(1, len(answers.values) / 2):
        print(
            f"{shown:,} of {len(answers.values):,} lists name the responses in the order shown or its reverse, so the"
            " judge may not read them: ask it with rankbuffer-audit before you train, or take another judge"
        )
    return "list", answers.values, replace(answers, calls=[*answers.calls, *failed])


def sample_for_audit(config: ResponsesConfig, path: Path, rows: list[dict]) -> int:
    """Sample responses for queries that are drawn from `rows`, write them as they came, and return the exit code."""
    assert config.audit_queries is not None
    drawn = random.Random(config.seed).sample(rows, min(config.audit_queries, len(rows)))
    texts, failures, sampled = sample_responses(config, {row["query_id"]: row for row in drawn})
    finished = [
        row | {"responses": (own := texts[row["query_id"]]), "models": [config.sampler_model] * len(own)}
        for row in drawn
        if row["query_id"] in texts
    ]
    step = {"step": "samples", "dataset_name": source_name(config.dataset_name), "queries_failed": len(failures)}
    return finish(path, finished, failures, [*read_provenance(config.dataset_name), step | sampled])


def sample_responses(
    config: ResponsesConfig, rows: dict[str, dict]
) -> tuple[dict[str, list[str]], dict[str, str], dict]:
    """Sample responses. Return the different ones and the causes of failure by query, and the record of this step."""
    sampler = config.sampler()
    request = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_tokens}
    chats = {
        f"{query_id} {i}": chat
        for query_id, row in rows.items()
        for i, chat in enumerate(sample_chats(query_id, row["prompt"], config.responses, request, config.seed))
    }
    log = beside(check_output(config.output_file), "samples.jsonl")
    writer = Judge(Servers.of(sampler), config.judge_max_attempts)
    answers = asyncio.run(ask_many(writer, chats, log, "sampling responses"))
    print(f"{len(answers.values):,} of {len(chats):,} responses: {cost_line(sampler, answers.totals)}")
    if answers.kept:  # the server does not tell its weights
        print(f"{answers.kept:,} are from {log}. If the server has a new model since, delete that file")
    samples = {  # a log of an earlier version has texts alone
        name: value if isinstance(value, dict) else {"text": value, "thought": False, "cut_off": False}
        for name, value in answers.values.items()
    }
    left_out = dict.fromkeys(
        cut_thoughts(samples), f"cut off inside its thinking: raise max_tokens={config.max_tokens}"
    )
    if cut_off := sum(sample["cut_off"] for sample in samples.values()):
        print(f"{cut_off:,} were cut off at max_tokens, {len(left_out):,} of them inside their thinking and left out")
    if config.format_check is None and (fault := tag_fault(sample["text"] for sample in samples.values())):
        raise SettingsError(
            f"of the responses, {fault}. If that is thinking, start the sampler's server with --reasoning-parser, or"
            " set format_check to a regular expression with a group (?P<answer>...). Else set format_check: none. The"
            " samples are kept"
        )
    read = {name: read_answer(sample["text"], config.format_check or "none").text for name, sample in samples.items()}
    unmatched = [name for name, text in read.items() if not text]
    left_out = dict.fromkeys(unmatched, f"no answer of the form format_check={config.format_check}") | left_out
    causes_of = answers.failures | left_out
    texts, failures = {}, {}
    for query_id in rows:
        names = [f"{query_id} {i}" for i in range(config.responses)]
        usable = [name for name in names if name in samples and name not in left_out]
        different = list(dict.fromkeys(read[name] for name in usable))  # equal ones have no order
        if len(different) >= config.least_responses:
            texts[query_id] = different
        else:
            causes = [causes_of[name] for name in names if name in causes_of]
            alike = "the others are the same and are kept: set more responses, another temperature or another seed"
            cause = causes[0] if causes else alike
            failures[query_id] = f"{len(different)} different responses of {config.responses}; {cause}"
    request |= {"seed": config.seed} | sampler.request
    sampled = {"model": config.sampler_model, **request, "cost": answers.totals.as_dict()}
    return texts, failures, sampled


if __name__ == "__main__":
    run_script(ResponsesConfig, main)
