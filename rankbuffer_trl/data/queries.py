"""Load a training set, refuse rows that cannot be trained on, and look queries up by id.

The trainer's own rows hold `prompt` and `query_id` only, because TRL copies them for every rollout. The process that
scores looks rubrics and responses up here. The table is an Arrow file mapped into memory: 100,000 queries take the
memory of an index, not of their texts.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from ..errors import RankBufferError
from ..groups import Query

Fault = tuple[str, str, object]
COLUMNS = ("query_id", "prompt", "rubrics", "responses", "models")
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class DataError(RankBufferError, ValueError):
    """A data set that cannot be used. The message names row, key and value."""


def load_queries(
    name: str, config: str | None = None, split: str = "train", streaming: bool = False
) -> Dataset | IterableDataset:
    """Load a data set from a `.jsonl`, `.json` or `.parquet` file, a folder of them, or the Hub.

    Args:
        name (`str`):
            Path of a file (all of it is `train`) or of a folder with a file per split, or the id of a data set.
        config (`str`, *optional*):
            Configuration of a data set on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        streaming (`bool`, *optional*, defaults to `False`):
            Read rows when they are needed, and keep no copy on disk. Training needs `False`.

    Raises:
        [`DataError`]: if the data set is missing, cannot be reached, is of another kind or not readable.

    Example:

    ```python
    from rankbuffer_trl import load_queries

    dataset = load_queries("recipes/quickstart/howto.jsonl")
    len(dataset)  # 36
    ```
    """
    path = Path(name)
    arguments: dict[str, Any] = {"name": config}
    if path.suffix in BUILDERS:
        if split != "train":
            raise DataError(
                f"the file {name} has no split {split!r}; name a folder with train{path.suffix}, {split}{path.suffix}"
            )
        if not path.is_file():
            raise DataError(
                f"the data set {name} does not exist (dataset_name is a file here, because it ends in {path.suffix})"
            )
        name, arguments = BUILDERS[path.suffix], {"data_files": str(path)}
    try:
        return load_dataset(name, **arguments, split=split, streaming=streaming)
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(f"the data set {path} cannot be read: {cause}") from error


class QueryTable:
    """The queries of a training set by id. All rows are checked once, when the table is made.

    Args:
        dataset (`Dataset`):
            Columns `query_id` (text, unique), `prompt` (list of messages), `rubrics` (list of `text` and `weight`),
            and, unless `anchors_needed` is 0, `responses` (list of text from worst to best).
        anchors_needed (`int`, *optional*, defaults to `0`):
            Number of responses that every row must have: `K0`, or 0 for bootstrap.

    Attributes:
        sha256 (`str`):
            Digest of all rows in their order. The order decides when a query is visited.

    Raises:
        [`DataError`]: for the first row that is not of this form.

    Example:

    ```python
    table = QueryTable(load_queries("recipes/quickstart/howto.jsonl"), anchors_needed=4)
    print(table[table.ids[0]].text)
    ```
    """

    def __init__(self, dataset: Dataset, anchors_needed: int = 0):
        required = ["query_id", "prompt", "rubrics"] + (["responses"] if anchors_needed else [])
        self._dataset = select(dataset, required)
        self._row: dict[str, int] = {}
        contents = hashlib.sha256()
        for number, row in enumerate(checked(self._dataset, anchors_needed)):
            contents.update(json.dumps(row, sort_keys=True).encode())
            self._row[row["query_id"]] = number
        self.sha256 = contents.hexdigest()

    def __len__(self) -> int:
        return len(self._row)

    def __contains__(self, query_id: str) -> bool:
        return query_id in self._row

    def __getitem__(self, query_id: str) -> Query:
        try:
            number = self._row[query_id]
        except KeyError:
            raise DataError(
                f"no query {query_id!r} in the data set that was given for rubrics and responses"
            ) from None
        return Query.from_row(self._dataset[number])

    @property
    def prompts(self) -> Dataset:
        """The rows with the columns `prompt` and `query_id` alone, for a trainer."""
        return self._dataset.select_columns(["prompt", "query_id"])

    @property
    def ids(self) -> list[str]:
        """The query ids, in the order of the rows."""
        return list(self._row)


def select(dataset: Dataset, required: list[str]) -> Dataset:
    """Return a data set with the columns `required` only.

    Raises:
        [`DataError`]: naming the column that is missing, the recipe that makes it, and the columns found.
    """
    hints = {
        "rubrics": " (recipes/generate_rubrics.py makes them)",
        "responses": " (recipes/generate_responses.py makes them; or choose a method that needs none, such as"
        " method_args: {bootstrap: true})",
    }
    for column in required:
        if column not in dataset.column_names:
            hint = hints.get(column, "")
            raise DataError(f"the data set has no column {column!r}{hint}; its columns are {dataset.column_names}")
    return dataset.select_columns(required)


def checked(dataset: Dataset, anchors_needed: int = 0, rubrics_needed: bool = True) -> Iterator[dict]:
    """Yield the rows of a data set. Each is checked by [`check_row`], and no two may have the same id.

    Raises:
        [`DataError`]: for the first row that is not well-formed, or if there are no rows.
    """
    seen: dict[str, int] = {}
    for number, row in enumerate(iterate(dataset)):
        query_id = check_row(row, number, anchors_needed, rubrics_needed)
        if query_id in seen:
            raise DataError(f"rows {seen[query_id]} and {number} have the same query_id {query_id!r}")
        seen[query_id] = number
        yield row
    if not seen:
        raise DataError("the data set has no rows")


def iterate(dataset: Dataset | IterableDataset) -> Iterator[dict]:
    """Yield the rows of a data set, decoded a hundred at a time.

    Raises:
        [`DataError`]: where the data set cannot be read further, for example at text that is not UTF-8.
    """
    count = 0
    try:
        for batch in dataset.iter(batch_size=100):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))
                count += 1
    except (ValueError, OSError, DatasetGenerationError) as error:
        raise DataError(f"the data set cannot be read after its first {count} rows or so: {error}") from error


def text_fault(value: object) -> str | None:
    """Return why `value` cannot be text of a prompt, or `None` if it can."""
    if not isinstance(value, str) or not value.strip():
        return "must be non-empty text"
    if "\0" in value:
        return "must be text without NUL characters"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "must be text without lone surrogates"
    return None


def check_row(row: dict, number: int, anchors_needed: int = 0, rubrics_needed: bool = True) -> str:
    """Check one row of a training set and return its query id. docs/data.md has the schema.

    Args:
        row (`dict`):
            `query_id`, `prompt`, `rubrics`, `responses` and, optionally, `models`. Other keys are ignored.
        number (`int`):
            Number of the row from 0, for messages.
        anchors_needed (`int`, *optional*, defaults to `0`):
            Number of responses that the row must have. With 0 it may have none, but those it has must be text.
        rubrics_needed (`bool`, *optional*, defaults to `True`):
            Whether the row must have rubrics. With `False` it may have none, but those it has must be well-formed.

    Raises:
        [`DataError`]: naming row, key and value.
    """
    values: list[Any] = [row.get(key) for key in COLUMNS]
    query_id, prompt, rubrics, responses, models = values
    for key, problem, value in chain(
        text_faults("query_id", query_id),
        prompt_faults(prompt),
        rubric_faults(rubrics) if rubrics_needed or rubrics else (),
        response_faults(responses, anchors_needed) if anchors_needed or responses else (),
        model_faults(models, responses) if models else (),
    ):
        name = f" (query_id {query_id!r})" if isinstance(query_id, str) else ""
        raise DataError(f"row {number}{name}: {key} {problem}, got {str(value)[:80]!r}")
    return query_id


# Each of these yields (key, problem, value). [`check_row`] stops at the first fault, so the code after a
# `yield` may rely on all checks before it.


def text_faults(key: str, value: object) -> Iterator[Fault]:
    """Yield the fault of a text, if it has one."""
    if fault := text_fault(value):
        yield key, fault, value


def prompt_faults(prompt: Any) -> Iterator[Fault]:
    """Yield the faults of a list of messages."""
    if not isinstance(prompt, list) or not prompt:
        yield "prompt", 'must be a non-empty list of messages such as [{"role": "user", "content": "..."}]', prompt
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            yield f"prompt[{i}]", "must have role and content", message
        yield from text_faults(f"prompt[{i}].role", message["role"])
        yield from text_faults(f"prompt[{i}].content", message["content"])
    if prompt[-1]["role"] != "user":
        yield "prompt", "must end with a user message", prompt[-1]["role"]


def rubric_faults(rubrics: Any) -> Iterator[Fault]:
    """Yield the faults of a list of rubrics."""
    if not isinstance(rubrics, list) or not rubrics:
        yield "rubrics", "must be a non-empty list", rubrics
    for i, rubric in enumerate(rubrics):
        if not isinstance(rubric, dict) or not {"text", "weight"} <= rubric.keys():
            yield f"rubrics[{i}]", "must have text and weight", rubric
        yield from text_faults(f"rubrics[{i}].text", rubric["text"])
        if type(rubric["weight"]) is not int or not 1 <= rubric["weight"] <= 5:
            yield f"rubrics[{i}].weight", "must be an integer from 1 to 5", rubric["weight"]


def response_faults(responses: Any, anchors_needed: int) -> Iterator[Fault]:
    """Yield the faults of a list of responses, of which at least `anchors_needed` must be there."""
    if not isinstance(responses, list) or len(responses) < anchors_needed:
        count = len(responses) if isinstance(responses, list) else 0
        least = f"hold at least {anchors_needed} responses" if anchors_needed else "be a list of text"
        yield "responses", f"must {least} from worst to best", f"{count} responses"
    for i, response in enumerate(responses):
        yield from text_faults(f"responses[{i}]", response)


def model_faults(models: Any, responses: Any) -> Iterator[Fault]:
    """Yield the faults of the names of the models that wrote the responses."""
    if not isinstance(models, list):
        yield "models", "must be a list of text", models
    if responses and len(models) != len(responses):
        yield "models", f"must name who wrote each of the {len(responses)} responses", models
    for i, model in enumerate(models):
        yield from text_faults(f"models[{i}]", model)
