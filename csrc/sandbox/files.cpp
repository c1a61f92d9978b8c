#include "sandbox/files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

namespace sandbox {
namespace {

// Copies until the end or an error: bytes copied, or -1.
long long copy(int from, int to, long long limit) {
  static char buffer[64 << 10];
  long long total = 0;
  for (;;) {
    ssize_t got = read(from, buffer, sizeof buffer);
    if (got <= 0) return got < 0 ? -1 : total;
    total += got;
    if (total > limit) {
      errno = EFBIG;
      return -1;
    }
    for (ssize_t done = 0; done < got;) {
      ssize_t put = write(to, buffer + done, got - done);
      if (put < 0) return -1;
      done += put;
    }
  }
}

int make_parents(char* path) {
  for (char* slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    int failed = mkdir(path, 0755) && errno != EEXIST ? errno : 0;
    *slash = '/';
    if (failed) return failed;
  }
  return 0;
}

}  // namespace

int read_file(const char* path, long long limit) {
  int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);  // never waits for the other end of a FIFO
  struct stat status;
  if (fd < 0 || fstat(fd, &status)) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (!S_ISREG(status.st_mode)) return EINVAL;
  return copy(fd, STDOUT_FILENO, limit) < 0 ? errno : 0;
}

int write_file(const char* path, unsigned mode) {
  static char target[PATH_MAX], partial[PATH_MAX + 16];
  struct stat status;
  if (*path != '/') return EINVAL;
  if (strlen(path) >= PATH_MAX - 16) return ENAMETOOLONG;
  if (!realpath(path, target)) {  // new, if not a link to nowhere
    if (errno != ENOENT || !lstat(path, &status)) return errno ? errno : ENOENT;
    strcpy(target, path);
    if (int failed = make_parents(target)) return failed;
  } else if (!stat(target, &status)) {
    if (S_ISDIR(status.st_mode)) return EISDIR;
    if (!S_ISREG(status.st_mode)) return EINVAL;
  }
  int directory =
      static_cast<int>(strrchr(target, '/') - target);  // beside it: its own name may be as long as names get
  snprintf(partial, sizeof partial, "%.*s/.%d~", directory, target, getpid());
  int fd = open(partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  if (fd < 0) return errno;
  bool written = copy(STDIN_FILENO, fd, LLONG_MAX) >= 0 && !fchmod(fd, mode) && !close(fd) && !rename(partial, target);
  if (written) return 0;
  int failed = errno;
  unlink(partial);
  return failed;
}

}  // namespace sandbox
