"""Load a training set, refuse rows that cannot be trained on, and look queries up by id.

The trainer's own rows hold no rubrics and responses, because TRL copies rows for every rollout. The process that
scores looks them up here. The table is an Arrow file mapped into memory: 100,000 queries take the memory of an index,
not of their texts.
"""

import ast
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, List, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from httpx import HTTPError
from pyarrow import ArrowException

from ..decoding import excerpt
from ..errors import RankBufferError
from ..groups import Query, Rubric
from ..judge._quoting import visible

logger = logging.getLogger(__name__)

Fault = tuple[str, str, object]
CHECK_HINT = "; `rankbuffer-data check` lists all faults of a file by line"
PAPER_SET = ", by recipes/prepare_nectar.py and then recipes/generate_rubrics.py"
QUERY_COLUMNS = ("query_id", "prompt", "rubrics", "responses", "models")
# Names that mean something to TRL or to the rank reward, so that no column of them is passed on.
TAKEN = ("prompts", "completions", "image", "images")
MEDIA = re.compile("^(image|audio|video)s?:|: .*(Image|Audio|Video)[(]", re.IGNORECASE)  # a name, or a type
# A whole prompt as a chat template writes it, from the header of a role to that of the answer or the end of a turn.
BAR = r"[|\uff5c]"
RENDERED = re.compile(
    rf"\s*(?:<(?:s|bos|BOS_TOKEN|{BAR}begin[^<>\s]*)>\s*)?"
    rf"(?:<\|(?:im_start|start_header_id)\|>\w|<start_of_turn>\w|<\|turn>\w|<{BAR}(?:user|system){BAR}>"
    r"|\[(?:INST|SYSTEM_PROMPT)\]).*"
    r"(?:<\|im_start\|>assistant|<\|(?:im_end|end_header_id|eot_id)\|>|<start_of_turn>model|<end_of_turn>|<turn\|>"
    rf"|<{BAR}assistant{BAR}>|\[/INST\])\s*(?:<think>\s*(?:</think>\s*)?)?",
    re.DOTALL | re.IGNORECASE,
)
ROLES = ("system", "developer", "user", "human", "assistant", "gpt")
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
OTHER_FILES = (".csv", ".tsv", ".txt", ".xls", ".xlsx", ".yaml", ".yml")
# What a data set that is missing, damaged or out of reach makes the libraries raise; a file without rows is the third.
UNREADABLE = (OSError, ValueError, StopIteration, ArrowException, DatasetsError, HTTPError)

GENERIC_RUBRICS = (
    Rubric("Does what the query asks, in full, and keeps to every constraint that it states.", 5),
    Rubric("Is correct: facts, reasoning, numbers and code hold up, and nothing is made up.", 5),
    Rubric("Is specific and useful to the person who asked, with detail where it matters.", 3),
    Rubric("Is clearly written and well organised, in a fitting tone and form.", 2),
    Rubric("Is no longer than it needs to be, without filler or repetition.", 1),
)
"""Rubrics for any query. They do not say what matters for one query, so expect a weaker reward."""


class DataError(RankBufferError, ValueError):
    """A data set that cannot be used. The message names row, key and value."""


class MissingFileError(DataError):
    """A data set whose file does not exist. The message says how to make it."""


