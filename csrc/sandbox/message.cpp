#include "sandbox/message.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace sandbox {

int receive(int socket, Message* message) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  iovec data = {message->bytes, kMaxBytes};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t length;
  do {
    length = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  message->num_fields = message->num_fds = 0;
  if (length < 0) return errno == EAGAIN ? -1 : 0;
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); item; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    message->num_fds = static_cast<int>((item->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(message->fd, CMSG_DATA(item), sizeof(int) * message->num_fds);
  }
  if (length == 0 && message->num_fds == 0) return 0;
  bool whole = !(header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && length > 0 && message->bytes[length - 1] == 0;
  for (char* next = message->bytes; whole && next < message->bytes + length; next += strlen(next) + 1) {
    if (message->num_fields == kMaxFields)
      whole = false;
    else
      message->field[message->num_fields++] = next;
  }
  if (whole && message->num_fds > 0) return 1;
  close_fds(message);
  return -1;
}

void close_fds(Message* message) {
  for (int i = 0; i < message->num_fds; ++i)
    if (message->fd[i] >= 0) close(message->fd[i]);
  message->num_fds = 0;
}

void send_strings(int socket, const char* const* strings, int count) {
  char packet[4096];
  size_t length = 0;
  for (int i = 0; i < count; ++i) {
    size_t size = strlen(strings[i]) + 1;
    if (length + size > sizeof packet) return;
    memcpy(packet + length, strings[i], size);
    length += size;
  }
  (void)!send(socket, packet, length, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void send_error(int socket, int code, const char* step) {
  char number[16];
  snprintf(number, sizeof number, "%d", code);
  const char* strings[] = {"error", number, step};
  send_strings(socket, strings, 3);
}

}  // namespace sandbox
