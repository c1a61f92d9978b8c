"""What may leave: rules over host, port, method, path and sizes. No rule, no way out.

    policy = Policy((Rule("pypi.org", paths=("/simple/*",)), Rule("*.example.org", methods=("GET", "POST"), request_bytes=10_000)))

The first rule that matches host and port decides; what it does not allow is denied, whatever later rules say. A host is compared as
its ASCII (IDNA) name in lower case; `*.example.org` is every name below example.org and not that name itself. An IP address is
allowed only by a rule that is that address. Paths match by `fnmatch` after the checks of `plain_path`: encoded slashes or dots,
`..`, `//`, backslashes and control characters are denied, because servers disagree about them.
"""

import fnmatch
import ipaddress
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

HOP = frozenset(b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split())  # of one connection
SENSITIVE = ("authorization", "cookie", "proxy-authorization", "x-api-key", "x-forwarded-for", "forwarded", "via")
NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")


class Denied(Exception):
    """Not allowed; `reason` is for the audit log, and for the sandbox."""

    def __init__(self, reason: str, status: int = 403):
        super().__init__(reason)
        self.reason, self.status = reason, status


def host_name(text: str) -> str:
    """The name or address in the one spelling that rules use. ValueError if it is none."""
    text = text.rstrip(".").strip("[]")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    name = text.lower() if text.isascii() else text.encode("idna").decode().lower()  # UnicodeError is a ValueError
    last = name.rsplit(".", 1)[-1]
    if not NAME.fullmatch(name) or last.isdigit() or last.startswith("0x"):
        raise ValueError(f"{text!r} is not a host name")  # 127.1, 0x7f.1: addresses to some resolvers
    return name


def plain_path(target: str) -> str:
    """The path of a request target, decoded, or Denied."""
    path = target.split("?", 1)[0]
    if not path.startswith("/"):
        raise Denied("the target must start with /", 400)
    if re.search(r"%2f|%5c|%2e|%00|%25", path, re.I) or "\\" in path or "//" in path or "#" in target:
        raise Denied("ambiguous path", 400)
    decoded = unquote(path)
    if any(part in (".", "..") for part in decoded.split("/")) or re.search(r"[\x00-\x20\x7f]", decoded):
        raise Denied("ambiguous path", 400)
    return decoded


@dataclass(frozen=True)
class Rule:
    """Hosts, and what may be asked of them. `tls` "tunnel" leaves encrypted connections closed, for clients that pin a CA of their
    own; only host and bytes are limited then."""

    host: str
    ports: tuple[int, ...] = (80, 443)
    methods: tuple[str, ...] = ("GET", "HEAD")
    paths: tuple[str, ...] = ("*",)
    request_bytes: int = 1 << 20  # of a body
    response_bytes: int = 1 << 30
    drop_headers: tuple[str, ...] = SENSITIVE  # of requests
    drop_response_headers: tuple[str, ...] = ("set-cookie",)
    websocket: bool = False
    private: bool = False  # may the name lead to a private, loopback or link-local address
    tls: Literal["intercept", "tunnel"] = "intercept"
    ca_pem: str = ""  # the only authority trusted for this host; empty: the system's

    def __post_init__(self):
        host = self.host[2:] if self.host.startswith("*.") else self.host
        if host_name(host) != host:
            raise ValueError(f"host must be lower-case ASCII as in {host_name(host)!r}, got {self.host!r}")
        if self.tls not in ("intercept", "tunnel"):
            raise ValueError(f"tls must be intercept or tunnel, got {self.tls!r}")
        if self.tls == "tunnel" and (self.paths != ("*",) or self.websocket):
            raise ValueError("a tunnel cannot limit paths: nobody reads it")

    def names(self, host: str) -> bool:
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


@dataclass(frozen=True)
class Policy:
    rules: tuple[Rule, ...] = ()
    connections: int = 64  # at once
    total_bytes: int = 1 << 34  # of the environment's life, both ways

    def resolvable(self, host: str) -> bool:
        """Whether a name has an address at all inside the sandbox."""
        return any(rule.names(host) for rule in self.rules)

    def connect(self, host: str, port: int) -> Rule:
        """The rule that speaks for this host and port, or Denied."""
        for rule in self.rules:
            if rule.names(host) and port in rule.ports:
                return rule
        raise Denied(f"no rule for {host}:{port}")


def read_policies(path: Path) -> dict[str, Policy]:
    """Policies by name, from JSON: {"pypi": {"rules": [{"host": "pypi.org", "paths": ["/simple/*"]}], "connections": 8}}.

    Names and fields are those of `Policy` and `Rule`. ValueError says what is wrong, and in which policy.
    """
    try:
        told = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f"{path}: policies must be an object by name, got {type(told).__name__}")
    found = {}
    for name, policy in told.items():
        try:
            rules = tuple(_built(Rule, rule) for rule in _listed(policy, "rules"))
            found[name] = _built(Policy, {**policy, "rules": rules})
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: policy {name!r}: {error}") from None
    return found


def _listed(policy, name: str) -> list:
    if not isinstance(policy, dict) or not isinstance(rules := policy.get(name, []), list):
        raise ValueError(f"must be an object with a list of {name}, got {policy!r}")
    return rules


def _built(kind: type, values) -> Policy | Rule:
    """A Rule or Policy of values that JSON has: lists for tuples, and otherwise the types of the defaults."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} must be an object, got {values!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    known = {f.name: f for f in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{kind.__name__} has no {name!r}, only {', '.join(known)}")
        expected = str if name == "host" else type(known[name].default)
        if type(value) is not expected:
            raise ValueError(f"{name} must be {'list' if expected is tuple else expected.__name__}, got {value!r}")
        inner = int if name == "ports" else str
        if expected is tuple and name != "rules" and not all(type(item) is inner for item in value):
            raise ValueError(f"{name} must be a list of {inner.__name__}, got {value!r}")
    return kind(**values)


def judge(rule: Rule, method: str, target: str, upgrade: bool):
    """Denied unless the rule allows this request."""
    if upgrade and not rule.websocket:
        raise Denied("upgrades are not allowed")
    if method not in rule.methods:
        raise Denied(f"method {method} is not allowed", 405)
    path = plain_path(target)
    if not any(fnmatch.fnmatchcase(path, pattern) for pattern in rule.paths):
        raise Denied("path is not allowed")


def kept(headers: list[tuple[bytes, bytes]], dropped: tuple[str, ...], upgrade: bool = False) -> list[tuple[bytes, bytes]]:
    """Headers that go on: without those of the connection, those it names, and those the rule drops."""
    named = {name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")}
    gone = HOP | named | {name.lower().encode() for name in dropped}
    passed = [(name, value) for name, value in headers if name.lower() not in gone or name.lower() == b"transfer-encoding"]
    if upgrade:
        passed += [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
    return passed
