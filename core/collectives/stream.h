// Several pieces of memory seen as one run of bytes, so that fused tensors are packed and unpacked on the fly.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ronde {

// A piece may have no input or no output (null): a rank that joined, or a side that is not needed.
struct Piece {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::size_t bytes = 0;
};

class Stream {
 public:
  void Add(const void* input, void* output, std::size_t bytes) {
    if (bytes == 0) return;
    pieces_.push_back({static_cast<const std::byte*>(input), static_cast<std::byte*>(output), bytes});
    starts_.push_back(bytes_);
    bytes_ += bytes;
  }
  std::size_t bytes() const { return bytes_; }

  // Calls f(piece part, its offset from `begin`) for the parts of [begin, end), clipped to the stream.
  template <class F>
  void ForRange(std::size_t begin, std::size_t end, F&& f) const {
    end = std::min(end, bytes_);
    if (begin >= end) return;
    auto next = std::upper_bound(starts_.begin(), starts_.end(), begin);
    for (std::size_t i = static_cast<std::size_t>(next - starts_.begin()) - 1; i < pieces_.size(); ++i) {
      if (starts_[i] >= end) return;
      std::size_t from = std::max(begin, starts_[i]) - starts_[i];
      std::size_t to = std::min(end, starts_[i] + pieces_[i].bytes) - starts_[i];
      const Piece& whole = pieces_[i];
      f(Piece{whole.input ? whole.input + from : nullptr, whole.output ? whole.output + from : nullptr, to - from},
        starts_[i] + from - begin);
    }
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<std::size_t> starts_;
  std::size_t bytes_ = 0;
};

}  // namespace ronde
