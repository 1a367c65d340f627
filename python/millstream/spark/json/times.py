"""Dates and times in JSON strings, read as Spark reads them when no format is given.

Where it sits: below `convert.py`. Results are what Arrow stores: days and microseconds since 1970.

    2026   2026-11   2026-11-16   2026-11-16 02:03   2026-11-16T02:03:04.123456+01:00   2026-11-16 02:03:04 Europe/Rome

Invariant I-TIM-1: a text that is not exactly one of the forms is None, never an approximation.
"""

from __future__ import annotations

import re
from calendar import isleap
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

MICROS_PER_DAY: Final = 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001
_MICROSECOND: Final = timedelta(microseconds=1)
_DATE: Final = re.compile(
    r"([+-]?)(\d{4,7})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.ASCII | re.DOTALL
)
_TIMESTAMP: Final = re.compile(
    r"([+-]?)(\d{4,6})(?:-(\d{1,2})(?:-(\d{1,2})"
    r"(?:[ T](?:(\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)?)?\s*(\D.*)?)?)?)?)?",
    re.ASCII | re.DOTALL,
)
_OFFSET: Final = re.compile(
    r"(?:UTC|GMT|UT)?([+-])(?:(\d{1,2}(?::\d{1,2}|:\d\d:\d\d)?)|(\d{4}(?:\d\d)?))", re.ASCII
)
_TRIM: Final = "".join(chr(code) for code in range(33)) + "\x7f"


def days(text: str) -> int | None:
    """Days since 1970 of a date."""
    match = _DATE.fullmatch(text.strip(_TRIM))
    if match is None:
        return None
    sign, year, month, day = match.groups()
    return days_of(int(year) * (-1 if sign == "-" else 1), int(month or 1), int(day or 1))


def micros(text: str, zone: str, *, local: bool) -> int | None:
    """Microseconds since 1970. `local`: the time is without a zone, and a text that names one is None."""
    match = _TIMESTAMP.fullmatch(text.strip(_TRIM))
    if match is None:
        return None
    sign, year, month, day, hour, minute, second, fraction, named = match.groups()
    date = days_of(int(year) * (-1 if sign == "-" else 1), int(month or 1), int(day or 1))
    hours, minutes, seconds = int(hour or 0), int(minute or 0), int(second or 0)
    if date is None or hours > 23 or minutes > 59 or seconds > 59:
        return None
    part = int((fraction or "")[:6].ljust(6, "0"))
    wall = date * MICROS_PER_DAY + ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + part
    if local:
        return wall if named is None else None
    shift = zone_shift_micros(named.strip() if named else zone, wall)
    return None if shift is None else wall - shift


@lru_cache(maxsize=4096)
def days_of(year: int, month: int, day: int) -> int | None:
    """Days since 1970 in the Gregorian calendar, for any year; None if there is no such day."""
    last = 28 + isleap(year) if month == 2 else 31 - (month in (4, 6, 9, 11))
    if not 1 <= month <= 12 or not 1 <= day <= last:
        return None
    shifted = year - (month <= 2)
    era, of_era = divmod(shifted, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def zone_shift_micros(name: str, wall: int) -> int | None:
    """How far the zone is ahead of UTC at a wall time; None if there is no such zone."""
    if name in ("Z", "UTC", "GMT", "UT"):
        return 0
    match = _OFFSET.fullmatch(name)
    if match is not None:
        sign, parted, joined = match.groups()
        parts = parted.split(":") if parted else (joined[:2], joined[2:4], joined[4:] or 0)
        hours, minutes, seconds = (int(part) for part in (*parts, 0, 0)[:3])
        total = (hours * 60 + minutes) * 60 + seconds
        if minutes > 59 or seconds > 59 or total > 18 * 3600:
            return None
        return total * 1_000_000 * (-1 if sign == "-" else 1)
    zone = _zone(name)
    if zone is None:
        return None
    # Outside the years that Python knows, the rule of the nearest one has to do.
    low, high = -62_135_510_400_000_000, 253_402_214_400_000_000
    moment = _EPOCH + min(max(wall, low), high) * _MICROSECOND
    shift = moment.replace(tzinfo=zone).utcoffset()
    return None if shift is None else round(shift.total_seconds() * 1_000_000)


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def known_zone(name: str) -> bool:
    return zone_shift_micros(name, 0) is not None
