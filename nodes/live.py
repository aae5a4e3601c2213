"""Picks as they are made, for the page that queued the prompt.

A page asks for them with POST /toma/live {"client_id": ..., "on": true}; until one did, and between two
sendings, nothing is computed for it.
"""

from __future__ import annotations

import json
import time
from asyncio import IncompleteReadError
from collections.abc import Callable
from threading import Thread

from ..toma_core.patcher.report import Pick, Report
from .running import page_server

EVENT = "toma.picks"
PAUSE = 0.25
LONGEST_WISH = 1000  # bytes

_watching: set[str] = set()


class Paced:
    """Sends on a thread of its own, at most four times a second. False while it would rather not: what
    comes then is dropped, and the sampler never waits."""

    def __init__(self, send: Callable[[Pick], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.send = send
        self.clock = clock
        self.last = -PAUSE
        self.sender: Thread | None = None

    def __bool__(self) -> bool:
        return self.clock() - self.last >= PAUSE and not (self.sender and self.sender.is_alive())

    def __call__(self, pick: Pick) -> None:
        self.last = self.clock()
        self.sender = Thread(target=self.send, args=(pick,), daemon=True)
        self.sender.start()


class LivePicks:
    """A listener that is false while nobody would see the pick."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.client = ""
        self.paced = Paced(self._send)

    def __deepcopy__(self, memo: dict) -> LivePicks:
        return self

    def __bool__(self) -> bool:
        return bool(_watching and self.paced and getattr(page_server(), "client_id", None) in _watching)

    def stepped(self, report: Report) -> None:
        pass

    def picked(self, pick: Pick) -> None:
        self.client = page_server().client_id
        self.paced(pick)

    def ended(self, report: Report) -> None:
        pass

    def _send(self, pick: Pick) -> None:
        message = {"node": self.node_id, "step": pick.step, "group": pick.group, "grid": pick.grid}
        page_server().send_sync(EVENT, {**message, "kept": pick.kept[0].tolist()}, self.client)


def add_route() -> None:
    server = page_server()
    if server is None:
        return
    from aiohttp import web
    from comfy.cli_args import args

    @server.routes.post("/toma/live")
    async def live(request: web.Request) -> web.Response:
        # ComfyUI refuses other sites by itself; before 0.20 it overlooked those that don't say who they are.
        if request.headers.get("Sec-Fetch-Site") == "cross-site" and not args.enable_cors_header:
            return web.Response(status=403)
        try:
            await request.content.readexactly(LONGEST_WISH + 1)
            return web.Response(status=413, text=f"Takes at most {LONGEST_WISH} bytes.")
        except IncompleteReadError as ended:
            body = ended.partial
        try:
            wish = json.loads(body)
            client, on = wish["client_id"], wish["on"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return web.Response(status=400, text='Takes {"client_id": "...", "on": true or false}.')
        if not isinstance(client, str) or not isinstance(on, bool):
            return web.Response(status=400, text="client_id is text, on is true or false.")
        _watching.intersection_update(server.sockets)
        if client not in server.sockets:
            return web.Response(status=404, text="No page with this client_id is connected.")
        (_watching.add if on else _watching.discard)(client)
        return web.json_response({"on": on})
