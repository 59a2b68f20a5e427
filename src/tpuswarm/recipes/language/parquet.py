"""Read the rows of Parquet files as JSON lines."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from tpuswarm.errors import InputError

ENDING = ".parquet"
BATCH_ROWS = 1000
BUFFER_BYTES = 2**22
"""Read of a column at a time."""


def read_rows(
    file: BinaryIO, name: str, columns: Sequence[str], size: int, advance: Callable[[int], None] | None
) -> Iterator[bytes]:
    """Yield each row as JSON, without its empty fields, and with those columns only.

    advance: called with shares of the file's size. Raise InputError without pyarrow, and if no such column exists.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(f"{name} needs a package that is not installed: pip install 'tpuswarm[parquet]'") from error
    table = ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)  # else it reads a whole row group at once
    names = table.schema_arrow.names
    found = [column for column in columns if column in names]
    if not found:
        raise InputError(f"{name} has the columns {', '.join(names[:8])}; name the one with the text by --json-field")
    for batch in table.iter_batches(BATCH_ROWS, columns=found):
        for row in batch.to_pylist():
            yield json.dumps(_without_empty(row)).encode()
        if advance:
            advance(size * batch.num_rows // table.metadata.num_rows)


def _without_empty(value: Any) -> Any:
    """Leave out fields that are null: a column has all fields that any of its rows has."""
    if isinstance(value, dict):
        return {name: _without_empty(field) for name, field in value.items() if field is not None}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
