"""The settings of a judge, for training, audits, data and evaluation.

Each class adds settings to the one before it, so a program has those settings alone that it uses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from ..errors import SettingsError
from ..settings import check_arguments, check_at_least, check_own_fields, documented, load_path, near, parse_setting
from ._endpoint import Endpoint
from ._judge import ChatClient, Judge
from ._ledger import Totals
from ._openai_client import PING as PING
from ._openai_client import OpenAIClient as OpenAIClient
from ._rubric_judge import RubricJudge
from ._servers import Servers as Servers

MOST_SAMPLES = 100  # a larger number is a slip: the price of a question grows with it


@documented
@dataclass
class ServersConfig:
    r"""
    Configuration of a model behind OpenAI-compatible servers, and of how it is asked.

    Parameters:
        judge_url (`str` or `list[str]`, *optional*):
            Base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8001/v1`, or several of them that serve
            the same model. A query stays with one of several servers while that server is up.
        judge_model (`str`, *optional*):
            Name under which the servers serve the judge.
        judge_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the servers' key. Any variable but the default one must be set.
        judge_request (`dict`, *optional*):
            Fields to set in every request, as JSON on the command line; `null` leaves a field out. For example
            `{"chat_template_kwargs": {"enable_thinking": false}}`.
        judge_headers (`dict`, *optional*):
            Headers of every request, as JSON on the command line, for example `{"X-Run": "mine"}`: by them, the owner
            of the judge can bill runs. No key belongs there. Checkpoints do not hold them. Default: none.
        judge_timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that a request may go without a byte from the server. The whole request may take five times as
            long.
        judge_wait (`float`, *optional*, defaults to `600.0`):
            Seconds for which questions wait when all servers of the judge are down, or at their limit of requests
            (HTTP 429). After that the questions fail.
        judge_max_retries (`int`, *optional*, defaults to `4`):
            Transport retries of one request, with backoff and jitter.
        judge_max_attempts (`int`, *optional*, defaults to `3`):
            Number of times that a question is asked, at most, if its answers are malformed.
        judge_concurrency (`int`, *optional*, defaults to `64`):
            Requests in flight at once, per server. There are fewer while a server does not answer so many in time.
        judge_prompt_price (`float`, *optional*):
            Price of a million prompt tokens, for the cost that is shown and for `judge_price_budget`.
        judge_cached_price (`float`, *optional*):
            Price of a million prompt tokens that the server had cached, as hosted judges have. Default: the full
            price.
        judge_completion_price (`float`, *optional*):
            Price of a million completion tokens.
    """

    judge_url: list[str] | None = None
    judge_model: str | None = None
    judge_api_key_env: str = Endpoint.api_key_env
    judge_request: dict | str | None = None
    judge_headers: dict | str | None = None
    judge_timeout: float = Endpoint.timeout
    judge_wait: float = Endpoint.wait
    judge_max_retries: int = Endpoint.max_retries
    judge_max_attempts: int = 3
    judge_concurrency: int = Endpoint.concurrency
    judge_prompt_price: float | None = None
    judge_cached_price: float | None = None
    judge_completion_price: float | None = None

    def __post_init__(self):
        if isinstance(self.judge_url, str):
            self.judge_url = [self.judge_url]
        check_own_fields(self, ServersConfig)
        self.judge_request = request = parse_object("judge_request", self.judge_request)
        self.judge_headers = headers = parse_object("judge_headers", self.judge_headers)
        alike = {item.name for item in fields(Endpoint)} - {"urls", "request", "headers", "role"}
        values = {name: getattr(self, f"judge_{name}") for name in alike}
        # What the judge's clients and prices are made from. Without servers it holds the prices alone.
        self.endpoint = Endpoint(tuple(self.judge_url or ()), request=request or {}, headers=headers or {}, **values)
        check_at_least(self, judge_max_attempts=1)

    def client(self) -> ChatClient:
        """Make the client that answers for the judge."""
        return Servers.of(self.endpoint)

    def judge(self) -> Judge:
        """Make the judge that these settings describe."""
        return Judge(self.client(), max_attempts=self.judge_max_attempts)


@documented
@dataclass
class FailureLimit(ServersConfig):
    r"""
    Configuration of how many judgments may fail.

    Parameters:
        judge_max_failures (`float`, *optional*, defaults to `0.25`):
            Share of judgments, in 0..1, above which failures stop the run. In training, it is that of each step.
    """

    judge_max_failures: float = 0.25

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.judge_max_failures <= 1:
            raise SettingsError(f"judge_max_failures is a share in 0..1, got {self.judge_max_failures}")


@documented
@dataclass
class ClientConfig(ServersConfig):
    r"""
    Configuration of a model behind servers, or of a class of your own that answers in its place.

    Parameters:
        judge_client (`str`, *optional*):
            Dotted path of a dataclass that answers in place of a server, see [`ChatClient`] and `docs/extending.md`.
            `judge_url` and `judge_model` must then be `null`. With neither a client nor a URL, the embedded rubric
            judge answers, which needs no model.
        judge_client_args (`dict`, *optional*):
            The arguments of `judge_client`, as JSON on the command line.
    """

    judge_client: str | None = None
    judge_client_args: dict | str | None = None

    def __post_init__(self):
        super().__post_init__()
        self.judge_client_args = parse_object("judge_client_args", self.judge_client_args)
        self._own_client()

    def client(self) -> ChatClient:
        """Make the client that answers for the judge: the servers, one's own, or the embedded rubric judge."""
        if self.judge_url:
            return super().client()
        own = self._own_client()
        return own[0](**own[1]) if own else RubricJudge()

    def _own_client(self) -> tuple[type[Any], dict[str, Any]] | None:
        """Return the class that `judge_client` names, with its arguments. It is made when the judge is made."""
        arguments = parse_object("judge_client_args", self.judge_client_args) or {}
        if self.judge_client is None:
            if arguments:
                raise SettingsError("judge_client_args is set, but judge_client is not: name the class")
            return None
        if self.judge_url:
            raise SettingsError("judge_client and judge_url are both set: set one of them to null")
        cause, cls = "it must be a dataclass with `name`, `complete` and `close`", None
        try:
            cls = load_path(self.judge_client)
        except LookupError as error:
            cause = str(error)
        if not (isinstance(cls, type) and is_dataclass(cls) and hasattr(cls, "complete") and hasattr(cls, "close")):
            raise SettingsError(f"there is no judge_client {self.judge_client!r} ({cause}): set its dotted path")
        return cls, check_arguments(cls, self.judge_client, arguments, "judge_client_args", {})


@documented
@dataclass
class VerdictConfig(ClientConfig):
    r"""
    Configuration of a judge that compares responses.

    Parameters:
        judge_decoding (`str`, *optional*, defaults to `"none"`):
            How the form of a verdict is enforced: `"regex"` (vLLM: no verdict can be malformed), `"json_schema"` (most
            other servers) or `"none"` (the prompt asks for the form, and the judge is asked again after a malformed
            answer).
        judge_free_tokens (`int`, *optional*, defaults to `256`):
            Tokens that an answer may have in addition to its verdict, for prose, a code fence or thinking. No effect
            for `"regex"`, which allows the verdict only.
        judge_guard (`bool`, *optional*, defaults to `True`):
            Quote responses in prompts, so that no response can imitate a prompt's headings, rubrics or instructions.
            `False` gives the paper's prompts.
        judge_samples (`int`, *optional*, defaults to `1`):
            Number of answers at temperature 1 that stand for the judge's probabilities, for servers that give none: a
            request asks for so many (`n`), and their shares are read. 5 keep about a quarter of the signal (cosine
            0.20 where probabilities have 0.72), 20 a half; no policy was trained with it. 1 reads the probabilities.
            No effect on methods that read words. At most 100.
    """

    judge_decoding: Literal["regex", "json_schema", "none"] = "none"
    judge_free_tokens: int = 256
    judge_guard: bool = True
    judge_samples: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, judge_free_tokens=0, judge_samples=1)
        if self.judge_samples > MOST_SAMPLES:
            raise SettingsError(f"judge_samples must be at most {MOST_SAMPLES}, got {self.judge_samples}")
        for key in ("n", "temperature") if self.judge_samples > 1 else ():  # answers without chance are copies of one
            if key in (self.judge_request or {}):
                raise SettingsError(f"judge_request must not set {key} if judge_samples is above 1, which sets it")

    def client(self) -> ChatClient:
        """Make the client that answers for the judge. Servers are told how to enforce the form of a verdict."""
        if self.judge_url:
            return Servers.of(self.endpoint, self.judge_decoding, self.judge_free_tokens, self.judge_samples)
        return super().client()

    def judge(self) -> Judge:
        """Make the judge that these settings describe."""
        return Judge(self.client(), max_attempts=self.judge_max_attempts, guard=self.judge_guard)


@dataclass
class JudgeConfig(FailureLimit, VerdictConfig):
    """Configuration of a judge: all settings of the classes above."""


@documented
@dataclass
class BudgetConfig(JudgeConfig):
    r"""
    Configuration of what a judge may take in the folder of a run.

    Parameters:
        judge_token_budget (`int`, *optional*):
            Judge tokens after which a training stops with a checkpoint, as after a SIGTERM. Prompt and completion
            tokens of all attempts count: those of evaluations and first questions, and all that was taken in this
            `output_dir` before. With a used-up budget nothing starts. Default: no limit.
        judge_price_budget (`float`, *optional*):
            Price of these tokens that counts in the same way. It needs `judge_prompt_price` and
            `judge_completion_price`.
    """

    judge_token_budget: int | None = None
    judge_price_budget: float | None = None

    def __post_init__(self):
        super().__post_init__()
        for key in ("judge_token_budget", "judge_price_budget"):
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise SettingsError(f"{key} must be above 0, got {getattr(self, key)}")
        if self.judge_price_budget is not None and None in (self.judge_prompt_price, self.judge_completion_price):
            raise SettingsError("judge_price_budget needs judge_prompt_price and judge_completion_price")

    @property
    def has_budget(self) -> bool:
        """Whether there is an end when the judge has taken a number of tokens."""
        return self.judge_token_budget is not None or self.judge_price_budget is not None

    def over_budget(self, spent: Totals) -> str | None:
        """Say which budget the judge has used up, `None` if none is."""
        tokens, price = self.judge_token_budget, self.judge_price_budget
        if tokens is not None and spent.spent_tokens >= tokens:
            return f"the judge has taken {spent.spent_tokens:,} tokens, judge_token_budget={tokens:,}"
        cost = self.endpoint.price(spent)
        if price is not None and cost is not None and cost >= price:
            return f"the judge has cost {cost:,.2f}, judge_price_budget={price:,.2f}"
        return None


def read_judge(key: str, settings: Mapping[str, Any]) -> JudgeConfig:
    """Return the judge that a setting with settings of a judge describes.

    Raises:
        [`SettingsError`]: if it has others, or wrong ones.
    """
    own = [each.name for each in fields(JudgeConfig)]
    if unknown := sorted(settings.keys() - own):
        raise SettingsError(f"{key} has no setting {unknown[0]!r}{near(unknown[0], own)}; it has {', '.join(own)}")
    try:
        return JudgeConfig(**settings)
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}") from None


def parse_object(key: str, value: dict | str | None) -> dict | None:
    """Return a setting that is a mapping in a YAML file, or JSON on the command line.

    Raises:
        [`SettingsError`]: if it is neither.
    """
    return parse_setting(key, value, dict, "a JSON object")
