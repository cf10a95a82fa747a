// The Python name of the compiled part of the cost model: cost/running_steps.py makes it, and has its twin.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "checks.h"
#include "quire/step_correction.h"
#include "quire/step_predictor.h"

namespace nb = nanobind;

namespace quire {
namespace {

using Kind = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>;  // the fields of LayerKind

LayersOfKind layers_of(const Kind& kind) {
  const auto& [name, window, token_bytes, state_bytes, flops_per_pair] = kind;
  using Sight = LayersOfKind::Sight;
  const bool is_chunked = name == "chunked", is_window = name == "window";
  if ((is_chunked || is_window) && window < 1) refuse("a window of ", window, " tokens");
  const Sight sight = is_chunked        ? Sight::kChunk
                      : is_window       ? Sight::kWindow
                      : name == "state" ? Sight::kNothing
                                        : Sight::kAll;
  return {sight, window, token_bytes, state_bytes, flops_per_pair};
}

// A tuple of a NamedTuple class. Calling the class would run Python code, and PyTuple_Type.tp_new would make two more
// tuples.
template <class... Fields>
nb::object named_tuple(nb::handle type, Fields&&... fields) {
  std::array items{nb::object(nb::cast(std::forward<Fields>(fields)))...};
  auto* const of_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  nb::object made = nb::steal(of_type->tp_alloc(of_type, items.size()));
  if (!made.is_valid()) throw nb::python_error();
#if PY_VERSION_HEX >= 0x030E0000
  reinterpret_cast<PyTupleObject*>(made.ptr())->ob_hash = -1;  // not computed yet, which is not the 0 of tp_alloc
#endif
  for (size_t i = 0; i < items.size(); ++i)
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), items[i].release().ptr());
  return made;
}

nb::object tuple_of(const std::vector<int64_t>& numbers) {
  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  if (!made.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < numbers.size(); ++i)
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), nb::cast(numbers[i]).release().ptr());
  return made;
}

using CountProducts = nb::typed<nb::callable, std::tuple<double, double, double, double>(int64_t, int64_t, int64_t)>;
using ReadingShare = nb::typed<nb::callable, double(int)>;
using Numbers = nb::typed<nb::list, int64_t>;

constexpr int64_t kMostTokens = 1 << 27;  // of a row: sums of a step of 256 rows fit into 64 bits

