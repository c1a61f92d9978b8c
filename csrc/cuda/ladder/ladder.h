// Runs one level of the ladder.
#pragma once
#include <stdexcept>

#include "cuda/ladder/level1.h"
#include "cuda/ladder/level2.h"
#include "cuda/ladder/level3.h"
#include "cuda/ladder/level7.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_ladder(L& l, int64_t level, const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
                const Tensor& out) {
  const auto start = [&]<class K, class C>(K, C, bool persistent) {
    ladder::globals<typename L::machine> g{};
    g.rows = static_cast<int>(out.sizes[0]), g.columns = static_cast<int>(out.sizes[1]);
    g.steps = static_cast<int>(a.sizes[1] * bytes_of(a.dtype) / 128);
    if (g.rows % C::kRows || g.columns % C::kColumns || a.sizes[1] * bytes_of(a.dtype) % 128)
      throw std::invalid_argument("the ladder has no tails: sizes must be whole tiles");
    g.a_map = l.tensor_map(a, C::kRows, 128, Swizzle::k128B),
    g.b_map = l.tensor_map(b, C::kColumns, 128, Swizzle::k128B);
    g.a = static_cast<const uint16_t*>(a.data), g.b = static_cast<const uint16_t*>(b.data);
    g.a_scales = a_scales.ptr<uint8_t>(), g.b_scales = b_scales.ptr<uint8_t>();
    g.out = out.ptr<float>();
    const int tiles = g.rows / C::kRows * (g.columns / C::kColumns);
    l.template run<K>(
        persistent ? l.num_sms() : tiles, g,
        {{"a", a}, {"a scales", a_scales}, {"b", b}, {"b scales", b_scales}, {"out", out, Use::kWritten}});
  };
  switch (level) {
    case 1:
      return start(level1::launchable<level1::config>{}, level1::config{}, false);
    case 2:
      return start(level2::launchable<level2::config>{}, level2::config{}, false);
    case 3:
      return start(level3::launchable<level3::config>{}, level3::config{}, false);
    case 4:
      return start(level4::launchable<level4::config>{}, level4::config{}, false);
    case 5:
      return start(level5::launchable<level5::config>{}, level5::config{}, false);
    case 6:
      return start(level6::launchable<level6::config>{}, level6::config{}, true);
    case 7:
      return start(level7::launchable<level7::config>{}, level7::config{}, true);
    default:
      throw std::invalid_argument("the ladder has levels 1 to 7");
  }
}

}  // namespace mxmoe::cuda
