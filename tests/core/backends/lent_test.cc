// Memory out of the ranks' heaps is used where it lies: results are those of packed memory, whatever part of the ranks
// and tensors is lent, nobody writes beside it, and it is its owner's again when its operation has ended.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "backends/ranks.h"

namespace ronde::testing {
namespace {

constexpr std::size_t kHeap = 8 << 20;
constexpr std::size_t kLargeChunk = 64 << 10;
constexpr std::uint64_t kFirstChunk = (std::uint64_t{1} << 32) - 3;

// Sums of four are exact.
float Number(int rank, std::size_t tensor, std::size_t i) {
  return static_cast<float>((i * 31 + tensor * 7 + static_cast<std::size_t>(rank) * 1009) % 10007);
}

class LentTest : public ::testing::TestWithParam<Carrier> {
 protected:
  void Make(int size, std::size_t slots = 5, double leave_seconds = 20) {
    RankConfig setup;
    setup.chunk_bytes = kLargeChunk;
    setup.ring_bytes = SlotRing::RingBytes(slots, kLargeChunk);
    setup.heap_bytes = kHeap;
    setup.leave_seconds = leave_seconds;
    ranks_ = MakeRanks(GetParam(), size, setup);
  }
  // Floats of the rank's heap, with a guard on both sides, or of its own memory.
  float* Floats(int rank, std::size_t count, bool lent) {
    const std::size_t bytes = (count + 2 * kGuard) * sizeof(float);
    float* all = nullptr;
    if (lent) {
      auto made = ranks_[rank].segment->heap()->Allocate(bytes);
      EXPECT_TRUE(made.ok()) << made.error().message();
      all = reinterpret_cast<float*>(made.value());
    } else {
      owned_.emplace_back(new float[count + 2 * kGuard]);
      all = owned_.back().get();
    }
    for (std::size_t i = 0; i < kGuard; ++i) all[i] = all[kGuard + count + i] = -1;
    guarded_.push_back({all, count});
    return all + kGuard;
  }
  void ExpectGuards() const {
    for (const auto& [all, count] : guarded_) {
      for (std::size_t i = 0; i < kGuard; ++i) {
        ASSERT_EQ(all[i], -1);
        ASSERT_EQ(all[kGuard + count + i], -1);
      }
    }
  }
  template <class MakeOperation>
  std::vector<Result> Run(MakeOperation make) {
    std::vector<Result> results(ranks_.size());
    std::vector<std::thread> threads;
    std::vector<FusedOperation> operations;
    for (std::size_t r = 0; r < ranks_.size(); ++r) operations.push_back(make(static_cast<int>(r)));
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      operations[r].first_chunk = next_chunk_;
      threads.emplace_back([&, r] { results[r] = RunToEnd(*ranks_[r].backend, operations[r]); });
    }
    for (auto& thread : threads) thread.join();
    next_chunk_ += ranks_[0].backend->Chunks(operations[0]);
    return results;
  }

  static constexpr std::size_t kGuard = 16;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<float[]>> owned_;
  std::vector<std::pair<float*, std::size_t>> guarded_;
  std::uint64_t next_chunk_ = kFirstChunk;
};
INSTANTIATE_TEST_SUITE_P(All, LentTest, ::testing::Values(Carrier::kSegment, Carrier::kShm));

// Which rank lends which tensor; also more tensors than a place has extents.
TEST_P(LentTest, AllreduceIsRightWhoeverLends) {
  const std::vector<std::size_t> counts = {1, 40000, 5, 300, 300001, 17};
  const std::vector<std::size_t> many(60, 3000);
  for (int size : {2, 3, 4}) {
    Make(size, size == 3 ? 5 : 13);  // with many slots, chunks that all lend are published several at once
    for (int pattern = 0; pattern < 5; ++pattern) {
      const auto& sizes = pattern == 4 ? many : counts;
      auto lent = [&](int r, std::size_t t) {
        switch (pattern) {
          case 0: return false;
          case 1: return r == 0;
          case 2: return r != 0;
          case 3: return (t + static_cast<std::size_t>(r)) % 2 == 0;
          default: return true;
        }
      };
      std::vector<std::vector<float*>> data(static_cast<std::size_t>(size));
      auto results = Run([&](int r) {
        FusedOperation op = OperationOf(Op::kAllreduce, Everyone(size));
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          float* tensor = Floats(r, sizes[t], lent(r, t));
          for (std::size_t i = 0; i < sizes[t]; ++i) tensor[i] = Number(r, t, i);
          data[r].push_back(tensor);
          op.tensors.push_back({tensor, tensor, {static_cast<std::int64_t>(sizes[t])}, {}});
        }
        return op;
      });
      for (int r = 0; r < size; ++r) {
        ASSERT_TRUE(results[r].ok()) << results[r].message();
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          for (std::size_t i = 0; i < sizes[t]; ++i) {
            float expected = 0;
            for (int m = 0; m < size; ++m) expected += Number(m, t, i);
            ASSERT_EQ(data[r][t][i], expected)
                << size << " ranks, pattern " << pattern << ", rank " << r << ", tensor " << t << ", index " << i;
          }
        }
      }
      ExpectGuards();
      for (int r = 0; r < size; ++r) {
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          if (!lent(r, t)) continue;
          ranks_[r].segment->heap()->Free(reinterpret_cast<std::byte*>(data[r][t] - kGuard));
        }
      }
      guarded_.clear();
    }
  }
}

