"""The training set: load it, refuse what cannot be trained on, look queries up by id.

Rubrics and responses stay out of the rows that the trainer multiplies; a row carries `prompt` and `query_id`, and the
process that scores looks the rest up here. The table is an Arrow file mapped into memory, so 100,000 queries cost an
index, not their text.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from ..errors import RankBufferError
from ..groups import Query, Rubric

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class DataError(RankBufferError, ValueError):
    """A data set that cannot be trained on. The message names row, key and value."""


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
            Its split.
        streaming (`bool`, *optional*, defaults to `False`):
            Read rows as they are wanted, and keep no copy on the disk. Training needs `False`.

    Raises:
        [`DataError`]: if the data set is missing, cannot be reached, is of another kind or not readable.
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
    """Queries by id, checked once at start.

    Args:
        dataset (`Dataset`):
            Columns `query_id` (text, unique), `prompt` (list of messages), `rubrics` (list of `text` and `weight`),
            and, unless `anchors_needed` is 0, `responses` (list of text from worst to best).
        anchors_needed (`int`, *optional*, defaults to `0`):
            How many responses every row must have: `K0`, or 0 for bootstrap.

    Attributes:
        sha256 (`str`):
            Digest of all rows in their order, which decides when a query is visited.

    Raises:
        [`DataError`]: for the first row that is not of this form.
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
            row = self._dataset[self._row[query_id]]
        except KeyError:
            raise DataError(
                f"no query {query_id!r} in the data set that was given for rubrics and responses"
            ) from None
        return Query(
            id=query_id,
            prompt=row["prompt"],
            rubrics=tuple(Rubric(rubric["text"], rubric["weight"]) for rubric in row["rubrics"]),
            responses=tuple(row.get("responses") or ()),
        )

    @property
    def prompts(self) -> Dataset:
        """The rows with the columns `prompt` and `query_id` alone, for a trainer."""
        return self._dataset.select_columns(["prompt", "query_id"])

    @property
    def ids(self) -> list[str]:
        """All query ids, in the order of the rows."""
        return list(self._row)


def select(dataset: Dataset, required: list[str]) -> Dataset:
    """The columns `required` alone.

    Raises:
        [`DataError`]: naming the one that is missing, what makes it, and the columns found.
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
    """The rows of a data set, each of them checked by [`check_row`], and none with another's id.

    Raises:
        [`DataError`]: for the first row that is not as it should be, or if there are no rows.
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
    """Rows of a data set, decoded a hundred at a time.

    Raises:
        [`DataError`]: where it cannot be read on, such as in text that is not UTF-8.
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
    """Why `value` cannot stand in a prompt, or `None` if it can."""
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
            `query_id`, `prompt`, `rubrics`, `responses` and, where there are any, `models`. Other keys are ignored.
        number (`int`):
            Its number from 0, for messages.
        anchors_needed (`int`, *optional*, defaults to `0`):
            How many responses it must have. With 0 it may have none, but what is there must be text.
        rubrics_needed (`bool`, *optional*, defaults to `True`):
            Whether it must have rubrics. With `False` they may be missing, but what is there must be well-formed.

    Raises:
        [`DataError`]: naming row, key and value.
    """

    def fail(key: str, problem: str, value: object) -> NoReturn:
        query_id = row.get("query_id")
        name = f" (query_id {query_id!r})" if isinstance(query_id, str) else ""
        raise DataError(f"row {number}{name}: {key} {problem}, got {str(value)[:80]!r}")

    def check_text(key: str, value: object) -> None:
        if fault := text_fault(value):
            fail(key, fault, value)

    values: list[Any] = [row.get(key) for key in ("query_id", "prompt", "rubrics", "responses", "models")]
    query_id, prompt, rubrics, responses, models = values
    check_text("query_id", query_id)
    if not isinstance(prompt, list) or not prompt:
        fail("prompt", 'must be a non-empty list of messages such as [{"role": "user", "content": "..."}]', prompt)
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            fail(f"prompt[{i}]", "must have role and content", message)
        check_text(f"prompt[{i}].role", message["role"])
        check_text(f"prompt[{i}].content", message["content"])
    if prompt[-1]["role"] != "user":
        fail("prompt", "must end with a user message", prompt[-1]["role"])
    if rubrics_needed or rubrics:
        if not isinstance(rubrics, list) or not rubrics:
            fail("rubrics", "must be a non-empty list", rubrics)
        for i, rubric in enumerate(rubrics):
            if not isinstance(rubric, dict) or not {"text", "weight"} <= rubric.keys():
                fail(f"rubrics[{i}]", "must have text and weight", rubric)
            check_text(f"rubrics[{i}].text", rubric["text"])
            if type(rubric["weight"]) is not int or not 1 <= rubric["weight"] <= 5:
                fail(f"rubrics[{i}].weight", "must be an integer from 1 to 5", rubric["weight"])
    if anchors_needed or responses:
        if not isinstance(responses, list) or len(responses) < anchors_needed:
            count = len(responses) if isinstance(responses, list) else 0
            least = f"hold at least {anchors_needed} responses" if anchors_needed else "be a list of text"
            fail("responses", f"must {least} from worst to best", f"{count} responses")
        for i, response in enumerate(responses):
            check_text(f"responses[{i}]", response)
    if models:
        if not isinstance(models, list):
            fail("models", "must be a list of text", models)
        if responses and len(models) != len(responses):
            fail("models", f"must name who wrote each of the {len(responses)} responses", models)
        for i, model in enumerate(models):
            check_text(f"models[{i}]", model)
    return query_id
