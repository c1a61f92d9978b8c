"""An OCI runtime: `runc`, or with the same bundle `runsc` (gVisor), Kata's `kata-runtime`, crun.

A bundle per sandbox: the image as a read-only root, tmpfs places, all namespaces, 65,536 user ids of its own, limits by cgroups, no
capability over the machine, sandboxd's server as the first process. A cluster's runtime class takes the same configuration.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from rl.environments.contained import INSIDE, ContainedBackend, writable_places
from rl.environments.node import FIRST_UID, PROGRAM, RANGES, SLOTS, UIDS
from rl.environments.sandbox import CannotIsolate, Capabilities, SandboxSpec

KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT")
MASKED = ("kcore", "kmsg", "keys", "sysrq-trigger", "timer_list", "sched_debug", "kallsyms", "config.gz", "cmdline", "acpi", "scsi")
PERIOD_US = 100_000


def bundle_config(spec: SandboxSpec, image: Path, cgroup: str, first_uid: int, server: int = 3) -> dict:
    """config.json of a sandbox (runtime-spec 1.0)."""
    capabilities = [f"CAP_{name}" for name in KEPT]
    limits = spec.limits
    ids = [{"containerID": 0, "hostID": first_uid, "size": UIDS}]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666"],
        },
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "size=65536k"]},
    ]
    for place in writable_places(spec, image):
        options = ["nosuid", "nodev", f"size={limits.disk_bytes}", f"nr_inodes={limits.inodes}", "mode=1777"]
        mounts.append({"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options})
    mounts.append({"destination": INSIDE, "type": "bind", "source": str(PROGRAM), "options": ["bind", "ro", "nosuid", "nodev"]})
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [INSIDE, "serve", str(server)],
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": {kind: capabilities for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}, {"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            "noNewPrivileges": True,
        },
        "root": {"path": str(image), "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {
            "cgroupsPath": cgroup,
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "memory": {"limit": limits.memory_bytes + limits.disk_bytes},
                "pids": {"limit": limits.pids + 2},
                "cpu": {"quota": max(1000, int(limits.cpus * PERIOD_US)), "period": PERIOD_US},
            },
            "namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount", "user", "cgroup")],
            "uidMappings": ids,
            "gidMappings": ids,
            "maskedPaths": [f"/proc/{name}" for name in MASKED],
            "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs"],
        },
    }


class Oci(ContainedBackend):
    """`runtime`: a program with runc's command line."""

    name = "oci"
    capabilities = Capabilities(
        isolation="container",
        memory_limit=True,
        pids_limit=True,
        cpu_limit=True,
        disk_limit=True,
        no_network=True,
        own_uids=True,
        syscall_filter=True,
    )

    def __init__(self, allow=(), runtime: str = "runc"):
        self._runtime = shutil.which(runtime)
        if not self._runtime:
            raise CannotIsolate(self.name, {"no_network": f"{runtime} is not installed"})
        self._directory = Path(tempfile.mkdtemp(prefix="bundles-"))
        super().__init__(allow, {})

    def _start(self, id, spec, image, server):
        bundle = self._directory / id
        bundle.mkdir()
        slot = int(id.rsplit("-", 1)[1]) % SLOTS
        first_uid = FIRST_UID + (RANGES * SLOTS + slot) * UIDS  # above the ranges of nodes
        (bundle / "config.json").write_text(json.dumps(bundle_config(spec, image, f"/anyrun-oci/{id}", first_uid)))
        runtime = [self._runtime, "--root", str(self._directory / "state")]
        return subprocess.Popen(
            [str(PROGRAM), "third", str(server), *runtime, "run", "--preserve-fds", "1", "--bundle", str(bundle), id],
            pass_fds=[server],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def _ended(self, id, process):
        super()._ended(id, process)
        command = [self._runtime, "--root", str(self._directory / "state"), "delete", "--force", id]
        subprocess.run(command, capture_output=True)
        shutil.rmtree(self._directory / id, ignore_errors=True)

    def close(self):
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)
