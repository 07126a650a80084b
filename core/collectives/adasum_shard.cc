#include "collectives/adasum_shard.h"

namespace ronde::adasum {
namespace {

// A matrix is exchanged for each split tensor only, so with many members it must be worth it.
constexpr std::size_t kWholeElements = 4096;
// Parts begin at multiples of this.
constexpr std::size_t kBorderElements = 16;
// In one step every rank reads and computes everything.
constexpr std::size_t kSmallBytes = 131072;

std::vector<bool> Present(const Group& group) {
  std::vector<bool> present(group.size());
  for (int m = 0; m < group.size(); ++m) present[m] = group.Contributes(m);
  return present;
}

std::size_t Count(const std::vector<bool>& present) {
  return static_cast<std::size_t>(std::count(present.begin(), present.end(), true));
}

// The scales are one factor of the result, as Adasum(s a, s b) = s Adasum(a, b).
void FindWeights(const std::vector<bool>& present, const math::ReduceSpec& spec, const double* gram,
                 std::span<double> weights) {
  math::AdasumWeights(present, gram, weights.data());
  for (double& weight : weights) weight *= spec.prescale * spec.postscale;
}

}  // namespace

bool IsSmall(std::size_t bytes, int members) { return bytes <= kSmallBytes / static_cast<std::size_t>(members); }

Layout::Layout(const std::vector<Piece>& tensors, std::size_t element, int members)
    : split_(tensors.size(), kWhole), shards_(members), bytes_(members) {
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::size_t elements = tensors[t].bytes / element;
    if (elements < kWholeElements) {
      auto least = std::min_element(bytes_.begin(), bytes_.end());
      Give(static_cast<int>(least - bytes_.begin()), t, 0, tensors[t].bytes);
      continue;
    }
    split_[t] = splits_++;
    const auto count = static_cast<std::size_t>(members);
    auto border = [&](std::size_t m) {  // without overflow
      if (m == count) return elements;
      return (elements / count * m + elements % count * m / count) / kBorderElements * kBorderElements;
    };
    for (std::size_t m = 0; m < count; ++m) {
      Give(static_cast<int>(m), t, border(m) * element, (border(m + 1) - border(m)) * element);
    }
  }
}

void Layout::Give(int member, std::size_t tensor, std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  shards_[member].push_back({tensor, offset, bytes, bytes_[member]});
  bytes_[member] += bytes;
}

Stream ShardStream(const Layout& layout, const std::vector<Piece>& tensors, int member) {
  Stream stream;
  for (const auto& part : layout.shard(member)) {
    const Piece& t = tensors[part.tensor];
    stream.Add(t.input ? t.input + part.offset : nullptr, t.output ? t.output + part.offset : nullptr, part.bytes);
  }
  return stream;
}

Owner::Owner(const Group& group, const math::ReduceSpec& spec, const std::vector<Piece>& tensors, const Layout& layout)
    : group_(group),
      spec_(spec),
      tensors_(tensors),
      layout_(layout),
      shard_(layout.shard(group.me)),
      present_(Present(group)),
      vectors_(Count(present_)),
      sum_(spec.dtype, vectors_),
      grams_(layout.splits() * math::GramSize(vectors_)),
      weights_(tensors.size() * vectors_) {}

std::span<double> Owner::WeightsOf(std::size_t tensor) { return {weights_.data() + tensor * vectors_, vectors_}; }

void Owner::Add(const Layout::Part& part, std::size_t bytes, bool ends) {
  sum_.Add(sources_, bytes / Info(spec_.dtype).size);
  if (!ends) return;
  const std::size_t size = math::GramSize(vectors_), split = layout_.split(part.tensor);
  if (split != Layout::kWhole) return sum_.Finish(grams_.data() + split * size);
  std::vector<double> gram(size);
  sum_.Finish(gram.data());
  FindWeights(present_, spec_, gram.data(), WeightsOf(part.tensor));
}

void Owner::Solve() {
  for (const auto& part : shard_) {
    const std::size_t split = layout_.split(part.tensor);
    if (split == Layout::kWhole) continue;
    FindWeights(present_, spec_, grams_.data() + split * math::GramSize(vectors_), WeightsOf(part.tensor));
  }
}

void Owner::Write(const Layout::Part& part, std::byte* out, std::byte* out2, std::size_t bytes) {
  if (out == nullptr) std::swap(out, out2);  // joined: the result is only for the others
  if (out == nullptr) return;
  math::WeightedSum(spec_.dtype, sources_, WeightsOf(part.tensor), out, out2, bytes / Info(spec_.dtype).size);
}

void CombineAll(const Group& group, const math::ReduceSpec& spec, const std::vector<Piece>& tensors,
                const std::vector<const std::byte*>& data) {
  const std::size_t element = Info(spec.dtype).size;
  const std::vector<bool> present = Present(group);
  const std::size_t vectors = Count(present), size = math::GramSize(vectors);
  const Layout layout(tensors, element, group.size());
  std::vector<std::size_t> starts(tensors.size());
  for (std::size_t t = 1; t < tensors.size(); ++t) starts[t] = starts[t - 1] + tensors[t - 1].bytes;

  std::vector<const void*> sources(vectors);
  auto find_sources = [&](std::size_t tensor, std::size_t offset) {
    std::size_t v = 0;
    for (std::size_t m = 0; m < data.size(); ++m) {
      if (present[m]) sources[v++] = data[m] + starts[tensor] + offset;
    }
  };
  math::GramSum sum(spec.dtype, vectors);
  std::vector<double> part_gram(size), grams(tensors.size() * size), weights(vectors);
  for (int m = 0; m < group.size(); ++m) {
    for (const auto& part : layout.shard(m)) {
      find_sources(part.tensor, part.offset);
      sum.Add(sources, part.bytes / element);
      sum.Finish(part_gram.data());
      for (std::size_t p = 0; p < size; ++p) grams[part.tensor * size + p] += part_gram[p];
    }
  }
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].output == nullptr) continue;
    FindWeights(present, spec, grams.data() + t * size, weights);
    find_sources(t, 0);
    math::WeightedSum(spec.dtype, sources, weights, tensors[t].output, nullptr, tensors[t].bytes / element);
  }
}

}  // namespace ronde::adasum
