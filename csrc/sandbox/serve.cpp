#include "sandbox/serve.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sandbox/files.h"
#include "sandbox/message.h"
#include "sandbox/tree.h"

namespace sandbox {
namespace {

constexpr int kMaxJobs = 128;
constexpr size_t kMaxCap = 4 << 20;
constexpr char kPath[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// One stream of a command: the first and the last half of `cap` bytes.
struct Stream {
  int fd = -1;
  char* bytes = nullptr;  // head, then the tail as a ring
  size_t head_cap = 0, tail_cap = 0;
  uint64_t total = 0;

  void open(int read_end, size_t cap) {
    fd = read_end;
    total = 0;
    head_cap = cap - cap / 2, tail_cap = cap / 2;
    bytes = static_cast<char*>(malloc(cap + 1));
  }
  void add(const char* data, size_t length) {
    size_t to_head = total < head_cap ? head_cap - total : 0;
    if (to_head > length) to_head = length;
    if (bytes && to_head) memcpy(bytes + total, data, to_head);
    total += to_head, data += to_head, length -= to_head;
    if (length > tail_cap) total += length - tail_cap, data += length - tail_cap, length = tail_cap;
    while (bytes && length) {
      size_t at = (total - head_cap) % tail_cap, part = tail_cap - at < length ? tail_cap - at : length;
      memcpy(bytes + head_cap + at, data, part);
      total += part, data += part, length -= part;
    }
  }
  size_t head() const { return total < head_cap ? total : head_cap; }
  size_t tail() const { return total - head() < tail_cap ? total - head() : tail_cap; }
  uint64_t dropped() const { return total - head() - tail(); }
  // In order: the ring is turned so that its oldest byte is first.
  const char* in_order() {
    size_t at = dropped() ? (total - head_cap) % tail_cap : 0;
    if (at) {
      char* turned = static_cast<char*>(malloc(tail_cap));
      if (turned) {
        memcpy(turned, bytes + head_cap + at, tail_cap - at);
        memcpy(turned + tail_cap - at, bytes + head_cap, at);
        memcpy(bytes + head_cap, turned, tail_cap);
        free(turned);
      }
    }
    return bytes;
  }
  void release() {
    free(bytes);
    bytes = nullptr;
  }
};

struct Job {
  pid_t supervisor = 0;  // 0: free; of a job that is over, whose pipes others hold open, -1
  int reply = -1;
  int64_t deadline = 0, idle = 0, last = 0;  // ms, monotonic
  uint32_t reason = kExit;
  Stream out, err;
};

Job jobs[kMaxJobs];
Message request;

int64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

[[noreturn]] void fail_command(const char* what) {
  int code = errno;
  dprintf(STDERR_FILENO, "%s: %s\n", what, strerror(code));
  _exit(code == ENOENT ? 127 : 126);
}

struct Request {  // the fields of "exec", "read" and "write"
  const char* verb;
  const char* cwd;
  uid_t uid;
  long timeout, idle;
  size_t cap;
  int given;  // bits: stdin, stdout, stderr
  int num_variables;
  char** variables;
  char** arguments;  // ends with a null pointer
};

bool parse(Message* message, Request* r) {
  char** f = message->field;
  if (message->num_fields < 9) return false;
  r->verb = f[0], r->cwd = f[1], r->uid = static_cast<uid_t>(atol(f[2]));
  r->timeout = atol(f[3]), r->idle = atol(f[4]), r->cap = static_cast<size_t>(atol(f[5]));
  r->given = atoi(f[6]), r->num_variables = atoi(f[7]);
  r->variables = f + 8;
  r->arguments = f + 8 + r->num_variables;
  int least = strcmp(r->verb, "exec") ? 2 : 1;
  if (message->num_fields == kMaxFields || r->num_variables < 0 || message->num_fields < 8 + r->num_variables + least)
    return false;
  f[message->num_fields] = nullptr;
  return r->cap <= kMaxCap && r->timeout > 0 && message->num_fds == 1 + __builtin_popcount(r->given & 7);
}

// The command itself: this process becomes it.
[[noreturn]] void run(const Request& r, const int* streams) {
  static const char* environment[kMaxFields + 1];
  setsid();
  for (int i = 0; i < 3; ++i) dup2(streams[i], i);                                 // all are above 2
  if (int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC); fd >= 0) {  // before the first process
    (void)!write(fd, "500", 3);
    close(fd);
  }
  if (r.uid && (setresgid(r.uid, r.uid, r.uid) || setresuid(r.uid, r.uid, r.uid))) fail_command("setuid");
  umask(022);
  if (chdir(r.cwd)) fail_command(r.cwd);
  if (!strcmp(r.verb, "read")) _exit(read_file(r.arguments[0], atoll(r.arguments[1])));
  if (!strcmp(r.verb, "write"))
    _exit(write_file(r.arguments[0], static_cast<unsigned>(strtoul(r.arguments[1], nullptr, 8))));
  const char* path = kPath;
  for (int i = 0; i < r.num_variables; ++i) {
    environment[i] = r.variables[i];
    if (!strncmp(r.variables[i], "PATH=", 5)) path = r.variables[i];
  }
  if (path == kPath) environment[r.num_variables] = kPath;
  close_range(3, ~0u, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  environ = const_cast<char**>(environment);
  execvp(r.arguments[0], r.arguments);
  fail_command(r.arguments[0]);
}

// Between the first process and a command: what the command orphans becomes a child of this, so that all of it can be
// found and killed for as long as the command runs. Ends as the command does.
[[noreturn]] void supervise(const Request& r, const int* streams) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  pid_t command = fork();
  if (command == 0) run(r, streams);
  if (command < 0) {
    dup2(streams[2], STDERR_FILENO);
    fail_command("fork");
  }
  close_range(0, ~0u, 0);
  for (;;) {
    int status;
    pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0 && errno != EINTR) _exit(126);
    if (ended != command) continue;
    if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
    sigset_t all;
    sigemptyset(&all);
    signal(WTERMSIG(status), SIG_DFL);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    raise(WTERMSIG(status));
    _exit(128 + WTERMSIG(status));
  }
}

Job* free_job() {
  for (Job& job : jobs)
    if (!job.supervisor) return &job;
  for (Job& job : jobs)  // give up an old pipe that something in the background still writes to
    if (job.supervisor < 0) {
      close(job.out.fd), close(job.err.fd);
      job = Job{};
      return &job;
    }
  return nullptr;
}

void start(Message* message) {
  Request r;
  if (!parse(message, &r)) return send_error(message->fd[0], E2BIG, "request");
  Job* job = free_job();
  if (!job) return send_error(message->fd[0], EAGAIN, "too many commands at once");
  int out[2], err[2], streams[3], next = 1;
  if (pipe2(out, O_CLOEXEC)) return send_error(message->fd[0], errno, "pipe");
  if (pipe2(err, O_CLOEXEC)) {
    close(out[0]), close(out[1]);
    return send_error(message->fd[0], errno, "pipe");
  }
  static const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  streams[0] = r.given & 1 ? message->fd[next++] : null;
  streams[1] = r.given & 2 ? message->fd[next++] : out[1];
  streams[2] = r.given & 4 ? message->fd[next++] : err[1];
  pid_t child = fork();
  if (child == 0) supervise(r, streams);
  int code = errno;
  close(out[1]), close(err[1]);
  if (child < 0) {
    close(out[0]), close(err[0]);
    return send_error(message->fd[0], code, "fork");
  }
  int64_t now = now_ms();
  job->supervisor = child, job->reply = message->fd[0];
  job->deadline = now + r.timeout, job->idle = r.idle, job->last = now;
  message->fd[0] = -1;
  fcntl(out[0], F_SETFL, O_NONBLOCK), fcntl(err[0], F_SETFL, O_NONBLOCK);
  job->out.open(out[0], r.cap), job->err.open(err[0], r.cap);
}

// Reads what is there; false at the end of the stream.
bool drain(Job* job, Stream* stream, int rounds) {
  static char buffer[64 << 10];
  while (rounds--) {
    ssize_t got = read(stream->fd, buffer, sizeof buffer);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    job->last = now_ms();
    if (stream->bytes) stream->add(buffer, static_cast<size_t>(got));
  }
  return true;
}

void answer(Job* job, int status) {
  Stream *out = &job->out, *err = &job->err;
  Answer a = {kMagic,
              status,
              job->reason,
              static_cast<uint32_t>(out->head() + out->tail()),
              static_cast<uint32_t>(err->head() + err->tail()),
              static_cast<uint32_t>(out->head()),
              static_cast<uint32_t>(err->head()),
              0,
              out->dropped(),
              err->dropped()};
  iovec parts[3] = {
      {&a, sizeof a}, {const_cast<char*>(out->in_order()), a.out}, {const_cast<char*>(err->in_order()), a.err}};
  for (int first = 0; first < 3;) {
    iovec chunk[3];
    int count = 0;
    for (size_t room = kChunk; first < 3 && room;) {
      size_t part = parts[first].iov_len < room ? parts[first].iov_len : room;
      if (part) chunk[count++] = {parts[first].iov_base, part};
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + part;
      parts[first].iov_len -= part, room -= part;
      if (!parts[first].iov_len) ++first;
    }
    msghdr header = {};
    header.msg_iov = chunk, header.msg_iovlen = static_cast<size_t>(count);
    if (count && sendmsg(job->reply, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
  }
}

void finish(Job* job, int status) {
  constexpr int kAll = 64;  // rounds: a pipe holds less, what keeps writing is no longer the command
  bool out_open = drain(job, &job->out, kAll), err_open = drain(job, &job->err, kAll);
  if (job->reply >= 0) {
    answer(job, status);
    close(job->reply);
  }
  job->out.release(), job->err.release();
  if (!out_open && !err_open) {
    close(job->out.fd), close(job->err.fd);
    *job = Job{};
    return;
  }
  job->supervisor =
      -1;  // goes on reading for nobody: what runs in the background must not stop or die of a full or broken pipe
  job->reply = -1;
}

void reap() {
  int status;
  for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;)
    for (Job& job : jobs)
      if (job.supervisor == ended) finish(&job, status);
}

void kill_job(Job* job, uint32_t reason) {
  job->reason = reason;
  if (!kill_descendants(job->supervisor)) _exit(1);  // processes that cannot be killed: the sandbox ends
  kill(job->supervisor, SIGKILL);
}

void handle(Message* message) {
  char number[16];
  const char* verb = message->field[0];
  if (!strcmp(verb, "processes") || !strcmp(verb, "kill")) {
    if (*verb == 'k') {
      for (Job& job : jobs)
        if (job.supervisor > 0) job.reason = kTimeout;
      while (kill(-1, SIGKILL) == 0) {
        reap();
        usleep(200);
      }
    }
    reap();
    snprintf(number, sizeof number, "%d", count_processes() - 1);
    const char* strings[] = {"ok", number};
    send_strings(message->fd[0], strings, 2);
  } else {
    start(message);
  }
  close_fds(message);
}

// Milliseconds until the next deadline, or -1.
int next_deadline(int64_t now) {
  int64_t next = INT64_MAX;
  for (const Job& job : jobs) {
    if (job.supervisor <= 0) continue;
    if (job.deadline < next) next = job.deadline;
    if (job.idle && job.last + job.idle < next) next = job.last + job.idle;
  }
  if (next == INT64_MAX) return -1;
  return next <= now ? 0 : static_cast<int>(next - now < 60000 ? next - now : 60000);
}

}  // namespace

void serve(int control) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, nullptr);
  signal(SIGPIPE, SIG_IGN);
  int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
  for (;;) {
    pollfd ready[2 + 3 * kMaxJobs];
    Job* owner[2 + 3 * kMaxJobs];
    int count = 2;
    ready[0] = {control, POLLIN, 0}, ready[1] = {signals, POLLIN, 0};
    for (Job& job : jobs) {
      if (!job.supervisor) continue;
      owner[count] = owner[count + 1] = owner[count + 2] = &job;
      ready[count++] = {job.out.fd, POLLIN, 0}, ready[count++] = {job.err.fd, POLLIN, 0},
      ready[count++] = {job.reply, 0, 0};
    }
    if (poll(ready, static_cast<nfds_t>(count), next_deadline(now_ms())) < 0 && errno != EINTR) return;
    for (int i = 2; i < count; ++i) {
      Job* job = owner[i];
      if (!ready[i].revents) continue;
      Stream* streams[] = {&job->out, &job->err};
      for (Stream* stream : streams) {
        if (ready[i].fd != stream->fd || drain(job, stream, 1)) continue;
        close(stream->fd);
        stream->fd = -1;
      }
      if (ready[i].fd == job->reply && ready[i].revents & (POLLHUP | POLLERR) && job->supervisor > 0)
        kill_job(job, kTimeout);
      if (job->supervisor < 0 && job->out.fd < 0 && job->err.fd < 0) *job = Job{};
    }
    if (ready[1].revents) {
      signalfd_siginfo info;
      (void)!read(signals, &info, sizeof info);
      reap();
    }
    int64_t now = now_ms();
    for (Job& job : jobs) {
      if (job.supervisor <= 0 || job.reason != kExit) continue;
      if (now >= job.deadline)
        kill_job(&job, kTimeout);
      else if (job.idle && now >= job.last + job.idle)
        kill_job(&job, kIdle);
    }
    if (ready[0].revents) {
      int got = receive(control, &request);
      if (got == 0) return;
      if (got > 0) handle(&request);
    }
  }
}

}  // namespace sandbox
