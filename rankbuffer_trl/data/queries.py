"""The training set: load it, refuse what cannot be trained on, look queries up by id.

Rubrics and responses stay out of the rows that the trainer multiplies; a row carries `prompt` and `query_id`, and the
process that scores looks the rest up here. The table is an Arrow file mapped into memory, so 100,000 queries cost an
index, not their text.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, load_dataset

from ..groups import Query, Rubric

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class DataError(ValueError):
    """A data set that cannot be trained on. The message names row, key and value."""


def load_queries(name: str, config: str | None = None, split: str = "train") -> Dataset:
    """Load a training set from a `.jsonl`, `.json` or `.parquet` file, a folder of them, or the Hub.

    Args:
        name (`str`):
            Path of a file (all of it is `train`) or of a folder with a file per split, or the id of a data set.
        config (`str`, *optional*):
            Configuration of a data set on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Its split.

    Raises:
        [`DataError`]: if the file is missing, of another kind or not readable.
    """
    path = Path(name)
    if path.suffix in BUILDERS:
        if split != "train":
            raise DataError(
                f"the file {name} has no split {split!r}; name a folder with train{path.suffix}, {split}{path.suffix}"
            )
        if not path.is_file():
            raise DataError(
                f"the data set {name} does not exist (dataset_name is a file here, because it ends in {path.suffix})"
            )
        try:
            return load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train")
        except Exception as error:
            cause = error.__cause__ or error
            raise DataError(f"the data set {name} cannot be read: {cause}") from error
    return load_dataset(name, config, split=split)


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
        missing = [column for column in required if column not in dataset.column_names]
        if missing:
            hint = (
                " (or choose a method that needs none, such as method_args: {bootstrap: true})"
                if missing == ["responses"]
                else ""
            )
            raise DataError(f"the data set has no column {missing[0]!r}{hint}; its columns are {dataset.column_names}")
        self._dataset = dataset.select_columns(required)
        self._row: dict[str, int] = {}
        contents = hashlib.sha256()
        for number, row in enumerate(iterate(self._dataset)):
            query_id = check_row(row, number, anchors_needed)
            contents.update(json.dumps(row, sort_keys=True).encode())
            if query_id in self._row:
                raise DataError(f"rows {self._row[query_id]} and {number} have the same query_id {query_id!r}")
            self._row[query_id] = number
        if not self._row:
            raise DataError("the data set has no rows")
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
    def ids(self) -> list[str]:
        """All query ids, in the order of the rows."""
        return list(self._row)


def iterate(dataset: Dataset) -> Iterator[dict]:
    """Rows of a data set, decoded a thousand at a time."""
    for batch in dataset.iter(batch_size=1000):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def check_row(row: dict, number: int, anchors_needed: int) -> str:
    """Check one row and return its query id.

    Raises:
        [`DataError`]: naming row, key and value.
    """

    def fail(key: str, problem: str, value: object) -> None:
        name = f" (query_id {row['query_id']!r})" if isinstance(row["query_id"], str) else ""
        raise DataError(f"row {number}{name}: {key} {problem}, got {str(value)[:80]!r}")

    query_id, prompt, rubrics = row["query_id"], row["prompt"], row["rubrics"]
    if not isinstance(query_id, str) or not query_id.strip():
        fail("query_id", "must be non-empty text", query_id)
    if not isinstance(prompt, list) or not prompt:
        fail("prompt", 'must be a non-empty list of messages such as [{"role": "user", "content": "..."}]', prompt)
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            fail(f"prompt[{i}]", "must have role and content", message)
        if not isinstance(message["role"], str) or not message["role"].strip():
            fail(f"prompt[{i}].role", "must be non-empty text", message["role"])
        if not isinstance(message["content"], str) or not message["content"].strip():
            fail(f"prompt[{i}].content", "must be non-empty text", message["content"])
    if prompt[-1]["role"] != "user":
        fail("prompt", "must end with a user message", prompt[-1]["role"])
    if not isinstance(rubrics, list) or not rubrics:
        fail("rubrics", "must be a non-empty list", rubrics)
    for i, rubric in enumerate(rubrics):
        if not isinstance(rubric, dict) or not {"text", "weight"} <= rubric.keys():
            fail(f"rubrics[{i}]", "must have text and weight", rubric)
        if not isinstance(rubric["text"], str) or not rubric["text"].strip():
            fail(f"rubrics[{i}].text", "must be non-empty text", rubric["text"])
        if type(rubric["weight"]) is not int or not 1 <= rubric["weight"] <= 5:
            fail(f"rubrics[{i}].weight", "must be an integer from 1 to 5", rubric["weight"])
    if anchors_needed:
        responses = row["responses"]
        if not isinstance(responses, list) or len(responses) < anchors_needed:
            count = len(responses) if isinstance(responses, list) else 0
            fail(
                "responses",
                f"must hold at least {anchors_needed} responses from worst to best",
                f"{count} responses",
            )
        for i, response in enumerate(responses):
            if not isinstance(response, str) or not response.strip():
                fail(f"responses[{i}]", "must be non-empty text", response)
    return query_id
