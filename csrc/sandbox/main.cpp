// sandboxd node SOCKET LAYERS | sandboxd serve SOCKET | sandboxd third SOCKET PROGRAM ARGUMENT...
//
// `node` makes the sandboxes of one machine for the Python side. It is one small process without threads: forking it
// costs little, and the child of each fork is the first process of a PID namespace that turns itself into the sandbox.
// It is the parent of all of them; when the Python side goes, its socket ends, and it kills them all; when it is killed
// itself, the kernel kills them (PDEATHSIG) and drops the mount namespace that held their files. Cgroups are what can
// be left; the next node removes them.
//
// `serve` is only the first process, with the system call filter, inside an isolation that something else has built.
// `third` becomes a program that takes the socket as its descriptor 3 (runc hands on those from 3 upwards).
//
// Requests (message.h) and answers:
//   create, slot, base uid, layer, bytes, inodes, host name, then l:LOWER... c:CGROUP s:FILE=VALUE...
//       the descriptor becomes the sandbox's control socket: "ready", or "error", errno, step
//   destroy, slot, keep layer ("0" | "1")                                         "ok", always, when nothing is left of
//   it replace, slot, fresh /dev/shm ("0" | "1"), layer, bytes, inodes, then l:...   "ok", or "error"... layer, name,
//   bytes, inodes                                                    "ok": an empty layer drop, layer "ok" pid, slot
//   "ok", first process or 0 when it has ended
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox/filter.h"
#include "sandbox/isolate.h"
#include "sandbox/message.h"
#include "sandbox/serve.h"

namespace sandbox {
namespace {

constexpr int kMaxSlots = 8192;

struct Box {
  pid_t first = 0;          // 0: has ended
  int user_namespace = -1;  // kept for the slot's next sandbox
  uid_t base = 0;
  char* layer = nullptr;
  char* groups[kMaxGroups] = {};
  int destroyer = -1;  // whoever waits for its end
  bool keep_layer = false;
};

Box boxes[kMaxSlots];
int num_boxes;  // slots used so far
Node node;
Message request;
char** arguments;  // of main

void ok(int reply, const char* value = "") {
  const char* strings[] = {"ok", value};
  send_strings(reply, strings, 2);
}

// Fills lowers, and for "create" cgroups, from tagged fields.
bool parse_tags(char** field, int count, Layer* layer, Spec* spec) {
  for (int i = 0; i < count; ++i) {
    char* value = field[i] + 2;
    if (!strncmp(field[i], "l:", 2) && layer->num_lowers < kMaxLowers) {
      layer->lower[layer->num_lowers++] = value;
    } else if (!strncmp(field[i], "c:", 2) && spec && spec->num_groups < kMaxGroups) {
      spec->groups[spec->num_groups++].directory = value;
    } else if (!strncmp(field[i], "s:", 2) && spec && spec->num_groups && strchr(value, '=')) {
      Group& group = spec->groups[spec->num_groups - 1];
      if (group.num_settings == 8) return false;
      group.settings[group.num_settings++] = value;
    } else {
      return false;
    }
  }
  return layer->num_lowers > 0;
}

void close_all_but(int kept) {
  if (kept > 3) close_range(3, static_cast<unsigned>(kept) - 1, 0);
  close_range(static_cast<unsigned>(kept) + 1, ~0u, 0);
}

// What `ps` inside shows of the first process and its supervisors says nothing of the host.
void hide_arguments() {
  for (char** argument = arguments; *argument; ++argument) memset(*argument, 0, strlen(*argument));
  strcpy(arguments[0], "init");
}

void create(Message* m, Box* box) {
  Spec spec = {};
  uid_t base = static_cast<uid_t>(strtoul(m->field[2], nullptr, 10));
  spec.layer = {.name = m->field[3],
                .size = m->field[4],
                .inodes = m->field[5],
                .lower = {},
                .num_lowers = 0,
                .user_namespace = -1};
  spec.host_name = m->field[6];
  if (!parse_tags(m->field + 7, m->num_fields - 7, &spec.layer, &spec)) return send_error(m->fd[0], EINVAL, "request");
  if (box->user_namespace < 0) box->user_namespace = make_user_namespace(base);
  if (box->user_namespace < 0) return send_error(m->fd[0], errno, "user namespace");
  spec.layer.user_namespace = box->user_namespace;
  pid_t first = static_cast<pid_t>(syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0));
  if (first < 0) return send_error(m->fd[0], errno, "process");
  if (first == 0) {
    int control = m->fd[0];
    if (const char* failed = enter(node, spec, base)) {
      send_error(control, errno, failed);
      _exit(1);
    }
    close_all_but(control);
    hide_arguments();
    const char* ready[] = {"ready"};
    send_strings(control, ready, 1);
    serve(control);
    _exit(0);
  }
  box->first = first;
  if (box - boxes >= num_boxes) num_boxes = static_cast<int>(box - boxes) + 1;
  box->base = base;
  box->layer = strdup(spec.layer.name);
  for (int i = 0; i < spec.num_groups; ++i) box->groups[i] = strdup(spec.groups[i].directory);
}

void unmount(const char* layer) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", node.layers, layer);
  umount2(path, MNT_DETACH);
  rmdir(path);
}

