// The host backend over every carrier: ranks are threads, each (rank, tensor, element) has its own value, and what must
// come out is computed here in long double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "backends/ranks.h"
#include "math/math.h"

namespace ronde::testing {
namespace {

// A whole number so small that sums are exact in every type, hashed from (rank, tensor, element) so that neighbours and
// bytes that moved by some stride differ.
int ValueOf(int rank, std::size_t tensor, std::size_t i) {
  std::uint64_t x = (static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u ^ (tensor + 1) * 0xbf58476d1ce4e5b9u ^
                    (i + 1) * 0x94d049bb133111ebu;
  return static_cast<int>((x ^ x >> 29) * 0x9e3779b97f4a7c15u >> 40) % 13 + 1;
}

template <class T>
T FromInt(int v) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    float f = static_cast<float>(v);
    T out;
    math::Convert(DType::kFloat32, &f, std::is_same_v<T, Float16> ? DType::kFloat16 : DType::kBFloat16, &out, 1);
    return out;
  } else if constexpr (std::is_same_v<T, bool>) {
    return v % 2 == 1;
  } else {
    return static_cast<T>(v);
  }
}

struct Buffer {
  std::vector<std::byte> bytes;
  std::byte* at(std::size_t odd) { return bytes.data() + odd; }
};

struct Job {
  int size;
  std::vector<Rank> ranks;
  std::uint64_t next_chunk;

