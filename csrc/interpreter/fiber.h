// A fiber: a function with a stack of its own that can stop in the middle and be resumed. Warps are fibers.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace mxmoe::interpreter {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);  // the body may not throw
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();  // from outside, until it pauses or ends
  void pause();   // from inside
  bool ended() const { return ended_; }

 private:
  static void entry(unsigned low, unsigned high);
  void switch_to(ucontext_t& from, ucontext_t& to, bool into_fiber, bool last);

  std::function<void()> body_;
  std::unique_ptr<std::byte[]> stack_;
  ucontext_t here_{}, outside_{};
  const void* outside_stack_ = nullptr;
  size_t outside_size_ = 0;
  bool ended_ = false;
};

}  // namespace mxmoe::interpreter