// Frees what a sandbox without processes leaves, in a process of its own: giving back its files can take a while.
void clean(Box* box) {
  pid_t cleaner = fork();
  if (cleaner <= 0) {
    if (box->layer && !box->keep_layer) unmount(box->layer);
    for (int i = kMaxGroups - 1; i >= 0; --i)  // a cgroup is busy for a moment after its last process
      for (int tries = 0; box->groups[i] && rmdir(box->groups[i]) && errno == EBUSY && tries < 200; ++tries)
        usleep(500);
    ok(box->destroyer);
    if (cleaner == 0) _exit(0);
  }
  close(box->destroyer);
  free(box->layer);
  for (char* group : box->groups) free(group);
  *box = Box{.user_namespace = box->user_namespace};
}

void destroy(Message* m, Box* box) {
  if (!box->layer) return ok(m->fd[0]);
  if (box->destroyer >= 0) return send_error(m->fd[0], EALREADY, "destroy");
  box->destroyer = m->fd[0];
  box->keep_layer = *m->field[2] == '1';
  m->fd[0] = -1;
  if (box->first)
    kill(box->first, SIGKILL);
  else
    clean(box);
}

void replace(Message* m, Box* box) {
  Layer layer = {.name = m->field[3],
                 .size = m->field[4],
                 .inodes = m->field[5],
                 .lower = {},
                 .num_lowers = 0,
                 .user_namespace = -1};
  if (!box->first) return send_error(m->fd[0], ESRCH, "sandbox");
  if (!parse_tags(m->field + 6, m->num_fields - 6, &layer, nullptr)) return send_error(m->fd[0], EINVAL, "request");
  layer.user_namespace = box->user_namespace;
  pid_t helper = fork();
  if (helper == 0) {
    const char* failed = replace_root(node, layer, box->base, box->first, *m->field[2] == '1');
    if (failed)
      send_error(m->fd[0], errno, failed);
    else
      ok(m->fd[0]);
    _exit(0);
  }
  if (helper < 0) return send_error(m->fd[0], errno, "process");
  free(box->layer);
  box->layer = strdup(layer.name);
}

void empty_layer(Message* m) {
  char path[512];
  Layer layer = {.name = m->field[1],
                 .size = m->field[2],
                 .inodes = m->field[3],
                 .lower = {},
                 .num_lowers = 0,
                 .user_namespace = -1};
  const char* failed = make_layer(node, layer, path, sizeof path);
  if (failed)
    send_error(m->fd[0], errno, failed);
  else
    ok(m->fd[0]);
}