TEST_P(LentTest, AnOutputElsewhereLeavesTheLentInputAlone) {
  constexpr std::size_t kCount = 100000;
  Make(2);
  std::vector<float*> in, out;
  auto results = Run([&](int r) {
    in.push_back(Floats(r, kCount, true));
    out.push_back(Floats(r, kCount, r == 1));
    for (std::size_t i = 0; i < kCount; ++i) in.back()[i] = Number(r, 0, i);
    FusedOperation op = OperationOf(Op::kAllreduce, Everyone(2));
    op.tensors.push_back({in.back(), out.back(), {kCount}, {}});
    return op;
  });
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(results[r].ok()) << results[r].message();
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(in[r][i], Number(r, 0, i));
      ASSERT_EQ(out[r][i], Number(0, 0, i) + Number(1, 0, i));
    }
  }
  ExpectGuards();
}

TEST_P(LentTest, AJoinedRankNeitherBringsNorTakes) {
  constexpr std::size_t kCount = 60000;
  Make(3);
  std::vector<float*> data(3);
  auto results = Run([&](int r) {
    FusedOperation op = OperationOf(Op::kAllreduce, Everyone(3));
    op.joined[1] = true;
    if (r == 1) {
      op.tensors.push_back({nullptr, nullptr, {kCount}, {}});
      return op;
    }
    data[r] = Floats(r, kCount, true);
    for (std::size_t i = 0; i < kCount; ++i) data[r][i] = Number(r, 0, i);
    op.tensors.push_back({data[r], data[r], {kCount}, {}});
    return op;
  });
  for (int r : {0, 2}) {
    ASSERT_TRUE(results[r].ok()) << results[r].message();
    for (std::size_t i = 0; i < kCount; ++i) ASSERT_EQ(data[r][i], Number(0, 0, i) + Number(2, 0, i));
  }
}

TEST_P(LentTest, BroadcastAndAllgatherReadWhereTheDataLies) {
  constexpr std::size_t kCount = 90000;
  Make(3);
  std::vector<float*> data, out;
  auto broadcast = Run([&](int r) {
    data.push_back(Floats(r, kCount, r != 2));
    for (std::size_t i = 0; i < kCount; ++i) data[r][i] = Number(r, 0, i);
    FusedOperation op = OperationOf(Op::kBroadcast, Everyone(3));
    op.root = 1;
    op.tensors.push_back({data[r], data[r], {kCount}, {}});
    return op;
  });
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(broadcast[r].ok()) << broadcast[r].message();
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(data[r][i], Number(1, 0, i));
      data[r][i] = Number(r, 1, i);
    }
  }
  auto rows = [](int r) { return static_cast<std::int64_t>(kCount) / (r + 1); };
  auto allgather = Run([&](int r) {
    out.push_back(Floats(r, static_cast<std::size_t>(rows(0) + rows(1) + rows(2)), r == 0));
    FusedOperation op = OperationOf(Op::kAllgather, Everyone(3));
    op.tensors.push_back({data[r], out[r], {rows(r)}, {rows(0), rows(1), rows(2)}});
    return op;
  });
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(allgather[r].ok()) << allgather[r].message();
    std::size_t at = 0;
    for (int m = 0; m < 3; ++m) {
      for (std::int64_t i = 0; i < rows(m); ++i) {
        ASSERT_EQ(out[r][at++], Number(m, 1, static_cast<std::size_t>(i)));
      }
    }
  }
  ExpectGuards();
}

// A rank whose operation failed gets its memory back only when its neighbours have left; a neighbour that never does
// (stopped) holds it up for a limited time.
TEST_P(LentTest, AFailureGivesMemoryBackWhenTheNeighboursHaveLeft) {
  constexpr std::size_t kCount = 100000;
  Make(2);
  auto make = [&](int r) {
    float* tensor = Floats(r, kCount, true);
    FusedOperation op = OperationOf(Op::kAllreduce, Everyone(2));
    op.first_chunk = kFirstChunk;
    op.tensors.push_back({tensor, tensor, {kCount}, {}});
    return op;
  };
  FusedOperation operation = make(0);
  std::atomic<bool> ended{false};
  Result result;
  std::thread runner([&] {
    result = RunToEnd(*ranks_[0].backend, operation);
    ended = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ranks_[0].backend->Abort(Result(Code::kPeerLost, "enough"));
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  EXPECT_FALSE(ended);  // rank 1 may still be at it
  ranks_[1].backend->Abort(Result(Code::kPeerLost, "enough"));
  const TimePoint start = Now();
  runner.join();
  EXPECT_EQ(result.message(), "enough");
  EXPECT_LT(Seconds(Now() - start), 10);  // not the limit of 20 s
}

TEST_P(LentTest, ANeighbourThatNeverLeavesIsNotWaitedForForLong) {
  constexpr std::size_t kCount = 100000;
  Make(2, 5, /*leave_seconds=*/0.2);
  float* tensor = Floats(0, kCount, true);
  FusedOperation op = OperationOf(Op::kAllreduce, Everyone(2));
  op.tensors.push_back({tensor, tensor, {kCount}, {}});
  std::thread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks_[0].backend->Abort(Result(Code::kPeerLost, "enough"));
  });
  const TimePoint start = Now();
  EXPECT_EQ(RunToEnd(*ranks_[0].backend, op).message(), "enough");
  EXPECT_LT(Seconds(Now() - start), 15);
  aborter.join();
}

}  // namespace
}  // namespace ronde::testing
