// Python names of the group of ranks.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "quire/shared_group.h"

namespace nb = nanobind;

namespace quire {
namespace {

void run(const GatherArgs& args) { args.group->gather(args); }
using Gather = CallOf<GatherArgs, run>;

void run(const ExchangeArgs& args) {
  for (int64_t i = 0; i < args.num_begins; ++i)
    if (args.begins[i] < (i == 0 ? 0 : args.begins[i - 1]) || args.begins[i] > args.rows)
      throw nb::value_error("begins do not ascend from 0 to the number of rows");
  args.group->exchange(args);
}
using Exchange = CallOf<ExchangeArgs, run>;

void check(bool is_legal, const char* what) {
  if (!is_legal) throw nb::value_error(what);
}

bool is_number(int rank) { return rank >= 0 && rank < Whereabouts::kMostRanks; }

}  // namespace

void bind_group(nb::module_& m) {
  const nb::exception<GroupError> failed(m, "GroupError", PyExc_RuntimeError);
  nb::exception<RankLate>(m, "RankLate", failed);
  nb::exception<StepVoid>(m, "StepVoid", PyExc_RuntimeError);
  nb::class_<SharedGroup>(m, "SharedGroup")
      .def(
          "__init__",
          [](SharedGroup* self, int fd, int64_t begin, std::vector<int> members, int rank, int64_t slot_bytes,
             int spin_microseconds, double timeout_seconds, const std::vector<std::pair<int, int>>& peers) {
            const int size = static_cast<int>(members.size());
            check(size >= 1 && size <= kMaxRanks, "the number of ranks is not in 1 to 64");
            check(rank >= 0 && rank < size, "the rank is not below their number");
            check(std::all_of(members.begin(), members.end(), is_number), "there are more ranks than can be");
            check(begin >= SharedGroup::kFirstPart && begin % 4096 == 0, "a group's memory begins with a page");
            check(slot_bytes >= 64 && slot_bytes % 64 == 0, "slots are multiples of 64 bytes");
            check(size % (peers.size() + 1) == 0, "machines have different numbers of ranks");
            const int num_local = size / (static_cast<int>(peers.size()) + 1);
            for (const auto& [other, socket] : peers)
              check(other >= 0 && other < size && other / num_local != rank / num_local, "a peer is on this machine");
            new (self)
                SharedGroup(fd, begin, std::move(members), rank, slot_bytes, spin_microseconds, timeout_seconds, peers);
          },
          nb::kw_only(), "fd"_a, "begin"_a, "members"_a, "rank"_a, "slot_bytes"_a, "spin_microseconds"_a,
          "timeout_seconds"_a, "peers"_a)
      .def_ro_static("first_part", &SharedGroup::kFirstPart, "Where the memory of the first group begins")
      .def_ro_static("closed", &SharedGroup::kClosed, "A cause: see abort")
      .def_ro_static("nonsense", &SharedGroup::kNonsense, "A cause: see abort")
      .def_ro_static("stopped", &SharedGroup::kStopped, "A cause: see abort")
      .def_static("num_bytes", &SharedGroup::num_bytes, "size"_a, "slot_bytes"_a)
      .def("abort", &SharedGroup::abort, "number"_a, "cause"_a = SharedGroup::kNotKnown,
           "Ends the waiting of all ranks, now and later. The cause is a number of errno or one of the constants")
      .def("begin_step", &SharedGroup::begin_step, "Called before the turns of a step")
      .def("end_step", &SharedGroup::end_step, nb::call_guard<nb::gil_scoped_release>(),
           "Called after the turns of a step")
      .def("void_step", &SharedGroup::void_step, nb::call_guard<nb::gil_scoped_release>(),
           "Called before leave_step, by a rank of several groups")
      .def("close", &SharedGroup::close, "Ends the connections to other machines")
      .def("leave_step", &SharedGroup::leave_step, nb::call_guard<nb::gil_scoped_release>(),
           "Called in place of end_step. Waits until no rank is in the step any more")
      .def_prop_ro("aborted", &SharedGroup::aborted, "The number of the rank that has failed; -1: none")
      .def_prop_ro("cause", &SharedGroup::cause, "Why it has failed, as text for people; empty: it is not known")
      .def_prop_ro("waited_seconds", &SharedGroup::waited_seconds,
                   "The seconds that the rank has waited for others, in all turns");
  nb::class_<Whereabouts>(m, "Whereabouts")
      .def(
          "__init__",
          [](Whereabouts* self, int fd, int number) {
            check(is_number(number), "there are more ranks than can be");
            new (self) Whereabouts(fd, number);
          },
          "fd"_a, "number"_a)
      .def("begin_step", &Whereabouts::begin_step)
      .def("end_step", &Whereabouts::end_step)
      .def("wait_for", &Whereabouts::await, "number"_a, "Notes the rank that this one waits for; -1: none")
      .def(
          "of",
          [](const Whereabouts& self, int number) {
            check(is_number(number), "there are more ranks than can be");
            const auto place = self.of(number);
            return std::tuple(place.pid, place.begun, place.ended, place.turns, place.awaited);
          },
          "number"_a, "Process, steps begun and ended, turns of the last step, and the rank that it waits for");
  bind_struct<Gather, KernelCall>(
      m, "Gather",
      [](Gather* self, SharedGroup* group, const std::vector<int64_t>& widths, TensorView owners, int reader,
         TensorView part, TensorView out) {
        check(widths.size() <= kMaxRanks, "there are more widths than ranks can be");
        const bool is_reader = reader == GatherArgs::kAllRanks || reader == group->rank();
        check(is_reader == out.is_given(), "those that want rows have a result, and no others");
        GatherArgs args{.group = group,
                        .widths = {},
                        .rows = part.size(0),
                        .owners = nullptr,
                        .reader = reader,
                        .part = {},
                        .out = {}};
        if (owners.is_given()) {
          args.owners = owners.data<const int32_t>();
          check(reader == GatherArgs::kAllRanks && owners.size(0) == args.rows &&
                    std::count(args.owners, args.owners + args.rows, group->rank()) == out.size(0),
                "the result has not as many rows as the rank owns");
        }
        const int64_t bytes = part.item_bytes();
        for (size_t i = 0; i < widths.size(); ++i) args.widths[i] = widths[i] * bytes;
        const auto part_rows = part.rows<const char>();
        args.part = {part_rows.data, part_rows.stride * bytes};
        if (out.is_given()) {
          const auto out_rows = out.rows<char>();
          args.out = {out_rows.data, out_rows.stride * bytes};
        }
        new (self) Gather(args);
      },
      "group"_a, "widths"_a, "owners"_a.none(), "reader"_a, "part"_a, "out"_a.none());
  bind_struct<Exchange, KernelCall>(
      m, "Exchange",
      [](Exchange* self, SharedGroup* group, const std::vector<int64_t>& firsts, TensorView begins, TensorView own,
         int64_t first_column, TensorView out) {
        check(firsts.size() == static_cast<size_t>(group->size()) + 1, "firsts are not one more than ranks");
        const int64_t bytes = own.item_bytes(), num_begins = begins.size(0);
        ExchangeArgs args{.group = group,
                          .firsts = {},
                          .begins = begins.data<const int32_t>(),
                          .num_begins = num_begins,
                          .rows = out.size(0),
                          .row_bytes = own.size(1) * bytes,
                          .own = {},
                          .own_rows = own.size(0),
                          .first_byte = first_column * bytes,
                          .num_columns_bytes = out.size(1) * bytes,
                          .out = {}};
        for (size_t i = 0; i < firsts.size(); ++i) {
          check(firsts[i] >= (i == 0 ? 0 : firsts[i - 1]) && firsts[i] < num_begins, "firsts are not in begins");
          args.firsts[i] = firsts[i];
        }
        check(own.size(1) > 0 && first_column >= 0 && first_column + out.size(1) <= own.size(1) &&
                  own.size(0) <= out.size(0),
              "the columns are not in the rows");
        const auto own_rows = own.rows<const char>();
        args.own = {own_rows.data, own_rows.stride * bytes};
        const auto out_rows = out.rows<char>();
        args.out = {out_rows.data, out_rows.stride * bytes};
        new (self) Exchange(args);
      },
      "group"_a, "firsts"_a, "begins"_a, "own"_a, "first_column"_a, "out"_a);
}

}  // namespace quire
