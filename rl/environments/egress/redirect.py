"""Every TCP connection that a sandbox opens ends in a socket of the proxy, and DNS in another: without a route, a bridge or a rule.

The sandbox's network namespace has the loopback device only. Here it gets a `local default` route, so that all of IPv4 and IPv6 is
"this machine", and a `sk_lookup` program that gives a connection to any address but 127.0.0.0/8 and ::1 to the proxy's listening
socket, whatever its port. The socket was made inside the namespace by a thread that entered it; the process that serves it is
outside. So there is nothing to leave through: no interface, no neighbour, no NAT; UDP, raw sockets and everything else end on
loopback. The peer's `getsockname()` is where the sandbox wanted to go. Needs root (CAP_SYS_ADMIN, CAP_BPF) and Linux 5.9.
"""

import ctypes
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
SYS_BPF = 321  # x86-64
MAP_CREATE, MAP_UPDATE, PROG_LOAD, LINK_CREATE = 0, 2, 5, 28
SOCKMAP, SK_LOOKUP_PROGRAM, SK_LOOKUP = 15, 30, 36
IP_V6ONLY, RTM_NEWROUTE, RTM_NEWLINK, REQUEST_ACK_CREATE = 26, 24, 16, 0x1 | 0x4 | 0x400
DNS_PORT = 53


class Unavailable(RuntimeError):
    """This machine cannot redirect, with the reason. The sandbox then has no way out at all."""


@dataclass
class Door:
    """The proxy's ends: listening sockets for IPv4 and IPv6, the DNS socket, and what keeps the program attached."""

    tcp: list[socket.socket]
    dns: socket.socket
    held: list[int]

    def close(self):
        for end in (*self.tcp, self.dns):
            end.close()
        for descriptor in self.held:
            os.close(descriptor)
        self.held.clear()


def inside(namespace: str, call: Callable):
    """`call()` in a thread of its own that has entered the network namespace at this path (/proc/PID/ns/net)."""
    result: list = []

    def enter():
        try:
            descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if LIBC.setns(descriptor, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))
                result.append(call())
            finally:
                os.close(descriptor)
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def open_door(namespace: str) -> Door:
    """Redirects all TCP of this network namespace. Unavailable where the machine refuses; nothing is left open then."""
    try:
        return inside(namespace, _open)
    except OSError as error:
        raise Unavailable(f"cannot redirect {namespace}: {error}") from error


def _open() -> Door:
    door = Door([], socket.socket(socket.AF_INET, socket.SOCK_DGRAM), [])
    try:
        _loopback_is_everything()
        door.dns.bind(("127.0.0.1", DNS_PORT))
        door.dns.setblocking(False)
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            listener = socket.socket(family, socket.SOCK_STREAM)
            door.tcp.append(listener)
            listener.bind((address, 0))
            listener.listen(128)
            listener.setblocking(False)
        _attach(door)
        return door
    except BaseException:
        door.close()
        raise


def _loopback_is_everything():
    """`ip link set lo up; ip route add local default dev lo; ip -6 route add local default dev lo`."""
    lo = socket.if_nametoindex("lo")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        _ask(netlink, RTM_NEWLINK, 0x1 | 0x4, struct.pack("=BxHiII", socket.AF_UNSPEC, 0, lo, 1, 1))
        for family in (socket.AF_INET, socket.AF_INET6):
            route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 255, 3, 254 if family == socket.AF_INET else 0, 2, 0)
            _ask(netlink, RTM_NEWROUTE, REQUEST_ACK_CREATE, route + struct.pack("=HHI", 8, 4, lo))


def _ask(netlink: socket.socket, kind: int, flags: int, body: bytes):
    netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    error = -struct.unpack_from("=i", netlink.recv(4096), 16)[0]
    if error not in (0, errno.EEXIST):
        raise OSError(error, f"netlink {kind}: {os.strerror(error)}")


