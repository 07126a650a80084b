#include "collectives/chunks.h"

#include <gtest/gtest.h>

#include <thread>

#include "transport/local/factory.h"

namespace ronde {
namespace {

constexpr std::size_t kChunk = 64, kSlots = 3;
constexpr std::uint64_t kFirst = (std::uint64_t{1} << 32) - 2;

class SlotRingTest : public testing::Test {
 protected:
  SlotRingTest() {
    auto hub = CreateLocalHub(3, SlotRing::RingBytes(kSlots, kChunk));
    for (int r = 0; r < 3; ++r) segments_.push_back(CreateLocalSegment(hub, r));
    ring_.emplace(*segments_[0], kChunk);
  }
  static auto Readers(std::vector<int> ranks) { return std::make_shared<const std::vector<int>>(std::move(ranks)); }
  Result Acquire(std::uint64_t chunk, std::vector<int> readers, double seconds = 0.02) {
    return ring_->Acquire(kFirst + chunk, Readers(std::move(readers)), After(seconds));
  }
  void Consume(int rank, std::uint64_t chunk) { segments_[rank]->Publish(Segment::kConsumed, kFirst + chunk + 1); }

  std::vector<std::unique_ptr<Segment>> segments_;
  std::optional<SlotRing> ring_;
};

TEST_F(SlotRingTest, UnusedSlotsAreFreeAndNeighboursDiffer) {
  EXPECT_EQ(ring_->slots(), kSlots);
  for (std::uint64_t c = 0; c < kSlots; ++c) {
    EXPECT_TRUE(Acquire(c, {0, 1, 2}).ok());
    EXPECT_NE(ring_->Slot(0, kFirst + c), ring_->Slot(0, kFirst + c + 1));
    EXPECT_EQ(ring_->Slot(1, kFirst + c), ring_->Slot(1, kFirst + c + kSlots));
  }
}

TEST_F(SlotRingTest, ReuseWaitsForEveryReaderOfThePreviousUseAndNamesTheLateOne) {
  ASSERT_TRUE(Acquire(0, {0, 1, 2}).ok());
  Consume(1, 0);
  Result late = Acquire(kSlots, {0, 1});  // the next operation does without rank 2
  EXPECT_EQ(late.code(), Code::kTimeout);
  EXPECT_NE(late.message().find("rank 2"), std::string::npos) << late.message();
  Consume(2, 0);
  EXPECT_TRUE(Acquire(kSlots, {0, 1}).ok());
  // Now rank 1 alone reads the slot.
  EXPECT_FALSE(Acquire(2 * kSlots, {0, 2}).ok());
  Consume(1, kSlots);
  EXPECT_TRUE(Acquire(2 * kSlots, {0, 2}).ok());
}

TEST_F(SlotRingTest, AnEarlierChunkOfAReaderIsNotEnough) {
  for (std::uint64_t c = 0; c < kSlots; ++c) ASSERT_TRUE(Acquire(c, {0, 1}).ok());
  Consume(1, 0);
  EXPECT_TRUE(Acquire(kSlots, {0, 1}).ok());
  EXPECT_FALSE(Acquire(kSlots + 1, {0, 1}).ok());
}

TEST_F(SlotRingTest, ItsOwnerIsNotWaitedFor) {
  ASSERT_TRUE(Acquire(0, {0}).ok());
  EXPECT_TRUE(Acquire(kSlots, {0}).ok());
}

TEST_F(SlotRingTest, AWaitEndsWhenTheReaderHasConsumed) {
  ASSERT_TRUE(Acquire(0, {0, 1}).ok());
  std::thread reader([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Consume(1, 0);
  });
  EXPECT_TRUE(Acquire(kSlots, {0, 1}, 20).ok());
  reader.join();
}

TEST(ChunksOf, IsAtLeastOneAndCountsTheLastPart) {
  EXPECT_EQ(ChunksOf(0, 64), 1u);
  EXPECT_EQ(ChunksOf(64, 64), 1u);
  EXPECT_EQ(ChunksOf(65, 64), 2u);
  EXPECT_EQ(ChunksOf(std::size_t{1} << 33, 64), std::uint64_t{1} << 27);
}

}  // namespace
}  // namespace ronde
