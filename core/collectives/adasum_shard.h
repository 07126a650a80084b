// Internal to Adasum: who owns what, and what an owner computes. Terms: see adasum.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "base/types.h"
#include "collectives/group.h"
#include "collectives/stream.h"
#include "math/adasum.h"
#include "math/math.h"

namespace ronde::adasum {

// Bytes that take one step.
bool IsSmall(std::size_t bytes, int members);

class Layout {
 public:
  struct Part {
    std::size_t tensor = 0;
    std::size_t offset = 0, bytes = 0;  // within the tensor
    std::size_t start = 0;              // within the shard
  };

  Layout(const std::vector<Piece>& tensors, std::size_t element, int members);

  static constexpr std::size_t kWhole = ~std::size_t{0};
  // Of a split tensor its number among those, else kWhole.
  std::size_t split(std::size_t tensor) const { return split_[tensor]; }
  std::size_t splits() const { return splits_; }
  const std::vector<Part>& shard(int member) const { return shards_[member]; }
  std::size_t shard_bytes(int member) const { return bytes_[member]; }
  std::size_t longest() const { return *std::max_element(bytes_.begin(), bytes_.end()); }

 private:
  void Give(int member, std::size_t tensor, std::size_t offset, std::size_t bytes);

  std::vector<std::size_t> split_;  // by tensor
  std::size_t splits_ = 0;
  std::vector<std::vector<Part>> shards_;  // by member
  std::vector<std::size_t> bytes_;         // by member
};

// A member's shard of this rank's tensors, as a stream.
Stream ShardStream(const Layout& layout, const std::vector<Piece>& tensors, int member);

// The work on the shard of the rank itself. Pass 1 takes it from its begin to its end.
class Owner {
 public:
  // Borrows all of them.
  Owner(const Group& group, const math::ReduceSpec& spec, const std::vector<Piece>& tensors, const Layout& layout);

  // Pass 1, bytes [begin, end) of the shard. at(m): where member m's data for `begin` lies; not asked of the own.
  template <class At>
  void Measure(std::size_t begin, std::size_t end, At&& at) {
    ForParts(begin, end, [&](const Layout::Part& part, std::size_t from, std::size_t to) {
      FindSources(part, from, begin, at);
      Add(part, to - from, to == part.start + part.bytes);
    });
  }
  std::size_t vectors() const { return vectors_; }  // members that contribute
  // What this shard adds to the matrices of the split tensors. Before Solve these are to be added up over all members.
  std::span<double> grams() { return grams_; }
  void Solve();
  // Pass 2: the results of [begin, end), into the own outputs and, unless null, to `also`, which stands for `begin`.
  template <class At>
  void Combine(std::size_t begin, std::size_t end, At&& at, std::byte* also) {
    ForParts(begin, end, [&](const Layout::Part& part, std::size_t from, std::size_t to) {
      FindSources(part, from, begin, at);
      std::byte* out = tensors_[part.tensor].output;
      if (out != nullptr) out += part.offset + (from - part.start);
      Write(part, out, also ? also + (from - begin) : nullptr, to - from);
    });
  }

 private:
  // f(part, from, to): the piece [from, to) of the shard lies in one part.
  template <class F>
  void ForParts(std::size_t begin, std::size_t end, F&& f) const {
    auto part = std::upper_bound(shard_.begin(), shard_.end(), begin,
                                 [](std::size_t at, const Layout::Part& p) { return at < p.start + p.bytes; });
    for (; part != shard_.end() && part->start < end; ++part) {
      f(*part, std::max(begin, part->start), std::min(end, part->start + part->bytes));
    }
  }
  template <class At>
  void FindSources(const Layout::Part& part, std::size_t from, std::size_t begin, At& at) {
    sources_.clear();
    for (int m = 0; m < group_.size(); ++m) {
      if (!group_.Contributes(m)) continue;
      sources_.push_back(m == group_.me ? tensors_[part.tensor].input + part.offset + (from - part.start)
                                        : at(m) + (from - begin));
    }
  }
  void Add(const Layout::Part& part, std::size_t bytes, bool ends);
  void Write(const Layout::Part& part, std::byte* out, std::byte* out2, std::size_t bytes);
  std::span<double> WeightsOf(std::size_t tensor);

  const Group& group_;
  const math::ReduceSpec& spec_;
  const std::vector<Piece>& tensors_;
  const Layout& layout_;
  const std::vector<Layout::Part>& shard_;
  std::vector<bool> present_;  // by member
  std::size_t vectors_ = 0;
  math::GramSum sum_;
  std::vector<double> grams_;    // of the split tensors
  std::vector<double> weights_;  // by tensor, as far as this rank has a part of it
  std::vector<const void*> sources_;
};

// All of it at once: data[m] is where member m's tensors lie, one after the other (null for one that joined).
void CombineAll(const Group& group, const math::ReduceSpec& spec, const std::vector<Piece>& tensors,
                const std::vector<const std::byte*>& data);

}  // namespace ronde::adasum
