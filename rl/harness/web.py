"""The web, from inside the sandbox: what its network policy lets out leaves, nothing where it has no network."""

import re
from dataclasses import dataclass
from html import unescape
from urllib.parse import quote

from rl.environments.sandbox import Sandbox
from rl.harness.schema import ToolError

MAX_BYTES = 1 << 20  # of a page
SECONDS = 20
FETCH = f"""import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={{"User-Agent": "agent"}})
try:
    with urllib.request.urlopen(request, timeout={SECONDS - 5}) as answer:
        sys.stdout.buffer.write(answer.read({MAX_BYTES}))
except (OSError, ValueError) as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
HIDDEN = re.compile(r"<(script|style|head|svg)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
BLOCK = re.compile(r"</?(?:p|div|li|ul|ol|tr|h[1-6]|br|table|pre|section|article)\b[^>]*>", re.IGNORECASE)
LINK = re.compile(r"<a\b[^>]*?href=[\"'](https?://[^\"']+)[\"'][^>]*>(.*?)</a\s*>", re.DOTALL | re.IGNORECASE)


def plain(page: str) -> str:
    """The text of a page: no tags, a line for each block, addresses of links behind them."""
    page = LINK.sub(r"\2 (\1)", HIDDEN.sub(" ", page))
    text = unescape(re.sub(r"<[^>]*>", "", BLOCK.sub("\n", page)))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


@dataclass(frozen=True)
class SandboxWeb:
    """`session.Web` over a sandbox's own network. `search_url` is a search engine's address with {query} in it; "": no search."""

    sandbox: Sandbox
    search_url: str = ""

    def search(self, query: str) -> str:
        if not self.search_url:
            raise ToolError("no search engine is set up here")
        return self.fetch(self.search_url.replace("{query}", quote(query)))

    def fetch(self, url: str) -> str:
        done = self.sandbox.exec(["python3", "-I", "-c", FETCH, url], timeout_s=SECONDS, output_bytes=2 * MAX_BYTES)
        if not done.ok:
            raise ToolError(f"{url[:200]}: {done.stderr.decode(errors='replace').strip()[-300:] or done.reason}")
        text = done.stdout.decode("utf-8", "replace")
        return plain(text) if "<" in text[:2000] else text