def load_queries(
    name: str, config: str | None = None, split: str = "train", streaming: bool = False
) -> Dataset | IterableDataset:
    """Load a data set from a `.jsonl`, `.json` or `.parquet` file, a folder of them, or the Hub.

    Args:
        name (`str`):
            Path of a file (all of it is `train`) or of a folder with a file per split, or the id of a data set.
        config (`str`, *optional*):
            Configuration of a data set on the Hub.
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
    if path.suffix in FILE_BUILDERS:
        if split != "train":
            raise DataError(
                f"the file {name} has no split {split!r}; name a folder with train{path.suffix}, {split}{path.suffix}"
            )
        if not path.is_file():
            raise MissingFileError(
                f"the data set {name} does not exist (dataset_name is a file here, because it ends in {path.suffix})."
                f" docs/data.md says how to make one{PAPER_SET * path.name.startswith('nectar_1000')}"
            )
        # Escaped, since its name may have a `*` or brackets.
        name, arguments = FILE_BUILDERS[path.suffix], {"data_files": escape(str(path))}
    elif path.suffix in OTHER_FILES or path.is_file():
        raise DataError(
            f"{name} is not supported, because rows need lists: write {path.stem}.jsonl, one JSON object per line"
            ' such as {"prompt": "How do I boil an egg?"}; .json and .parquet are read, too'
        )
    for apart in path.glob("*_kept_apart.*") if path.is_dir() else ():
        if (base := apart.with_stem(apart.stem.removesuffix("_kept_apart"))).is_file():
            raise DataError(
                f"the folder {path} holds prompts that were kept apart, in {apart.name}, and all of its files would be"
                f" read as one: name {base}"
            )
    try:
        if "data_files" in arguments and not streaming:  # the cache knows a file by its time, which a copy may keep
            with path.open("rb") as file:
                arguments["name"] = hashlib.file_digest(file, "sha256").hexdigest()
        return load_dataset(name, **arguments, split=split, streaming=streaming)
    except (*UNREADABLE, RuntimeError) as error:
        # A bug keeps its traceback.
        if not isinstance(error, UNREADABLE) and "scripts are no longer supported" not in str(error):
            raise
        cause = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        if path.is_dir() and "save_to_disk" not in cause:  # its files may not belong together
            # Not what belongs to a file, such as `x.jsonl.provenance.json`.
            files = sorted(
                str(f) for f in path.iterdir() if [s for s in f.suffixes if s in FILE_BUILDERS] == [f.suffix]
            )
            raise DataError(
                f"the data set {path} is a folder that cannot be read as a whole: name one file of it"
                f" ({', '.join(files[:5]) or 'it has no .jsonl, .json or .parquet file'}), or a folder that has only"
                f" train.jsonl and files of other splits ({'...' * (len(cause) > 100)}{cause[-100:]})"
            ) from error
        foreign = isinstance(error, PermissionError) and Path(str(error.filename)).resolve() != path.resolve()
        hint = "; set HF_HOME to a folder that can be written" if foreign else CHECK_HINT
        raise DataError(f"the data set {path} cannot be read: {cause}{hint}") from error


class QueryTable:
    """The queries of a training set by id. All rows are checked once, when the table is made.

    Args:
        dataset (`Dataset`):
            Columns `prompt` (a text or a list of messages), `rubrics` (list of `text` and `weight`; without the
            column, all queries have the generic ones), unless `anchors_needed` is 0 `responses` (list of text from
            worst to best), and, if the rows have ids, `query_id` (text, unique). Further columns may have any type.
        anchors_needed (`int`, *optional*, defaults to `0`):
            Number of responses that every row must have: `K0`, or 0 for bootstrap.

    Attributes:
        sha256 (`str`):
            Digest of all rows in their order, without further columns.

    Raises:
        [`DataError`]: for the first row that is not of this form.

    Example:

    ```python
    table = QueryTable(load_queries("recipes/quickstart/howto.jsonl"), anchors_needed=4)
    print(table[table.ids[0]].text)
    ```
    """

    def __init__(self, dataset: Dataset, anchors_needed: int = 0):
        check_kind(dataset)
        warn_of_columns(dataset)
        names = dataset.column_names
        self._generic = {} if "rubrics" in names else generic_row(f"the data set with the columns {names}")
        required = ["prompt", *(["rubrics"] if "rubrics" in names else []), *(["responses"] if anchors_needed else [])]
        self._dataset = normal_rows(select(dataset, required))
        # Also if no method needs them: a preflight plays visits with them.
        self._written = dataset.select_columns(["responses"]) if "responses" in dataset.column_names else None
        self._further = dataset.select_columns([c for c in dataset.column_names if c not in (*QUERY_COLUMNS, *TAKEN)])
        self._row: dict[str, int] = {}
        contents = hashlib.sha256()  # of the rows in their order, which decides when a query is visited
        for number, row in enumerate(checked_rows(self._dataset, anchors_needed, rubrics_needed=not self._generic)):
            contents.update(json.dumps(row | self._generic, sort_keys=True).encode())
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
            raise DataError(f"no query {query_id!r} in the data set that has rubrics and responses") from None
        return Query.from_row(self._dataset[number] | self._generic)

    def written(self, query_id: str) -> tuple[str, ...]:
        """Return the responses that the data set has for a query."""
        responses = self._written[self._row[query_id]]["responses"] if self._written else None
        # The rows were not checked for them.
        return tuple(text for text in responses if not text_fault(text)) if isinstance(responses, list) else ()

    @property
    def prompts(self) -> Dataset:
        """The rows for a trainer: `prompt`, `query_id`, and the columns that this package does not read itself."""
        rows = self._dataset.select_columns(["prompt", "query_id"])
        return concatenate_datasets([rows, self._further], axis=1) if self._further.column_names else rows

    @property
    def ids(self) -> list[str]:
        """The query ids, in the order of the rows."""
        return list(self._row)


def check_kind(dataset: Any) -> None:
    """Refuse what is not one whole split."""
    if not isinstance(dataset, Dataset):
        kind, why = type(dataset).__name__, ", and queries are looked up by id"
        if isinstance(dataset, Mapping):
            why = f" of splits ({', '.join(repr(str(key)) for key in islice(dataset, 5))})"
        raise DataError(f"the data set is a {kind}{why}: pass one split, a `datasets.Dataset` without streaming")


def warn_of_columns(dataset: Dataset) -> None:
    """Warn once of columns that matter to the user, as their names say, and that nothing here reads."""
    media = [name for name, kind in dataset.features.items() if MEDIA.search(f"{name}: {kind}")]
    alike = [name for name in dataset.column_names if "rubric" in name.lower()]
    unread = [name for name in ("tools", "chat_template_kwargs") if name in dataset.column_names]
    if media:
        warn(f"the data set's columns {media} are left out: policy and judge read text alone")
    if unread:
        warn(
            f"the data set's columns {unread} are not read by the chat template: pass tools to RankBufferTrainer, and"
            " set chat_template_kwargs in the recipe"
        )
    if alike and "rubrics" not in dataset.column_names:
        warn(f"the data set's columns {alike} are not read: rubrics stand in the column 'rubrics' (docs/data.md)")


def warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # the main process alone
        logger.warning(text)


def select(dataset: Dataset, required: list[str]) -> Dataset:
    """Return a data set with the columns `required` and, if it has one, `query_id`."""
    check_columns(dataset.column_names, required)
    return dataset.select_columns([c for c in ("query_id", *required) if c in dataset.column_names])


def check_columns(names: list[str], required: list[str]) -> None:
    """Refuse a data set without one of the columns `required`."""
    for column in required:
        if column not in names:
            hint = "docs/data.md names the columns"
            if column == "responses":
                hint = (
                    "recipes/generate_responses.py makes them, as does the role `data` of a launch script;"
                    " method_args: {bootstrap: true} needs none"
                )
            raise DataError(f"the data set has no column {column!r} ({hint}); its columns are {names}")


@cache
def generic_row(whose: str) -> dict[str, list]:
    """Return the generic rubrics as the part of a row."""
    warn(
        f"{whose} has no rubrics, so the judge goes by five that fit any query. Expect a weaker reward:"
        " recipes/generate_rubrics.py writes rubrics for each query"
    )
    return {"rubrics": [{"text": rubric.text, "weight": rubric.weight} for rubric in GENERIC_RUBRICS]}


def normal_rows(dataset: Dataset) -> Dataset:
    """Return a data set whose rows are all as [`normal_row`] makes them."""
    columns = dataset.column_names
    named = "query_id" in columns and not dataset.data.column("query_id").null_count
    if named and isinstance(dataset.features["prompt"], List):
        return dataset
    try:  # not from the cache: its key does not change when the code of `normal_row` does
        return dataset.map(normal_row, load_from_cache_file=False, desc="prompts and ids")
    except UnicodeDecodeError as error:
        raise DataError(f"the data set cannot be read, because it is not UTF-8: {error}{CHECK_HINT}") from error


def normal_row(row: dict) -> dict:
    """Return a row whose prompt is a list of messages and which has an id."""
    prompt, query_id = row.get("prompt"), row.get("query_id")
    if isinstance(prompt, str):  # TRL alone would leave out the chat template of a text
        prompt = [{"role": "user", "content": prompt}]
    return row | {"query_id": prompt_id(prompt) if query_id is None else query_id, "prompt": prompt}


def prompt_id(prompt: Any) -> str:
    """Return the id of a query that has none."""
    with suppress(TypeError, AttributeError):  # the prompt has a fault, which is reported as such
        prompt = [[message.get("role"), message.get("content")] for message in prompt]  # a judge reads these alone
    # A hash: it stays when rows are added, removed or moved.
    return "prompt-" + hashlib.sha256(json.dumps(prompt, default=str).encode()).hexdigest()[:16]


def checked_rows(dataset: Dataset, anchors_needed: int = 0, rubrics_needed: bool = True) -> Iterator[dict]:
    """Yield the rows of a data set as [`normal_row`] makes them. Each is checked, and no two may have the same id."""
    seen: dict[str, str] = {}
    for number, row in enumerate(iterate(dataset), start=1):
        row = normal_row(row)
        for fault in row_faults(row, f"row {number}", seen, anchors_needed, rubrics_needed):
            raise DataError(fault + CHECK_HINT)
        yield row
    if not seen:
        raise DataError("the data set has no rows")


def iterate(dataset: Dataset | IterableDataset) -> Iterator[dict]:
    """Yield the rows of a data set.

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
        cause = " ".join(str(error).split())
        raise DataError(f"the data set cannot be read after its first {count} rows or so: {cause}") from error


