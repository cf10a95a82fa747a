"""A headless Chromium driven through chromedriver's HTTP interface (W3C WebDriver), for the page's tests."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
WHY_NOT = (
    None if CHROMIUM and CHROMEDRIVER else "no chromium and chromedriver on PATH (Debian: chromium, chromium-driver)"
)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
# WebDriver's names of keys that have no character.
ENTER, ESCAPE, TAB, SHIFT, SPACE = "\ue007", "\ue00c", "\ue004", "\ue008", " "
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, fixed by the W3C


class Browser:
    """`with Browser() as browser`. Elements are named by CSS selectors."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        assert CHROMEDRIVER is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if started := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise AssertionError("chromedriver did not start")
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{started[1]}", timeout=60, trust_env=False)
        capabilities = {
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*FLAGS, f"--user-data-dir={self._profile.name}"],
                "perfLoggingPrefs": {"enableNetwork": True, "enablePage": False},
            },
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._session = ""
        self._session = "/session/" + self._post("/session", capabilities={"alwaysMatch": capabilities})["sessionId"]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.delete(self._session)
        self._http.close()
        self._driver.terminate()
        self._driver.communicate(timeout=10)
        self._profile.cleanup()

    def _post(self, path: str, **body: Any) -> Any:
        response = self._http.post(self._session + path, json=body)
        value = response.json()["value"]
        assert response.status_code == 200, f"{path}: {value['message']}"
        return value

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._post("/goog/cdp/execute", cmd=command, params=params)

    def open(self, url: str) -> None:
        """Forget the browser's log so far, and load a page."""
        self.log("browser")
        self.log("performance")
        self._post("/url", url=url)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """The log since the last call: "browser" is the console, "performance" the DevTools events."""
        return self._post("/se/log", type=kind)

    def requested_urls(self) -> list[str]:
        """Everything the page asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def js(self, expression: str, *args: Any) -> Any:
        """The value of a JavaScript expression (a promise is awaited); its arguments are `args[0]` and so on."""
        script = f"const args = arguments; return (async () => ({expression}))();"
        return self._post("/execute/sync", script=script, args=list(args))

    def wait(self, expression: str, *args: Any, seconds: float = 15.0) -> Any:
        """Until a JavaScript expression is true. The page itself looks again and again."""
        waiting = f"""(async () => {{
            let value;
            for (const end = performance.now() + {1000 * seconds}; !(value = await ({expression}));)
                if (performance.now() > end) return null;
                else await new Promise(done => setTimeout(done, 10));
            return value;
        }})()"""
        value = self.js(waiting, *args)
        assert value, f"waited {seconds} s for {expression} {args}"
        return value

    def text(self, css: str) -> str:
        """The text of the first such element."""
        return self.js("document.querySelector(args[0]).textContent", css)

    def wait_for_text(self, css: str, text: str) -> None:
        """Until an element exists whose text contains `text`."""
        self.wait("[...document.querySelectorAll(args[0])].some(e => e.textContent.includes(args[1]))", css, text)

    def click(self, css: str) -> None:
        """With the mouse: fails if the element cannot be hit."""
        element = self._post("/element", using="css selector", value=css)[_ELEMENT]
        self._post(f"/element/{element}/click")

    def press(self, keys: str, holding: str = "") -> None:
        """Type into whatever has the focus."""
        actions = [{"type": "keyDown", "value": key} for key in holding]
        actions += [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        actions += [{"type": "keyUp", "value": key} for key in holding]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def focused(self) -> str:
        """The id of the focused element, or its text."""
        return self.js("document.activeElement.id || document.activeElement.textContent")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._http.get(f"{self._session}/screenshot").json()["value"]))
