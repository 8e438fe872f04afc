// An operator input with one number per token or per sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace gac {

// A contiguous input [count]; converts to false if absent.
template <class T>
struct Column {
  at::Tensor tensor;
  const T* data = nullptr;

  Column(const char* name, const std::optional<at::Tensor>& t, int64_t count) {
    if (!t) return;
    TORCH_CHECK_TYPE(t->scalar_type() == c10::CppTypeToScalarType<T>::value, name, " has dtype ",
                     t->scalar_type(), ": expected ", c10::CppTypeToScalarType<T>::value);
    TORCH_CHECK_VALUE(t->dim() == 1 && t->size(0) == count, name, " has shape ", t->sizes(),
                      ": expected [", count, "]");
    tensor = t->contiguous();
    data = tensor.const_data_ptr<T>();
  }
  explicit operator bool() const { return data != nullptr; }
  T operator[](int64_t i) const { return data[i]; }
};

}  // namespace gac
