"""Call a logger so that neither its errors nor its waits end the run."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tpuswarm.train.process.time_limit import CallHung, time_limit
from tpuswarm.train.user_code import describe_failure

TIMEOUT_S, URGENT_TIMEOUT_S = 60.0, 2.0
RECOVERY_TIMEOUT_S = 10.0
"""Minimum for a recovery, even if the machine may be taken away soon."""

Report = Callable[[str], None]


class GuardedLogger:
    """Reports the first error of a logger, and leaves a logger that hangs; training continues."""

    def __init__(
        self,
        name: str,
        open_logger: Callable[[], Any],
        report: Report,
        recover: Callable[[Any, BaseException], str] | None = None,
    ):
        """recover: called with the logger and its error; returns a sentence if the logger works again."""
        self._name, self._report, self._recover = name, report, recover
        self._failures, self._has_recovered, self._timeout_s = 0, False, TIMEOUT_S
        self.logger: Any = None
        """None if it could not be opened, or hangs."""
        self._try(f"{name} failed at the start", lambda: setattr(self, "logger", open_logger()))

    def write(self, row: Mapping[str, Any]) -> None:
        self.call(f"{self._name} failed at step {row['step']}", lambda logger: logger.write(dict(row)))

    def call(self, failure: str, call: Callable[[Any], object]) -> bool:
        """Call a function with the logger; return whether it succeeds. failure: begins the sentence about an error."""
        return self.logger is not None and self._try(failure, lambda: call(self.logger))

    def close(self, is_urgent: bool) -> None:
        """Close the logger; is_urgent: the machine may be taken away soon."""
        failure, self._timeout_s = f"{self._name} failed at the end", URGENT_TIMEOUT_S if is_urgent else TIMEOUT_S
        if not self.call(failure, lambda logger: logger.close()) and self._recover:
            self.call(failure, lambda logger: logger.close())
        if self._failures > 1:
            self._report(f"{self._name} failed {self._failures:,} times in all; metrics.jsonl has every row")

    def _try(self, failure: str, call: Callable[[], object]) -> bool:
        try:
            with time_limit(self._timeout_s):
                call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # of any library
            self._fail(failure, error)
            return False
        return True

    def _fail(self, failure: str, error: BaseException) -> None:
        if self._recover and self.logger is not None:
            with suppress(Exception, SystemExit):
                with time_limit(max(self._timeout_s, RECOVERY_TIMEOUT_S)):
                    sentence = self._recover(self.logger, error)
                if not self._has_recovered:
                    self._report(sentence)
                self._has_recovered = True
                return
        self._failures += 1
        if self._recover or isinstance(error, CallHung):
            self.logger = None
            self._report(f"{describe_failure(failure, error)}; it is not called again, and training continues")
        elif self._failures == 1:
            self._report(f"{describe_failure(failure, error)}; training continues")
