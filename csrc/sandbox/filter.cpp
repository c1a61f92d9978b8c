// The filter, as classic BPF written by hand: calls of another architecture kill; what reaches shared parts of the
// kernel (mounts, namespaces, keys, programs, rings, modules, clocks) is EPERM; sockets are UNIX, INET and INET6 only,
// because vsock and others are not divided by network namespaces; the rest is allowed. clone3 is ENOSYS, so that
// libraries use clone, whose flags a filter can read.
#include "sandbox/filter.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "the system call filter knows x86-64 and aarch64"
#endif

namespace sandbox {
namespace {

constexpr uint32_t kDenied[] = {
    // mounts and namespaces
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_unshare,
    SYS_setns,
    SYS_fsopen,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fspick,
    SYS_open_tree,
    SYS_move_mount,
    SYS_mount_setattr,
    SYS_open_by_handle_at,
    SYS_name_to_handle_at,
    SYS_quotactl,
    SYS_swapon,
    SYS_swapoff,
    // kernel objects that belong to no namespace
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_io_uring_setup,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_fanotify_init,
    SYS_memfd_secret,
    SYS_syslog,
    SYS_kcmp,
    SYS_lookup_dcookie,
    // the machine
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_kexec_file_load,
    SYS_reboot,
    SYS_acct,
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_adjtimex,
    SYS_clock_adjtime,
    SYS_vhangup,
    SYS_migrate_pages,
    SYS_move_pages,
#if defined(__x86_64__)
    SYS_iopl,
    SYS_ioperm,
    SYS_modify_ldt,
    SYS_uselib,
    SYS_ustat,
    SYS_sysfs,
    SYS__sysctl,
    SYS_create_module,
    SYS_nfsservctl,
#endif
};
constexpr uint32_t kFamilies[] = {AF_UNIX, AF_INET, AF_INET6};
constexpr uint32_t kTerminalInjection[] = {TIOCSTI, TIOCLINUX};
constexpr uint32_t kNamespaces =
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;

struct Program {
  sock_filter code[160];
  uint16_t length = 0;

  constexpr void add(uint16_t op, uint32_t k, uint8_t yes = 0, uint8_t no = 0) { code[length++] = {op, yes, no, k}; }
  constexpr void load(size_t offset) { add(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset)); }
  constexpr void skip_unless(uint32_t value, uint8_t count) { add(BPF_JMP | BPF_JEQ | BPF_K, value, 0, count); }
  constexpr void fail(uint32_t code) { add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | code); }
  constexpr void allow() { add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW); }
  constexpr void kill() { add(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS); }
};

constexpr size_t argument(int i) {  // the low half: what is looked at here is 32 bits wide in the kernel, too
  return offsetof(seccomp_data, args) + 8 * i;
}

constexpr Program make_program() {
  Program p = {};
  p.load(offsetof(seccomp_data, arch));
  p.add(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0);
  p.kill();
  p.load(offsetof(seccomp_data, nr));
#if defined(__x86_64__)
  p.add(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1);  // x32: the same calls by other numbers
  p.kill();
#endif
  for (uint32_t call : kDenied) {
    p.skip_unless(call, 1);
    p.fail(EPERM);
  }
  p.skip_unless(SYS_clone3, 1);
  p.fail(ENOSYS);
  p.skip_unless(SYS_clone, 4);
  p.load(argument(0));
  p.add(BPF_JMP | BPF_JSET | BPF_K, kNamespaces, 0, 1);
  p.fail(EPERM);
  p.allow();
  p.skip_unless(SYS_ioctl, 6);
  p.load(argument(1));
  for (uint32_t request : kTerminalInjection) {
    p.skip_unless(request, 1);
    p.fail(EPERM);
  }
  p.allow();
  p.skip_unless(SYS_socket, 8);
  p.load(argument(0));
  for (uint32_t family : kFamilies) {
    p.skip_unless(family, 1);
    p.allow();
  }
  p.fail(EAFNOSUPPORT);
  p.allow();
  return p;
}

}  // namespace

int install_filter() {
  static constexpr Program program = make_program();
  sock_fprog filter = {program.length, const_cast<sock_filter*>(program.code)};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

}  // namespace sandbox