  // Runs `make(rank)` on all members at once; returns each one's result.
  std::vector<Result> Run(const std::vector<int>& members, const std::function<FusedOperation(int)>& make) {
    std::vector<Result> results(size);
    std::vector<std::thread> threads;
    std::uint64_t chunks = 0;
    for (int r : members) {
      threads.emplace_back([&, r] {
        FusedOperation operation = make(r);
        operation.first_chunk = next_chunk;
        std::uint64_t mine = ranks[r].backend->Chunks(operation);
        if (r == members.front()) chunks = mine;
        ranks[r].backend->Run(operation, [&, r](Result result) { results[r] = std::move(result); });
      });
    }
    for (auto& t : threads) t.join();
    next_chunk += chunks;
    return results;
  }
};

class HostBackendTest : public ::testing::TestWithParam<std::tuple<Carrier, int>> {
 protected:
  Job MakeJob() {
    auto [carrier, size] = GetParam();
    return Job{size, MakeRanks(carrier, size), (std::uint64_t{1} << 32) - 5};
  }
  std::vector<int> Everyone() {
    std::vector<int> all(std::get<1>(GetParam()));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
};

TEST_P(HostBackendTest, AllreduceOfEveryTypeFusedOrNotIsRightAndBitIdentical) {
  Job job = MakeJob();
  auto members = Everyone();
  for (const auto& info : kDTypes) {
    for (std::vector<std::size_t> sizes : std::vector<std::vector<std::size_t>>{{1}, {0}, {3, 17, 0, 4097}, {900, 1}}) {
      Reduction reduction = info.kind == Kind::Bool ? Reduction::kMax : Reduction::kSum;
      std::vector<std::vector<Buffer>> data(job.size, std::vector<Buffer>(sizes.size()));
      auto results = job.Run(members, [&](int r) {
        FusedOperation op;
        op.dtype = info.id;
        op.reduction = reduction;
        op.members = members;
        op.joined.assign(members.size(), false);
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          auto& buffer = data[r][t];
          buffer.bytes.resize(sizes[t] * info.size + 3);
          std::byte* base = buffer.at(t % 2 ? 3 : 0);  // odd addresses too
          Dispatch(info.id, [&](auto zero) {
            using T = decltype(zero);
            for (std::size_t i = 0; i < sizes[t]; ++i) {
              T v = FromInt<T>(ValueOf(r, t, i));
              std::memcpy(base + i * sizeof v, &v, sizeof v);
            }
          });
          op.tensors.push_back({base, base, {static_cast<std::int64_t>(sizes[t])}, {}});
        }
        return op;
      });
      for (int r : members) ASSERT_TRUE(results[r].ok()) << results[r].message();
      for (std::size_t t = 0; t < sizes.size(); ++t) {
        Dispatch(info.id, [&](auto zero) {
          using T = decltype(zero);
          for (std::size_t i = 0; i < sizes[t]; ++i) {
            int sum = 0;
            bool any = false;
            for (int r : members) sum += ValueOf(r, t, i), any |= ValueOf(r, t, i) % 2 == 1;
            T expected = FromInt<T>(info.kind == Kind::Bool ? any : sum);
            for (int r : members) {
              ASSERT_EQ(std::memcmp(data[r][t].at(t % 2 ? 3 : 0) + i * sizeof expected, &expected, sizeof expected), 0)
                  << info.name << " tensor " << t << " element " << i << " rank " << r;
            }
          }
        });
      }
    }
  }
}

FusedOperation Floats(Op kind, const std::vector<int>& members) {
  FusedOperation op;
  op.op = kind;
  op.members = members;
  op.joined.assign(members.size(), false);
  return op;
}

TEST_P(HostBackendTest, RandomOperationsOnOverlappingSetsOneAfterTheOther) {
  Job job = MakeJob();
  std::mt19937 random(3);
  for (int round = 0; round < 120; ++round) {
    std::vector<int> members;
    while (members.empty()) {
      for (int r = 0; r < job.size; ++r) {
        if (random() % 3 != 0) members.push_back(r);
      }
    }
    std::size_t count = members.size();
    Op kind = std::vector<Op>{Op::kAllreduce, Op::kBroadcast, Op::kAllgather, Op::kReducescatter,
                              Op::kAlltoall}[random() % 5];
    std::size_t tensors = kind == Op::kAlltoall ? 1 : 1 + random() % 3;
    std::vector<std::vector<std::int64_t>> rows(tensors);
    for (auto& list : rows) {
      std::size_t n = kind == Op::kAllgather ? count : kind == Op::kAlltoall ? count * count : 1;
      for (std::size_t i = 0; i < n; ++i)
        list.push_back(static_cast<std::int64_t>(random() % 5 == 0 ? 0 : random() % 300));
    }
    int root = members[random() % count];
    auto value = [&](int rank, std::size_t t, std::int64_t i) {
      return static_cast<float>(rank * 100 + t * 10 + i % 9);
    };
    std::vector<std::vector<std::vector<float>>> in(job.size, std::vector<std::vector<float>>(tensors)), out = in;
    auto split = [&](std::int64_t total, std::size_t m) {
      auto n = static_cast<std::int64_t>(count), k = static_cast<std::int64_t>(m);
      return total / n + (k < total % n ? 1 : 0);
    };
    auto results = job.Run(members, [&](int r) {
      FusedOperation op = Floats(kind, members);
      op.root = root;
      auto me = static_cast<std::size_t>(std::find(members.begin(), members.end(), r) - members.begin());
      for (std::size_t t = 0; t < tensors; ++t) {
        std::int64_t mine = rows[t][0], result = rows[t][0];
        if (kind == Op::kAllgather) {
          mine = rows[t][me];
          result = std::accumulate(rows[t].begin(), rows[t].end(), std::int64_t{0});
        } else if (kind == Op::kAlltoall) {
          mine = result = 0;
          for (std::size_t d = 0; d < count; ++d) mine += rows[t][me * count + d], result += rows[t][d * count + me];
        } else if (kind == Op::kReducescatter) {
          result = split(rows[t][0], me);
        }
        for (std::int64_t i = 0; i < mine * 2; ++i) in[r][t].push_back(value(r, t, i));
        out[r][t].assign(static_cast<std::size_t>(result * 2), -1);
        FusedTensor tensor{in[r][t].data(), out[r][t].data(), {mine, 2}, {}};
        if (kind == Op::kAllgather || kind == Op::kAlltoall) tensor.rows = rows[t];
        op.tensors.push_back(tensor);
      }
      return op;
    });
    for (std::size_t me = 0; me < count; ++me) {
      int r = members[me];
      ASSERT_TRUE(results[r].ok()) << results[r].message();
      for (std::size_t t = 0; t < tensors; ++t) {
        std::vector<float> expected;
        auto sum = [&](std::int64_t i) {
          float s = 0;
          for (int other : members) s += value(other, t, i);
          return s;
        };
        if (kind == Op::kAllreduce) {
          for (std::int64_t i = 0; i < rows[t][0] * 2; ++i) expected.push_back(sum(i));
        } else if (kind == Op::kBroadcast) {
          for (std::int64_t i = 0; i < rows[t][0] * 2; ++i) expected.push_back(value(root, t, i));
        } else if (kind == Op::kAllgather) {
          for (std::size_t m = 0; m < count; ++m) {
            for (std::int64_t i = 0; i < rows[t][m] * 2; ++i) expected.push_back(value(members[m], t, i));
          }
        } else if (kind == Op::kReducescatter) {
          std::int64_t begin = 0;
          for (std::size_t m = 0; m < me; ++m) begin += split(rows[t][0], m);
          for (std::int64_t i = 0; i < split(rows[t][0], me) * 2; ++i) expected.push_back(sum(begin * 2 + i));
        } else {
          for (std::size_t s = 0; s < count; ++s) {
            std::int64_t begin = 0;
            for (std::size_t d = 0; d < me; ++d) begin += rows[t][s * count + d];
            for (std::int64_t i = 0; i < rows[t][s * count + me] * 2; ++i) {
              expected.push_back(value(members[s], t, begin * 2 + i));
            }
          }
        }
        ASSERT_EQ(out[r][t], expected) << Info(kind).name << " round " << round << " rank " << r << " tensor " << t;
      }
    }
  }
}

TEST_P(HostBackendTest, AverageAndScalesAreAppliedBeforeTheOneRounding) {
  Job job = MakeJob();
  auto members = Everyone();
  float big = 40000;
  std::vector<Float16> data(static_cast<std::size_t>(job.size));
  for (auto& v : data) math::Convert(DType::kFloat32, &big, DType::kFloat16, &v, 1);
  auto results = job.Run(members, [&](int r) {
    FusedOperation op = Floats(Op::kAllreduce, members);
    op.dtype = DType::kFloat16;
    op.reduction = Reduction::kAverage;
    op.prescale = 2;
    op.postscale = 0.5;
    op.tensors.push_back({&data[r], &data[r], {1}, {}});
    return op;
  });
  for (int r : members) {
    ASSERT_TRUE(results[r].ok());
    float out = 0;
    math::Convert(DType::kFloat16, &data[r], DType::kFloat32, &out, 1);
    EXPECT_EQ(out, 40000.0f);
  }
}

TEST_P(HostBackendTest, JoinedMembersBringNothingAndStillWork) {
  Job job = MakeJob();
  if (job.size < 2) GTEST_SKIP() << "needs a second rank";
  auto members = Everyone();
  int gone = job.size - 1;
  for (Op kind : {Op::kAllreduce, Op::kReducescatter, Op::kAllgather, Op::kBroadcast}) {
    for (std::int64_t n : {5, 5000}) {
      std::vector<std::vector<float>> in(job.size), out(job.size);
      auto results = job.Run(members, [&](int r) {
        FusedOperation op = Floats(kind, members);
        op.reduction = kind == Op::kAllreduce ? Reduction::kMin : Reduction::kAverage;
        op.joined[gone] = true;
        FusedTensor tensor{nullptr, nullptr, {n}, {}};
        if (kind == Op::kAllgather) {
          tensor.rows.assign(members.size(), n);
          tensor.rows[gone] = 0;
          if (r == gone) tensor.shape = {0};
        }
        if (r != gone) {
          for (std::int64_t i = 0; i < n; ++i) in[r].push_back(static_cast<float>((r + 1) * 1000 + i % 11));
          out[r].assign(static_cast<std::size_t>(n) * members.size(), -1);
          tensor.input = in[r].data();
          tensor.output = out[r].data();
        }
        op.tensors.push_back(tensor);
        return op;
      });
      for (int r : members) ASSERT_TRUE(results[r].ok()) << results[r].message();
      if (kind == Op::kAllreduce) {
        EXPECT_EQ(out[0][4], 1004.0f);
      }
      if (kind == Op::kReducescatter) {
        float sum = 0;
        for (int r = 0; r < gone; ++r) sum += static_cast<float>((r + 1) * 1000);
        EXPECT_FLOAT_EQ(out[0][0], sum / static_cast<float>(job.size));
      }
      if (kind == Op::kAllgather && job.size > 2) {
        EXPECT_EQ(out[0][static_cast<std::size_t>(n)], 2000.0f);
      }
    }
  }
}

TEST_P(HostBackendTest, AbortWakesRanksThatWaitForOneThatNeverComes) {
  auto [carrier, size] = GetParam();
  if (size < 2) GTEST_SKIP() << "needs a second rank";
  auto ranks = MakeRanks(carrier, size, {.wait_seconds = 0});
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  std::vector<Result> results(size);
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> data(size, std::vector<float>(4000, 1));
  for (int r = 1; r < size; ++r) {
    threads.emplace_back([&, r] {
      FusedOperation op = Floats(Op::kAllreduce, members);
      op.tensors.push_back({data[r].data(), data[r].data(), {4000}, {}});
      ranks[r].backend->Run(op, [&, r](Result result) { results[r] = std::move(result); });
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  auto start = Now();
  for (int r = 1; r < size; ++r) ranks[r].backend->Abort(Result(Code::kPeerLost, "rank 0 is dead"));
  for (auto& t : threads) t.join();
  EXPECT_LT(Seconds(Now() - start), 1.0);
  for (int r = 1; r < size; ++r) EXPECT_EQ(results[r].message(), "rank 0 is dead");
}

INSTANTIATE_TEST_SUITE_P(All, HostBackendTest,
                         ::testing::Combine(::testing::Values(Carrier::kSegment, Carrier::kShm, Carrier::kTransport,
                                                              Carrier::kTcp),
                                            ::testing::Values(1, 2, 3, 4, 7)));

TEST(Chunks, AreEqualOnRanksWithAndWithoutMemory) {
  auto ranks = MakeRanks(Carrier::kSegment, 2);
  for (Op kind : {Op::kAllreduce, Op::kBroadcast, Op::kReducescatter}) {
    FusedOperation op = Floats(kind, {0, 1});
    op.tensors.push_back({nullptr, nullptr, {5000}, {}});
    std::uint64_t without = ranks[0].backend->Chunks(op);
    std::vector<float> data(5000);
    op.tensors[0].input = data.data();
    EXPECT_EQ(ranks[1].backend->Chunks(op), without);
    EXPECT_GT(without, 1u);
  }
}

}  // namespace
}  // namespace ronde::testing
