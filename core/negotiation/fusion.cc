#include "negotiation/fusion.h"

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "wire/codec.h"

namespace ronde {
namespace {

// What must be equal for two tensors to share a fused operation, as bytes of the writer's.
std::string_view Signature(Writer& writer, const AgreedEntry& entry, DType dtype, std::size_t index,
                           bool keep_groups_apart) {
  const Definition& d = *entry.definition;
  writer.Clear();
  writer.Byte(static_cast<std::uint8_t>(d.op));
  writer.Byte(static_cast<std::uint8_t>(dtype));
  writer.Byte(static_cast<std::uint8_t>(d.reduction));
  writer.Double(d.prescale);
  writer.Double(d.postscale);
  writer.Signed(d.root);
  writer.Signed(d.device);
  writer.Signeds(entry.joined);
  // Groups stay apart from everything else; single tensors share the number 0.
  writer.Unsigned(keep_groups_apart && d.tensors.size() > 1 ? index + 1 : 0);
  return writer.bytes();
}

std::int64_t Bytes(const AgreedEntry& entry, std::size_t index) {
  const TensorSpec& tensor = entry.definition->tensors[index];
  std::int64_t rows = 1;
  if (Info(entry.definition->op).ragged) {
    rows = 0;
    for (const auto& values : entry.values) {
      if (index < values.size() && values[index] > rows) rows = values[index];
    }
    return rows * RowElements(tensor.shape) * static_cast<std::int64_t>(Info(tensor.dtype).size);
  }
  return NumElements(tensor.shape) * static_cast<std::int64_t>(Info(tensor.dtype).size);
}

}  // namespace

Plan PlanFusion(const Batch& batch, const FusionLimits& limits, std::size_t /*num_members*/) {
  Plan plan;
  struct Open {
    std::size_t list;
    std::int64_t bytes;
  };
  std::map<std::string, Open, std::less<>> open;  // lists that may still grow, by signature
  Writer writer;
  writer.Reserve(64);
  for (std::size_t e = 0; e < batch.entries.size(); ++e) {
    const AgreedEntry& entry = batch.entries[e];
    if (!entry.error.ok()) continue;
    for (std::size_t t = 0; t < entry.definition->tensors.size(); ++t) {
      PlannedTensor planned{e, t};
      if (limits.threshold <= 0 || !Info(entry.definition->op).fusable) {
        plan.push_back({planned});
        continue;
      }
      std::int64_t bytes = Bytes(entry, t);
      std::string_view signature =
          Signature(writer, entry, entry.definition->tensors[t].dtype, e, limits.keep_groups_apart);
      auto found = open.find(signature);
      if (found != open.end() && found->second.bytes + bytes <= limits.threshold) {
        plan[found->second.list].push_back(planned);
        found->second.bytes += bytes;
      } else {
        open.insert_or_assign(std::string(signature), Open{plan.size(), bytes});
        plan.push_back({planned});
      }
    }
  }
  return plan;
}

}  // namespace ronde