void handle(Message* m) {
  char number[16];
  const char* verb = m->field[0];
  int least = !strcmp(verb, "create") ? 8 : !strcmp(verb, "replace") ? 7 : !strcmp(verb, "destroy") ? 3 : 2;
  int slot = m->num_fields < 2 ? -1 : atoi(m->field[1]);
  if (m->num_fields < least || slot < 0 || slot >= kMaxSlots)
    send_error(m->fd[0], EINVAL, "request");
  else if (!strcmp(verb, "create"))
    boxes[slot].layer ? send_error(m->fd[0], EBUSY, "slot") : create(m, &boxes[slot]);
  else if (!strcmp(verb, "destroy"))
    destroy(m, &boxes[slot]);
  else if (!strcmp(verb, "replace"))
    replace(m, &boxes[slot]);
  else if (!strcmp(verb, "layer"))
    m->num_fields < 4 ? send_error(m->fd[0], EINVAL, "request") : empty_layer(m);
  else if (!strcmp(verb, "drop"))
    unmount(m->field[1]), ok(m->fd[0]);
  else if (!strcmp(verb, "pid")) {
    snprintf(number, sizeof number, "%d", boxes[slot].first);
    ok(m->fd[0], number);
  } else
    send_error(m->fd[0], ENOSYS, verb);
  close_fds(m);
}

void reap() {
  for (pid_t ended; (ended = waitpid(-1, nullptr, WNOHANG)) > 0;)
    for (int slot = 0; slot < num_boxes; ++slot) {
      if (boxes[slot].first != ended) continue;
      boxes[slot].first = 0;
      if (boxes[slot].destroyer >= 0) clean(&boxes[slot]);
    }
}

// Everything ends with the Python side.
void end_all() {
  for (Box& box : boxes)
    if (box.first) kill(box.first, SIGKILL);
  while (waitpid(-1, nullptr, 0) > 0 || errno == EINTR) {
  }
  for (Box& box : boxes)
    if (box.layer) clean(&box);
  while (waitpid(-1, nullptr, 0) > 0 || errno == EINTR) {
  }
}

int run_node(int control, const char* layers) {
  sigset_t mask;
  sigemptyset(&mask);
  constexpr int kHandled[] = {SIGCHLD, SIGTERM, SIGINT, SIGHUP};  // a terminal's ^C is the Python side's
  for (int signal : kHandled) sigaddset(&mask, signal);
  sigprocmask(SIG_BLOCK, &mask, nullptr);
  signal(SIGPIPE, SIG_IGN);
  setsid();
  umask(022);
  node.layers = layers;
  node.stage = make_stage();
  const char* failed = nullptr;
  if (node.stage < 0 || unshare(CLONE_NEWNS))
    failed = "mount namespace";
  else if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr))
    failed = "private mounts";
  else if (mount("layers", layers, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=700"))
    failed = "place of the layers";
  else if ((node.life = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0))) < 0)
    failed = "pidfd";
  if (failed) {
    send_error(control, errno, failed);
    return 1;
  }
  ok(control);
  int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
  for (;;) {
    pollfd ready[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
    if (poll(ready, 2, -1) < 0) continue;
    if (ready[1].revents) {
      signalfd_siginfo info;
      while (read(signals, &info, sizeof info) > 0) {
      }
      reap();
    }
    if (!ready[0].revents) continue;
    int got = receive(control, &request);
    if (got == 0) break;
    if (got > 0) handle(&request);
  }
  end_all();
  return 0;
}

}  // namespace
}  // namespace sandbox

int main(int argc, char** argv) {
  using namespace sandbox;
  arguments = argv;
  if (argc == 4 && !strcmp(argv[1], "node")) return run_node(atoi(argv[2]), argv[3]);
  if (argc == 3 && !strcmp(argv[1], "serve")) {
    const char* ready[] = {"ready"};
    if (install_filter() || prctl(PR_SET_DUMPABLE, 0)) {
      send_error(atoi(argv[2]), errno, "seccomp");
      return 1;
    }
    send_strings(atoi(argv[2]), ready, 1);
    serve(atoi(argv[2]));
    return 0;
  }
  if (argc >= 4 && !strcmp(argv[1], "third")) {
    if (dup2(atoi(argv[2]), 3) == 3) execvp(argv[3], argv + 3);
    perror(argv[3]);
    return 127;
  }
  fprintf(stderr, "usage: sandboxd node SOCKET LAYERS | serve SOCKET | third SOCKET PROGRAM ARGUMENT...\n");
  return 2;
}
