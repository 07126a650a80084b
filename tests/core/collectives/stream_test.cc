#include "collectives/stream.h"

#include <gtest/gtest.h>

#include <vector>

namespace ronde {
namespace {

TEST(Stream, EveryRangeIsSeenOnceAndInOrder) {
  // Lengths 1, 2, 3, 5, 8 with empty tensors between; byte i of the stream lies at bytes[i].
  std::vector<std::byte> bytes(19), results(19);
  Stream stream;
  std::size_t start = 0;
  for (std::size_t length : {1, 0, 2, 3, 0, 5, 8, 0}) {
    stream.Add(bytes.data() + start, results.data() + start, length);
    start += length;
  }
  ASSERT_EQ(stream.bytes(), 19u);
  for (std::size_t begin = 0; begin <= 20; ++begin) {
    for (std::size_t end = 0; end <= 25; ++end) {
      std::size_t next = begin;
      stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
        ASSERT_GT(piece.bytes, 0u);
        ASSERT_EQ(piece.input, bytes.data() + next);
        ASSERT_EQ(piece.output, results.data() + next);
        ASSERT_EQ(offset, next - begin);
        next += piece.bytes;
      });
      std::size_t last = std::min<std::size_t>(end, 19);
      ASSERT_EQ(next, last > begin ? last : begin) << begin << " to " << end;
    }
  }
}

TEST(Stream, OnlyIsTheRangeWhenItLiesInOnePiece) {
  std::vector<std::byte> first(4), second(4);
  Stream stream;
  stream.Add(first.data(), nullptr, 4);
  stream.Add(second.data(), nullptr, 4);
  EXPECT_EQ(stream.Only(1, 4).input, first.data() + 1);
  EXPECT_EQ(stream.Only(1, 4).bytes, 3u);
  EXPECT_EQ(stream.Only(4, 100).input, second.data());
  EXPECT_EQ(stream.Only(4, 100).bytes, 4u);
  EXPECT_EQ(stream.Only(4, 8).output, nullptr);
  EXPECT_EQ(stream.Only(3, 5).bytes, 0u);
  EXPECT_EQ(stream.Only(2, 2).bytes, 0u);
  EXPECT_EQ(stream.Only(8, 9).bytes, 0u);
  EXPECT_EQ(Stream().Only(0, 1).bytes, 0u);
}

}  // namespace
}  // namespace ronde
