"""Attempts to reach out of a sandbox: name -> Python text that prints ESCAPED if it got through.

The same text runs outside, as root in namespaces of its own where it would change something, and must print it there: otherwise the
attempt shows nothing. SECRET, SOCKET, ABSTRACT, PORT, KEY and PID stand for things of the host that the test makes.
"""

PRELUDE = """
import ctypes, errno, os, socket, struct, sys, time, fcntl, resource, array
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
def works(number, *arguments):
    # reached the kernel's own checks of what was asked, which a filter does not let happen
    try: call(number, *arguments)
    except OSError as error: return error.errno not in (errno.EPERM, errno.ENOSYS, errno.EACCES)
    return True
def check(outcome):
    if outcome is not False: print('ESCAPED')
"""

MOUNTS = {
    "mount a tmpfs": "call(165, b'x', b'/tmp', b'tmpfs', 0, b'')",
    "bind mount": "call(165, b'/etc', b'/tmp', None, 4096, None)",
    "remount the root writable": "call(165, None, b'/', None, 32 | 4096, None)",
    "mount proc anew": "call(165, b'proc', b'/tmp', b'proc', 0, None)",
    "unmount proc": "call(166, b'/proc', 2)",
    "open_tree": "call(428, -100, b'/', 1)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "fspick": "works(433, -100, b'/', 0)",
    "mount_setattr": "works(442, -100, b'/nowhere', 0, b'\\0' * 32, 32)",
    "move_mount": "works(429, -100, b'/nowhere', -100, b'/nowhere', 0)",
    "pivot_root": "works(155, b'/nowhere', b'/nowhere')",
    "swapon": "works(167, b'/nowhere', 0)",
    "quotactl": "works(179, 0, b'/nowhere', 0, None)",
    "file handles": "works(303, -100, b'/', None, None, 0)",
    "open by handle": "works(304, -100, b'\\0' * 16, 0)",
}
NAMESPACES = {
    f"unshare {name}": f"call(272, {flag})"
    for name, flag in (
        ("mount", 0x20000), ("user", 0x10000000), ("net", 0x40000000), ("pid", 0x20000000), ("ipc", 0x8000000), ("uts", 0x4000000),
        ("cgroup", 0x2000000), ("time", 0x80),
    )
} | {
    "clone into a user namespace": "pid = call(56, 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)",
    "clone3": "works(435, None, 0)",
    "join the first process' mount namespace": "fd = os.open('/proc/1/ns/mnt', os.O_RDONLY); call(308, fd, 0)",
    "set the host name": "call(170, b'escaped', 7)",
}  # fmt: skip
PROC = {
    "read the kernel's memory": "os.read(os.open('/proc/kcore', os.O_RDONLY), 1) != b''",
    "read the kernel's log": "os.fstat(os.open('/proc/kmsg', os.O_RDONLY)).st_rdev == 0",
    "read the kernel's command line": "os.read(os.open('/proc/cmdline', os.O_RDONLY), 1) != b''",
    "read the kernel's symbols": "os.read(os.open('/proc/kallsyms', os.O_RDONLY), 1) != b''",
    "read key rings": "os.fstat(os.open('/proc/keys', 0)).st_rdev == 0",
    "set swappiness": "fd = os.open('/proc/sys/vm/swappiness', os.O_RDWR); os.write(fd, os.read(fd, 9))",
    "set core_pattern": "fd = os.open('/proc/sys/kernel/core_pattern', os.O_RDWR); os.write(fd, os.read(fd, 99))",
    "set a network sysctl": "fd = os.open('/proc/sys/net/ipv4/ip_forward', os.O_RDWR); os.write(fd, os.read(fd, 9))",
    "open sysrq": "os.fstat(os.open('/proc/sysrq-trigger', os.O_WRONLY)).st_rdev == 0",
    "memory of the first process": "os.open('/proc/1/mem', os.O_RDWR)",
    "environment of the first process": "os.read(os.open('/proc/1/environ', os.O_RDONLY), 1)",
    "root of the first process": "os.listdir('/proc/1/root')",
    "descriptors of the first process": "os.listdir('/proc/1/fd')",
    "kernel objects in /sys": "os.listdir('/sys/kernel')",
    "cgroups": "os.listdir('/sys/fs/cgroup')[0]",
}
DEVICES = {
    "make a block device": "os.mknod('/tmp/block', 0o60600, os.makedev(254, 0)); os.unlink('/tmp/block')",
    "make a character device": "os.mknod('/tmp/mem', 0o20600, os.makedev(1, 1)); os.unlink('/tmp/mem')",
    "open the kernel's log device": "os.open('/dev/kmsg', os.O_RDONLY)",
    "open loop-control": "os.open('/dev/loop-control', os.O_RDWR)",
    "open fuse": "os.open('/dev/fuse', os.O_RDWR)",
}
PROCESSES = {
    "trace the parent": "call(101, 0x4206, os.getppid(), 0, 0)",
    "read the parent's memory": "os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY)",
    "copy from the parent's memory": "works(310, os.getppid(), None, 0, None, 0, 0) and os.listdir(f'/proc/{os.getppid()}/fd')",
    "signal a process of the host": "os.kill(PID, 0)",
    "see a process of the host": "os.stat('/proc/PID')",
    "a pidfd of a process of the host": "os.pidfd_open(PID)",
    "compare kernel objects": "works(312, os.getpid(), os.getpid(), 0, 0, 1)",
    "gain privileges by set-uid": "call(157, 39, 0, 0, 0, 0) == 0",
    "CAP_SYS_ADMIN in the bounding set": "call(157, 23, 21, 0, 0, 0) == 1",
    "CAP_SYS_PTRACE in the bounding set": "call(157, 23, 19, 0, 0, 0) == 1",
    "CAP_NET_ADMIN in the bounding set": "call(157, 23, 12, 0, 0, 0) == 1",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "negative nice": "os.setpriority(os.PRIO_PROCESS, 0, -5)",
}
SOCKETS = {
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "netlink": "socket.socket(16, socket.SOCK_RAW, 0)",
    "packet": "socket.socket(17, socket.SOCK_RAW, 0)",
    "raw ICMP": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "abstract unix socket of the host": "socket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')",
    "unix socket of the host": "socket.socket(socket.AF_UNIX).connect('SOCKET')",
    "TCP to the host": "socket.create_connection(('127.0.0.1', PORT), 2)",
}
KERNEL = {
    "add_key": "call(248, b'user', b'escape', b'x', 1, -1)",
    "keyctl": "call(250, 0, -3, 1)",
    "request_key": "works(249, b'user', b'nowhere', None, 0)",
    "bpf": "works(321, 0, None, 0)",
    "perf_event_open": "works(298, None, 0, -1, -1, 0)",
    "userfaultfd": "works(323, 0x1000)",
    "io_uring_setup": "works(425, 1, None)",
    "fanotify_init": "works(300, 0, 0)",
    "memfd_secret": "call(447, 0)",
    "kernel log": "call(103, 10, None, 0)",
    "load a module": "works(175, None, 0, b'')",
    "unload a module": "works(176, b'nowhere', 0)",
    "set the clock": "call(227, 0, struct.pack('qq', *divmod(time.time_ns(), 10**9)))",
    "accounting": "works(163, b'/nowhere')",
    "port access": "call(173, 0x80, 1, 1)",
    "host name of the domain": "call(171, b'escaped', 7)",
}
FILES = {
    "a path of the host": "open('SECRET').read() == 'secret'",
    "a link to a path of the host": "os.symlink('SECRET', f'/tmp/l{os.getpid()}'); open(f'/tmp/l{os.getpid()}').read() == 'secret'",
    "through the root of a process": "open('/proc/self/root/SECRET').read() == 'secret'",
    "out of a chroot": (
        "os.makedirs('/tmp/jail', exist_ok=True); fd = os.open('/', os.O_RDONLY); os.chroot('/tmp/jail'); os.fchdir(fd)\n"
        "for _ in range(50): os.chdir('..')\n"
        "os.chroot('.'); open('SECRET').read() == 'secret'"
    ),
    "shared memory of the host": "libc.shmget(KEY, 0, 0) >= 0",
    "raise the limit of open files": "resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))",
}
ATTEMPTS = MOUNTS | NAMESPACES | PROC | DEVICES | PROCESSES | SOCKETS | KERNEL | FILES


def script(text: str, **values) -> str:
    """The attempt as a program: its last expression says whether it got through; an error is a no."""
    for name, value in values.items():
        text = text.replace(name, str(value))
    *before, last = text.replace("; ", "\n").split("\n")
    body = "\n".join([*before, f"check({last})"])
    return f"{PRELUDE}\ntry:\n    exec({body!r})\nexcept (OSError, ValueError) as error:\n    print('refused', error)\n"
