// Shared parts of all bindings, and one bind function per kernel family, each in csrc/bindings_<family>.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include "tensor_view.h"

namespace quire {

using namespace nanobind::literals;

// One call of a kernel with all its arguments, made from named tensors and numbers. It never changes. It may run again
// as long as its tensors keep their addresses. Each run checks the numbers in tensors that lead to memory.
class KernelCall {
 public:
  virtual ~KernelCall() = default;
  virtual void run() const = 0;
};

template <class Args, void (*kRun)(const Args&)>
class CallOf final : public KernelCall {
 public:
  explicit CallOf(const Args& args) : args_(args) {}
  void run() const override { kRun(args_); }

 private:
  const Args args_;
};

// Makes a Python class from `construct`. All arguments of `construct` after the first one are fields, given by name.
template <class Class, class... Base, class Construct, class... Fields>
void bind_struct(nanobind::module_& m, const char* name, const Construct& construct, const Fields&... fields) {
  nanobind::class_<Class, Base...>(m, name).def("__init__", construct, nanobind::kw_only(), fields...);
}

void bind_activation(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_cost(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_latent(nanobind::module_& m);
void bind_limits(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_norm_rope(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_spec_decode(nanobind::module_& m);

}  // namespace quire