def _bpf(command: int, layout: str, *values) -> int:
    attributes = ctypes.create_string_buffer(struct.pack(layout, *values), 128)
    result = LIBC.syscall(SYS_BPF, command, attributes, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf {command}: {os.strerror(ctypes.get_errno())}")
    return result


def _attach(door: Door):
    """Puts the listeners into a map and the program before the namespace's own socket lookup."""
    sockets = _bpf(MAP_CREATE, "IIIII", SOCKMAP, 4, 8, len(door.tcp), 0)
    door.held.append(sockets)
    for i, listener in enumerate(door.tcp):
        key, value = ctypes.c_uint32(i), ctypes.c_uint64(listener.fileno())
        _bpf(MAP_UPDATE, "IIQQQ", sockets, 0, ctypes.addressof(key), ctypes.addressof(value), 0)
    code = ctypes.create_string_buffer(assemble(program(sockets)))
    license, log = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(1 << 16)
    loaded = _bpf(
        PROG_LOAD, "IIQQIIQII16sII", SK_LOOKUP_PROGRAM, len(code) // 8, ctypes.addressof(code), ctypes.addressof(license),
        1, len(log), ctypes.addressof(log), 0, 0, b"anygress", 0, SK_LOOKUP,
    )  # fmt: skip
    door.held.append(loaded)
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    door.held.append(namespace)
    door.held.append(_bpf(LINK_CREATE, "IIII", loaded, namespace, SK_LOOKUP, 0))


def program(sockets: int) -> list:
    """int lookup(ctx): TCP to all but 127.0.0.0/8 and ::1 goes to sockets[0] (IPv4) or sockets[1] (IPv6), or nowhere.

    Rows are (opcode, dst, src, offset or label, immediate); strings are labels. Offsets are those of `struct bpf_sk_lookup`.
    """
    load, mov, movi, or_, xor, and_, jeq, jne, call, store = 0x61, 0xBF, 0xB7, 0x4F, 0xA7, 0x57, 0x15, 0x55, 0x85, 0x63
    return [
        (mov, 6, 1, 0, 0),  # r6 = ctx
        (load, 2, 6, 12, 0), (jne, 2, 0, "pass", 6),  # protocol TCP
        (load, 2, 6, 8, 0), (jeq, 2, 0, "ipv4", 2),  # family
        (load, 2, 6, 44, 0), (load, 3, 6, 48, 0), (or_, 2, 3, 0, 0), (load, 3, 6, 52, 0), (or_, 2, 3, 0, 0),
        (load, 3, 6, 56, 0), (xor, 3, 0, 0, 0x01000000), (or_, 2, 3, 0, 0), (jeq, 2, 0, "pass", 0),  # ::1
        (movi, 3, 0, 0, 1), (0x05, 0, 0, "give", 0),
        "ipv4",
        (load, 2, 6, 40, 0), (and_, 2, 0, 0, 0xFF), (jeq, 2, 0, "pass", 127), (movi, 3, 0, 0, 0),
        "give",
        (store, 10, 3, -4, 0), (0x18, 1, 1, 0, sockets), (mov, 2, 10, 0, 0), (0x07, 2, 0, 0, -4), (call, 0, 0, 0, 1),  # map_lookup
        (jeq, 0, 0, "drop", 0),
        (mov, 7, 0, 0, 0), (mov, 1, 6, 0, 0), (mov, 2, 7, 0, 0), (movi, 3, 0, 0, 0), (call, 0, 0, 0, 124),  # sk_assign
        (mov, 8, 0, 0, 0), (mov, 1, 7, 0, 0), (call, 0, 0, 0, 86),  # sk_release
        (jne, 8, 0, "drop", 0),
        "pass", (movi, 0, 0, 0, 1), (0x95, 0, 0, 0, 0),
        "drop", (movi, 0, 0, 0, 0), (0x95, 0, 0, 0, 0),
    ]  # fmt: skip


def assemble(rows: list) -> bytes:
    """Machine code: eight bytes a row, sixteen for one that loads a map."""
    at, position = {}, 0
    for row in rows:
        if isinstance(row, str):
            at[row] = position
        else:
            position += 2 if row[0] == 0x18 else 1
    code, position = b"", 0
    for opcode, dst, src, offset, immediate in (row for row in rows if not isinstance(row, str)):
        offset = at[offset] - position - 1 if isinstance(offset, str) else offset
        code += struct.pack("<BBhi", opcode, src << 4 | dst, offset, immediate)
        code += bytes(8) if opcode == 0x18 else b""
        position += 2 if opcode == 0x18 else 1
    return code