// The numbers of each row are read where they lie: a vector of them would be one more thing to write.
int64_t number_at(const Numbers& numbers, size_t row) {
  const int64_t number = PyLong_AsLongLong(PyList_GET_ITEM(numbers.ptr(), static_cast<Py_ssize_t>(row)));
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

class CorrectedSteps {
 public:
  CorrectedSteps(const std::vector<Kind>& kinds, const std::array<double, 8>& constants, const CountProducts& products,
                 double spread, const std::vector<std::pair<int, double>>& factors, const ReadingShare& reading_share,
                 nb::type_object load_type, nb::type_object time_type)
      : predictor_(
            all_layers(kinds), constants_of(constants),
            [products](int64_t num_tokens, int64_t num_logits, int64_t other_tokens) {
              const auto [weights, operations, rescanned, exchanges] =
                  nb::cast<std::tuple<double, double, double, double>>(products(num_tokens, num_logits, other_tokens));
              return StepProducts{weights, operations, rescanned, exchanges};
            }),
        correction_(spread, checked(factors),
                    [reading_share](int size) { return nb::cast<double>(reading_share(size)); }),
        load_type_(checked(load_type)),
        time_type_(checked(time_type)) {
    for (size_t i = 0; i < kBounds.size(); ++i) bounds_[i] = nb::str(kBounds[i]);
  }

  double cold = 0;  // see Pause in cost/correct.py

  StepCorrection& correction() { return correction_; }

  nb::object predict(const nb::typed<nb::tuple, nb::object, nb::ellipsis>& load, double pause) {
    const auto numbers = [&load](size_t field) { return nb::cast<int64_t>(load[field]); };
    const auto by_kind = [&load](size_t field) { return nb::cast<std::vector<int64_t>>(load[field]); };
    return time_of({numbers(0), numbers(1), numbers(2), by_kind(3), by_kind(4), numbers(5)}, pause);
  }

  std::pair<nb::object, nb::object> predict_rows(const Numbers& starts, const Numbers& counts, int64_t num_logits,
                                                 double pause, int64_t other_tokens) {
    const size_t num_rows = counts.size();
    if (starts.size() != num_rows) refuse(starts.size(), " starts for ", num_rows, " rows");
    predictor_.begin_load(num_logits, other_tokens);
    for (size_t row = 0; row < num_rows; ++row) {
      const int64_t start = number_at(starts, row), count = number_at(counts, row);
      if (start < 0 || count < 1 || start > kMostTokens || count > kMostTokens)
        refuse("a row of ", count, " tokens after ", start);
      predictor_.add_row(start, count);
    }
    const StepLoad& load = predictor_.load();
    return {named_tuple(load_type_, load.num_tokens, load.num_rows, load.num_logits, tuple_of(load.kv_tokens),
                        tuple_of(load.pairs), load.other_tokens),
            time_of(load, pause)};
  }

 private:
  static std::vector<LayersOfKind> all_layers(const std::vector<Kind>& kinds) {
    std::vector<LayersOfKind> all;
    for (const Kind& kind : kinds) all.push_back(layers_of(kind));
    return all;
  }

  static StepConstants constants_of(const std::array<double, 8>& c) {
    return {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
  }

  static const std::vector<std::pair<int, double>>& checked(const std::vector<std::pair<int, double>>& factors) {
    for (const auto& [size, factor] : factors)
      if (size < 0 || size > StepCorrection::kLargestSize) refuse("a step of size ", size);
    return factors;
  }

  static nb::type_object checked(const nb::type_object& type) {
    if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), &PyTuple_Type)) refuse("a class without tuples");
    return type;
  }

  nb::object time_of(const StepLoad& load, double pause) {
    if (load.kv_tokens.size() != predictor_.num_kinds() || load.pairs.size() != predictor_.num_kinds())
      refuse("a load of other kinds of layers");
    const auto [seconds, low, high, bound] =
        predictor_.time(load, correction_.spread(), correction_.factor(load.num_tokens), cold * cooled(pause));
    return named_tuple(time_type_, seconds, low, high, bounds_[static_cast<size_t>(bound)]);
  }

  StepPredictor predictor_;
  StepCorrection correction_;
  const nb::type_object load_type_, time_type_;
  std::array<nb::object, kBounds.size()> bounds_;  // made once: a new string for each step takes its own memory
};

}  // namespace

void bind_cost(nb::module_& m) {
  nb::class_<CorrectedSteps>(m, "CorrectedSteps")
      .def(
          nb::init<const std::vector<Kind>&, const std::array<double, 8>&, const CountProducts&, double,
                   const std::vector<std::pair<int, double>>&, const ReadingShare&, nb::type_object, nb::type_object>(),
          nb::kw_only(), "kinds"_a, "constants"_a, "products"_a, "spread"_a, "factors"_a, "reading_share"_a,
          "load_type"_a, "time_type"_a)
      .def("predict", &CorrectedSteps::predict, "load"_a, "pause"_a)
      .def("predict_rows", &CorrectedSteps::predict_rows, "starts"_a, "counts"_a, "num_logits"_a, "pause"_a,
           "other_tokens"_a)
      .def_rw("cold", &CorrectedSteps::cold)
      .def_prop_ro("spread", [](CorrectedSteps& self) { return self.correction().spread(); })
      .def_prop_ro("num_corrections", [](CorrectedSteps& self) { return self.correction().num_steps(); })
      .def(
          "set_spread", [](CorrectedSteps& self, double spread) { self.correction().set_spread(spread); }, "spread"_a)
      .def(
          "factor", [](CorrectedSteps& self, int64_t num_tokens) { return self.correction().factor(num_tokens); },
          "num_tokens"_a)
      .def("factors", [](CorrectedSteps& self) { return self.correction().factors(); })
      .def(
          "correct",
          [](CorrectedSteps& self, int64_t num_tokens, double predicted, double measured) {
            self.correction().add(num_tokens, predicted, measured);
          },
          "num_tokens"_a, "predicted"_a, "measured"_a);
}

}  // namespace quire
