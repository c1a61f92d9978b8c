#include "interpreter/fiber.h"

#include <cstdint>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace mxmoe::interpreter {
namespace {
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 1 << 20;  // sanitized frames are large
#else
constexpr size_t kStackBytes = 1 << 18;
#endif
}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(new std::byte[kStackBytes]) {
  getcontext(&here_);
  here_.uc_stack.ss_sp = stack_.get();
  here_.uc_stack.ss_size = kStackBytes;
  here_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);  // makecontext passes ints
  makecontext(&here_, reinterpret_cast<void (*)()>(&Fiber::entry), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(self >> 32));
}

// AddressSanitizer has to know which stack is in use.
void Fiber::switch_to(ucontext_t& from, ucontext_t& to, bool into_fiber, bool last) {
#if defined(__SANITIZE_ADDRESS__)
  void* saved = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &saved, into_fiber ? stack_.get() : outside_stack_,
                                 into_fiber ? kStackBytes : outside_size_);
  swapcontext(&from, &to);
  __sanitizer_finish_switch_fiber(saved, into_fiber ? nullptr : &outside_stack_, into_fiber ? nullptr : &outside_size_);
#else
  (void)into_fiber, (void)last;
  swapcontext(&from, &to);
#endif
}

void Fiber::resume() {
  switch_to(outside_, here_, true, false);
}

void Fiber::pause() {
  switch_to(here_, outside_, false, false);
}

void Fiber::entry(unsigned low, unsigned high) {
  auto* self = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self->outside_stack_, &self->outside_size_);
#endif
  self->body_();
  self->ended_ = true;
  self->switch_to(self->here_, self->outside_, false, true);
}

}  // namespace mxmoe::interpreter
