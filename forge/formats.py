"""Numbers and times as a person reads them, the same in the terminal and in the report."""

from __future__ import annotations


def number(value: float) -> str:
    """Three digits, whole from a thousand on: 1,240, 0.412, 3.1e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Example: 3.2 s, 1:24, 1:02:03."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s" if seconds < 59.95 else "1:00"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
