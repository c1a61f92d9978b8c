// A tensor as the core sees it: a pointer, a dtype, sizes and strides in elements. No torch headers.
#pragma once
#include <array>
#include <cstdint>

namespace mxmoe {

enum class DType : uint8_t { kF32, kBF16, kF16, kU8, kI32, kI64 };  // every 8-bit float arrives as kU8

constexpr int kMaxDims = 4;

struct Tensor {
  void* data = nullptr;  // nullptr: an absent optional argument
  DType dtype = DType::kU8;
  int ndim = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides{};

  explicit operator bool() const { return data != nullptr; }
  template <typename T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
};

}  // namespace mxmoe
