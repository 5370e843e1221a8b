"""Stopping cleanly on Ctrl-C and SIGTERM."""

import signal

from engine import distributed


class StopSignal:
    """Context manager in which SIGINT (Ctrl-C) and SIGTERM only set a flag; bool(stop) is the flag.

    The loop checks the flag after each step, saves and exits with `exit_code`. A second Ctrl-C ends the process at
    once. On exit the previous signal handlers are restored.
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal that came

    def __enter__(self) -> "StopSignal":
        self.handlers = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        if distributed.world() == 1:  # torchrun forwards the Ctrl-C that its children have received already
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return bool(self.number)

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, the convention of shells."""
        return 128 + (self.number or signal.SIGTERM)  # no signal here: another rank received it
