"""The access log: one JSON object a line for each request, on the logger ``npufleet.access``.

Prompts, answers, keys and metadata are never in it. What a client chose (its request id, its address) is cut to a
length and written as JSON, so that it cannot begin a line of its own.
"""

from __future__ import annotations

import json
import logging
import secrets
import time

_log = logging.getLogger("npufleet.access")
_LONGEST = 200


class AccessLog:
    """Writes the log, or nothing where it is off."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def write(self, **members: str | int | float | None) -> None:
        """One line; members that are None or "" are left out, numbers of seconds are rounded to microseconds."""
        if not self.enabled:
            return
        line: dict[str, str | int | float] = {"time": round(time.time(), 3)}
        for key, value in members.items():
            if value is None or value == "":
                continue
            line[key] = value[:_LONGEST] if isinstance(value, str) else _rounded(value)
        _log.info("%s", json.dumps(line))


def _rounded(value: int | float) -> int | float:
    return round(value, 6) if isinstance(value, float) else value


def request_id(given: str) -> str:
    """A client's own request id where it is a plain word of up to 128 letters, else a new one."""
    plain = 0 < len(given) <= 128 and given.isascii() and given.isprintable() and " " not in given
    return given if plain else f"req-{secrets.token_hex(8)}"
