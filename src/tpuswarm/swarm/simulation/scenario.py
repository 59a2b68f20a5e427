"""The file that `tpuswarm simulate` reads: a model, its exchange, and groups of members."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tpuswarm.config.toml_file import Count, StrictTable
from tpuswarm.swarm.core.arithmetic.fragments import aggregators_for, fragment_sizes, fragments_for
from tpuswarm.swarm.core.values import Form

MAX_MEMBERS = 10_000
"""Every message of each member is simulated."""


class Model(StrictTable):
    parameters: Count
    batch: Count
    """Rows of a member's step."""
    tokens_per_row: Count


class Exchange(StrictTable):
    """How members exchange the model."""

    cycle: PositiveInt = 50
    """Steps of the fastest member between two pushes."""
    overlap: Annotated[Literal["auto", "0"], BeforeValidator(str)] = "auto"
    quantize: Literal["int8", "int4"] | None = None
    fragments: PositiveInt | None = None
    """Defaults to the choice of `tpuswarm train`."""


class MemberGroup(StrictTable):
    """Equal members."""

    name: str | None = None
    count: PositiveInt
    tokens_per_s: PositiveFloat | None = None
    step_s: PositiveFloat | None = None
    mbit_up: PositiveFloat
    """Megabits per second that a member sends."""
    mbit_down: PositiveFloat
    latency_ms: NonNegativeFloat = 40.0
    """Round trip."""
    dials_in: bool = False
    """Whether they join with an invite, from anywhere."""
    preempted_every_hours: PositiveFloat | None = None
    """Mean for one member; None for never."""
    back_after_minutes: PositiveFloat = 5.0
    """From a preemption until the member requests the model again, including compilation."""

    @model_validator(mode="after")
    def _one_speed(self) -> "MemberGroup":
        if (self.tokens_per_s is None) == (self.step_s is None):
            raise ValueError("give either tokens_per_s or step_s")
        return self


class Scenario(StrictTable):
    """The whole file."""

    hours: PositiveFloat | None = None
    tokens: Count | None = None
    """Length: hours, or tokens to count until the run ends."""
    seed: int = 0
    model: Model
    exchange: Exchange = Exchange()
    members: tuple[MemberGroup, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> "Scenario":
        if (self.hours is None) == (self.tokens is None):
            raise ValueError("give either hours or tokens")
        if self.count > MAX_MEMBERS:
            raise ValueError(f"{self.count:,} members are too many: at most {MAX_MEMBERS:,} can be simulated")
        if (asked := self.exchange.fragments or 0) > (most := len(self.fragments)):
            raise ValueError(f"{self.model.parameters} parameters cannot be split into {asked} fragments, only {most}")
        return self

    @property
    def count(self) -> int:
        """Number of members."""
        return sum(group.count for group in self.members)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a member's step."""
        return self.model.batch * self.model.tokens_per_row

    def step_s(self, group: MemberGroup) -> float:
        """Return the duration of a member's step."""
        return group.step_s or self.tokens_per_step / group.tokens_per_s  # type: ignore[operator]  # one of them is set

    @cached_property
    def tokens_per_s(self) -> float:
        """Undisturbed speed of all members."""
        return sum(group.count * self.tokens_per_step / self.step_s(group) for group in self.members)

    @cached_property
    def fragments(self) -> tuple[int, ...]:
        """Parameters of each fragment of the model."""
        parameters = self.model.parameters
        return fragment_sizes(parameters, self.exchange.fragments or fragments_for(parameters, self.count))

    @property
    def shards(self) -> int:
        """Number of aggregators."""
        return min(len(self.fragments), aggregators_for(self.count))

    @property
    def form(self) -> Form:
        """How pushes and downloads are encoded."""
        return self.exchange.quantize or "plain"
