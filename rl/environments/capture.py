"""Run a host process with deadlines and bounded output: what the subprocess backend's commands are."""

import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable

from rl.environments.sandbox import TIMEOUT_EXIT, ExecResult

READ = 64 << 10


class HeadTail:
    """Keeps the first and the last half of `cap` bytes of a stream.

    >>> kept = HeadTail(8); kept.add(b"abcdef"); kept.add(b"ghijkl"); kept.join(), kept.dropped
    (b'abcd\\n[... 4 bytes dropped ...]\\nijkl', 4)
    """

    def __init__(self, cap: int):
        self.head_cap, self.tail_cap = cap - cap // 2, cap // 2
        self.head, self.tail, self.dropped = b"", bytearray(), 0

    def add(self, data: bytes) -> None:
        room = self.head_cap - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        over = len(self.tail) - self.tail_cap
        if over > 0:
            self.dropped += over
            del self.tail[:over]

    def join(self) -> bytes:
        return join(self.head, bytes(self.tail), self.dropped)


def join(head: bytes, tail: bytes, dropped: int) -> bytes:
    """Both halves with a marker for what is missing; a UTF-8 character that the cut went through is dropped whole."""
    if not dropped:
        return head + tail
    before, after = _without_partial_end(head), _without_partial_start(tail)
    dropped += len(head) - len(before) + len(tail) - len(after)
    return before + b"\n[... %d bytes dropped ...]\n" % dropped + after


def _without_partial_end(data: bytes) -> bytes:
    for back in range(1, min(3, len(data)) + 1):  # the lead byte of a character is at most three before the cut
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if needed > back else data
        if byte < 0x80:
            break
    return data


def _without_partial_start(data: bytes) -> bytes:
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]


def run(
    argv: list[str],
    *,
    cwd: str,
    env: dict[str, str],
    stdin: bytes,
    timeout_s: float,
    idle_s: float,
    output_bytes: int,
    kill: Callable[[subprocess.Popen], None],
) -> ExecResult:
    """Start argv, collect its output until it ends or a deadline passes; then `kill(process)` must end its tree."""
    start = time.monotonic()
    with tempfile.TemporaryFile() if stdin else open(os.devnull, "rb") as source:
        if stdin:
            source.write(stdin)
            source.seek(0)
        process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    streams = {process.stdout: HeadTail(output_bytes), process.stderr: HeadTail(output_bytes)}
    reason, last = "exit", start
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None  # looked at before the pipes: what it wrote is all there then
            now = time.monotonic()
            if not ended and (now - start >= timeout_s or (idle_s and now - last >= idle_s)):
                reason = "timeout" if now - start >= timeout_s else "idle"
                kill(process)
                process.wait()
                ended = True
            read = 0
            for key, _ in selector.select(0 if ended else 0.005):
                data = key.fileobj.read(READ)
                if data:
                    streams[key.fileobj].add(data)
                    read, last = read + len(data), now
                elif data == b"":
                    selector.unregister(key.fileobj)
            if ended and not read:
                break
    for stream in streams:
        stream.close()
    code = process.returncode
    if reason != "exit":
        code = TIMEOUT_EXIT
    elif code < 0:
        code, reason = 128 - code, "signal"
    out, err = streams.values()
    return ExecResult(code, out.join(), err.join(), reason, out.dropped + err.dropped, time.monotonic() - start)
