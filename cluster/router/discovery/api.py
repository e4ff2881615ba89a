"""List and watch objects of a Kubernetes API server.

Source: Kubernetes API Concepts, "Efficient detection of changes": a list gives a resource version, a watch from it
gives one JSON object a line; after 410 Gone the history is lost and the list is made anew. Bookmarks keep the
version young while nothing changes.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

_PAGE = 500
_WATCH_SECONDS = 300
_SILENCE = 30.0  # seconds beyond the watch's own end after which its connection counts as lost
_LIST_SECONDS = 30.0
_LINE_LIMIT = 16 << 20  # bytes of one event


class Gone(Exception):
    """The server does not know the version any more: list again."""


class ApiError(Exception):
    """The server refused."""


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """Where the server is and how to speak to it. The files are read for each request: tokens are renewed."""

    url: str
    token: Path | None = None
    ca: Path | None = None

    @classmethod
    def in_cluster(cls, host: str, port: str, folder: Path) -> ApiServer:
        """That of the pod this runs in; ``folder`` is where its service account's files are mounted."""
        bracketed = f"[{host}]" if ":" in host else host
        return cls(url=f"https://{bracketed}:{port}", token=folder / "token", ca=folder / "ca.crt")

    async def list(self, path: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        """All objects under ``path`` that ``selector`` means, and the version of the list."""
        found: list[dict[str, Any]] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS)
        async with self._session(timeout) as session:
            while True:
                async with session.get(self.url + path, params=query, headers=self._headers()) as answer:
                    await _check(answer)
                    page = await answer.json(content_type=None)
                found += page.get("items") or []
                more = page["metadata"].get("continue")
                if not more:
                    return found, str(page["metadata"]["resourceVersion"])
                query["continue"] = more

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """The events after ``version``, until the server ends the watch. Raises :class:`Gone`."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_LIST_SECONDS, sock_read=_WATCH_SECONDS + _SILENCE
        )
        async with (
            self._session(timeout) as session,
            session.get(self.url + path, params=query, headers=self._headers()) as answer,
        ):
            await _check(answer)
            async for line in answer.content:
                event: dict[str, Any] = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    if status.get("code") == 410:
                        raise Gone(status.get("message", ""))
                    raise ApiError(f"{status.get('code')}: {status.get('message')}")
                yield event

    def _session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        context: ssl.SSLContext | bool = True
        if self.ca is not None:
            context = ssl.create_default_context(cafile=str(self.ca))
        return aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(ssl=context),
            read_bufsize=_LINE_LIMIT,
        )

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token.read_text().strip()}"
        return headers


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 410:
        raise Gone(await answer.text())
    if answer.status != 200:
        text = (await answer.text())[:500]
        raise ApiError(f"{answer.status} for {answer.url.path}: {text}")
