// The first process of a sandbox: runs commands and reads and writes files for the Python side, reaps what is orphaned.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sandbox {

// How a command ended; `out` and `err` bytes of its streams follow, in packets of at most kChunk bytes in all.
struct Answer {
  uint32_t magic;
  int32_t status;  // of wait(2); of "read" and "write": exit status 0, or errno
  uint32_t reason;
  uint32_t out, err;            // bytes that follow
  uint32_t out_head, err_head;  // of them before the cut
  uint32_t reserved;
  uint64_t out_dropped, err_dropped;
};
constexpr uint32_t kMagic = 0x62784178;
constexpr size_t kChunk = 60 << 10;
enum Reason : uint32_t { kExit = 0, kTimeout = 1, kIdle = 2 };

// Serves requests from `control` until its end; then returns, and with the first process the whole PID namespace ends.
//   "exec" | "read" | "write", cwd, uid, timeout ms, idle ms, cap of each stream, which of stdin, stdout, stderr come
//   as descriptors (bits 1, 2, 4), number of variables, variables..., then argv... | path, largest size | path, mode
//   (octal)   -> Answer "processes"   -> "ok", how many there are besides this one "kill"        -> "ok", when all
//   others are gone
void serve(int control);

}  // namespace sandbox
