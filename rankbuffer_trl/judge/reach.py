"""Is a judge there, and does it serve the model? Asked before anything is spent."""

from .errors import JudgeError, TransportError
from .judge import Judge
from .openai_client import OpenAIClient
from .servers import Servers


def servers_of(judge: Judge) -> list[OpenAIClient]:
    """The servers behind a judge; none for the embedded one."""
    if isinstance(judge.client, Servers):
        return judge.client.clients
    return [judge.client] if isinstance(judge.client, OpenAIClient) else []


async def check_server(client: OpenAIClient) -> int | None:
    """The context length of a server that is there and serves the model, `None` if it does not say.

    Raises:
        [`JudgeError`]: naming the server and what is wrong.
    """
    try:
        models = await client.models()
    except TransportError as error:
        if error.status == 401:
            raise JudgeError(
                f"the judge server {client.url} does not take the key, so nothing was started: {error}. Is the right"
                f" one in the environment variable {client.api_key_env}, which judge_api_key_env names?"
            ) from error
        if error.kind == "refused":  # not every endpoint lists its models; the questions to come will tell
            return None
        raise JudgeError(
            f"the judge server {client.url} cannot be reached, so nothing was started: {error}. Is it up, and does"
            " judge_url name it?"
        ) from error
    if client.model not in models:
        raise JudgeError(
            f"the judge server {client.url} does not serve judge_model={client.model!r}; it serves"
            f" {', '.join(map(repr, models))}"
        )
    return models[client.model]
