// Vector clocks: what has happened before now. Everything that acts on memory by itself (a warp, a copy in flight, a
// tensor core) is a component that counts its steps; a clock holds, for every component, the last step it knows to be
// over.
#pragma once
#include <cstdint>
#include <vector>

namespace mxmoe::interpreter {

class Clock {
 public:
  uint32_t of(uint32_t component) const {
    return component >= first_ && component - first_ < steps_.size() ? steps_[component - first_] : 0;
  }

  void raise(uint32_t component, uint32_t step) {
    cover(component, component + 1);
    uint32_t& known = steps_[component - first_];
    known = step > known ? step : known;
  }

  void join(const Clock& other) {
    if (other.steps_.empty()) return;
    cover(other.first_, other.first_ + static_cast<uint32_t>(other.steps_.size()));
    uint32_t* mine = steps_.data() + (other.first_ - first_);
    for (size_t i = 0; i < other.steps_.size(); ++i) mine[i] = other.steps_[i] > mine[i] ? other.steps_[i] : mine[i];
  }

  void forget(uint32_t component) {
    if (of(component)) steps_[component - first_] = 0;
  }

 private:
  void cover(uint32_t first, uint32_t end) {
    if (steps_.empty()) first_ = first;
    if (first < first_) steps_.insert(steps_.begin(), first_ - first, 0), first_ = first;
    if (end - first_ > steps_.size()) steps_.resize(end - first_, 0);
  }

  uint32_t first_ = 0;  // components of a later CTA start high
  std::vector<uint32_t> steps_;
};

}  // namespace mxmoe::interpreter
