"""A whole stack, a headless Chromium, and one job that was submitted and watched through the page."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from stack import Stack
from waiting import wait_until
from watched import Watched, submit_and_watch

from syncline.gateway.app import create_app
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SIZE: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "these tests need Chromium (Debian: apt-get install chromium)"
    with sync_playwright() as driver:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has no user namespace of its own to hide in
        browser = driver.chromium.launch(executable_path=found, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    started = Stack(runs)
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)


@pytest.fixture(scope="module")
def job(chromium: Browser, stack: Stack) -> Watched:
    """A job that has ended, with what the page showed of it meanwhile."""
    with chromium.new_context(viewport=SIZE, reduced_motion="reduce") as context:
        return submit_and_watch(context.new_page(), stack)


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page of a browser profile of its own. Fails the test for an error in its scripts, or a breach of its policy."""
    with chromium.new_context(viewport=SIZE, reduced_motion="reduce") as context:
        opened, wrong = context.new_page(), list[str]()
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on(
            "console",
            lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None,
        )
        yield opened
        assert not wrong


@pytest.fixture
def another(stack: Stack) -> Iterator[Callable[..., str]]:
    """Makes further gateways over the same run root, with settings of their own; returns the address of each."""
    made: list[tuple[uvicorn.Server, threading.Thread, Bus]] = []
    redis = json.loads((stack.runs / "up.json").read_text())["redis_url"]

    def make(database: int = 0, token: str | None = None) -> str:
        named = {"SYNCLINE_RUNS": str(stack.runs), "SYNCLINE_MODELS": stack.env["SYNCLINE_MODELS"]}
        settings = Settings.read({**named, "SYNCLINE_REDIS_URL": f"{redis}?db={database}"})
        settings = msgspec.structs.replace(settings, token=token)
        bus = Bus(settings.redis_url, deadline=5)
        app = create_app(settings, bus)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run)
        thread.start()
        made.append((server, thread, bus))
        wait_until(lambda: server.started, 20, "uvicorn serving")
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield make
    for server, thread, bus in made:
        server.should_exit = True
        thread.join(20)
        bus.close()


@pytest.fixture
def picture() -> Callable[[Page, str], None]:
    """Keeps a picture of the page for the documentation, when SYNCLINE_PICTURES asks for it (`make pictures`)."""

    def keep(page: Page, name: str) -> None:
        folder = os.environ.get("SYNCLINE_PICTURES")
        if folder:
            # the page's policy lets nobody hide the caret or stop what moves, and needs neither
            page.screenshot(path=Path(folder) / f"ui-{name}.png", animations="allow", caret="initial")

    return keep
