"""Picks as they are made, for the page that queued the prompt.

A page asks for them with POST /toma/live {"client_id": ..., "on": true}; until one did, and between two
sendings, nothing is computed for it.
"""

from __future__ import annotations

import time
from threading import Thread

from .running import page_server

EVENT = "toma.picks"
PAUSE = 0.25

_watching: set[str] = set()


class LivePicks:
    """A listener that is false while nobody would see the pick. Copying from the device and sending
    happen on a thread of their own: the sampler does not wait, and what comes meanwhile is dropped."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.last = 0.0
        self.sender: Thread | None = None

    def __bool__(self) -> bool:
        if not _watching or time.monotonic() - self.last < PAUSE or (self.sender and self.sender.is_alive()):
            return False
        return getattr(page_server(), "client_id", None) in _watching

    def __call__(self, pick) -> None:
        self.last = time.monotonic()
        self.sender = Thread(target=self._send, args=(pick, page_server().client_id), daemon=True)
        self.sender.start()

    def _send(self, pick, client: str) -> None:
        message = {"node": self.node_id, "step": pick.step, "group": pick.group, "grid": pick.grid}
        page_server().send_sync(EVENT, {**message, "kept": pick.kept[0].tolist()}, client)


def add_route() -> None:
    server = page_server()
    if server is None:
        return
    from aiohttp import web

    @server.routes.post("/toma/live")
    async def live(request: web.Request) -> web.Response:
        try:
            wish = await request.json()
            client, on = wish["client_id"], wish["on"]
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400, text='Takes {"client_id": "...", "on": true or false}.')
        if not isinstance(client, str) or not isinstance(on, bool):
            return web.Response(status=400, text="client_id is text, on is true or false.")
        _watching.intersection_update(server.sockets)
        if client not in server.sockets:
            return web.Response(status=404, text="No page with this client_id is connected.")
        (_watching.add if on else _watching.discard)(client)
        return web.json_response({"on": on})
