// Builds a sandbox around the calling process, and new root file systems for one that runs.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

namespace sandbox {

constexpr int kMaxLowers = 64;
constexpr int kMaxGroups = 8;
constexpr uid_t kUidRange = 65536;

// What the node and its sandboxes share.
struct Node {
  const char* layers;  // directory of the layers, in the node's own mount namespace: NAME/u holds the files, NAME/w is
                       // overlayfs's
  int stage;           // a mount namespace with nothing in it but a place to build: copying it is cheap
  int life;            // a pidfd of the node's process
};

struct Layer {
  const char* name;
  const char* size;  // bytes
  const char* inodes;
  const char* lower[kMaxLowers];  // directories, uppermost first
  int num_lowers;
  int user_namespace;
};

struct Group {  // one cgroup
  const char* directory;
  const char* settings[8];  // "file=value"
  int num_settings;
};

struct Spec {
  Layer layer;
  const char* host_name;
  Group groups[kMaxGroups];
  int num_groups;
};

// A user namespace whose ids 0..65535 are `base`... outside; a descriptor, or -1.
int make_user_namespace(uid_t base);

// A mount namespace for Node::stage; a descriptor, or -1.
int make_stage();

// A tmpfs of its own for a layer, where the node sees it; it lives until it is unmounted. Returns null, or the step
// that failed.
const char* make_layer(const Node& node, const Layer& layer, char* path, size_t path_size);

// In the first process of a new PID namespace: gives up everything of the host. Returns null, or the step that failed
// (errno).
const char* enter(const Node& node, const Spec& spec, uid_t base);

// From outside: a new root for the sandbox whose first process is `first`; its files are `layer`, its /proc, /dev stay,
// /dev/shm is emptied if `fresh`. There must be no other process in it. Returns null, or the step that failed (errno).
const char* replace_root(const Node& node, const Layer& layer, uid_t base, pid_t first, bool fresh);

}  // namespace sandbox
