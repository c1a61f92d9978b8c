"""A real browser without a screen, where there is one: a page says what it saw in its title, as JSON."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path


def seen(url: str, directory: Path, budget_ms: int = 3000) -> dict | None:
    """What the page at `url` says after so many milliseconds of its own time; None where there is no browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,900", f"--user-data-dir={directory / 'browser'}"]
    command = [browser, *options, f"--virtual-time-budget={budget_ms}", "--dump-dom", url]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))
