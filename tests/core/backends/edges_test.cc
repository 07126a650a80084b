// What is easily got wrong at the borders of the host backend: long operations, memory in place and at odd addresses,
// one order of addition everywhere, threads that flush denormals, rings that are too small, ranks that do not come.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "backends/ranks.h"
#include "math/math.h"

namespace ronde::testing {
namespace {

// Runs make(rank) on all ranks; the results by rank.
template <class Make>
std::vector<Result> RunAll(std::vector<Rank>& ranks, Make make, std::uint64_t first_chunk = 0, int first_rank = 0) {
  std::vector<Result> results(ranks.size());
  std::vector<std::thread> threads;
  for (int r = first_rank; r < static_cast<int>(ranks.size()); ++r) {
    threads.emplace_back([&, r] {
      FusedOperation operation = make(r);
      operation.first_chunk = first_chunk;
      results[r] = RunToEnd(*ranks[r].backend, operation);
    });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

class EdgesTest : public ::testing::TestWithParam<Carrier> {};
INSTANTIATE_TEST_SUITE_P(All, EdgesTest,
                         ::testing::Values(Carrier::kSegment, Carrier::kShm, Carrier::kTransport, Carrier::kTcp));

// Element i of rank r's tensor t; sums of four are exact.
std::int32_t Number(int rank, std::size_t tensor, std::size_t i) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(i) * 2654435761u ^ (rank * 3 + tensor) * 40503u) >> 4);
}

// Several megabytes, so that many blocks, chunks and rounds of the ring follow each other, in tensors whose borders are
// nowhere near those of blocks; at addresses that are odd.
TEST_P(EdgesTest, LongFusedListsOfEveryOperationAreRight) {
  constexpr int kRanks = 4;  // so that a broadcast is passed on
  auto ranks = MakeRanks(GetParam(), kRanks, {.ring_bytes = SlotRing::RingBytes(8, 16384), .chunk_bytes = 16384});
  const auto members = Everyone(kRanks);
  std::uint64_t first_chunk = 0;
  for (Op kind : {Op::kAllreduce, Op::kBroadcast, Op::kAllgather, Op::kReducescatter, Op::kAlltoall}) {
    std::vector<std::int64_t> rows = {1, 200003, 0, 70001, 16, 131072};
    if (kind == Op::kAlltoall) rows = {300000};
    struct Memory {
      std::vector<std::byte> in, out;
    };
    std::vector<std::vector<Memory>> memory(kRanks, std::vector<Memory>(rows.size()));
    // Rows that rank s has for d: uneven, the sum over d is rows[0].
    auto split = [&](int s, int d) { return d < kRanks - 1 ? (s + 1) * 20000 - d : rows[0] - (s + 1) * 60000 + 3; };
    auto own = [&](std::size_t t, int r) { return kind == Op::kAllgather ? rows[t] / (r + 1) : rows[t]; };
    auto share = [&](std::size_t t, int r) { return rows[t] / kRanks + (r < rows[t] % kRanks ? 1 : 0); };
    auto results = RunAll(
        ranks,
        [&](int r) {
          FusedOperation op = OperationOf(kind, members);
          op.dtype = DType::kInt32;
          op.root = 1;
          for (std::size_t t = 0; t < rows.size(); ++t) {
            FusedTensor tensor{nullptr, nullptr, {own(t, r)}, {}};
            std::int64_t result = rows[t];
            if (kind == Op::kAllgather) {
              result = 0;
              for (int m : members) tensor.rows.push_back(own(t, m)), result += own(t, m);
            } else if (kind == Op::kAlltoall) {
              result = 0;
              for (int s : members) result += split(s, r);
              for (int s : members) {
                for (int d : members) tensor.rows.push_back(split(s, d));
              }
            } else if (kind == Op::kReducescatter) {
              result = share(t, r);
            }
            Memory& m = memory[r][t];
            m.in.resize(static_cast<std::size_t>(own(t, r)) * 4 + 1);
            m.out.resize(static_cast<std::size_t>(result) * 4 + 3);
            for (std::int64_t i = 0; i < own(t, r); ++i) {
              std::int32_t v = Number(r, t, static_cast<std::size_t>(i));
              std::memcpy(m.in.data() + 1 + i * 4, &v, 4);
            }
            tensor.input = m.in.data() + 1;
            tensor.output = m.out.data() + 3;
            op.tensors.push_back(tensor);
          }
          return op;
        },
        first_chunk);
    first_chunk += 10000;
    for (int r : members) {
      ASSERT_TRUE(results[r].ok()) << results[r].message();
      for (std::size_t t = 0; t < rows.size(); ++t) {
        std::vector<std::int32_t> expected;
        auto sum = [&](std::size_t i) {
          std::int32_t all = 0;
          for (int m : members) all += Number(m, t, i);
          return all;
        };
        if (kind == Op::kAllreduce || kind == Op::kBroadcast) {
          for (std::int64_t i = 0; i < rows[t]; ++i) {
            expected.push_back(kind == Op::kBroadcast ? Number(1, t, i) : sum(i));
          }
        } else if (kind == Op::kAllgather) {
          for (int m : members) {
            for (std::int64_t i = 0; i < own(t, m); ++i) expected.push_back(Number(m, t, i));
          }
        } else if (kind == Op::kReducescatter) {
          std::int64_t begin = 0;
          for (int m = 0; m < r; ++m) begin += share(t, m);
          for (std::int64_t i = 0; i < share(t, r); ++i) expected.push_back(sum(begin + i));
        } else {
          for (int s : members) {
            std::int64_t begin = 0;
            for (int d = 0; d < r; ++d) begin += split(s, d);
            for (std::int64_t i = 0; i < split(s, r); ++i) expected.push_back(Number(s, t, begin + i));
          }
        }
        ASSERT_EQ(memory[r][t].out.size(), expected.size() * 4 + 3);
        ASSERT_TRUE(expected.empty() ||
                    std::memcmp(memory[r][t].out.data() + 3, expected.data(), expected.size() * 4) == 0)
            << Info(kind).name << " rank " << r << " tensor " << t;
      }
    }
  }
}

// Floats of many sizes, whose sum depends on the order of addition: it is that of the members, whatever the carrier,
// the rank and the fusion.
TEST_P(EdgesTest, SumsAreAddedInTheOrderOfTheMembersFusedOrNot) {
  constexpr int kRanks = 4;
  constexpr std::size_t kCounts[] = {5, 300, 40000};
  auto ranks = MakeRanks(GetParam(), kRanks);
  std::vector<std::vector<std::vector<float>>> in(kRanks);
  std::mt19937 random(11);
  std::uniform_real_distribution<float> exponent(-20, 20), mantissa(-1, 1);
  for (auto& rank : in) {
    for (std::size_t count : kCounts) {
      rank.emplace_back();
      for (std::size_t i = 0; i < count; ++i)
        rank.back().push_back(std::ldexp(mantissa(random), int(exponent(random))));
    }
  }
  std::uint64_t first_chunk = 0;
  for (bool fused : {false, true}) {
    auto out = in;
    std::vector<std::vector<std::size_t>> lists =
        fused ? std::vector<std::vector<std::size_t>>{{0, 1, 2}} : std::vector<std::vector<std::size_t>>{{2}, {1}, {0}};
    for (const auto& list : lists) {
      auto results = RunAll(
          ranks,
          [&](int r) {
            FusedOperation op = OperationOf(Op::kAllreduce, Everyone(kRanks));
            for (std::size_t t : list) {
              op.tensors.push_back({in[r][t].data(), out[r][t].data(), {std::int64_t(kCounts[t])}, {}});
            }
            return op;
          },
          first_chunk);
      first_chunk += 1000;
      for (auto& result : results) ASSERT_TRUE(result.ok()) << result.message();
    }
    for (std::size_t t = 0; t < std::size(kCounts); ++t) {
      std::vector<float> expected = in[0][t];
      for (int r = 1; r < kRanks; ++r) {
        for (std::size_t i = 0; i < kCounts[t]; ++i) expected[i] += in[r][t][i];
      }
      for (int r = 0; r < kRanks; ++r) {
        ASSERT_EQ(std::memcmp(out[r][t].data(), expected.data(), expected.size() * 4), 0)
            << "rank " << r << " tensor " << t << (fused ? " fused" : "");
      }
    }
  }
}

TEST_P(EdgesTest, ReducescatterOfEveryTypeIsRight) {
  constexpr int kRanks = 3;
  constexpr std::int64_t kRows = 500, kColumns = 3;  // 167, 167 and 166 rows
  auto ranks = MakeRanks(GetParam(), kRanks);
  std::uint64_t first_chunk = 0;
  for (const auto& info : kDTypes) {
    if (info.kind == Kind::Bool) continue;
    Dispatch(info.id, [&](auto zero) {
      using T = decltype(zero);
      auto make = [](int value) {
        T v{};
        if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
          auto f = static_cast<float>(value);
          math::Convert(DType::kFloat32, &f, std::is_same_v<T, Float16> ? DType::kFloat16 : DType::kBFloat16, &v, 1);
        } else {
          v = static_cast<T>(value);
        }
        return v;
      };
      auto value = [](int r, std::int64_t i) { return static_cast<int>((i * 7 + i / 31 + r * 5) % 40) + 1; };
      std::unique_ptr<T[]> in[kRanks], out[kRanks];
      auto results = RunAll(
          ranks,
          [&](int r) {
            in[r].reset(new T[kRows * kColumns]);
            out[r].reset(new T[kRows * kColumns]);
            for (std::int64_t i = 0; i < kRows * kColumns; ++i) in[r][i] = make(value(r, i));
            FusedOperation op = OperationOf(Op::kReducescatter, Everyone(kRanks));
            op.dtype = info.id;
            op.tensors.push_back({in[r].get(), out[r].get(), {kRows, kColumns}, {}});
            return op;
          },
          first_chunk);
      first_chunk += 1000;
      for (int r = 0; r < kRanks; ++r) {
        ASSERT_TRUE(results[r].ok()) << results[r].message();
        std::int64_t begin = r * 167 * kColumns, count = (r < 2 ? 167 : 166) * kColumns;
        for (std::int64_t i = 0; i < count; ++i) {
          T expected = make(value(0, begin + i) + value(1, begin + i) + value(2, begin + i));
          ASSERT_EQ(std::memcmp(&out[r][i], &expected, sizeof expected), 0) << info.name << " rank " << r << " " << i;
        }
      }
    });
  }
}

