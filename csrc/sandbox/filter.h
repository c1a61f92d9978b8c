// What a sandbox's processes may ask the kernel for.
#pragma once

namespace sandbox {

// Installs the system call filter for this process and its descendants, for good. Returns 0, or -1 with errno.
int install_filter();

}  // namespace sandbox
