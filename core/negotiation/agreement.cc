#include "negotiation/agreement.h"

#include <algorithm>
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

// The fields that must agree, in the order in which a difference is reported. Each is compared and shown as text.
struct Field {
  const char* name;
  std::string (*show)(const Definition&);
};
constexpr Field kFields[] = {
    {"the operation", [](const Definition& d) { return std::string(Info(d.op).name); }},
    {"the number of tensors", [](const Definition& d) { return std::to_string(d.tensors.size()); }},
    {"the names of the tensors",
     [](const Definition& d) {
       std::string text;
       for (const auto& t : d.tensors) text += (text.empty() ? "" : ", ") + t.name;
       return text;
     }},
    {"dtype",
     [](const Definition& d) {
       std::string text;
       for (const auto& t : d.tensors) text += (text.empty() ? "" : ", ") + std::string(Info(t.dtype).name);
       return text;
     }},
    {"shape",
     [](const Definition& d) {
       std::string text;
       for (const auto& t : d.tensors) {
         std::string shape = ToString(t.shape);
         // The first dimension of a ragged operation is free.
         if (Info(d.op).ragged) shape = t.shape.size() > 1 ? "[any, " + shape.substr(4) : "[any]";
         text += (text.empty() ? "" : ", ") + shape;
       }
       return text;
     }},
    {"the reduction", [](const Definition& d) { return std::string(Info(d.reduction).name); }},
    {"the prescale factor", [](const Definition& d) { return Number(d.prescale); }},
    {"the postscale factor", [](const Definition& d) { return Number(d.postscale); }},
    {"the root rank", [](const Definition& d) { return std::to_string(d.root); }},
    {"the device", [](const Definition& d) { return d.device < 0 ? "host" : "device " + std::to_string(d.device); }},
    {"the ranks of the process set",
     [](const Definition& d) {
       std::string text;
       for (int r : d.ranks) text += (text.empty() ? "" : ", ") + std::to_string(r);
       return "[" + text + "]";
     }},
};
// Values of huge groups would drown the message.
constexpr std::size_t kMaxShown = 200;

}  // namespace

Result CheckAgreement(const std::vector<Opinion>& opinions) {
  bool equal = std::all_of(opinions.begin(), opinions.end(),
                           [&](const Opinion& o) { return *o.definition == *opinions.front().definition; });
  if (equal) return Ok();
  for (const Field& field : kFields) {
    std::map<std::string, std::vector<int>> ranks_by_value;
    for (const auto& opinion : opinions) {
      auto& ranks = ranks_by_value[field.show(*opinion.definition)];
      ranks.insert(ranks.end(), opinion.ranks.begin(), opinion.ranks.end());
    }
    if (ranks_by_value.size() < 2) continue;
    std::vector<std::pair<int, std::string>> shown;  // by lowest rank, so that the text is the same whatever came first
    for (auto& [value, ranks] : ranks_by_value) {
      std::string text = value.size() > kMaxShown ? value.substr(0, kMaxShown) + "..." : value;
      shown.emplace_back(*std::min_element(ranks.begin(), ranks.end()), text + " on " + DescribeRanks(ranks));
    }
    std::sort(shown.begin(), shown.end());
    const Opinion* first = &opinions.front();
    for (const auto& opinion : opinions) {
      if (*std::min_element(opinion.ranks.begin(), opinion.ranks.end()) == shown.front().first) first = &opinion;
    }
    std::string message = Describe(*first->definition) + ": ranks disagree about " + field.name + ": ";
    for (std::size_t i = 0; i < shown.size(); ++i) message += (i ? ", " : "") + shown[i].second;
    return Result(Code::kMismatch, message);
  }
  return Result(Code::kMismatch, Describe(*opinions.front().definition) + ": ranks disagree");
}

}  // namespace ronde
