#include "negotiation/agreement.h"

#include <algorithm>
#include <functional>
#include <map>
#include <sstream>

namespace ronde {

std::string Describe(const Definition& definition) {
  std::string text(Info(definition.op).name);
  if (!definition.name.empty()) return text + " '" + definition.name + "'";
  return Info(definition.op).tensors ? text + " (unnamed)" : text;
}

std::string DescribeRanks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end > i) text += (end == i + 1 ? ", " : "-") + std::to_string(ranks[end]);
    i = end + 1;
  }
  return text;
}

namespace {

std::string Number(double value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}

// The fields that must agree, in the order in which a difference is reported. Each is compared and shown as text; a
// field of tensors once for each, when ranks agree about how many there are.
struct Field {
  const char* name;
  bool of_tensors;
  std::string (*show)(const Definition&, std::size_t tensor);
};
constexpr Field kFields[] = {
    {"the operation", false, [](const Definition& d, std::size_t) { return std::string(Info(d.op).name); }},
    {"the number of tensors", false, [](const Definition& d, std::size_t) { return std::to_string(d.tensors.size()); }},
    {"the names of the tensors", true,
     [](const Definition& d, std::size_t t) { return "'" + d.tensors[t].name + "'"; }},
    {"dtype", true, [](const Definition& d, std::size_t t) { return std::string(Info(d.tensors[t].dtype).name); }},
    {"shape", true,
     [](const Definition& d, std::size_t t) {
       std::string shape = ToString(d.tensors[t].shape);
       // The first dimension of a ragged operation is free.
       if (Info(d.op).ragged) return d.tensors[t].shape.size() > 1 ? "[any, " + shape.substr(4) : "[any]";
       return shape;
     }},
    {"the reduction", false, [](const Definition& d, std::size_t) { return std::string(Info(d.reduction).name); }},
    {"the prescale factor", false, [](const Definition& d, std::size_t) { return Number(d.prescale); }},
    {"the postscale factor", false, [](const Definition& d, std::size_t) { return Number(d.postscale); }},
    {"the root rank", false, [](const Definition& d, std::size_t) { return std::to_string(d.root); }},
    {"the device", false,
     [](const Definition& d, std::size_t) { return d.device < 0 ? "host" : "device " + std::to_string(d.device); }},
    {"the ranks of the process set", false,
     [](const Definition& d, std::size_t) {
       std::string text;
       for (int r : d.ranks) text += (text.empty() ? "" : ", ") + std::to_string(r);
       return "[" + text + "]";
     }},
};
// Values of huge sets would drown the message.
constexpr std::size_t kMaxShown = 200;

// " float32 on rank 0; float64 on rank 1", by lowest rank so that the text is the same whatever came first. Empty: all
// say the same.
std::string Disagreement(const std::vector<Opinion>& opinions,
                         const std::function<std::string(const Definition&)>& show) {
  std::map<std::string, std::vector<int>> ranks_by_value;
  for (const auto& opinion : opinions) {
    auto& ranks = ranks_by_value[show(*opinion.definition)];
    ranks.insert(ranks.end(), opinion.ranks.begin(), opinion.ranks.end());
  }
  if (ranks_by_value.size() < 2) return {};
  std::vector<std::pair<int, std::string>> shown;
  for (const auto& [value, ranks] : ranks_by_value) {
    std::string text = value.size() > kMaxShown ? value.substr(0, kMaxShown) + "..." : value;
    shown.emplace_back(*std::min_element(ranks.begin(), ranks.end()), text + " on " + DescribeRanks(ranks));
  }
  std::sort(shown.begin(), shown.end());
  std::string text;
  for (const auto& [lowest, part] : shown) text += (text.empty() ? " " : "; ") + part;
  return text;
}

int Lowest(const Opinion& opinion) { return *std::min_element(opinion.ranks.begin(), opinion.ranks.end()); }

}  // namespace

Result CheckAgreement(const std::vector<Opinion>& opinions) {
  bool equal = std::all_of(opinions.begin(), opinions.end(), [&](const Opinion& o) {
    return o.definition == opinions.front().definition || *o.definition == *opinions.front().definition;
  });
  if (equal) return Ok();
  auto first = std::min_element(opinions.begin(), opinions.end(),
                                [](const Opinion& a, const Opinion& b) { return Lowest(a) < Lowest(b); });
  std::string message = Describe(*first->definition) + ": ranks disagree";
  const std::vector<TensorSpec>& tensors = first->definition->tensors;
  for (const Field& field : kFields) {
    for (std::size_t t = 0; t < (field.of_tensors ? tensors.size() : 1); ++t) {
      std::string text = Disagreement(opinions, [&](const Definition& d) { return field.show(d, t); });
      if (text.empty()) continue;
      message += std::string(" about ") + field.name;
      if (field.of_tensors && tensors.size() > 1) message += " (tensor '" + tensors[t].name + "')";
      return Result(Code::kMismatch, message + ":" + text);
    }
  }
  return Result(Code::kMismatch, message);
}

Result DisagreeAboutGroup(const std::string& tensor, const std::vector<Opinion>& opinions) {
  std::string text = Disagreement(opinions, [](const Definition& d) {
    return d.tensors.size() > 1 ? "in group '" + d.name + "'" : std::string("alone");
  });
  return Result(Code::kMismatch, "tensor '" + tensor + "': ranks disagree about its group:" + text);
}

}  // namespace ronde
