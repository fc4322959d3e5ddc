"""Places the ticks of figures: whole steps, and numbers that a reader can read on a logarithmic axis."""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

NARROW = 10.0  # largest / smallest value below which powers of ten leave an axis without ticks


class _PlainLog(LogLocator):
    """Ticks at 1, 2 and 5 times a power of ten; on a narrow range at even distances."""

    def tick_values(self, vmin: float, vmax: float):
        """Returns the ticks from vmin to vmax; matplotlib calls it with the limits of the view."""
        low, high = min(vmin, vmax), max(vmin, vmax)
        if low > 0 and high / low < NARROW:
            return [tick for tick in MaxNLocator(5).tick_values(low, high) if tick > 0]
        return super().tick_values(vmin, vmax)


def plain_log(axis: Axis, formatter: Formatter | None = None) -> None:
    """Labels a logarithmic axis with plain numbers, 0.05 instead of 5x10^-2, or as `formatter` writes them."""
    axis.set_major_locator(_PlainLog(subs=(1, 2, 5)))
    axis.set_major_formatter(formatter or FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def whole_numbers(axis: Axis) -> None:
    """Labels an axis of steps with whole numbers alone."""
    axis.set_major_locator(MaxNLocator(6, integer=True))
