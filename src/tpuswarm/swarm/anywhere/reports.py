"""The reports of members that dialled in: checked, since a stranger's program may have written them."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from tpuswarm.train.look.pictures import PICTURES, TEXTS

MAX_ROWS, MAX_COLUMNS = 10_000, 64
Name = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9_./ -]+$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Finite = Annotated[float, Field(ge=-1e39, le=1e39)]
"""The range of float32: sums of more may overflow."""
Row = Annotated[dict[Name, Finite | Count | bool | Name | None], Field(max_length=MAX_COLUMNS)]


@with_config(ConfigDict(strict=True, extra="forbid"))
class Report(TypedDict):
    """A report of MemberProcess, as the supervisor reads it."""

    incarnation: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None
    base: Count | None
    tokens: Count
    at_risk: Count
    rows_per_s: Annotated[float, Field(ge=0, le=1e12)] | None
    push_bytes_per_s: Annotated[float, Field(ge=0, le=1e12)] | None
    round_trip_s: Annotated[float, Field(ge=0, le=1e12)] | None
    awaits_storage: bool
    evaluating: bool
    first: Count
    """Number of the first row."""
    rows: Annotated[tuple[Row, ...], Field(max_length=MAX_ROWS)]


_REPORT: TypeAdapter[Report] = TypeAdapter(Report)


def check_report(report: Any, member: str) -> Report:
    """Return a member's report. Raise ValueError if it is not one, or speaks of another member."""
    try:
        found = _REPORT.validate_python(report)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for row in found["rows"]:
        is_step, is_evaluation = "loss" in row, isinstance(row.get("eval_loss"), float)
        numbers = (row.get("step"), row.get("version"), row.get("tokens"))
        if not (is_step or is_evaluation) or row.get("member") != member or not all(type(n) is int for n in numbers):
            raise ValueError("a row is neither a step nor an evaluation of this member")
        for name, value in row.items():
            if name in (PICTURES, TEXTS) or (isinstance(value, str) and name != "member"):
                raise ValueError(f"{name} is not a number")
    return found
