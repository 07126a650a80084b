#include "engine/checks.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "math/math.h"

namespace ronde {

std::string Describe(const Request& request) {
  std::string text(Info(request.op).name);
  if (!Info(request.op).tensors && request.name.empty()) return text;
  return text + (request.name.empty() ? " (unnamed)" : " '" + request.name + "'");
}

namespace {

Result CheckTensor(const Request& request, std::size_t index, const std::vector<std::unique_ptr<Backend>>& backends) {
  const OpInfo& op = Info(request.op);
  const TensorRequest& tensor = request.tensors[index];
  // Texts are made for errors only.
  auto what = [&] {
    return Describe(request) + (request.tensors.size() > 1 ? " tensor " + std::to_string(index) : "");
  };
  auto wrong = [&](const std::string& why) { return Result(Code::kArgument, what() + ": " + why); };
  for (auto dimension : tensor.shape) {
    if (dimension < 0) return wrong("shape " + ToString(tensor.shape) + " has a negative dimension");
  }
  if ((op.ragged || request.op == Op::kReducescatter) && tensor.shape.empty()) {
    return wrong("a scalar has no first dimension; reshape it to [1]");
  }
  if (tensor.input == nullptr && NumElements(tensor.shape) > 0) return wrong("no input memory was given");
  if (op.reduces) {
    if (Result bad = math::CheckReduction(request.reduction, tensor.dtype); !bad.ok()) return bad.Because(what());
  }
  if (request.op == Op::kReducescatter && request.reduction == Reduction::kAdasum) {
    return wrong("adasum is a reduction of allreduce only");
  }
  for (const auto& backend : backends) {
    if (backend->Supports(request.op, tensor.dtype, request.device)) return Ok();
  }
  return wrong("no backend takes " + std::string(Info(tensor.dtype).name) + " tensors on device " +
               std::to_string(request.device));
}

Result CheckSplits(const Request& request, std::size_t members) {
  auto wrong = [&](const std::string& why) { return Result(Code::kArgument, Describe(request) + ": " + why); };
  auto count = static_cast<std::int64_t>(members);
  if (request.splits.empty()) {
    for (const auto& tensor : request.tensors) {
      if (tensor.shape[0] % count != 0) {
        return wrong("without splits the first dimension (" + std::to_string(tensor.shape[0]) +
                     ") must be a multiple of the number of members (" + std::to_string(members) + ")");
      }
    }
    return Ok();
  }
  if (request.splits.size() != members * request.tensors.size()) {
    return wrong("splits has " + std::to_string(request.splits.size()) + " entries; it needs one for each of the " +
                 std::to_string(members) + " members");
  }
  for (std::size_t t = 0; t < request.tensors.size(); ++t) {
    std::int64_t sum = 0;
    for (std::size_t m = 0; m < members; ++m) {
      std::int64_t rows = request.splits[t * members + m];
      if (rows < 0) return wrong("splits has a negative entry (" + std::to_string(rows) + ")");
      sum += rows;
    }
    if (sum != request.tensors[t].shape[0]) {
      return wrong("splits add up to " + std::to_string(sum) + " rows, but the tensor has " +
                   std::to_string(request.tensors[t].shape[0]));
    }
  }
  return Ok();
}

// Results of one request may share memory with their own input only: else what a tensor receives depends on the order
// in which the parts move.
Result CheckOverlap(const Request& request) {
  const bool like_input = request.op == Op::kAllreduce || request.op == Op::kBroadcast;
  if (request.tensors.size() < 2 || !like_input) return Ok();
  struct Range {
    std::uintptr_t begin, end;
    std::size_t tensor;
    bool written;
  };
  std::vector<Range> ranges;
  auto add = [&](const void* memory, std::size_t tensor, bool written) {
    const TensorRequest& t = request.tensors[tensor];
    auto begin = reinterpret_cast<std::uintptr_t>(memory);
    std::size_t bytes = static_cast<std::size_t>(NumElements(t.shape)) * Info(t.dtype).size;
    if (memory != nullptr && bytes > 0) ranges.push_back({begin, begin + bytes, tensor, written});
  };
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    add(request.tensors[i].input, i, false);
    add(request.tensors[i].output, i, true);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  // The range that reaches farthest so far, of those read and of those written.
  const Range* reach[2] = {nullptr, nullptr};
  for (const Range& range : ranges) {
    for (bool written : {false, true}) {
      const Range* before = reach[written];
      if (before != nullptr && before->end > range.begin && (written || range.written) &&
          before->tensor != range.tensor) {
        return Result(Code::kArgument, Describe(request) + ": tensors " +
                                           std::to_string(std::min(before->tensor, range.tensor)) + " and " +
                                           std::to_string(std::max(before->tensor, range.tensor)) +
                                           " share memory, and the result goes there; give each memory of its own");
      }
    }
    const Range*& farthest = reach[range.written];
    if (farthest == nullptr || range.end > farthest->end) farthest = &range;
  }
  return Ok();
}

}  // namespace

Result CheckRequest(const Request& request, int rank, const std::vector<int>& members,
                    const std::vector<std::unique_ptr<Backend>>& backends) {
  const OpInfo& op = Info(request.op);
  auto wrong = [&](const std::string& why) { return Result(Code::kArgument, Describe(request) + why); };
  auto is_member = [&](int r) { return std::binary_search(members.begin(), members.end(), r); };
  if (!is_member(rank)) {
    return wrong(": rank " + std::to_string(rank) + " is not in process set " + std::to_string(request.set));
  }
  if (op.tensors != !request.tensors.empty()) {
    return wrong(op.tensors ? ": no tensor was given" : " takes no tensors");
  }
  if (op.rooted && !is_member(request.root)) {
    return wrong(": root rank " + std::to_string(request.root) + " is not in process set " +
                 std::to_string(request.set));
  }
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    RONDE_RETURN_IF_ERROR(CheckTensor(request, i, backends));
  }
  if (op.splits) RONDE_RETURN_IF_ERROR(CheckSplits(request, members.size()));
  return CheckOverlap(request);
}

