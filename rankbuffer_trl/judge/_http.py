"""The HTTP library under the `openai` client: httpx2 since its version 3, httpx before. The names are the same."""

from typing import TYPE_CHECKING

from openai import VERSION

if TYPE_CHECKING or not VERSION.startswith("2."):
    from httpx2 import Limits, ReadTimeout, Request, Response
else:  # other libraries still require it
    from httpx import Limits, ReadTimeout, Request, Response

__all__ = ["Limits", "ReadTimeout", "Request", "Response"]
