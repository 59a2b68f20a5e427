"""A region of a terminal that is drawn anew again and again."""

from rich.live import Live

from tpuswarm.train.process import input_echo


class LiveRegion(Live):
    """As rich has it, but what is typed meanwhile is not shown."""

    def start(self, refresh: bool = False) -> None:
        """Begin to draw."""
        if not self.is_started:
            input_echo.hide()
        super().start(refresh)

    def stop(self) -> None:
        """Draw once more, and leave it there."""
        began = self.is_started
        try:
            super().stop()
        finally:
            if began:
                input_echo.show()
