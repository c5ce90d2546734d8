"""Says what a run is doing when nothing was printed for a while: a slow first step, a long validation on a CPU."""

import time

FIRST, MOST = (
    10,
    600,
)  # seconds of silence until the first line, which double until each next one, and their limit


def duration(seconds):
    minutes, s = divmod(int(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{seconds:.1f}s"


class Pulse:
    """spoke() after each line and step, item() before each part of a long phase, line() now and then."""

    def __init__(self):
        self.step_s = 0.0  # of the last step: steps that take longer than FIRST are no reason for a line each
        self.clear()
        self.spoke()

    def spoke(self, step_s=None):
        """A line was printed, or a step that took step_s seconds is done."""
        self.step_s = step_s or self.step_s
        self._since, self._wait = time.monotonic(), max(FIRST, 3 * self.step_s)

    def clear(self):
        """What follows has no parts."""
        self.label, self._number, self._total, self._shown = None, 0, None, False
        self._began = time.monotonic()

    def item(self, label, number, total=None, shown=False):
        """Part `number` of `total`, counted from 1, begins. shown: a progress bar shows the parts, so print no line."""
        if number == 1:
            self._began = time.monotonic()
        self.label, self._number, self._total, self._shown = label, number, total, shown

    def line(self, where):
        """The line that is due, or None; where: step and phase in words, for a phase without parts."""
        now = time.monotonic()
        silent = now - self._since
        if silent < self._wait or self._shown:
            return None
        self._wait = silent + min(MOST, silent)
        if self.label is None:
            return f"{'working':<12} {where}; {duration(silent)} since the last line"
        parts, left = f"{self.label} {self._number}", ""
        if self._total:
            parts += f" of {self._total}"
            if self._number > 1:
                each = (
                    now - self._began
                ) / self._number  # the part under way counts as done: the least that is left
                left = f", at least {duration(each * (self._total - self._number))} more"
        return f"{'working':<12} {where.partition(' (')[0]}, {parts}; {duration(silent)} since the last line{left}"