def text_fault(value: object) -> str | None:
    """Return why `value` cannot be text of a prompt, or `None` if it can."""
    if not isinstance(value, str):
        return "must be non-empty text"
    if "\0" in value:
        return "must be text without NUL characters"
    try:
        value.encode()  # neither the store nor a request can hold a lone surrogate
    except UnicodeEncodeError:
        return "must be text without lone surrogates"
    return None if any(map(shows, value)) else "must be non-empty text"


def shows(letter: str) -> bool:
    """Return whether a character shows something."""
    # No white space, no zero-width character, no blank of Braille.
    return bool(visible(letter).strip().strip("\u2800"))


def row_faults(
    row: dict, place: str, seen: dict[str, str], anchors_needed: int = 0, rubrics_needed: bool = True
) -> Iterator[str]:
    """Yield the faults of one row of a training set, the first one of each column. docs/data.md has the schema.

    Args:
        row (`dict`):
            `query_id`, `prompt`, `rubrics`, `responses` and, optionally, `models`.
        place (`str`):
            The row's place in the data set, for messages, such as `line 3`.
        seen (`dict[str, str]`):
            The places of the rows before it by id. The row's own is added.
        anchors_needed (`int`, *optional*, defaults to `0`):
            Number of responses that the row must have. With 0 it may have none, but those it has must be text.
        rubrics_needed (`bool`, *optional*, defaults to `True`):
            Whether the row must have rubrics. With `False` it may have none, but those it has must be well-formed.
    """
    values: list[Any] = [row.get(key) for key in QUERY_COLUMNS]
    query_id, prompt, rubrics, responses, models = values
    columns = (
        text_faults("query_id", query_id),
        prompt_faults(prompt),
        rubric_faults(rubrics) if rubrics_needed or rubrics else (),
        response_faults(responses, anchors_needed) if anchors_needed or responses else (),
        model_faults(models, responses) if models else (),
    )
    named = isinstance(query_id, str) and not (prompt is None and query_id == prompt_id(None))  # else made of nothing
    name = f" (query_id {query_id!r})" if named else ""
    for faults in columns:
        for key, problem, value in islice(faults, 1):
            yield f"{place}{name}: {key} {problem}, got {excerpt(value)}"
    if named:
        first = seen.setdefault(query_id, place)
        if first != place and query_id == prompt_id(prompt):
            yield f"{place}{name}: the prompt is the same as in {first}, and a row without query_id needs its own"
        elif first != place:
            yield f"{place}: the query_id {query_id!r} is that of {first}, too"


