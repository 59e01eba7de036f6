"""The settings of a judge, for training, audits, data and evaluation."""

from dataclasses import dataclass, field, is_dataclass
from typing import Any

from ..errors import SettingsError
from ..settings import check_arguments, check_own_fields, load_path, parse_json
from .endpoint import Endpoint, check_at_least, check_seconds
from .judge import ChatClient, Judge
from .rubric_judge import RubricJudge
from .servers import Servers
from .verdicts import DECODINGS


@dataclass
class JudgeConfig:
    r"""
    Configuration of the judge.

    Parameters:
        judge_url (`str` or `list[str]`, *optional*):
            Base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8001/v1`, or several of them that serve
            the same model. A query stays with one of several servers while that server is up. Without a URL, the
            embedded rubric judge answers, which needs no model.
        judge_model (`str`, *optional*):
            Name under which the servers serve the judge.
        judge_client (`str`, *optional*):
            Dotted path of a dataclass that answers in place of a server, see [`ChatClient`] and `docs/extending.md`.
            `judge_url` and `judge_model` must then be `null`.
        judge_client_args (`dict`, *optional*):
            The arguments of `judge_client`, as JSON on the command line.
        judge_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the servers' key. Any variable but the default one must be set.
        judge_decoding (`str`, *optional*, defaults to `"none"`):
            How the form of a verdict is enforced: `"regex"` (vLLM: no verdict can be malformed), `"json_schema"` (most
            other servers) or `"none"` (the prompt asks for the form, and the judge is asked again after a malformed
            answer).
        judge_free_tokens (`int`, *optional*, defaults to `256`):
            Tokens that an answer may have in addition to its verdict, for prose, a code fence or thinking. No effect
            for `"regex"`, which allows the verdict only.
        judge_request (`dict`, *optional*):
            Fields to set in every request, as JSON on the command line; `null` leaves a field out. For example
            `{"chat_template_kwargs": {"enable_thinking": false}}`.
        judge_guard (`bool`, *optional*, defaults to `True`):
            Quote responses in prompts, so that no response can imitate a prompt's headings, rubrics or instructions.
            `False` gives the paper's prompts.
        judge_timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that a request may go without a byte from the server. The whole request may take five times as
            long.
        judge_wait (`float`, *optional*, defaults to `600.0`):
            Seconds for which questions wait when all servers of the judge are down. After that the questions fail.
            `judge_step_timeout` also ends the wait.
        judge_step_timeout (`float`, *optional*):
            Seconds for judging one step after its last rollout, above which the run stops with an error. Default: nine
            tenths of `ddp_timeout`, because the other processes give up after `ddp_timeout`.
        judge_max_retries (`int`, *optional*, defaults to `4`):
            Transport retries of one request, with backoff and jitter.
        judge_max_attempts (`int`, *optional*, defaults to `3`):
            Number of times that a question is asked, at most, if its answers are malformed.
        judge_concurrency (`int`, *optional*, defaults to `64`):
            Requests in flight at once, per server.
        judge_max_failures (`float`, *optional*, defaults to `0.25`):
            Share of a step's judgments, in 0..1, above which failures stop the run.
        judge_prompt_price (`float`, *optional*):
            Price of a million prompt tokens, for the cost that is shown. Cached tokens count in full.
        judge_completion_price (`float`, *optional*):
            Price of a million completion tokens.
    """

    judge_url: list[str] | None = field(
        default=None,
        metadata={"help": "Base URL of an OpenAI-compatible server, or several. Default: the embedded rubric judge."},
    )
    judge_model: str | None = field(default=None, metadata={"help": "Name under which the servers serve the judge."})
    judge_client: str | None = field(
        default=None, metadata={"help": "Dotted path of a dataclass that answers in place of a server."}
    )
    judge_client_args: dict | str | None = field(
        default=None, metadata={"help": "JSON object with the arguments of judge_client."}
    )
    judge_api_key_env: str = field(
        default="OPENAI_API_KEY", metadata={"help": "Environment variable that holds the servers' key."}
    )
    judge_decoding: str = field(
        default="none",
        metadata={
            "help": "How a verdict's form is enforced: 'regex' on vLLM, 'json_schema' on most others, or 'none'.",
            "choices": list(DECODINGS),
        },
    )
    judge_free_tokens: int = field(
        default=256, metadata={"help": "Tokens an answer may have in addition to its verdict. No effect for 'regex'."}
    )
    judge_request: dict | str | None = field(
        default=None, metadata={"help": "JSON object of fields to set in every request; null leaves a field out."}
    )
    judge_guard: bool = field(
        default=True, metadata={"help": "Quote responses in prompts. False gives the paper's prompts."}
    )
    judge_timeout: float = field(default=120.0, metadata={"help": "Seconds that a request may go without a byte."})
    judge_wait: float = field(
        default=600.0, metadata={"help": "Seconds for which questions wait when all servers are down."}
    )
    judge_step_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds of judging after a step's last rollout. Default: 0.9 of ddp_timeout."},
    )
    judge_max_retries: int = field(default=4, metadata={"help": "Transport retries of one request."})
    judge_max_attempts: int = field(
        default=3, metadata={"help": "How often one question is asked when its answers are malformed."}
    )
    judge_concurrency: int = field(default=64, metadata={"help": "Requests in flight at once, per server."})
    judge_max_failures: float = field(
        default=0.25, metadata={"help": "Share of a step's judgments above which failures stop the run."}
    )
    judge_prompt_price: float | None = field(
        default=None, metadata={"help": "Price of a million prompt tokens, for the cost that is shown."}
    )
    judge_completion_price: float | None = field(
        default=None, metadata={"help": "Price of a million completion tokens, for the cost that is shown."}
    )

    def __post_init__(self):
        if isinstance(self.judge_url, str):
            self.judge_url = [self.judge_url]
        check_own_fields(self, JudgeConfig)
        self.judge_request = read_object("judge_request", self.judge_request)
        self.endpoint()  # raises for what no endpoint has
        self.judge_client_args = read_object("judge_client_args", self.judge_client_args)
        self._own_client()
        check_at_least("judge_free_tokens", self.judge_free_tokens, 0)
        check_at_least("judge_max_attempts", self.judge_max_attempts, 1)
        check_seconds("judge_step_timeout", self.judge_step_timeout)
        if not 0 <= self.judge_max_failures <= 1:
            raise SettingsError(f"judge_max_failures is a share in 0..1, got {self.judge_max_failures}")
        if self.judge_decoding not in DECODINGS:
            raise SettingsError(f"judge_decoding must be one of {', '.join(DECODINGS)}, got {self.judge_decoding!r}")

    def endpoint(self) -> Endpoint:
        """Describe the judge's model and its servers; for the embedded judge there are none."""
        return Endpoint(
            urls=tuple(self.judge_url or ()),
            model=self.judge_model,
            api_key_env=self.judge_api_key_env,
            request=read_object("judge_request", self.judge_request) or {},
            timeout=self.judge_timeout,
            max_retries=self.judge_max_retries,
            concurrency=self.judge_concurrency,
            wait=self.judge_wait,
            prompt_price=self.judge_prompt_price,
            completion_price=self.judge_completion_price,
        )

    def judge(self) -> Judge:
        """Make the judge that these settings describe."""
        own = self._own_client()
        client: ChatClient = own[0](**own[1]) if own else RubricJudge()
        if self.judge_url:
            client = Servers.of(self.endpoint(), self.judge_decoding, self.judge_free_tokens)
        return Judge(client, max_attempts=self.judge_max_attempts, guard=self.judge_guard)

    def _own_client(self) -> tuple[type[Any], dict[str, Any]] | None:
        """Return the class that `judge_client` names, with its arguments. It is made when the judge is made."""
        arguments = read_object("judge_client_args", self.judge_client_args) or {}
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


def read_object(key: str, value: dict | str | None) -> dict | None:
    """Return a setting that is a mapping in a YAML file, or JSON on the command line.

    Raises:
        [`SettingsError`]: if it is neither.
    """
    value = parse_json(key, value)
    if not isinstance(value, dict | None):
        raise SettingsError(f"{key} must be a JSON object, got {value!r}")
    return value