#if defined(__SSE__)
TEST_P(EdgesTest, DenormalsSurviveOnThreadsThatFlushThemAndTheirSettingsToo) {
  auto ranks = MakeRanks(GetParam(), 2);
  constexpr unsigned kFlushAndRoundDown = 0x1f80 | 0x8040 | 0x2000;
  const float tiny = std::ldexp(1.0f, -140);
  std::vector<float> data[2] = {std::vector<float>(50, tiny), std::vector<float>(50, 2 * tiny)};
  unsigned after[2] = {}, inside[2] = {};
  std::vector<std::thread> threads;
  for (int r : {0, 1}) {
    threads.emplace_back([&, r] {
      unsigned before = _mm_getcsr();
      _mm_setcsr(kFlushAndRoundDown);
      FusedOperation op = OperationOf(Op::kAllreduce, {0, 1});
      op.tensors.push_back({data[r].data(), data[r].data(), {50}, {}});
      ranks[r].backend->Run(op, [&](Result result) {
        EXPECT_TRUE(result.ok()) << result.message();
        inside[r] = _mm_getcsr() & ~0x3fu;
      });
      after[r] = _mm_getcsr() & ~0x3fu;  // but for what happened meanwhile
      _mm_setcsr(before);
    });
  }
  for (auto& thread : threads) thread.join();
  for (int r : {0, 1}) {
    for (float v : data[r]) ASSERT_EQ(v, std::ldexp(3.0f, -140));
    EXPECT_EQ(after[r], kFlushAndRoundDown);
    EXPECT_EQ(inside[r], kFlushAndRoundDown) << "done belongs to the caller";
  }
}
#endif

