"""The command `rankbuffer-serve`: rank rewards over HTTP, for any trainer.

    rankbuffer-serve --config paper/rankbuffer.yaml --dataset_name my_queries.jsonl --output_dir runs/served

It reads the recipes of `rankbuffer-train` and names the keys of this project that mean nothing here. It asks the judge
one question before it listens. A SIGTERM refuses new groups and leaves the open ones a few seconds. A second one ends
it at once. Groups that wait for a judge that is down fail at the first one.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from datasets import disable_progress_bars

from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.judge import Judge, Question, Usage
from rankbuffer_trl.judge.config import BudgetConfig, read_object
from rankbuffer_trl.judge.endpoint import check_seconds
from rankbuffer_trl.judge.servers import Servers
from rankbuffer_trl.rewards import listen
from rankbuffer_trl.rewards.format import AnswerReader, check_format
from rankbuffer_trl.rewards.method import RewardMethod, load_method
from rankbuffer_trl.settings import check_at_least, documented
from rankbuffer_trl.store.database import lock_store, unlock
from rankbuffer_trl.store.places import LIVE_STORE
from rankbuffer_trl.training.budget import check_budget
from rankbuffer_trl.training.scorer import stand_in

from ..jobs.reach import check_servers
from ..train.parser import RecipeParser
from .groups import SingleGroups
from .server import GroupServer, is_loopback


@documented
@dataclass
class ServeConfig(BudgetConfig):
    r"""
    Configuration of the rewards over HTTP.

    It adds the parameters below to those of [`BudgetConfig`]. `judge_max_failures` is the share of each group.

    Parameters:
        output_dir (`str`):
            Folder for buffers, history and ledger, one for each run. A second server on it is refused.
        dataset_name (`str`, *optional*):
            The queries with rubrics and references: a `.jsonl`, `.json` or `.parquet` file, or on the Hub. Default:
            each request brings its own.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        method (`str`, *optional*, defaults to `"rankbuffer"`):
            The reward method: the name of a file in `rankbuffer_trl/rewards`, or the dotted path of your own class.
        method_args (`dict`, *optional*):
            The arguments of the reward method, as JSON on the command line.
        seed (`int`, *optional*, defaults to `42`):
            The seed of methods that draw.
        format_check (`str`, *optional*, defaults to `"none"`):
            The format that a text must have, as in training. The judge sees the answer alone.
        judge_step_timeout (`float`, *optional*):
            Seconds for judging one group, above which it fails. Default: no limit.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on. Any but that of this machine itself needs a token.
        port (`int`, *optional*, defaults to `8003`):
            Port to listen on. 0 takes a free one.
        token_env (`str`, *optional*, defaults to `"RANKBUFFER_TOKEN"`):
            Environment variable with the token that requests must have. If it is not set, none is needed.
    """

    output_dir: str = ""
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    method: str = "rankbuffer"
    method_args: dict | str | None = None
    seed: int = 42
    format_check: str = "none"
    judge_step_timeout: float | None = None
    host: str = "127.0.0.1"
    port: int = 8003
    token_env: str = "RANKBUFFER_TOKEN"

    def __post_init__(self):
        super().__post_init__()
        if not self.output_dir:
            raise SettingsError("output_dir is not set: name a folder for the buffers of this run")
        self.reward_method()
        check_format(self.format_check)
        check_seconds("judge_step_timeout", self.judge_step_timeout)
        check_at_least(self, port=0)
        if self.port > 65535:
            raise SettingsError(f"port must be at most 65535, got {self.port}")

    @property
    def token(self) -> str:
        """The token, empty if there is none. It is no field, so that nothing prints it."""
        return os.environ.get(self.token_env, "").strip()

    def check_host(self) -> None:
        """Refuse to listen for other machines without a token.

        Raises:
            [`SettingsError`]: naming the variable.
        """
        if not is_loopback(self.host) and not self.token:
            raise SettingsError(
                f"host {self.host} can be reached from other machines, so requests need a token: export one in"
                f" {self.token_env}, or leave host out"
            )

    def reward_method(self) -> RewardMethod:
        """Build the reward method with its arguments.

        Raises:
            [`SettingsError`]: if there is no such method or argument.
        """
        return load_method(self.method, read_object("method_args", self.method_args) or {}, self.seed)


def questions_to_try(method: RewardMethod, queries: QueryTable | None) -> Iterable[Question]:
    """Yield the questions of first visits. Without queries, they are about one that is made up."""
    made_up = Query(
        "preflight",
        [{"role": "user", "content": "How long does tea steep?"}],
        (Rubric("Names a time.", 1),),
        tuple(f"{i} minutes." for i in range(method.responses_needed)),
    )
    for query in (queries[id] for id in queries.ids) if queries else (made_up,):
        yield from listen.first_questions(method, stand_in(query, G=2))


async def try_judge(judge: Judge, method: RewardMethod, queries: QueryTable | None, timeout: float | None) -> None:
    """Check that the judge is there, holds the prompts of first visits, and answers a question.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """
    await check_servers(judge, questions_to_try(method, queries))
    await judge.first_question(next(iter(questions_to_try(method, queries))), timeout)


async def serve(args: ServeConfig) -> None:
    """Check data and judge, then serve until a SIGTERM or Ctrl-C, which leaves the open groups a few seconds.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    args.check_host()
    store = Path(args.output_dir) / LIVE_STORE
    check_budget(args, args.output_dir, store if store.is_file() else None)
    method, judge, queries = args.reward_method(), args.judge(), None
    if args.dataset_name:
        rows = load_queries(args.dataset_name, args.dataset_config, args.dataset_train_split)
        queries = QueryTable(rows, anchors_needed=method.responses_needed)
    if store.parent.is_dir():  # a folder that is in use, or cannot be written, is refused before the judge is asked
        lock_store(store)
        unlock(store)
    try:
        spent: list[Usage] = []
        first = Judge(judge.client, judge.max_attempts, judge.guard, on_spent=spent.append)
        await try_judge(first, method, queries, args.judge_step_timeout)
        if args.has_budget and not sum(map(sum, spent)):
            raise SettingsError(
                "the judge server reports no token counts, so a budget cannot end the service: unset it"
            )
        groups = SingleGroups(method, judge, store, args.judge_max_failures, args.judge_step_timeout)
        for tokens in spent:
            groups.store.spend(tokens)
    except BaseException:
        await judge.client.close()
        raise
    server = GroupServer(groups, AnswerReader(args.format_check), queries, args.token)
    runner = server.runner()
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, args.host, args.port).start()
        except OSError as error:
            where = f"{args.host}, port {args.port}"
            raise SettingsError(f"cannot listen at {where} ({error}): name another port") from error
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, ended.set)
        about = f"{len(queries)} queries" if queries else "queries from requests"
        about += f", format_check {args.format_check}"
        print(f"[serve] {args.host} port {runner.addresses[0][1]}, {about}, run {await groups.run_id()}", flush=True)
        budget = asyncio.create_task(server.until(lambda: args.over_budget(groups.store.spent)))
        budget.add_done_callback(lambda task: ended.set())
        await ended.wait()
        cause = budget.done() and budget.result()
        for number in signals:
            loop.remove_signal_handler(number)  # the next one ends the process at once
        print(f"[serve] {f'{cause}: ' if cause else ''}ends after {server.open} open groups", flush=True)
        if isinstance(judge.client, Servers):
            judge.client.end_waits()  # whoever ends the server may have ended its judge
        await server.drain()
    finally:
        await runner.cleanup()
        await groups.close()


def main(argv: Sequence[str] | None = None) -> None:
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        parser = RecipeParser((ServeConfig,), "rankbuffer-serve")
        (args,) = parser.parse_args_and_config(argv)
        if parser.unused:
            print(f"[serve] not used here, from the recipe: {', '.join(parser.unused)}", flush=True)
        asyncio.run(serve(args))
        os._exit(0)  # all is closed, and to take down torch can take longer than `docker stop` waits
    except (RankBufferError, OSError) as error:
        sys.exit(f"rankbuffer-serve: {' '.join(str(error).split())}")
    except KeyboardInterrupt:  # before it listens, or the second one
        sys.exit("rankbuffer-serve: interrupted. The groups that were recorded are kept")


if __name__ == "__main__":
    main()
