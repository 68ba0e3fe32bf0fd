"""Formatting of numbers for the terminal and for reports. Missing is not zero: None becomes "n/a"."""

MISSING = "n/a"


def number(value: float | None) -> str:
    """Three significant digits, with thousands separators: 0.00213, 1.23, 45.6, 12,345."""
    if value is None:
        return MISSING
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def count(value: int | None) -> str:
    """An integer with thousands separators: 118,287."""
    return MISSING if value is None else f"{value:,}"


def metric(value: float | None, digits: int = 3) -> str:
    """A COCO metric: 0.831."""
    return MISSING if value is None else f"{value:.{digits}f}"


def percentage(value: float | None) -> str:
    """A fraction in percent: 61 %, 4.2 %, 0.03 %. Only 0 (or less) is shown as 0 %, only 1 (or more) as 100 %."""
    if value is None:
        return MISSING
    percent = value * 100
    if percent <= 0:
        return "0 %"
    if percent < 0.01:
        return "<0.01 %"
    if percent < 1:
        return f"{percent:.2g} %"
    if percent < 9.95:
        return f"{percent:.1f} %"
    if 99.5 <= percent < 100:
        return f"{int(percent * 10) / 10:.1f} %"
    return f"{percent:.0f} %"


def duration(seconds: float | None) -> str:
    """0.25 s, 8.1 s, 42 s, 3 min 05 s, 2 h 14 min, 3 d 04 h."""
    if seconds is None:
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds >= 0.001 or seconds <= 0 else "<0.001 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def size(size_bytes: float | None) -> str:
    """512 B, 1.5 KiB, 10.2 GiB."""
    if size_bytes is None:
        return MISSING
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def memory(used_bytes: float, total_bytes: float) -> str:
    """10.2 of 139.8 GiB."""
    unit, name = (2**30, "GiB") if total_bytes >= 2**30 else (2**20, "MiB")
    return f"{used_bytes / unit:.1f} of {total_bytes / unit:.1f} {name}"


def cost(value: float | None) -> str:
    """In the currency of the price: 12.30, 0.0042, <0.0001."""
    if value is None:
        return MISSING
    if 0 < value < 0.0001:
        return "<0.0001"
    return f"{value:,.2f}" if value >= 0.095 or value <= 0 else f"{value:.2g}"


def cost_range(low_high: tuple[float, float] | None) -> str:
    """1.20, or a range, 1.20–3.40; `n/a` without a price."""
    if low_high is None:
        return MISSING
    low, high = map(cost, low_high)
    return low if low == high else f"{low}–{high}"


def setting(value: object) -> str:
    """A setting: yes, 0.001, 320 320."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return " ".join(map(setting, value))
    return str(value)


def plural(value: int, noun: str, plural_form: str | None = None) -> str:
    """1 step, 2 steps, 3 boxes (with plural_form)."""
    return f"{value:,} {noun if value == 1 else plural_form or noun + 's'}"
