"""An endpoint: a model behind OpenAI-compatible servers, how to talk to it, and what it costs."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingsError
from ..settings import check_at_least
from ._errors import ECHOED
from ._ledger import Totals

DEFAULT_KEY = "OPENAI_API_KEY"
# Scheme, host, port and path alone.
ADDRESS = re.compile(r"(\w+://)?([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,9})?(/[\w.~-]*)*")
KEY = re.compile(  # of known providers. An id of an account may look as random, so no other text counts as a key.
    r"(?<![a-z0-9])((sk[-_]|gsk_|hf_|xai-|nvapi-|aiza|eyj)[\w-]{8}"
    r"|(csk-|pplx-|glpat-|r8_|fw_|tgp_v1_|gh[oprsu]_|github_pat_|akia|asia)\w{16})",
    re.IGNORECASE,
)

CLIENT_HEADER = re.compile(  # what the HTTP client sets, and what authorises
    r".*(authorization|cookie|api-?key|token|secret).*|host|connection|content-.*|transfer-.*|accept.*|expect|upgrade|te",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Endpoint:
    """A model behind one or several OpenAI-compatible servers.

    Args:
        urls (`tuple[str, ...]`, *optional*, defaults to `()`):
            Base URLs of servers that all serve the model. Without one there is nothing to connect to, but the prices
            still hold.
        model (`str`, *optional*):
            The name under which the servers serve the model.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the servers' key.
        request (`Mapping`, *optional*):
            Fields to set in every request; `None` leaves a field out.
        headers (`Mapping[str, str]`, *optional*):
            Headers to set in every request.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that a request may go without a byte from the server.
        max_retries (`int`, *optional*, defaults to `4`):
            Transport retries of one request.
        concurrency (`int`, *optional*, defaults to `64`):
            Requests in flight at once, per server.
        wait (`float`, *optional*, defaults to `600.0`):
            Seconds for which questions are held when all servers are down.
        prompt_price (`float`, *optional*):
            Price of a million prompt tokens.
        cached_price (`float`, *optional*):
            Price of a million prompt tokens that the server had cached. Default: `prompt_price`.
        completion_price (`float`, *optional*):
            Price of a million completion tokens.
        role (`str`, *optional*, defaults to `"judge"`):
            What the model is used for. The settings that describe the endpoint begin with it in error messages.

    Raises:
        [`SettingsError`]: naming the setting whose value cannot work.

    Example:

    ```python
    from rankbuffer_trl.judge import Totals
    from rankbuffer_trl.judge._endpoint import Endpoint

    endpoint = Endpoint(("http://127.0.0.1:8001/v1",), "my-judge", prompt_price=0.5, completion_price=2.0)
    totals = Totals(spent_prompt_tokens=4_000_000, spent_completion_tokens=100_000)
    endpoint.price(totals)  # 2.2
    ```
    """

    urls: tuple[str, ...] = ()
    model: str | None = None
    api_key_env: str = DEFAULT_KEY
    request: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 120.0
    max_retries: int = 4
    concurrency: int = 64
    wait: float = 600.0
    prompt_price: float | None = None
    cached_price: float | None = None
    completion_price: float | None = None
    role: str = "judge"

    def __post_init__(self):
        least = {"max_retries": 0, "concurrency": 1, "wait": 0}
        check_at_least(self, f"{self.role}_", **least, prompt_price=0, cached_price=0, completion_price=0)
        check_seconds(f"{self.role}_timeout", self.timeout)
        url, model, variable = (f"{self.role}_{name}" for name in ("url", "model", "api_key_env"))
        check_variable(self.api_key_env, variable)
        for each in self.urls:
            check_url(url, each, variable, os.environ.get(self.api_key_env))
        check_headers(f"{self.role}_headers", self.headers, variable)
        if fixed := {"messages", "model", "stream"} & self.request.keys():
            raise SettingsError(f"{self.role}_request must not set {min(fixed)}, which each request sets itself")
        if len(set(self.urls)) < len(self.urls):
            raise SettingsError(f"{url} names a server twice: {list(self.urls)}")
        if self.urls and not self.model:
            raise SettingsError(f"{url} is {list(self.urls)} but {model} is not set: name the model it serves")
        if not self.urls and self.model:
            raise SettingsError(f"{model} is {self.model!r} but {url} is not set: say where it is served")

    def price(self, totals: Totals) -> float | None:
        """Return what all attempts cost; `None` if neither the price of prompts nor that of completions is set."""
        if self.prompt_price is None and self.completion_price is None:
            return None
        full = self.prompt_price or 0
        cached = min(totals.spent_cached_tokens, totals.spent_prompt_tokens)  # whatever a server says
        prompt = (totals.spent_prompt_tokens - cached) * full
        prompt += cached * (full if self.cached_price is None else self.cached_price)
        return (prompt + totals.spent_completion_tokens * (self.completion_price or 0)) / 1e6


def check_seconds(key: str, value: float | None) -> None:
    """Refuse a time limit that is not above 0 seconds and finite."""
    if value is not None and not 0 < value < math.inf:
        raise SettingsError(f"{key} must be above 0 seconds, got {value}")


def check_url(key: str, url: str, variable: str | None = None, secret: str | None = None) -> None:
    """Refuse an address that no server has, and one with a key in it.

    Args:
        key (`str`):
            The setting that holds the address, for the error message.
        variable (`str`, *optional*):
            The setting that names the variable with the key, for the error message.
        secret (`str`, *optional*):
            The key itself.

    Raises:
        [`SettingsError`]: naming the setting `key`. An address that may hold a key is not shown.
    """
    if not url:
        raise SettingsError(f"{key} is empty: name a server, such as http://127.0.0.1:8001/v1, or leave {key} out")
    address = ADDRESS.fullmatch(url)
    # Logs show addresses. A key of a few characters, such as `none`, may be a part of any.
    if not address or KEY.search(url) or (secret and len(secret) >= ECHOED and secret in url):
        where = f", and put the key into the environment variable that {variable} names" if variable else ""
        raise SettingsError(
            f"{key} has a user, a query or a key in it, or more than scheme, host, port and path: leave that out"
            f"{where}. The address is not shown because of the key"
        )
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"{key} must start with http:// or https://, got {url!r}")
    if address[3] and not 0 < int(address[3][1:]) <= 65535:
        raise SettingsError(f"{key} has no port between 1 and 65535, got {url!r}")


def check_headers(key: str, headers: Mapping[str, Any], variable: str) -> None:
    """Refuse headers that cannot be sent, that the client itself sets, or that look like a key."""
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z][\w-]{0,99}", name, re.ASCII) or CLIENT_HEADER.fullmatch(name):
            raise SettingsError(f"{key} cannot have the header {name[:99]!r}: name one of your own, such as X-Run")
        # Settings are written into files, and a key must not be.
        if not isinstance(value, str) or not re.fullmatch(r"[!-~]([ -~]{0,998}[!-~])?", value) or KEY.search(value):
            raise SettingsError(
                f"{key} has a header {name} that is no text of printable ASCII characters, or looks like a key: a key"
                f" belongs into the environment variable that {variable} names"
            )


def check_variable(name: str, key: str) -> None:
    """Refuse what is not the name of an environment variable."""
    if not re.fullmatch("[A-Z_][A-Z0-9_]*", name) and name not in os.environ:  # it may be a key, so it is not shown
        raise SettingsError(
            f"{key} must be the name of an environment variable, in capital letters, such as {DEFAULT_KEY}. Its value"
            " is not shown here because it may be a key: export the key in such a variable"
        )


def read_key(variable: str, key: str) -> str | None:
    """Return the key that an environment variable holds; `None` if the default variable is not set.

    Args:
        key (`str`):
            The setting that names the variable, for the error message.

    Raises:
        [`SettingsError`]: if another variable is not set, or if the key cannot be sent in a header.
    """
    value = os.environ.get(variable)
    if not value and variable != DEFAULT_KEY:  # who names a variable has a key; many servers need none
        raise SettingsError(
            f"{key} names the environment variable {variable}, which is not set: export the server's key there, or"
            f" leave {key} out if the server wants none"
        )
    if value and not re.fullmatch("[!-~]+", value):
        raise SettingsError(
            f"the environment variable {variable} holds a character that no key has: set it again to the key alone"
        )
    return value or None
