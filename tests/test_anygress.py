"""Anygress: the policy by itself, then clients inside a network namespace against servers outside of it."""

import errno
import http.client
import json
import socket
import ssl
import time

import pytest

from rl.environments.egress.certificates import Authority, variables
from rl.environments.egress.policy import Denied, Policy, Rule, host_name, judge, kept, plain_path, read_policies
from rl.environments.egress.proxy import Names
from rl.environments.egress.redirect import Unavailable, inside, open_door
from tests.egress_cases import Place, missing, namespace, servers

HOSTS = ["open.test", "get.test", "a.wild.test", "ws.test", "tunnel.test", "pinned.test", "10.9.8.7"]


# The policy


@pytest.mark.parametrize(
    ("text", "name"), [("PyPI.org.", "pypi.org"), ("bücher.example", "xn--bcher-kva.example"), ("[::1]", "::1")]
)
def test_hosts_have_one_spelling(text, name):
    assert host_name(text) == name


@pytest.mark.parametrize("text", ["", "a b", "127.1", "0x7f.1", "2130706433", "-a.b", "a..b", "a/b", "x" * 64])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 (UnicodeError is one, with another text)
        host_name(text)


@pytest.mark.parametrize(
    "path", ["/a/../b", "/a/%2e%2e/b", "/a%2fb", "/a\\b", "//a", "/a%00", "/a%252e", "/.", "http://x/", "*", "/a b", "/a#b"]
)
def test_ambiguous_paths_are_denied(path):
    with pytest.raises(Denied):
        plain_path(path)


def test_paths_are_decoded_before_they_are_compared():
    rule = Rule("a.test", paths=("/caf\u00e9/*",))
    judge(rule, "GET", "/caf%C3%A9/x?q=/../", False)
    with pytest.raises(Denied, match="path"):
        judge(rule, "GET", "/caf/x", False)


def test_the_first_rule_that_matches_decides():
    policy = Policy((Rule("a.test", methods=("GET",)), Rule("*.test", ports=(8443,)), Rule("a.test", methods=("POST",))))
    assert policy.connect("a.test", 443).methods == ("GET",)
    assert policy.connect("b.test", 8443).host == "*.test"
    for host, port in (("b.test", 443), ("test", 8443), ("a.test.evil", 443), ("xa.test", 443), ("127.0.0.1", 80)):
        with pytest.raises(Denied, match="no rule"):
            policy.connect(host, port)
    with pytest.raises(Denied):
        Policy().connect("a.test", 443)


def test_headers_of_the_connection_and_sensitive_ones_go():
    headers = [(b"Host", b"a"), (b"Connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"Authorization", b"s"), (b"Accept", b"*/*")]
    assert kept(headers, Rule("a.test").drop_headers) == [(b"Host", b"a"), (b"Accept", b"*/*")]


@pytest.mark.parametrize("wrong", [dict(host="A.test"), dict(host="*.1.2"), dict(host="a.test", tls="tunnel", paths=("/x",))])
def test_rules_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=r"host|tunnel"):
        Rule(**wrong)


def test_policies_are_read_from_json(tmp_path):
    told = {
        "a": {"rules": [{"host": "*.test", "ports": [8443], "tls": "tunnel"}, {"host": "b.org", "private": True}], "connections": 3}
    }
    path = tmp_path / "policies.json"
    path.write_text(json.dumps({**told, "shut": {}}))
    rules = (Rule("*.test", ports=(8443,), tls="tunnel"), Rule("b.org", private=True))
    assert read_policies(path) == {"a": Policy(rules, connections=3), "shut": Policy()}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "Expecting"), ("[]", "by name, got list"), ('{"a": []}', "'a': must be an object"),
        ('{"a": {"rules": {}}}', "list of rules"),
        ('{"a": {"rules": ["x"]}}', "Rule must be an object"), ('{"a": {"rules": [{}]}}', "host"),
        ('{"a": {"rules": [{"host": 1}]}}', "host must be str"), ('{"a": {"rules": [{"host": "A.test"}]}}', "lower-case"),
        ('{"a": {"rules": [{"host": "a.test", "ports": 80}]}}', "ports must be list"),
        ('{"a": {"rules": [{"host": "a.test", "ports": ["80"]}]}}', "list of int"),
        ('{"a": {"rules": [{"host": "a.test", "private": 1}]}}', "private must be bool"),
        ('{"a": {"rules": [{"host": "a.test", "tls": "no"}]}}', "tls must be"), ('{"a": {"connection": 3}}', "no 'connection'"),
        ('{"a": {"connections": true}}', "connections must be int"),
    ],
)  # fmt: skip
def test_policies_that_are_none_are_refused(tmp_path, text, wrong):
    path = tmp_path / "policies.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong) as raised:
        read_policies(path)
    assert str(path) in str(raised.value)


