"""The page in a real browser: Chromium over its DevTools pipe, which needs no driver and no library."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apiece import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BINARY = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# Chromium listens on descriptor 3 and speaks on 4.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 30
UGLY = "<script>alert(1)</script>" + "long" * 30


class Browser:
    """One Chromium with one tab. Messages are JSON, ended by a zero byte."""

    def __init__(self, binary: str, profile: str) -> None:
        (its_read, self.write_end), (self.read_end, its_write) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (its_read, its_write)]  # clear of 3 and 4
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, theirs), binary, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (its_read, its_write, *theirs):
            os.close(end)
        self.sent = 0
        self.buffer = b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def receive(self) -> dict[str, Any]:
        """The next message; events are kept."""
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self.read_end, 1 << 16)
            assert part, "Chromium is gone"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    def close(self) -> None:
        os.close(self.write_end)  # Chromium leaves when its pipe does
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read_end)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if BINARY is None:
        pytest.skip(f"no Chromium on the PATH: looked for {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Browser(BINARY, profile)
        yield opened
        opened.close()


@pytest.fixture
def written(fake: Callable[..., Path], tmp_path: Path) -> Path:
    """A page with every kind of figure: three methods, one of them with a name that bites and unfinished."""
    names = [f"{group}_{score}_mean" for group in ("seen", "unseen") for score in ("initial", "personalized")]
    rounds = [{"round": r} | dict.fromkeys(names, 0.1 + 0.08 * r) for r in range(0, 11, 2)]
    clients = [[i, i < 8, "test", "accuracy", 9, 9, i / 10, (i + i % 3) / 12] for i in range(10)]
    partition = [[i, f"c{i}", int(i < 8), "train", i % 4, 3 + i] for i in range(10)]
    labels = [[r, label, 1 + r * (label + 3) % 7] for r in range(1, 51) for label in range(10)]
    adaptation = [
        (along, n, 0.5 + n / 200) for along in ("epochs", "examples") for n in (0, 1, 2, 5, 10, 20, 50)
    ]
    part = {"initial": 0.3, "personalized": 0.6}
    folders = [
        fake(
            f"{method[0]}{seed}",
            method=method,
            seed=seed,
            rounds=rounds,
            clients=clients,
            partition=partition,
            labels=labels,
            adaptation=adaptation,
            also={"digits[0-4]": {"seen": part, "unseen": part}},
            seen=(0.5, best - 0.01 * seed),
            unseen=(0.4, best - 0.02 * seed),
            finished=method != UGLY,
        )
        for method, best in (("fedavg", 0.8), ("reptile", 0.9), (UGLY, 0.0))
        for seed in (0, 1)
    ]
    return report.write(folders, tmp_path / "page.html", "apiece report")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_shows_and_nothing_complains(
    browser: Browser, written: Path, width: int, scheme: str
) -> None:
    browser.open(written, width, scheme)
    shown = browser.evaluate(
        """[...document.querySelectorAll("figure svg[role=img]")].map(svg => {
            const box = svg.getBoundingClientRect();
            return [box.width, box.height, getComputedStyle(svg).visibility, svg.checkVisibility()];
        })"""
    )
    assert (
        len(shown) == 2 + 4 + 2 + 2 + 1 + 1 + 2
    )  # glance, curves, adaptation, clients, partition, drift, traffic
    heads = browser.evaluate('[...document.querySelectorAll("h2")].map(h => h.textContent)')
    assert {"Scored on other data too", "Adaptation curves", "What the cohorts held"} <= set(heads)
    assert all(w > 100 and h > 30 and seen == "visible" and rendered for w, h, seen, rendered in shown), shown
    assert browser.complaints() == []
    # Wide things scroll by themselves; the page does not.
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    asked = [
        e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [written.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_the_page(browser: Browser, written: Path, scheme: str) -> None:
    """WCAG: a contrast of 4.5 for text, 3 for graphics."""
    browser.open(written, scheme=scheme)
    page = luminance(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert page > 0.9 if scheme == "light" else page < 0.1
    text = browser.evaluate(
        """[...document.querySelectorAll("h1, .lead, .sub, .about, td, svg text")].map(
            e => e.closest("svg") ? getComputedStyle(e).fill : getComputedStyle(e).color)"""
    )
    colours = browser.evaluate(
        """[0, 1, 2, 3, 4, 5, 6].map(i => {
            const path = document.querySelector("path.line");
            path.setAttribute("class", "line s" + i);
            return getComputedStyle(path).stroke;
        })"""
    )
    assert len(set(colours)) == 7
    assert min(contrast(page, luminance(colour)) for colour in set(text)) >= 4.5
    assert min(contrast(page, luminance(colour)) for colour in colours) >= 3.0


def test_the_table_sorts_when_its_head_is_clicked(browser: Browser, written: Path) -> None:
    """Column 2 is seen personalized: reptile 0.895 before fedavg 0.795; the unfinished one stays last."""
    browser.open(written)
    names = '[...document.querySelector("tbody").querySelectorAll("th")].map(th => th.dataset.v.slice(0, 7))'
    click = 'document.querySelectorAll("thead tr:last-child th")[2].click()'
    assert browser.evaluate(names) == ["fedavg", "reptile", "<script"]
    browser.evaluate(click)
    assert browser.evaluate(names) == ["reptile", "fedavg", "<script"]
    browser.evaluate(click)
    assert browser.evaluate(names) == ["fedavg", "reptile", "<script"]
    assert browser.complaints() == []


def test_a_page_that_misbehaves_is_noticed(browser: Browser, written: Path) -> None:
    """The checks above can fail: a foreign image is refused by the page's own policy, and heard of."""
    page = written.with_name("bad.html")
    text = written.read_text(encoding="utf-8").replace("<h1>", '<img src="other.png"><h1>')
    page.write_text(text, encoding="utf-8")
    browser.open(page)
    assert any("Content Security Policy" in json.dumps(complaint) for complaint in browser.complaints())


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)"."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)
