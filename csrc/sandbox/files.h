// File verbs, done by a process inside the sandbox with the rights of the user it works for.
#pragma once

namespace sandbox {

// Copies a regular file to stdout; returns 0 or errno (EFBIG over `limit` bytes).
int read_file(const char* path, long long limit);

// Replaces a file by stdin as a whole, making missing directories; returns 0 or errno, and then the old file is intact.
int write_file(const char* path, unsigned mode);

}  // namespace sandbox
