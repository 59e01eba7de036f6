"""The data set: its rows, its prompts, and what is wrong with them."""

from ._prompts import check_prompts, render_messages
from ._queries import (
    CHECK_HINT,
    FILE_BUILDERS,
    GENERIC_RUBRICS,
    DataError,
    MissingFileError,
    QueryTable,
    check_columns,
    checked_rows,
    generic_row,
    iterate,
    load_queries,
    normal_row,
    prompt_faults,
    prompt_id,
    response_faults,
    row_faults,
    select,
    text_fault,
    text_faults,
    warn_of_columns,
)
