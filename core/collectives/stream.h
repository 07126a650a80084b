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

  // [begin, end), clipped to the stream, as one piece if it lies in one; else a piece of no bytes.
  Piece Only(std::size_t begin, std::size_t end) const {
    end = std::min(end, bytes_);
    if (begin >= end) return {};
    std::size_t i = IndexAt(begin);
    if (end > starts_[i] + pieces_[i].bytes) return {};
    return Part(i, begin - starts_[i], end - starts_[i]);
  }

  // Calls f(piece part, its offset from `begin`) for the parts of [begin, end), clipped to the stream.
  template <class F>
  void ForRange(std::size_t begin, std::size_t end, F&& f) const {
    end = std::min(end, bytes_);
    if (begin >= end) return;
    for (std::size_t i = IndexAt(begin); i < pieces_.size() && starts_[i] < end; ++i) {
      std::size_t from = std::max(begin, starts_[i]);
      std::size_t to = std::min(end, starts_[i] + pieces_[i].bytes);
      f(Part(i, from - starts_[i], to - starts_[i]), from - begin);
    }
  }

 private:
  // The piece that holds the byte at `offset` (below bytes_).
  std::size_t IndexAt(std::size_t offset) const {
    auto next = std::upper_bound(starts_.begin(), starts_.end(), offset);
    return static_cast<std::size_t>(next - starts_.begin()) - 1;
  }
  Piece Part(std::size_t i, std::size_t from, std::size_t to) const {
    const Piece& whole = pieces_[i];
    return {whole.input ? whole.input + from : nullptr, whole.output ? whole.output + from : nullptr, to - from};
  }

  std::vector<Piece> pieces_;
  std::vector<std::size_t> starts_;
  std::size_t bytes_ = 0;
};

}  // namespace ronde