TEST_P(EdgesTest, ALimitOfAWaitNamesTheRankThatDidNotCome) {
  constexpr int kRanks = 3;
  for (Op kind : {Op::kAllreduce, Op::kReducescatter, Op::kAllgather}) {
    auto ranks = MakeRanks(GetParam(), kRanks, {.wait_seconds = 0.1});
    std::vector<float> in(30000), out[kRanks];
    auto start = Now();
    auto results = RunAll(
        ranks,
        [&](int r) {
          FusedOperation op = OperationOf(kind, Everyone(kRanks));
          out[r].resize(in.size() * kRanks);
          FusedTensor tensor{in.data(), out[r].data(), {std::int64_t(in.size())}, {}};
          if (kind == Op::kAllgather) tensor.rows.assign(kRanks, std::int64_t(in.size()));
          op.tensors.push_back(tensor);
          return op;
        },
        0, /*first_rank=*/1);
    EXPECT_LT(Seconds(Now() - start), 5.0);
    bool named = false;
    for (int r = 1; r < kRanks; ++r) {
      EXPECT_FALSE(results[r].ok()) << Info(kind).name;
      named |= results[r].message().find("rank 0") != std::string::npos;
    }
    EXPECT_TRUE(named) << Info(kind).name << ": " << results[1].message() << "; " << results[2].message();
  }
}

