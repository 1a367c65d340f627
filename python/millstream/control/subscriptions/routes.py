"""The subscription API over HTTP: `/v1/stream/__ds/...`.

Sits above `manager`; reads requests, calls it, renders answers. Invariant: a token is checked before
the body's claims are looked at, and an unknown subscription is 404 whatever else is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millstream.control.http import (
    PROTOCOL_PREFIX,
    ApiError,
    JsonResponse,
    read_json_object,
    to_json,
)
from millstream.control.limits import VIEW_STEP_STREAMS, VIEW_STREAMS_BYTES_MAX, VIEW_STREAMS_MAX
from millstream.control.subscriptions import parsing
from millstream.control.subscriptions.model import Link, Refused, Subscription

if TYPE_CHECKING:
    from millstream.control.subscriptions.manager import SubscriptionManager

JWKS_PATH: Final = PROTOCOL_PREFIX + "/jwks.json"
BASE_PATH: Final = PROTOCOL_PREFIX + "/subscriptions/{id}"

NOT_DELIVERED: Final = "not delivered"

Handler = Callable[[Request], Awaitable[Response]]


class SubscriptionRoutes:
    def __init__(self, manager: SubscriptionManager, base_url_of: Callable[[Request], str]) -> None:
        self._manager = manager
        self._base_url_of = base_url_of
        self._one_large_view = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            _route(JWKS_PATH, GET=self.jwks),
            _route(BASE_PATH, PUT=self.put, GET=self.get, DELETE=self.delete),
            _route(BASE_PATH + "/streams", POST=self.add_streams),
            _route(BASE_PATH + "/streams/{path:path}", DELETE=self.remove_stream),
            _route(BASE_PATH + "/callback", POST=self.callback),
            _route(BASE_PATH + "/claim", POST=self.claim),
            _route(BASE_PATH + "/ack", POST=self.ack),
            _route(BASE_PATH + "/release", POST=self.release),
        ]

    async def jwks(self, request: Request) -> Response:
        """The public keys that webhook signatures can be checked with."""
        del request
        return JsonResponse(
            self._manager.keys.jwks(),
            headers={"Cache-Control": "public, max-age=300", "Vary": "Origin"},
            media_type="application/jwk-set+json",
        )

    async def put(self, request: Request) -> Response:
        """Create a subscription, or confirm that it exists with the same configuration."""
        config = parsing.config(await read_json_object(request))
        base_url = self._base_url_of(request)
        subscription, created = await self._manager.create(_id(request), config, base_url)
        return await self._show(subscription, base_url, 201 if created else 200)

    async def get(self, request: Request) -> Response:
        """One subscription with its streams and acknowledged offsets."""
        subscription = await self._manager.get(_id(request))
        return await self._show(subscription, self._base_url_of(request))

    async def delete(self, request: Request) -> Response:
        """Remove a subscription; its wake in flight is void."""
        await self._manager.delete(_id(request))
        return Response(status_code=204)

    async def add_streams(self, request: Request) -> Response:
        """Link streams explicitly, each at its current tail."""
        paths = parsing.stream_paths((await read_json_object(request)).get("streams"))
        await self._manager.add_streams(_id(request), paths)
        return Response(status_code=204)

    async def remove_stream(self, request: Request) -> Response:
        """Remove an explicit link; a link by pattern stays."""
        path = parsing.stream_path(request.path_params["path"], "the stream")
        await self._manager.remove_stream(_id(request), path)
        return Response(status_code=204)

    async def callback(self, request: Request) -> Response:
        """A webhook receiver acknowledges, extends its lease, or finishes."""
        return await self._acknowledge(request, "webhook")

    async def ack(self, request: Request) -> Response:
        """A pull worker acknowledges, extends its lease, or finishes."""
        return await self._acknowledge(request, "pull-wake")

    async def claim(self, request: Request) -> Response:
        """A pull worker takes the lease of a subscription with pending work."""
        worker = parsing.worker(await read_json_object(request))
        subscription, token, views = await self._manager.claim(_id(request), worker)
        wake = subscription.wake
        if wake is None:  # deleted streams or an expired lease took it away before we could answer
            raise Refused(
                409, "NO_PENDING_WORK", "the pending work was removed while it was being claimed"
            )
        return JsonResponse(
            {
                "wake_id": wake.wake_id,
                "generation": wake.generation,
                "token": token,
                "streams": [view.to_json() for view in views],
                "lease_ttl_ms": subscription.config.lease_ttl_ms,
            }
        )

    async def release(self, request: Request) -> Response:
        """A pull worker gives the lease back without finishing."""
        id = _id(request)  # noqa: A001
        token = await self._token(request, id)
        wake_request = parsing.wake_request(await read_json_object(request), token)
        await self._manager.release(id, wake_request)
        return Response(status_code=204)

    async def _acknowledge(self, request: Request, kind: str) -> Response:
        id = _id(request)  # noqa: A001
        token = await self._token(request, id)
        wake_request = parsing.wake_request(await read_json_object(request), token)
        next_wake = await self._manager.acknowledge(id, kind, wake_request)
        return JsonResponse({"ok": True, "next_wake": next_wake})

    async def _token(self, request: Request, id: str) -> tuple[str, int]:  # noqa: A002
        await self._manager.get(id)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Refused(401, "TOKEN_INVALID", "an Authorization: Bearer token is required")
        return self._manager.open_token(token.strip())

    async def _show(self, shown: Subscription, base_url: str, status: int = 200) -> Response:
        if shown.linked <= VIEW_STEP_STREAMS:
            return await self._view(shown, base_url, status)
        with self._manager.large_views.place():
            async with self._one_large_view:
                shown = await self._manager.get(shown.id)  # as it is now that we had to wait
                return await self._view(shown, base_url, status)

    async def _view(self, subscription: Subscription, base_url: str, status: int) -> Response:
        """Seen in one moment, put into words a step at a time: short calls and deliveries go on meanwhile."""
        shown = self._view_without_streams(subscription, base_url)
        total = subscription.linked
        links = list(islice(self._manager.links_of(subscription), VIEW_STREAMS_MAX))
        streams: list[bytes] = []
        room = VIEW_STREAMS_BYTES_MAX
        for number, link in enumerate(links):
            if number % VIEW_STEP_STREAMS == VIEW_STEP_STREAMS - 1:
                await asyncio.sleep(0)
            streams.append(to_json(_link_view(link)))
            room -= len(streams[-1]) + 1
            if room < 0:
                streams.pop()
                break
        if len(streams) < total:
            shown["streams_total"] = total
        body = to_json(shown)[:-1] + b',"streams":[' + b",".join(streams) + b"]}"
        return Response(body, status, media_type=JsonResponse.media_type)

    def _view_without_streams(self, subscription: Subscription, base_url: str) -> dict[str, object]:
        config = subscription.config
        webhook: dict[str, object] | None = None
        if config.webhook_url is not None:
            signing = {
                "alg": "ed25519",
                "kid": self._manager.keys.kid,
                "jwks_url": base_url + JWKS_PATH,
            }
            webhook = {"url": config.webhook_url, "signing": signing}
        view: dict[str, object] = {
            "id": subscription.id,
            "subscription_id": subscription.id,
            "type": config.type,
            "pattern": config.pattern,
            "webhook": webhook,
            "wake_stream": config.wake_stream,
            "lease_ttl_ms": config.lease_ttl_ms,
            "created_at": _timestamp(subscription.created_at_ms),
            "status": subscription.status,
            "description": config.description,
        }
        wake = subscription.wake
        if subscription.status == "failed" and wake is not None and wake.next_attempt_at_ms:
            view["next_attempt_at"] = _timestamp(wake.next_attempt_at_ms)
            # Where a webhook was refused, and how, would tell a client what listens in networks that it cannot see.
            view["last_error"] = NOT_DELIVERED if webhook is not None else wake.last_error
        return view


def _id(request: Request) -> str:
    return parsing.subscription_id(request.path_params["id"])


def _link_view(link: Link) -> dict[str, object]:
    return {
        "path": link.path,
        "link_type": "explicit" if link.explicit else "glob",
        "acked_offset": link.acked,
    }


def _timestamp(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _route(path: str, **handlers: Handler) -> Route:
    """One route per path, so that a wrong method is told about all the right ones."""

    async def dispatch(request: Request) -> Response:
        try:
            return await handlers[request.method](request)
        except Refused as refusal:
            raise ApiError(
                refusal.status, refusal.code, refusal.message, extra=refusal.extra
            ) from refusal

    # HEAD is not offered: it would be answered with the body of a GET, through a proxy that sends it on.
    route = Route(path, dispatch, methods=list(handlers))
    route.methods = set(handlers)
    dispatch.handlers = handlers  # type: ignore[attr-defined]
    return route