def test_names_give_out_few_addresses():
    names = Names(Policy((Rule("*.test"),)), most=2)
    query = b"\0\0\1\0\0\1\0\0\0\0\0\0" + b"\1%c\4test\0\0\1\0\1"
    codes = [names.answer(query % letter)[2] for letter in (b"a", b"b", b"a", b"c")]
    assert codes == [0, 0, 0, 3]


def test_certificates_are_of_their_host_and_authority():
    mine, other = Authority("a"), Authority("b")
    for authority, accepted in ((mine, True), (other, False)):
        client = ssl.create_default_context(cadata=authority.pem)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        inner = client.wrap_bio(to_client, to_server, server_hostname="a.test")
        outer = mine.context("a.test").wrap_bio(to_server, to_client, server_side=True)
        verdict = None
        for _ in range(6):
            for side in (inner, outer):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError:
                    verdict = False
        assert (verdict is None and inner.version() is not None) == accepted
    assert set(variables("/ca.pem").values()) == {"/ca.pem"}


def test_a_namespace_that_is_gone_is_unavailable():
    with pytest.raises(Unavailable, match="cannot redirect"):
        open_door("/proc/0/ns/net")


# From inside a namespace


@pytest.fixture(scope="module")
def outside():
    with servers(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def shared(outside):
    if missing():
        pytest.skip(missing())
    seen, authority, ports = outside
    mine = dict(private=True, ca_pem=authority.pem)
    policy = Policy(
        (
            Rule("open.test", methods=("GET", "HEAD", "POST"), request_bytes=1000, response_bytes=10_000, **mine),
            Rule("get.test", paths=("/allowed/*",), **mine),
            Rule("*.wild.test", **mine),
            Rule("ws.test", websocket=True, **mine),
            Rule("tunnel.test", ports=(443,), tls="tunnel", private=True),
            Rule("pinned.test", private=True, ca_pem=Authority("another").pem),
            Rule("inward.test"),
            Rule("10.9.8.7", **mine),
        )
    )
    with namespace() as path:
        place = Place(path, policy, ports, seen)
        yield place
        place.close()


@pytest.fixture
def place(shared):
    shared.clear()
    return shared


def settled(place, text):
    """Whether a reason with this text gets logged."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if any(text in reason for reason in place.reasons()):
            return True
        time.sleep(0.01)
    raise AssertionError(place.log)


def test_host_allowed(place):
    status, headers, body = place.request("GET", "open.test/a?b=1")
    assert (status, body, headers["X-Kept"]) == (200, b"hello", "yes")
    assert place.seen[0][:2] == ("GET", "/a?b=1")
    assert settled(place, "allow: ")  # noted once the answer has gone out
    (entry,) = (entry for entry in place.log if entry.get("reason") != "dns")
    expected = {"verdict": "allow", "host": "open.test", "target": "/a?b=1", "status": 200, "received": 5}
    assert {name: entry.get(name) for name in expected} == expected


def test_host_of_a_wildcard(place):
    assert place.request("GET", "a.wild.test/")[0] == 200
    assert place.query("wild.test")[0] == 3


def test_host_not_named_has_no_address(place):
    assert place.query("other.test") == (3, [])
    assert place.log[-1]["verdict"] == "deny"
    assert not place.resolved


def test_host_not_named_by_its_address(place):
    with pytest.raises((http.client.HTTPException, OSError)):
        place.request("GET", "open.test/", address="93.184.216.34")
    settled(place, "no rule for 93.184.216.34:80")
    assert not place.seen


def test_host_header_of_another(place):
    assert place.request("GET", "open.test/", headers={"Host": "evil.test"})[0] == 421
    assert not place.seen


def test_port_not_named(place):
    with place.connect("open.test", 22) as client:
        assert client.recv(10) == b""
    settled(place, "no rule for open.test:22")


def test_method_denied(place):
    assert place.request("DELETE", "open.test/")[0] == 405
    assert place.request("POST", "get.test/allowed/x", b"")[0] == 405
    assert not place.seen


def test_method_connect_is_no_way_around(place):
    with place.connect("open.test", 80) as client:
        client.sendall(b"CONNECT evil.test:443 HTTP/1.1\r\nHost: open.test\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 405")
    assert not place.seen


def test_path_denied(place):
    assert place.request("GET", "get.test/allowed/x")[0] == 200
    assert place.request("GET", "get.test/other")[0] == 403
    assert len(place.seen) == 1


@pytest.mark.parametrize("path", ["allowed/../secret", "allowed/%2e%2e/secret", "allowed/..%2fsecret", "allowed//x"])
def test_path_that_climbs(place, path):
    assert place.request("GET", f"get.test/{path}")[0] == 400
    assert not place.seen


def test_size_of_a_request(place):
    assert place.request("POST", "open.test/", b"x" * 1000)[0] == 200
    assert place.request("POST", "open.test/", b"x" * 1001)[0] == 413
    assert [len(seen[3]) for seen in place.seen] == [1000]


def test_size_of_a_chunked_request(place):
    status, _, _ = place.request("POST", "open.test/", iter([b"x" * 600] * 2), {"Transfer-Encoding": "chunked"}, chunked=True)
    assert status == 413
    assert not place.seen
    assert place.request("POST", "open.test/", iter([b"x" * 300] * 2), {"Transfer-Encoding": "chunked"}, chunked=True)[0] == 200
    assert place.seen[0][3] == b"x" * 600


def test_size_of_a_response(place):
    assert len(place.request("GET", "open.test/big/10000")[2]) == 10_000
    with pytest.raises(http.client.IncompleteRead):
        place.request("GET", "open.test/big/200000")
    settled(place, "response body is too large")


def test_header_dropped_on_the_way_out(place):
    secret = {"Authorization": "Bearer x", "Cookie": "a=b", "X-Api-Key": "k", "Connection": "X-Hop", "X-Hop": "1", "X-Mine": "2"}
    place.request("GET", "open.test/", headers=secret)
    sent = {name.lower(): value for name, value in place.seen[0][2].items()}
    assert sent["x-mine"] == "2"
    assert not sent.keys() & {"authorization", "cookie", "x-api-key", "x-hop"}


def test_header_dropped_on_the_way_in(place):
    _, headers, _ = place.request("GET", "open.test/")
    assert "Set-Cookie" not in headers
    assert headers["X-Kept"] == "yes"


def test_header_that_smuggles(place):
    for lines in (
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Transfer-Encoding: gzip, chunked",
        b"Content-Length: +5",
        b"A: b\r\n c: d\x00",
    ):
        with place.connect("open.test", 80) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: open.test\r\n" + lines + b"\r\n\r\n0\r\n\r\n")
            assert client.recv(1000)[:12] in (b"", b"HTTP/1.1 501")
    assert not place.seen


def test_dns_says_nothing_else(place):
    assert place.query("open.test", 28) == (0, [])  # AAAA
    assert place.query("open.test", 16) == (0, [])  # TXT
    assert place.query("c2VjcmV0.leak.example") == (3, [])
    assert not place.resolved


def test_dns_elsewhere(place):
    with place.make_socket(kind=socket.SOCK_DGRAM) as client:
        client.connect(("8.8.8.8", 53))
        client.send(b"\0" * 20)
        began = time.monotonic()
        client.settimeout(1)
        with pytest.raises(OSError):  # noqa: PT011 (refused, or silent)
            client.recv(100)
        assert time.monotonic() - began < 2


def test_ip_literal(place):
    assert place.request("GET", "10.9.8.7/", address="10.9.8.7")[0] == 200
    with place.connect("", 80, "10.9.8.8") as client:
        assert client.recv(10) == b""


def test_private_address_behind_a_name(place):
    assert place.request("GET", "inward.test/")[0] == 403
    settled(place, "which is not public")
    assert not place.seen


def test_raw_socket_reaches_loopback_only(place):
    assert inside(place.path, socket.if_nameindex) == [(1, "lo")]
    with place.make_socket(kind=socket.SOCK_RAW, protocol=socket.IPPROTO_ICMP) as client:
        client.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("93.184.216.34", 0))
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as outside,
        place.make_socket(socket.AF_PACKET, socket.SOCK_RAW) as packet,
    ):
        outside.settimeout(0.2)
        packet.bind(("lo", 0))
        packet.send(b"\xff" * 12 + b"\x08\0" + b"anygress-raw" * 4)
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            try:
                assert b"anygress-raw" not in outside.recv(65535)
            except TimeoutError:
                break


def test_ipv6(place):
    with place.connect("", 443, "2606:2800:220:1::1") as client:
        assert client.recv(10) == b""
    settled(place, "no rule for 2606:2800:220:1::1:443")
    with place.make_socket(socket.AF_INET6) as client:
        client.connect(("::ffff:10.9.8.7", 80))
        client.sendall(b"GET / HTTP/1.1\r\nHost: 10.9.8.7\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_redirect_is_judged_anew(place):
    status, headers, _ = place.request("GET", "open.test/away")
    assert (status, headers["Location"]) == (302, "http://other.test/")
    with pytest.raises(socket.gaierror):
        place.request("GET", "other.test/")


WEBSOCKET = b"GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"


def test_websocket_denied(place):
    with place.connect("open.test", 80) as client:
        client.sendall(WEBSOCKET % b"open.test")
        assert client.recv(100).startswith(b"HTTP/1.1 403")
    assert not place.seen


def test_websocket_allowed(place):
    with place.connect("ws.test", 80) as client:
        client.sendall(WEBSOCKET % b"ws.test")
        assert client.recv(1000).startswith(b"HTTP/1.1 101")
        client.sendall(b"over there")
        assert client.recv(100) == b"OVER THERE"


def test_tls_is_read_and_judged(place):
    with place.tls("get.test", place.proxy.authority.pem) as client:
        assert place.request("GET", "get.test/allowed/x", over=client)[0] == 200
    with place.tls("get.test", place.proxy.authority.pem) as client:
        assert place.request("GET", "get.test/other", over=client)[0] == 403
    assert len(place.seen) == 1


def test_tls_client_that_pins_another_authority(place, outside):
    with pytest.raises(ssl.SSLCertVerificationError):
        place.tls("open.test", outside[1].pem)
    settled(place, "tls")
    assert not place.seen


def test_tls_in_a_tunnel_with_a_pinned_authority(place, outside):
    with place.tls("tunnel.test", outside[1].pem) as client:
        assert place.request("GET", "tunnel.test/any", over=client)[0] == 200
    with pytest.raises((ssl.SSLError, OSError)):
        place.tls("tunnel.test", outside[1].pem, name="open.test")
    settled(place, "server name 'open.test' is not the host connected to")


def test_tls_server_with_another_authority_than_pinned(place):
    with place.tls("pinned.test", place.proxy.authority.pem) as client:
        assert place.request("GET", "pinned.test/", over=client)[0] == 502
    settled(place, "CERTIFICATE_VERIFY_FAILED")
    assert not place.seen


def test_tls_name_of_another_host(place):
    with pytest.raises(ssl.SSLError):
        place.tls("open.test", place.proxy.authority.pem, name="evil.test")
    settled(place, "server name is not the host connected to")
    assert not place.seen


def test_own_servers_are_left_alone(place):
    """Loopback inside the sandbox is its own, on any port."""
    with place.make_socket() as server:
        server.bind(("127.0.0.1", 80))
        server.listen()
        with place.connect("", 80, "127.0.0.1"):
            server.settimeout(5)
            server.accept()[0].close()
    with place.make_socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", 81))
    assert not place.log


def test_many_requests_on_a_connection(place):
    connection = http.client.HTTPConnection("open.test")
    connection.sock = place.connect("open.test", 80)
    for i in range(5):
        connection.request("GET", f"/{i}")
        assert connection.getresponse().read() == b"hello"
    connection.close()
    assert [seen[1] for seen in place.seen] == [f"/{i}" for i in range(5)]


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_by_default_nothing_leaves(outside):
    seen, _, ports = outside
    seen.clear()
    with namespace() as path:
        place = Place(path, Policy(), ports, seen)
        try:
            assert place.query("open.test")[0] == 3
            for address, port in (
                ("93.184.216.34", 80),
                ("1.1.1.1", 443),
                ("10.0.0.1", 22),
                ("2606:4700::1111", 443),
                ("169.254.169.254", 80),
            ):
                with place.connect("", port, address) as client:
                    assert client.recv(10) == b""
        finally:
            place.close()
        with place.make_socket() as client, pytest.raises(OSError) as refused:  # noqa: PT011 without a proxy there is not even a door
            client.connect(("93.184.216.34", 80))
        assert refused.value.errno in (errno.ECONNREFUSED, errno.ENETUNREACH)
    assert not seen
    assert not place.resolved


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_connections_and_bytes_are_limited(outside):
    seen, _, ports = outside
    with namespace() as path:
        policy = Policy((Rule("open.test", methods=("GET",), private=True),), connections=2, total_bytes=12)
        place = Place(path, policy, ports, seen)
        try:
            held = [place.connect("open.test", 80) for _ in range(2)]
            time.sleep(0.1)
            with place.connect("open.test", 80) as client:
                assert client.recv(10) == b""
            for client in held:
                client.close()
            time.sleep(0.1)
            assert [place.request("GET", "open.test/")[2] for _ in range(2)] == [b"hello"] * 2
            with pytest.raises(http.client.IncompleteRead):
                place.request("GET", "open.test/")
        finally:
            place.close()
    settled(place, "used up its bytes")
