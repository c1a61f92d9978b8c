#include "sandbox/isolate.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox/filter.h"

#define TRY(step, call) \
  if ((call) < 0) return step

namespace sandbox {
namespace {

// Not in every libc.
int open_tree(int directory, const char* path, unsigned flags) {
  return static_cast<int>(syscall(SYS_open_tree, directory, path, flags | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
}
int move_mount(int mount, int directory, const char* path) {
  return static_cast<int>(syscall(SYS_move_mount, mount, "", directory, path, MOVE_MOUNT_F_EMPTY_PATH));
}
int set_option(int context, const char* key, const char* value) {
  return static_cast<int>(syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, key, value, 0));
}

int write_text(const char* path, const char* text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t done = write(fd, text, strlen(text));
  int code = errno;
  close(fd);
  errno = code;
  return done < 0 ? -1 : 0;
}

// A detached copy of a mount whose owners are shifted by the user namespace.
int shifted(const char* path, int user_namespace, bool read_only) {
  int fd = open_tree(AT_FDCWD, path, 0);
  mount_attr attributes = {};
  attributes.attr_set = MOUNT_ATTR_IDMAP | MOUNT_ATTR_NODEV | (read_only ? MOUNT_ATTR_RDONLY : 0);
  attributes.userns_fd = static_cast<uint64_t>(user_namespace);
  if (fd >= 0 && syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes) == 0) return fd;
  int code = errno;
  if (fd >= 0) close(fd);
  errno = code;
  return -1;
}

// In a new copy of the stage: the overlay of the layer on its lowers, mounted at /m.
const char* make_root(const Node& node, const Layer& layer, uid_t base) {
  char path[512], options[1024] = "volatile,upperdir=/d/u,workdir=/d/w,lowerdir=";
  int lower[kMaxLowers];
  for (int i = 0; i < layer.num_lowers; ++i)
    TRY("image", lower[i] = shifted(layer.lower[i], layer.user_namespace, true));
  if (const char* failed = make_layer(node, layer, path, sizeof path)) return failed;
  int upper = shifted(path, layer.user_namespace, false);
  TRY("shifting the layer", upper);
  TRY("setns(stage)", setns(node.stage, CLONE_NEWNS));
  TRY("unshare(NEWNS)", unshare(CLONE_NEWNS));
  TRY("moving the layer", move_mount(upper, AT_FDCWD, "/d"));
  close(upper);
  for (int i = 0; i < layer.num_lowers; ++i) {
    snprintf(path, sizeof path, "/l%d", i);
    TRY("moving the image", move_mount(lower[i], AT_FDCWD, path));
    close(lower[i]);
    strcat(options, i ? ":" : "");
    strcat(options, path);
  }
  // overlayfs acts with the credentials of whoever mounted it; files it makes must belong to the sandbox's root.
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct caps[2];
  setfsgid(base), setfsuid(base);
  TRY("capget", syscall(SYS_capget, &header, caps));
  for (auto& half : caps) half.effective = half.permitted;  // setfsuid has taken some
  TRY("capset", syscall(SYS_capset, &header, caps));
  int failed = mount("overlay", "/m", "overlay", MS_NODEV, options);
  int code = errno;
  setfsuid(0), setfsgid(0);
  errno = code;
  TRY("overlay", failed);
  return nullptr;
}

const char* make_dev(uid_t base) {
  constexpr struct {
    const char* path;
    unsigned major, minor;
  } kDevices[] = {{"dev/null", 1, 3},   {"dev/zero", 1, 5},    {"dev/full", 1, 7},
                  {"dev/random", 1, 8}, {"dev/urandom", 1, 9}, {"dev/tty", 5, 0}};
  constexpr const char* kLinks[][2] = {{"pts/ptmx", "dev/ptmx"},
                                       {"/proc/self/fd", "dev/fd"},
                                       {"/proc/self/fd/0", "dev/stdin"},
                                       {"/proc/self/fd/1", "dev/stdout"},
                                       {"/proc/self/fd/2", "dev/stderr"}};
  char options[96];
  TRY("/dev", mount("dev", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755"));
  mode_t mask = umask(0);
  for (auto& device : kDevices)
    TRY("device",
        mknod(device.path, S_IFCHR | 0666, makedev(device.major, device.minor)) | chown(device.path, base, base));
  for (auto& link : kLinks) TRY("link in /dev", symlink(link[0], link[1]));
  TRY("/dev/pts", mkdir("dev/pts", 0755) | mkdir("dev/shm", 01777));
  umask(mask);
  snprintf(options, sizeof options, "newinstance,ptmxmode=0666,mode=620,gid=%u,max=64", base + 5);
  TRY("devpts", mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options));
  TRY("/dev/shm", mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=4096,mode=1777"));
  TRY("read-only /dev",
      mount(nullptr, "dev", nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, nullptr));
  return nullptr;
}

const char* make_proc() {
  constexpr const char* kHidden[] = {"proc/kcore",         "proc/kmsg",        "proc/keys",        "proc/key-users",
                                     "proc/sysrq-trigger", "proc/timer_list",  "proc/sched_debug", "proc/kallsyms",
                                     "proc/config.gz",     "proc/cmdline",     "proc/kpagecount",  "proc/kpageflags",
                                     "proc/kpagecgroup",   "proc/vmallocinfo", "proc/slabinfo"};
  constexpr const char* kReadOnly[] = {"proc/sys", "proc/irq", "proc/bus", "proc/fs", "proc/acpi", "proc/scsi"};
  TRY("/proc", mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr));
  for (const char* path : kHidden)
    if (mount("dev/null", path, nullptr, MS_BIND, nullptr) && errno != ENOENT) return "hiding a file of /proc";
  for (const char* path : kReadOnly) {
    if (mount(path, path, nullptr, MS_BIND, nullptr)) continue;  // this kernel does not have it
    TRY("read-only /proc",
        mount(nullptr, path, nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr));
  }
  return nullptr;
}

const char* leave_old_root() {
  TRY("pivot_root", syscall(SYS_pivot_root, ".", "."));
  TRY("leaving the old root", umount2(".", MNT_DETACH));
  TRY("chdir(/)", chdir("/"));
  return nullptr;
}

int start_loopback() {
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request = {};
  strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  int failed = fd < 0 ? -1 : ioctl(fd, SIOCSIFFLAGS, &request);
  if (fd >= 0) close(fd);
  return failed;
}

const char* join_groups(const Spec& spec) {
  char path[512];
  for (int i = 0; i < spec.num_groups; ++i) {
    const Group& group = spec.groups[i];
    if (mkdir(group.directory, 0755) && errno != EEXIST) return group.directory;
    for (int j = 0; j < group.num_settings; ++j) {
      const char* value = strchr(group.settings[j], '=');
      snprintf(path, sizeof path, "%s/%.*s", group.directory, static_cast<int>(value - group.settings[j]),
               group.settings[j]);
      TRY("setting of the cgroup", write_text(path, value + 1));
    }
    // A thread that moves itself by version 1's `tasks` does not wait for a grace period (10-20 ms) as `cgroup.procs`
    // does.
    snprintf(path, sizeof path, "%s/tasks", group.directory);
    if (access(path, W_OK)) snprintf(path, sizeof path, "%s/cgroup.procs", group.directory);
    TRY("joining the cgroup", write_text(path, "0"));
  }
  return nullptr;
}

int lower_limit(int resource, rlim_t value) {
  rlimit now;
  if (getrlimit(resource, &now)) return -1;
  if (now.rlim_max < value) value = now.rlim_max;
  rlimit lower = {value, value};
  return setrlimit(resource, &lower);
}

const char* drop_privileges(int user_namespace) {
  constexpr int kKept[] = {CAP_CHOWN,  CAP_DAC_OVERRIDE, CAP_FOWNER,           CAP_FSETID,     CAP_KILL,   CAP_SETGID,
                           CAP_SETUID, CAP_SETPCAP,      CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_SETFCAP};
  uint64_t kept = 0;
  for (int cap : kKept) kept |= 1ull << cap;
  TRY("setns(user)", setns(user_namespace, CLONE_NEWUSER));
  close(user_namespace);
  TRY("setgroups", setgroups(0, nullptr));
  TRY("setgid", setresgid(0, 0, 0));
  TRY("setuid", setresuid(0, 0, 0));
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // again: changing ids clears it
  for (int cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; ++cap)
    if (!(kept >> cap & 1)) TRY("bounding set", prctl(PR_CAPBSET_DROP, cap, 0, 0, 0));
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  uint32_t low = static_cast<uint32_t>(kept), high = static_cast<uint32_t>(kept >> 32);
  __user_cap_data_struct caps[2] = {{low, low, 0}, {high, high, 0}};
  TRY("capset", syscall(SYS_capset, &header, caps));
  TRY("setrlimit", lower_limit(RLIMIT_NOFILE, 4096) | lower_limit(RLIMIT_CORE, 0) |
                       lower_limit(RLIMIT_MEMLOCK, 8 << 20) | lower_limit(RLIMIT_MSGQUEUE, 800 << 10));
  TRY("seccomp", install_filter());
  prctl(PR_SET_DUMPABLE, 0);  // the sandbox's root may not look into, or steer, its first process
  return nullptr;
}

}  // namespace

const char* make_layer(const Node& node, const Layer& layer, char* path, size_t path_size) {
  int context = static_cast<int>(syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC));
  TRY("fsopen(tmpfs)", context);
  TRY("size of the layer", set_option(context, "size", layer.size));
  TRY("inodes of the layer", set_option(context, "nr_inodes", layer.inodes));
  TRY("mode of the layer", set_option(context, "mode", "0755"));
  TRY("tmpfs of the layer", syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, nullptr, nullptr, 0));
  int mount = static_cast<int>(syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV));
  TRY("mount of the layer", mount);
  TRY("directory of the layer", mkdirat(mount, "u", 0755) | mkdirat(mount, "w", 0755));
  snprintf(path, path_size, "%s/%s", node.layers, layer.name);
  if (mkdir(path, 0700) && errno != EEXIST) return "place of the layer";
  TRY("attaching the layer", move_mount(mount, AT_FDCWD, path));
  close(mount), close(context);
  return nullptr;
}

