#include "transport/shared_heap.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace ronde {
namespace {

constexpr std::size_t kPage = 4096, kPages = 16;

class SharedHeapTest : public testing::Test {
 protected:
  SharedHeapTest() : memory_(kPage * (kPages + 1)) {
    auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    base_ = memory_.data() + (kPage - address % kPage) % kPage;
    heap_.emplace(
        base_, kPage * kPages,
        [this](std::size_t offset, std::size_t bytes) {
          if (refuse_) return Result(Code::kTransport, "the host is full");
          for (std::size_t at = offset; at < offset + bytes; at += kPage) {
            EXPECT_TRUE(backed_.insert(at).second) << "page " << at / kPage << " is handed out twice";
          }
          return Ok();
        },
        [this](std::size_t offset, std::size_t bytes) {
          for (std::size_t at = offset; at < offset + bytes; at += kPage) EXPECT_EQ(backed_.erase(at), 1u);
        });
  }
  std::vector<std::byte> memory_;
  std::byte* base_;
  std::set<std::size_t> backed_;
  bool refuse_ = false;
  std::optional<SharedHeap> heap_;
};

TEST_F(SharedHeapTest, HandsOutEveryPageOnceAndTakesThemBackInAnyOrder) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte*> all;
    for (std::size_t i = 0; i < kPages; ++i) {
      auto made = heap_->Allocate(i % 2 ? 1 : kPage);
      ASSERT_TRUE(made.ok());
      all.push_back(made.value());
    }
    EXPECT_FALSE(heap_->Allocate(1).ok());
    EXPECT_EQ(backed_.size(), kPages);
    for (std::size_t i = 0; i < kPages; ++i) heap_->Free(all[(i * 7 + static_cast<std::size_t>(round)) % kPages]);
    EXPECT_TRUE(backed_.empty());
    auto whole = heap_->Allocate(kPage * kPages);  // the pages have grown together again
    ASSERT_TRUE(whole.ok());
    heap_->Free(whole.value());
  }
}

TEST_F(SharedHeapTest, FindsWhatLiesInIt) {
  EXPECT_EQ(heap_->Find(base_, kPage * kPages), 0u);
  EXPECT_EQ(heap_->Find(base_ + 100, 8), 100u);
  EXPECT_EQ(heap_->Find(base_ + kPage * kPages - 8, 8), kPage * kPages - 8);
  EXPECT_FALSE(heap_->Find(base_ + kPage * kPages - 8, 9));
  EXPECT_FALSE(heap_->Find(base_ - 1, 1));
  EXPECT_FALSE(heap_->Find(nullptr, 1));
  EXPECT_FALSE(heap_->Find(base_, ~std::size_t{0}));
}

TEST_F(SharedHeapTest, RefusalsNameTheReasonAndLoseNothing) {
  EXPECT_NE(heap_->Allocate(kPage * kPages + 1).error().message().find("RONDE_SHARED_BYTES"), std::string::npos);
  EXPECT_FALSE(heap_->Allocate(~std::size_t{0}).ok());
  refuse_ = true;
  EXPECT_NE(heap_->Allocate(1).error().message().find("the host is full"), std::string::npos);
  refuse_ = false;
  auto whole = heap_->Allocate(kPage * kPages);
  ASSERT_TRUE(whole.ok());
  heap_->Free(base_ + kPage);  // nothing that was handed out
  EXPECT_FALSE(heap_->Allocate(1).ok());
}

TEST_F(SharedHeapTest, NothingIsStillSomething) {
  auto one = heap_->Allocate(0), other = heap_->Allocate(0);
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_NE(one.value(), other.value());
}

TEST(SharedHeap, WhatIsAsLargeAsAHugePageBeginsWhereOneCan) {
  constexpr std::size_t kHuge = SharedHeap::kHugePage;
  std::vector<std::byte> memory(5 * kHuge);
  std::byte* const base = memory.data();
  SharedHeap heap(base, 5 * kHuge, nullptr, nullptr);
  auto small = heap.Allocate(kPage), large = heap.Allocate(kHuge + kPage), larger = heap.Allocate(2 * kHuge);
  ASSERT_TRUE(small.ok() && large.ok() && larger.ok());
  EXPECT_EQ(small.value(), base);
  EXPECT_EQ(large.value(), base + kHuge);
  EXPECT_EQ(larger.value(), base + 3 * kHuge);
  EXPECT_FALSE(heap.Allocate(kHuge).ok());
  auto skipped = heap.Allocate(kHuge - kPage);  // what alignment left free
  ASSERT_TRUE(skipped.ok());
  EXPECT_EQ(skipped.value(), base + kPage);
  for (std::byte* each : {large.value(), small.value(), larger.value(), skipped.value()}) heap.Free(each);
  EXPECT_TRUE(heap.Allocate(5 * kHuge).ok());
}

TEST(SharedHeap, ARefusalSaysWhatIsUsedOfWhatWasGiven) {
  SharedHeap heap(nullptr, kPage - 1, nullptr, nullptr);
  EXPECT_EQ(heap.Allocate(8).error().message(),
            "no 8 bytes of shared memory: the rank has 0 in all (RONDE_SHARED_BYTES is 4095, of which whole pages of "
            "4096 bytes are used)");
}

TEST(SharedHeap, WithoutRoomRefusesEverything) {
  SharedHeap heap(nullptr, 0, nullptr, nullptr);
  EXPECT_FALSE(heap.Allocate(0).ok());
  EXPECT_FALSE(heap.Find(&heap, 1));
}

}  // namespace
}  // namespace ronde