# Each of these yields (key, problem, value). Only the first fault is read, so the code after a `yield` may rely on all
# checks before it.


def text_faults(key: str, value: object) -> Iterator[Fault]:
    """Yield the fault of a text, if it has one."""
    if fault := text_fault(value):
        yield key, fault, value


def spells_messages(text: str) -> bool:
    """Say whether a whole text is the JSON or Python of messages."""
    if text.lstrip()[:1] not in ("[", "{"):
        return False
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = parse(text.strip())
            if isinstance(value, dict) and len(value) == 1:  # {"messages": [...]}
                value = next(iter(value.values()))
            messages = value if isinstance(value, list) else [value]
            return bool(messages) and all(
                isinstance(each, dict)
                and ("content" in each or "value" in each)
                and each.get("role", each.get("from")) in ROLES
                for each in messages
            )
    return False


def prompt_faults(prompt: Any) -> Iterator[Fault]:
    """Yield why a prompt cannot be one of a training set. A caller stops at the first fault."""
    if not isinstance(prompt, list) or not prompt:
        yield "prompt", 'must be a text or a list of messages such as [{"role": "user", "content": "..."}]', prompt
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            yield f"prompt[{i}]", "must have role and content", message
        yield from text_faults(f"prompt[{i}].role", message["role"])
        yield from text_faults(f"prompt[{i}].content", message["content"])
    text = prompt[0]["content"] if len(prompt) == 1 else ""
    if spells_messages(text):
        problem = "must be the list of messages itself, not a text that spells it: parse it, as json.loads does"
        yield "prompt", problem, text
    if RENDERED.fullmatch(text):
        yield "prompt", "must be the user's words without a chat template, which is added later: take it off", text
    if prompt[-1]["role"] != "user":
        yield "prompt", "must end with a user message", prompt[-1]["role"]