TEST_P(EdgesTest, AbortEndsEveryOperationThatWaitsAndAllLaterOnes) {
  constexpr int kRanks = 3;
  const Result cause(Code::kPeerLost, "rank 0 is dead");
  for (Op kind : {Op::kAllreduce, Op::kBroadcast, Op::kReducescatter, Op::kAllgather, Op::kAlltoall}) {
    auto ranks = MakeRanks(GetParam(), kRanks, {.wait_seconds = 0});
    constexpr std::int64_t kCount = 3000000;  // more than rings and socket buffers hold
    std::vector<float> in(kCount), out[kRanks];
    for (auto& o : out) o.resize(kCount * kRanks);
    auto make = [&](int r) {
      FusedOperation op = OperationOf(kind, Everyone(kRanks));
      FusedTensor tensor{in.data(), out[r].data(), {kCount}, {}};
      if (kind == Op::kAllgather) tensor.rows.assign(kRanks, kCount);
      if (kind == Op::kAlltoall) tensor.rows.assign(kRanks * kRanks, kCount / kRanks);
      op.tensors.push_back(tensor);
      return op;
    };
    TimePoint aborted;
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      aborted = Now();
      for (int r = 1; r < kRanks; ++r) ranks[r].backend->Abort(cause);
    });
    auto results = RunAll(ranks, make, 0, /*first_rank=*/1);
    auto end = Now();
    aborter.join();
    EXPECT_LT(Seconds(end - aborted), 1.0) << Info(kind).name;
    for (int r = 1; r < kRanks; ++r) {
      EXPECT_EQ(results[r].message(), cause.message()) << Info(kind).name << " rank " << r;
      EXPECT_EQ(RunToEnd(*ranks[r].backend, make(r)).message(), cause.message());
    }
  }
}

TEST(HostBackend, ARingOfTooFewChunksIsRefusedByName) {
  const std::size_t enough = SlotRing::RingBytes(SlotRing::kMinSlots, kChunk);
  for (std::size_t ring : {std::size_t{64}, 2 * kChunk, enough - 1, enough}) {
    auto ranks = MakeRanks(Carrier::kSegment, 2, {.ring_bytes = ring});
    std::vector<float> data[2] = {std::vector<float>(5000, 1), std::vector<float>(5000, 2)};
    auto results = RunAll(ranks, [&](int r) {
      FusedOperation op = OperationOf(Op::kAllreduce, {0, 1});
      op.tensors.push_back({data[r].data(), data[r].data(), {5000}, {}});
      return op;
    });
    for (auto& result : results) {
      if (ring >= enough) {
        EXPECT_TRUE(result.ok()) << result.message();
      } else {
        EXPECT_EQ(result.code(), Code::kArgument);
        EXPECT_NE(result.message().find("RONDE_RING_BYTES"), std::string::npos) << result.message();
      }
    }
  }
}

TEST(HostBackend, ReductionsThatATypeLacksAreRefused) {
  auto ranks = MakeRanks(Carrier::kSegment, 1);
  std::complex<float> value(1, 2);
  FusedOperation op = OperationOf(Op::kAllreduce, {0});
  op.dtype = DType::kComplex64;
  op.reduction = Reduction::kMin;
  op.tensors.push_back({&value, &value, {1}, {}});
  Result result = RunToEnd(*ranks[0].backend, op);
  EXPECT_EQ(result.code(), Code::kArgument);
  EXPECT_NE(result.message().find("complex64"), std::string::npos) << result.message();
}

TEST(HostBackend, WithoutAWayToAllMembersItSaysSo) {
  HostBackendConfig config;
  auto backend = CreateHostBackend(config);
  float value = 3;
  FusedOperation op = OperationOf(Op::kAllreduce, {0, 1});
  op.tensors.push_back({&value, &value, {1}, {}});
  EXPECT_EQ(RunToEnd(*backend, op).code(), Code::kInternal);
  op.members = {0};
  op.postscale = 2;
  EXPECT_TRUE(RunToEnd(*backend, op).ok());  // alone, nothing has to move
  EXPECT_EQ(value, 6);
}

}  // namespace
}  // namespace ronde::testing