Definition DefinitionOf(const Request& request) {
  const OpInfo& op = Info(request.op);
  Definition definition;
  definition.op = request.op;
  definition.set = request.set;
  definition.name = request.name;
  definition.device = request.device;
  definition.ranks = request.ranks;
  // Fields that mean nothing for an operation stay at their defaults, so that ranks cannot disagree about them.
  if (op.reduces) {
    definition.reduction = request.reduction;
    definition.prescale = request.prescale;
    definition.postscale = request.postscale;
  }
  if (op.rooted) definition.root = request.root;
  definition.tensors.reserve(request.tensors.size());
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    const TensorRequest& tensor = request.tensors[i];
    TensorSpec spec{tensor.name, tensor.dtype, tensor.shape};
    if (spec.name.empty() && !request.name.empty()) {
      spec.name = request.tensors.size() == 1 ? request.name : request.name + "." + std::to_string(i);
    }
    if (op.ragged) spec.shape[0] = 0;
    definition.tensors.push_back(std::move(spec));
  }
  return definition;
}

namespace {

// As they travel: what differs in bits is another definition.
bool SameBits(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }

bool IsNameOfMember(std::string_view name, std::string_view group, std::size_t index) {
  char digits[20];
  const std::string_view number(digits, std::to_chars(digits, digits + sizeof digits, index).ptr - digits);
  return name.size() == group.size() + 1 + number.size() && name.starts_with(group) && name[group.size()] == '.' &&
         name.ends_with(number);
}

bool Matches(const Request& request, std::size_t index, const TensorSpec& spec) {
  const TensorRequest& tensor = request.tensors[index];
  if (tensor.dtype != spec.dtype || tensor.shape.size() != spec.shape.size()) return false;
  const auto skipped = static_cast<std::ptrdiff_t>(Info(request.op).ragged);  // the first dimension is a value
  if (!std::equal(tensor.shape.begin() + skipped, tensor.shape.end(), spec.shape.begin() + skipped)) return false;
  if (!tensor.name.empty() || request.name.empty()) return spec.name == tensor.name;
  return request.tensors.size() == 1 ? spec.name == request.name : IsNameOfMember(spec.name, request.name, index);
}

}  // namespace

bool Matches(const Request& request, const Definition& definition) {
  const OpInfo& op = Info(request.op);
  if (definition.op != request.op || definition.set != request.set || definition.device != request.device ||
      definition.name != request.name || definition.ranks != request.ranks) {
    return false;
  }
  if (op.reduces && (definition.reduction != request.reduction || !SameBits(definition.prescale, request.prescale) ||
                     !SameBits(definition.postscale, request.postscale))) {
    return false;
  }
  if (op.rooted && definition.root != request.root) return false;
  if (definition.tensors.size() != request.tensors.size()) return false;
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    if (!Matches(request, i, definition.tensors[i])) return false;
  }
  return true;
}

Values ValuesOf(const Request& request, std::size_t members) {
  const OpInfo& op = Info(request.op);
  if (op.splits) {
    if (!request.splits.empty()) return request.splits;
    Values values;
    for (const auto& tensor : request.tensors) {
      values.insert(values.end(), members, tensor.shape[0] / static_cast<std::int64_t>(members));
    }
    return values;
  }
  Values values;
  if (op.ragged) {
    for (const auto& tensor : request.tensors) values.push_back(tensor.shape[0]);
  }
  return values;
}

}  // namespace ronde