int make_user_namespace(uid_t base) {
  int gate[2];
  if (pipe2(gate, O_CLOEXEC)) return -1;
  pid_t child = static_cast<pid_t>(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
  if (child == 0) {
    char byte;
    close(gate[1]);
    (void)!read(gate[0], &byte, 1);  // its end, when the parent has what it wants
    _exit(0);
  }
  char path[64], map[64];
  int fd = -1;
  snprintf(map, sizeof map, "0 %u %u", base, kUidRange);
  const char* failed = child < 0 ? "clone" : nullptr;
  constexpr const char* kMaps[] = {"uid_map", "gid_map"};
  for (const char* name : kMaps) {
    snprintf(path, sizeof path, "/proc/%d/%s", child, name);
    if (!failed && write_text(path, map)) failed = name;
  }
  snprintf(path, sizeof path, "/proc/%d/ns/user", child);
  if (!failed) fd = open(path, O_RDONLY | O_CLOEXEC);
  int code = errno;
  close(gate[0]), close(gate[1]);
  if (child > 0) waitpid(child, nullptr, 0);
  errno = code;
  return fd;
}

int make_stage() {
  int ready[2], fd = -1;
  char byte, path[64];
  if (pipe2(ready, O_CLOEXEC)) return -1;
  pid_t child = fork();
  if (child == 0) {
    const char* here = "/tmp";
    bool made = !unshare(CLONE_NEWNS) && !mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) &&
                !mount("stage", here, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=128,mode=755") &&
                !chdir(here) && !mkdir("m", 0755) && !mkdir("d", 0755);
    for (int i = 0; i < kMaxLowers; ++i) {
      snprintf(path, sizeof path, "l%d", i);
      made = made && !mkdir(path, 0755);
    }
    made = made && !leave_old_root();
    if (made) (void)!write(ready[1], "x", 1);
    close(ready[1]);
    pause();
  }
  close(ready[1]);
  if (child > 0 && read(ready[0], &byte, 1) == 1) {
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", child);
    fd = open(path, O_RDONLY | O_CLOEXEC);
  }
  close(ready[0]);
  if (child > 0) kill(child, SIGKILL), waitpid(child, nullptr, 0);
  return fd;
}

const char* enter(const Node& node, const Spec& spec, uid_t base) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  pollfd life = {node.life, POLLIN, 0};
  if (poll(&life, 1, 0) != 0) return "the node";  // it ended before the line above
  setsid();
  if (const char* failed = join_groups(spec)) return failed;
  if (const char* failed = make_root(node, spec.layer, base)) return failed;
  TRY("unshare", unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP));
  TRY("sethostname", sethostname(spec.host_name, strlen(spec.host_name)));
  TRY("loopback", start_loopback());
  TRY("chdir", chdir("/m"));
  if (const char* failed = make_dev(base)) return failed;
  if (const char* failed = make_proc()) return failed;
  if (const char* failed = leave_old_root()) return failed;
  return drop_privileges(spec.layer.user_namespace);
}

