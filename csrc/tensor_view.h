// A torch tensor as an argument of a binding. Only this class reads the address, sizes, strides and dtype of a tensor.
// It uses the C functions that torch offers for this purpose (DLPack's exchange API, github.com/dmlc/dlpack). It needs
// no Torch headers, and takes a fraction of the time of data_ptr(), shape and stride() in Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "quire/dtype.h"
#include "quire/strided.h"

namespace quire {

// A view is valid during the call. If an argument may be None, None has the address nullptr.
class TensorView {
 public:
  // Reads an object. False: it is no tensor.
  bool read(PyObject* object) noexcept;

  bool is_given() const { return tensor_.ndim > 0; }

  // Throws TypeError if the kernels do not have the dtype.
  DType dtype() const;
  CacheType cache_type() const;

  int64_t size(int dim) const;
  int64_t item_bytes() const;  // the bytes of an element
  int64_t bytes() const;
  // Throws ValueError if the tensor has another number of dimensions.
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data) + tensor_.byte_offset);
  }
  template <class T>
  StridedRows<T> rows() const {
    return {data<T>(), stride(0, 2)};
  }
  template <class T>
  StridedHeads<T> heads() const {
    return {data<T>(), stride(0, 3), stride(1, 3)};
  }
  template <class T>
  StridedBlocks<T> blocks(int dims) const {
    return {data<T>(), stride(0, dims), stride(1, dims)};
  }

 private:
  int64_t stride(int dim, int dims) const;

  nanobind::dlpack::dltensor tensor_ = {};
};

}  // namespace quire

namespace nanobind::detail {

template <>
struct type_caster<quire::TensorView> {
  NB_TYPE_CASTER(quire::TensorView, const_name("torch.Tensor"))

  // nanobind accepts None only for an argument that is declared so.
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    return source.is_none() || value.read(source.ptr());
  }
};

}  // namespace nanobind::detail
