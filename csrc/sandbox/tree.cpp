#include "sandbox/tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace sandbox {
namespace {

struct Process {
  pid_t id, parent;
  bool below, stopped;
};

constexpr int kMaxProcesses = 1 << 15;
Process processes[kMaxProcesses];

// Reads all processes that are not zombies; their number.
int list_processes() {
  DIR* proc = opendir("/proc");
  int count = 0;
  for (dirent* entry; proc && count < kMaxProcesses && (entry = readdir(proc));) {
    pid_t id = atoi(entry->d_name);
    if (id <= 0) continue;
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", id);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    char* after_name = strrchr(text, ')');  // the name may have anything in it
    char state;
    int parent;
    if (!after_name || sscanf(after_name + 1, " %c %d", &state, &parent) != 2 || state == 'Z' || state == 'X') continue;
    processes[count++] = {id, parent, false, state == 'T'};
  }
  if (proc) closedir(proc);
  return count;
}

// Marks what is below `root`; how many.
int mark_below(pid_t root, int count) {
  int marked = 0;
  for (bool more = true; more;) {
    more = false;
    for (int i = 0; i < count; ++i) {
      if (processes[i].below) continue;
      bool below = processes[i].parent == root;
      for (int j = 0; j < count && !below; ++j) below = processes[j].below && processes[j].id == processes[i].parent;
      if (below) processes[i].below = more = true, ++marked;
    }
  }
  return marked;
}

}  // namespace

int count_processes() {
  return list_processes();
}

bool kill_descendants(pid_t root) {
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    int count = list_processes();
    if (!mark_below(root, count)) return true;
    bool all_stopped = true;
    for (int i = 0; i < count; ++i) {
      if (!processes[i].below || processes[i].stopped) continue;
      all_stopped = false;
      kill(processes[i].id, SIGSTOP);
    }
    // Nothing that is stopped forks: now the list is complete. What cannot be stopped (D) must not hold up the rest.
    for (int i = 0; i < count && (all_stopped || round > 20); ++i)
      if (processes[i].below) kill(processes[i].id, SIGKILL);
    usleep(round < 20 ? 200 : 1000);
  }
  return false;
}

}  // namespace sandbox
