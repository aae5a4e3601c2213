"""A real ComfyUI server in a process of its own, and a small client for it."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import websocket

ROOT = Path(__file__).resolve().parents[2]
DEV = Path(os.environ.get("TOMA_DEV") or ROOT / ".dev")  # what dev.py makes
DEMO_PACK = ROOT / "tests" / "demo_pack"
PACK_NAME = "ComfyUI-ToMA"


def user_files() -> dict[str, str]:
    """A first start shows a tutorial, a later one the last workflow: both would stand before the tests."""
    settings = {
        "Comfy.TutorialCompleted": True,
        "Comfy.InstalledVersion": importlib.metadata.version("comfyui-frontend-package"),
        "Comfy.Workflow.Persist": False,
    }
    return {"comfy.settings.json": json.dumps(settings), "comfy.templates.json": "[]", "user.css": ""}


class PromptError(Exception):
    """A prompt was refused, failed in a node, or was interrupted. `details` is what the server said."""

    def __init__(self, message: str, details: dict):
        super().__init__(message)
        self.details = details


@dataclass
class Finished:
    """What came of a prompt: `outputs[node_id]`, its history entry, and all websocket events in order."""

    outputs: dict
    history: dict
    events: list[tuple[str, dict | bytes]]
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def link(pack: Path, target: Path) -> None:
    """Symbolic link, or a copy where the system does not permit links."""
    if target.is_symlink() or target.exists():
        return
    try:
        target.symlink_to(pack, target_is_directory=True)
    except OSError:
        copy_pack(pack, target)


def copy_pack(pack: Path, target: Path) -> None:
    made_here = shutil.ignore_patterns(".git", ".dev", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(pack, target, ignore=made_here)


@dataclass
class Job:
    """A queued prompt. Its websocket was open before it was queued, so no event is missed."""

    server: "ComfyServer"
    prompt_id: str
    socket: websocket.WebSocket
    started: float
    events: list[tuple[str, dict | bytes]] = field(default_factory=list)

    def wait(self, timeout: float = 120, on_event: Callable[[str, dict], None] | None = None) -> Finished:
        error = None
        deadline = time.monotonic() + timeout
        try:
            while True:
                kind, data = self.receive(deadline)
                self.events.append((kind, data))
                if kind == "binary":
                    continue
                if on_event:
                    on_event(kind, data)
                if data.get("prompt_id") != self.prompt_id:
                    continue
                if kind in ("execution_error", "execution_interrupted"):
                    error = (kind, data)
                if kind == "executing" and data.get("node") is None:
                    break
        finally:
            self.socket.close()
        if error:
            kind, data = error
            what = f"{data.get('node_type')}: {data.get('exception_message', kind)}"
            raise PromptError(what + "\n" + "".join(data.get("traceback", [])), data)
        history = self.server.get(f"/history/{self.prompt_id}")[self.prompt_id]
        return Finished(history["outputs"], history, self.events, time.monotonic() - self.started)

    def receive(self, deadline: float) -> tuple[str, dict | bytes]:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise websocket.WebSocketTimeoutException
            self.socket.settimeout(left)
            message = self.socket.recv()
        except websocket.WebSocketTimeoutException:
            raise TimeoutError(f"The prompt did not finish in time.\n{self.server.log_tail()}") from None
        except (websocket.WebSocketException, OSError) as error:
            raise RuntimeError(f"The server went away: {error}\n{self.server.log_tail()}") from None
        if isinstance(message, bytes):
            return "binary", message
        message = json.loads(message)
        return message["type"], message["data"]


class ComfyServer:
    """Use as a context manager. `packs` maps a folder name under custom_nodes to the pack linked there."""

    def __init__(self, base: Path, packs: dict[str, Path] | None = None, port: int = 0, arguments: tuple = ()):
        self.base = Path(base)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = self.base / f"server-{self.port}.log"
        self.startup_log = ""
        self.started = 0.0
        if packs is None:
            packs = {PACK_NAME: ROOT, **({"toma_demo_pack": DEMO_PACK} if DEMO_PACK.is_dir() else {})}
        self.packs = packs
        self.arguments = arguments
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "ComfyServer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self, timeout: float = 400) -> None:
        for folder in ("custom_nodes", "input", "output", "temp", "models", "user/default"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        for name, text in user_files().items():
            file = self.base / "user" / "default" / name
            if not file.exists():
                file.write_text(text)
        for name, pack in self.packs.items():
            link(pack, self.base / "custom_nodes" / name)
        command = [sys.executable, os.path.join(os.environ["COMFYUI_PATH"], "main.py"), "--cpu"]
        command += [
            "--use-pytorch-cross-attention",
            "--port",
            str(self.port),
            "--base-directory",
            str(self.base),
        ]
        # In a file: 0.16 opens a database in memory anew for every thread, and finds it empty.
        self.database = self.base / "user" / f"comfyui-{self.port}.db"
        command += ["--database-url", f"sqlite:///{self.database.as_posix()}"]
        command += ["--disable-auto-launch", "--disable-api-nodes"]
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments], stdout=log, stderr=subprocess.STDOUT, cwd=self.base
            )
        self.started = time.time()
        deadline = time.monotonic() + timeout
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"ComfyUI did not start.\n{self.log_tail()}")
            try:
                self.get("/system_stats")
                self.startup_log = self.log
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process:
            for file in self.database.parent.glob(f"{self.database.name}*"):
                file.unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    def get(self, path: str, **query):
        """JSON where the answer is JSON, bytes otherwise."""
        if query:
            path += "?" + urllib.parse.urlencode(query)
        return self._answer(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict | None = None):
        data = json.dumps(body or {}).encode()
        return self._answer(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}))

    def _answer(self, request: urllib.request.Request):
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read()
            return json.loads(body) if body and "json" in answer.headers.get("Content-Type", "") else body

    def submit(self, prompt: dict, watch: bool = False) -> Job:
        """`watch`: as a page with live picks does."""
        client = uuid.uuid4().hex
        listener = websocket.create_connection(f"ws://127.0.0.1:{self.port}/ws?clientId={client}", timeout=60)
        if watch:
            self.post("/toma/live", {"client_id": client, "on": True})
        started = time.monotonic()
        try:
            answer = self.post("/prompt", {"prompt": prompt, "client_id": client})
        except urllib.error.HTTPError as error:
            listener.close()
            details = json.loads(error.read() or b"{}")
            raise PromptError(f"The prompt was refused: {json.dumps(details, indent=1)}", details) from None
        return Job(self, answer["prompt_id"], listener, started)

    def queue(self, prompt: dict, timeout: float = 120, on_event: Callable | None = None) -> Finished:
        """Run a prompt (API format) to its end. Raises PromptError with the node's error."""
        return self.submit(prompt).wait(timeout, on_event)

    def interrupt(self) -> None:
        self.post("/interrupt")

    def image(self, description: dict) -> bytes:
        """The file behind an entry of outputs[node]["images"]."""
        return self.get("/view", **description)
