"""A Redis server's url, its client, and its error messages, none of which shows the password."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from k3rl.errors import StoreError, UserInputError


class SafeUrl:
    """A server's url that shows itself, and what the server says, without the password."""

    def __init__(self, url: str) -> None:
        """Raises UserInputError for a url that is not one of a Redis server."""
        self._url, self._shown = url, ""
        try:
            parts = urlsplit(url)
            port = f":{parts.port}" if parts.port else ""
        except ValueError:
            parts, port = urlsplit(""), ""
        if parts.scheme == "unix" and parts.path[:1] == "/" and parts.netloc[-1:] in ("", "@"):
            self._shown = f"unix://{unquote(parts.path)}"
        database = parts.path.strip("/")
        if parts.scheme in ("redis", "rediss") and parts.hostname and (database or "0").isdecimal():
            self._shown = f"{parts.scheme}://{parts.hostname}{port}/{database}"
        if not self._shown:
            # What is wrong may be a password with an unquoted / or #: show nothing of it.
            raise UserInputError(
                "store.redis: neither redis://[user:password@]host[:port][/number], the same with"
                " rediss://, nor unix:///absolute/path; quote special characters as %2F"
            )
        found = [parts.password or "", *parse_qs(parts.query).get("password", [])]
        spellings = {word for p in found for word in (p, unquote(p)) if word}
        self._secrets = sorted(spellings, key=len, reverse=True)

    def __str__(self) -> str:
        """The url without user and password."""
        return self._shown

    def client(self) -> Redis:
        """A client of it that connects to nothing yet; retrying is the caller's."""
        try:
            client = Redis.from_url(
                self._url,
                protocol=2,
                decode_responses=True,
                encoding_errors="replace",
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 0),
            )
            # Only a connection looks at the url's options.
            cast(Any, client.connection_pool).make_connection()
        except (TypeError, ValueError, exceptions.RedisError) as error:
            raise UserInputError(f"store.redis: {self._shown}: {self._clean(error)}") from None
        return client

    def refused(self, error: Exception) -> StoreError:
        """What to raise when the server answered with an error."""
        return StoreError(
            f"{self._shown}: refused a command of the live index: {self._clean(error)};"
            " check user, password, memory and disk of that server"
        )

    def unreachable(self, reason: str, limit_s: float) -> StoreError:
        """What to raise when nothing answered."""
        return StoreError(
            f"{self._shown}: no Redis server answered in {limit_s:.3g} s ({self._clean(reason)});"
            " start it, correct store.redis, or use store.redis=embedded"
        )

    def _clean(self, said: object) -> str:
        text = " ".join(str(said).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
