// Messages between the Python side and the processes here: lists of strings, with descriptors, over SOCK_SEQPACKET
// sockets.
//
// A request is NUL-terminated strings in one packet; its first descriptor is the socket for the answer. Whoever asked
// and is gone is known by that socket's hang-up, whoever was asked and is gone by its end: there are no ids to match
// and nothing to clean up.
#pragma once

#include <stddef.h>

namespace sandbox {

constexpr size_t kMaxBytes = 192 << 10;  // of one request; a packet must fit into a socket's default buffer
constexpr int kMaxFields = 8192;
constexpr int kMaxFds = 4;

struct Message {
  char bytes[kMaxBytes + 1];
  char* field[kMaxFields];
  int num_fields;
  int fd[kMaxFds];
  int num_fds;
};

// One request into `message`: 1, 0 at the end of the socket, -1 for what is no request (its descriptors are closed).
int receive(int socket, Message* message);

void close_fds(Message* message);

// Strings, each with its NUL. Never waits: a reader that does not read loses the answer.
void send_strings(int socket, const char* const* strings, int count);

// "error", errno, what failed.
void send_error(int socket, int code, const char* step);

}  // namespace sandbox
