#include "tensor_view.h"

#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace quire {
namespace {

// The beginning of DLPack's table of C functions, version 1, up to the function that is used here.
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*view)(void* object, nb::dlpack::dltensor* view);
};

// Type codes of DLPack.
enum Code : uint8_t { kInt = 0, kFloat = 2, kBfloat = 4, kFloat8E4m3 = 10, kFloat8E5m2 = 12 };

// DLPack's functions for a type; nullptr: objects of this type are no tensors.
const ExchangeApi* exchange_api(PyTypeObject* type) noexcept {
  static PyTypeObject* last_type = nullptr;  // nearly always torch.Tensor; guarded by the GIL
  static const ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  PyObject* const capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  void* const table = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  PyErr_Clear();
  Py_XDECREF(capsule);
  const auto* api = static_cast<const ExchangeApi*>(table);
  while (api != nullptr && api->major != 1) api = api->previous;
  if (api == nullptr) return nullptr;
  Py_INCREF(type);  // the address is not given to another type
  Py_XDECREF(last_type);
  last_type = type;
  return last_api = api;
}

[[noreturn]] void refuse(const char* what, const nb::dlpack::dltensor& x) {
  const std::string code = "DLPack code " + std::to_string(x.dtype.code) + " of " + std::to_string(x.dtype.bits);
  throw nb::type_error(("a tensor has " + code + " bits, expected " + what).c_str());
}

}  // namespace

bool TensorView::read(PyObject* object) noexcept {
  const ExchangeApi* const api = exchange_api(Py_TYPE(object));
  if (api != nullptr && api->view(object, &tensor_) == 0) return true;
  PyErr_Clear();
  return false;
}

DType TensorView::dtype() const {
  if (tensor_.dtype.code == kFloat && tensor_.dtype.bits == 32) return DType::f32;
  if (tensor_.dtype.code == kFloat && tensor_.dtype.bits == 16) return DType::f16;
  if (tensor_.dtype.code == kBfloat && tensor_.dtype.bits == 16) return DType::bf16;
  refuse("float32, bfloat16 or float16", tensor_);
}

CacheType TensorView::cache_type() const {
  if (tensor_.dtype.code == kFloat8E4m3) return CacheType::e4m3;
  if (tensor_.dtype.code == kFloat8E5m2) return CacheType::e5m2;
  if (tensor_.dtype.code == kInt && tensor_.dtype.bits == 8) return CacheType::int8;
  dtype();
  return CacheType::model;
}

int64_t TensorView::size(int dim) const {
  if (dim >= tensor_.ndim) throw std::invalid_argument("a tensor has " + std::to_string(tensor_.ndim) + " dimensions");
  return tensor_.shape[dim];
}

int64_t TensorView::item_bytes() const { return tensor_.dtype.bits / 8; }

int64_t TensorView::bytes() const {
  int64_t bytes = item_bytes();
  for (int i = 0; i < tensor_.ndim; ++i) bytes *= tensor_.shape[i];
  return bytes;
}

int64_t TensorView::stride(int dim, int dims) const {
  if (tensor_.data == nullptr) return 0;
  if (tensor_.ndim != dims)
    throw std::invalid_argument("a tensor has " + std::to_string(tensor_.ndim) + " dimensions, expected " +
                                std::to_string(dims));
  return tensor_.strides[dim];
}

}  // namespace quire