const char* replace_root(const Node& node, const Layer& layer, uid_t base, pid_t first, bool fresh) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/ns/mnt", first);
  int inside = open(path, O_RDONLY | O_CLOEXEC);
  TRY("mount namespace of the sandbox", inside);
  if (const char* failed = make_root(node, layer, base)) return failed;
  int root = open_tree(AT_FDCWD, "/m", 0);
  TRY("new root", root);
  TRY("setns(sandbox)", setns(inside, CLONE_NEWNS));
  int proc = open_tree(AT_FDCWD, "/proc", AT_RECURSIVE), dev = open_tree(AT_FDCWD, "/dev", AT_RECURSIVE);
  TRY("/proc of the sandbox", proc);
  TRY("/dev of the sandbox", dev);
  TRY("attaching the new root", move_mount(root, AT_FDCWD, "/dev"));
  TRY("entering the new root", fchdir(root));
  TRY("keeping /proc", move_mount(proc, AT_FDCWD, "proc"));
  TRY("keeping /dev", move_mount(dev, AT_FDCWD, "dev"));
  if (fresh) {
    TRY("old /dev/shm", umount2("dev/shm", MNT_DETACH));
    TRY("/dev/shm", mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=4096,mode=1777"));
  }
  return leave_old_root();
}

}  // namespace sandbox
