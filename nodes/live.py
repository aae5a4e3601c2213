"""A run as it goes, for the page that queued the prompt: its steps, and which tokens were picked.

A page says that it is there with POST /toma/live {"client_id": ..., "on": true}; `on` asks for picks, too. Until one
did, and between two sendings, nothing is computed for it. Each message of a run tells the whole run so far, so one that
was dropped, or missed by a page that reloads, is made up for by the next.
"""

from __future__ import annotations

import json
import time
from asyncio import IncompleteReadError
from collections.abc import Callable
from dataclasses import asdict
from threading import Thread
from uuid import uuid4

from ..toma_core.patcher.report import Evaluated, Pick, Report
from ..toma_core.settings import Settings
from .running import page_server
from .unsampled import sampled

PICKS, RUN = "toma.picks", "toma.run"
PAUSE = 0.25
LONGEST_WISH = 1000  # bytes
MOST_BARS = 200  # as many evaluations as the page draws

_watching: dict[str, bool] = {}  # pages by client id, and whether they want picks


class Paced:
    """Sends on a thread of its own, at most four times a second. False while it would rather not: what
    comes then is dropped, and the sampler never waits."""

    def __init__(self, send: Callable, clock: Callable[[], float] = time.monotonic) -> None:
        self.send = send
        self.clock = clock
        self.last = -PAUSE
        self.sender: Thread | None = None

    def __bool__(self) -> bool:
        return self.clock() - self.last >= PAUSE and not (self.sender and self.sender.is_alive())

    def __call__(self, *message) -> None:
        self.last = self.clock()
        self._start(self.send, message)

    def finish(self, *message) -> None:
        """Sends this in any case, after what is under way."""
        self._start(self._send_after, (self.sender, message))

    def _send_after(self, before: Thread | None, message: tuple) -> None:
        if before:
            before.join()
        self.send(*message)

    def _start(self, act: Callable, args: tuple) -> None:
        self.sender = Thread(target=act, args=args, daemon=True)
        self.sender.start()


class Live:
    """A listener that is false while nobody would see anything."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.runs = Paced(self._send_run)
        self.picks = Paced(self._send_pick)
        self.now: tuple[Report, str] | None = None  # the run that is told of, and its name

    def __deepcopy__(self, memo: dict) -> Live:
        return self

    def __bool__(self) -> bool:
        return bool(_watching and (self.runs or self.picks) and _client() in _watching)

    def stepped(self, report: Report) -> None:
        if self.runs:
            self.runs(_client(), self._name(report), report, False)

    def picked(self, pick: Pick) -> None:
        if _watching.get(_client() or "") and self.picks:
            self.picks(_client(), pick)

    def ended(self, report: Report) -> None:
        sampled(self.node_id)
        if _client() in _watching:
            self.runs.finish(_client(), self._name(report), report, True)
        self.now = None

    def _name(self, report: Report) -> str:
        """A page tells by it which messages belong together."""
        if self.now is None or self.now[0] is not report:
            self.now = (report, uuid4().hex)
        return self.now[1]

    def _send_run(self, client: str, name: str, report: Report, over: bool) -> None:
        message = {"node": self.node_id, "run": name, "over": over, **told(report)}
        page_server().send_sync(RUN, message, client)

    def _send_pick(self, client: str, pick: Pick) -> None:
        message = {"node": self.node_id, "step": pick.step, "group": pick.group, "grid": pick.grid}
        page_server().send_sync(PICKS, {**message, "kept": pick.kept[0].tolist()}, client)


def _client() -> str | None:
    """The page whose prompt is at work."""
    return getattr(page_server(), "client_id", None)


def told(report: Report) -> dict:
    """What the strip shows of a run, under way or over."""
    return {
        "steps": report.steps,
        "tolerance": report.settings.tolerance,
        "settings": as_widgets(report.settings),
        "evaluations": [_row(evaluated) for evaluated in list(report.evaluations)[:MOST_BARS]],
        "summary": report.summary(),
        "finished": report.finished,
        "notes": list(report.notes),
    }


def as_widgets(settings: Settings) -> dict:
    """Settings as the widgets of the node hold them."""
    return {**asdict(settings), "tile_size": str(settings.tile_size), "merge": settings.merge.value}


def _row(evaluated: Evaluated) -> list:
    off = evaluated.off
    return [
        evaluated.step,
        evaluated.kind,
        evaluated.why,
        float(f"{min(off, 1e6):.4g}") if off is not None and off == off else None,
        round(evaluated.work, 4),
    ]


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
        for gone in set(_watching) - set(server.sockets):
            _watching.pop(gone, None)
        if client not in server.sockets:
            return web.Response(status=404, text="No page with this client_id is connected.")
        _watching[client] = on
        return web.json_response({"on": on})