def rubric_faults(rubrics: Any) -> Iterator[Fault]:
    if not isinstance(rubrics, list) or not rubrics:
        yield "rubrics", "must be a non-empty list", rubrics
    for i, rubric in enumerate(rubrics):
        if not isinstance(rubric, dict) or not {"text", "weight"} <= rubric.keys():
            yield f"rubrics[{i}]", "must have text and weight", rubric
        yield from text_faults(f"rubrics[{i}].text", rubric["text"])
        # A bool is an int to `isinstance`.
        if type(rubric["weight"]) is not int or not 1 <= abs(rubric["weight"]) <= 5:
            yield f"rubrics[{i}].weight", "must be an integer from 1 to 5, or from -5 to -1", rubric["weight"]
        if rubric.get("must"):  # false and null, which a column of a data set may hold, change nothing
            problem = "is no longer a rule of its own: remove it, the weight says how much counts"
            yield f"rubrics[{i}].must", problem, rubric["must"]
    if all(rubric["weight"] < 0 for rubric in rubrics):
        yield "rubrics", "must have a weight above 0: an answer that says nothing has no fault", rubrics


def response_faults(responses: Any, anchors_needed: int) -> Iterator[Fault]:
    """Yield the faults of a list of responses."""
    if not isinstance(responses, list):
        yield "responses", "must be a list of text from worst to best", responses
    if len(responses) < anchors_needed:
        yield "responses", f"must hold at least {anchors_needed} responses from worst to best", len(responses)
    for i, response in enumerate(responses):
        yield from text_faults(f"responses[{i}]", response)


def model_faults(models: Any, responses: Any) -> Iterator[Fault]:
    if not isinstance(models, list):
        yield "models", "must be a list of text", models
    if isinstance(responses, list) and responses and len(models) != len(responses):
        yield "models", f"must name who wrote each of the {len(responses)} responses", models
    for i, model in enumerate(models):
        yield from text_faults(f"models[{i}]", model)
