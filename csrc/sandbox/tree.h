// Processes as /proc shows them in this PID namespace.
#pragma once

#include <sys/types.h>

namespace sandbox {

// How many there are, zombies left out.
int count_processes();

// Stops, then kills everything below `root`, but not itself; false if something is still there after two seconds.
bool kill_descendants(pid_t root);

}  // namespace sandbox
