// Adasum through the host backend over every carrier: ranks are threads, and what must come out is computed here by the
// definition, in long double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "backends/ranks.h"
#include "math/adasum_reference.h"
#include "math/math.h"

namespace ronde::testing {
namespace {

using math::test::AdasumOf;
using math::test::Vector;

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
constexpr std::uint64_t kFirstChunk = (std::uint64_t{1} << 32) - 5;  // numbers of 32 bits would wrap

// Different for every (seed, rank, tensor, element).
double ValueOf(unsigned seed, int rank, std::size_t tensor, std::size_t i) {
  std::uint64_t x = (static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u ^ (tensor + 1) * 0xbf58476d1ce4e5b9u ^
                    (i + 1) * 0x94d049bb133111ebu ^ seed * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 29) * 0x9e3779b97f4a7c15u;
  return static_cast<double>(x >> 40) / (1 << 23) - 0.8;  // [-0.8, 1.2)
}

struct Case {
  DType dtype = DType::kFloat32;
  std::vector<std::size_t> sizes;  // elements of each tensor
  std::vector<int> members;
  std::vector<int> joined;
  double prescale = 1, postscale = 1;
  bool in_place = true;
  unsigned seed = 1;
  std::function<double(int, std::size_t, std::size_t)> value;  // (rank, tensor, element); default: ValueOf

  bool Joined(int rank) const { return std::find(joined.begin(), joined.end(), rank) != joined.end(); }
  double Value(int rank, std::size_t t, std::size_t i) const {
    return value ? value(rank, t, i) : ValueOf(seed, rank, t, i);
  }
};

// One rank's memory of a case. Tensors lie at odd addresses.
class Memory {
 public:
  Memory(const Case& c, int rank) : case_(c) {
    const std::size_t element = Info(c.dtype).size;
    for (std::size_t t = 0; t < c.sizes.size(); ++t) {
      std::vector<double> exact(c.sizes[t]);
      for (std::size_t i = 0; i < exact.size(); ++i) exact[i] = c.Value(rank, t, i);
      inputs_.emplace_back(exact.size() * element + kOdd);
      outputs_.emplace_back(exact.size() * element + kOdd);
      math::Convert(DType::kFloat64, exact.data(), c.dtype, inputs_.back().data() + kOdd, exact.size());
    }
  }
  std::byte* input(std::size_t t) { return inputs_[t].data() + kOdd; }
  std::byte* output(std::size_t t) { return case_.in_place ? input(t) : outputs_[t].data() + kOdd; }
  std::vector<double> Read(const std::byte* from, std::size_t t) const {
    std::vector<double> values(case_.sizes[t]);
    math::Convert(case_.dtype, from, DType::kFloat64, values.data(), values.size());
    return values;
  }
  std::vector<std::byte> Bits(std::size_t t) {
    return {output(t), output(t) + case_.sizes[t] * Info(case_.dtype).size};
  }

 private:
  static constexpr std::size_t kOdd = 3;
  const Case& case_;
  std::vector<std::vector<std::byte>> inputs_, outputs_;
};

FusedOperation OperationFor(const Case& c, Memory* memory) {
  FusedOperation operation = OperationOf(Op::kAllreduce, c.members);
  operation.reduction = Reduction::kAdasum;
  operation.dtype = c.dtype;
  operation.prescale = c.prescale;
  operation.postscale = c.postscale;
  for (std::size_t m = 0; m < c.members.size(); ++m) operation.joined[m] = c.Joined(c.members[m]);
  for (std::size_t t = 0; t < c.sizes.size(); ++t) {
    FusedTensor tensor;
    if (memory != nullptr) tensor.input = memory->input(t), tensor.output = memory->output(t);
    tensor.shape = {static_cast<std::int64_t>(c.sizes[t])};
    operation.tensors.push_back(tensor);
  }
  return operation;
}

// By tensor. An absent member's vector is zeros.
std::vector<Vector> Expected(const Case& c) {
  std::vector<Vector> results;
  std::vector<Memory> inputs;
  for (int r : c.members) inputs.emplace_back(c, r);
  for (std::size_t t = 0; t < c.sizes.size(); ++t) {
    std::vector<Vector> vectors;
    for (std::size_t m = 0; m < c.members.size(); ++m) {
      const auto values = inputs[m].Read(inputs[m].input(t), t);
      vectors.emplace_back(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (!c.Joined(c.members[m])) vectors.back()[i] = c.prescale * values[i];
      }
    }
    results.push_back(AdasumOf(vectors));
    for (auto& x : results.back()) x *= c.postscale;
  }
  return results;
}

// What rounding to the type and summing in the accumulator may cost, beside the tensor's largest value.
double Tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 0x1p-10;
    case DType::kBFloat16: return 0x1p-7;
    case DType::kFloat32: return 2e-6;
    default: return 1e-10;
  }
}

using Bits = std::vector<std::vector<std::byte>>;  // by tensor

class Cluster {
 public:
  Cluster(Carrier carrier, int size, const RankConfig& setup = {}) : ranks_(MakeRanks(carrier, size, setup)) {}

  // Runs the case on its members at once, checks that all hold the same, right values, and returns those.
  Bits Check(const Case& c) {
    std::vector<Memory> memory;
    for (std::size_t r = 0; r < ranks_.size(); ++r) memory.emplace_back(c, static_cast<int>(r));
    Run(c.members,
        [&](int r) { return OperationFor(c, c.Joined(r) ? nullptr : &memory[static_cast<std::size_t>(r)]); });
    const auto expected = Expected(c);
    Bits bits;
    const int* first =
        std::find_if(c.members.data(), c.members.data() + c.members.size(), [&](int r) { return !c.Joined(r); });
    for (std::size_t t = 0; t < c.sizes.size(); ++t) {
      Memory& one = memory[static_cast<std::size_t>(*first)];
      bits.push_back(one.Bits(t));
      const auto values = one.Read(one.output(t), t);
      long double largest = 0;
      for (auto x : expected[t]) largest = std::max(largest, std::abs(x));
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_NEAR(values[i], static_cast<double>(expected[t][i]),
                    static_cast<double>(largest + 1) * Tolerance(c.dtype))
            << Info(c.dtype).name << " tensor " << t << " of " << c.sizes[t] << ", element " << i;
        if (::testing::Test::HasFailure()) return bits;
      }
      for (int r : c.members) {
        if (c.Joined(r)) continue;
        EXPECT_EQ(memory[static_cast<std::size_t>(r)].Bits(t), bits[t]) << "rank " << r;
      }
    }
    return bits;
  }

  // A sum right after, which is wrong if the ranks count chunks differently or a slot is still in use.
  void CheckSum(const std::vector<int>& members) {
    std::vector<std::vector<float>> data(ranks_.size(), std::vector<float>(700));
    for (std::size_t r = 0; r < data.size(); ++r) {
      for (std::size_t i = 0; i < 700; ++i) data[r][i] = static_cast<float>(r * 1000 + i);
    }
    Run(members, [&](int r) {
      FusedOperation operation = OperationOf(Op::kAllreduce, members);
      operation.tensors.push_back(
          {data[static_cast<std::size_t>(r)].data(), data[static_cast<std::size_t>(r)].data(), {700}, {}});
      return operation;
    });
    for (int r : members) {
      for (std::size_t i = 0; i < 700; ++i) {
        float sum = 0;
        for (int m : members) sum += static_cast<float>(static_cast<std::size_t>(m) * 1000 + i);
        ASSERT_EQ(data[static_cast<std::size_t>(r)][i], sum) << "rank " << r << " element " << i;
      }
    }
  }

  void Run(const std::vector<int>& members, const std::function<FusedOperation(int)>& make) {
    std::vector<std::thread> threads;
    std::vector<Result> results(ranks_.size());
    std::vector<std::uint64_t> chunks(ranks_.size());
    for (int r : members) {
      threads.emplace_back([&, r] {
        FusedOperation operation = make(r);
        operation.first_chunk = next_chunk_;
        chunks[static_cast<std::size_t>(r)] = backend(r).Chunks(operation);
        results[static_cast<std::size_t>(r)] = RunToEnd(backend(r), operation);
      });
    }
    for (auto& thread : threads) thread.join();
    for (int r : members) {
      EXPECT_TRUE(results[static_cast<std::size_t>(r)].ok()) << results[static_cast<std::size_t>(r)].message();
      EXPECT_EQ(chunks[static_cast<std::size_t>(r)], chunks[static_cast<std::size_t>(members.front())]);
    }
    next_chunk_ += chunks[static_cast<std::size_t>(members.front())];
  }
  Backend& backend(int rank) { return *ranks_[static_cast<std::size_t>(rank)].backend; }

 private:
  std::vector<Rank> ranks_;
  std::uint64_t next_chunk_ = kFirstChunk;
};

// Those of a rank that stops after some waits: no progress is seen of it any more.
class StoppingSegment final : public Segment {
 public:
  StoppingSegment(Segment* under, int* left) : under_(under), left_(left) {}
  const std::vector<int>& ranks() const override { return under_->ranks(); }
  int rank() const override { return under_->rank(); }
  std::size_t ring_bytes() const override { return under_->ring_bytes(); }
  std::byte* Peer(int rank) const override { return under_->Peer(rank); }
  void Publish(Stage stage, std::uint64_t count) override {
    if (*left_ > 0) under_->Publish(stage, count);
  }
  Result Await(int peer, Stage stage, std::uint64_t count, Deadline deadline) override {
    if ((*left_)-- <= 0) return Result(Code::kPeerLost, "this rank stops");
    return under_->Await(peer, stage, count, deadline);
  }
  void Abort(const Result& cause) override { under_->Abort(cause); }
  std::shared_ptr<SharedHeap> heap() const override { return under_->heap(); }
  std::span<std::byte> PeerHeap(int rank) const override { return under_->PeerHeap(rank); }
  void Leave() override { under_->Leave(); }
  bool AwaitLeft(int peer, std::uint64_t count, Deadline deadline) override {
    return under_->AwaitLeft(peer, count, deadline);
  }

 private:
  Segment* under_;
  int* left_;
};

class StoppingTransport final : public Transport {
 public:
  StoppingTransport(Transport* under, int* left) : under_(under), left_(left) {}
  int rank() const override { return under_->rank(); }
  int size() const override { return under_->size(); }
  Handle Send(int peer, std::uint64_t tag, std::span<const std::byte> data) override {
    return under_->Send(peer, tag, data);
  }
  Handle Recv(int peer, std::uint64_t tag, std::span<std::byte> data) override { return under_->Recv(peer, tag, data); }
  Result Wait(Handle handle, Deadline deadline) override {
    if ((*left_)-- > 0) return under_->Wait(handle, deadline);
    (void)under_->Wait(handle, Now());  // nothing stays lent
    return Result(Code::kPeerLost, "this rank stops");
  }
  void Abort(const Result& cause) override { under_->Abort(cause); }

 private:
  Transport* under_;
  int* left_;
};

class AdasumTest : public ::testing::TestWithParam<std::tuple<Carrier, int>> {
 protected:
  Carrier carrier() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  Case Of(DType dtype, std::vector<std::size_t> sizes) const {
    Case c;
    c.dtype = dtype;
    c.sizes = std::move(sizes);
    c.members = Everyone(size());
    return c;
  }
};

TEST_P(AdasumTest, OfEveryTypeAndSizeIsRightAndFollowedByARightSum) {
  Cluster cluster(carrier(), size());
  unsigned seed = 0;
  for (DType dtype : kFloats) {
    // One element; none; a chunk or so; tensors with one owner, with several, and both together.
    for (const auto& sizes : std::vector<std::vector<std::size_t>>{
             {1}, {0}, {13}, {257, 3}, {4095}, {4096}, {3, 17, 0, 4099}, {900, 1, 12345, 31}, {40001}}) {
      Case c = Of(dtype, sizes);
      c.seed = ++seed;
      c.in_place = seed % 3 != 0;
      cluster.Check(c);
      cluster.CheckSum(c.members);
      if (HasFailure()) return;
    }
  }
}

TEST_P(AdasumTest, HasTheSameBitsFusedOrNotAndWithAnyChunks) {
  for (DType dtype : kFloats) {
    const Case together = Of(dtype, {5, 4097, 100, 0, 9000, 70, 33});
    std::vector<Bits> all;
    RankConfig large;
    large.chunk_bytes = 5 * kChunk;
    large.ring_bytes = SlotRing::RingBytes(16, large.chunk_bytes);
    RankConfig one;  // all in one step, where the members are few
    one.chunk_bytes = 1 << 20;
    one.ring_bytes = SlotRing::RingBytes(3, 1 << 20);
    for (const auto& setup : {RankConfig{}, large, one}) {
      Cluster cluster(carrier(), size(), setup);
      all.push_back(cluster.Check(together));
      Bits alone;
      for (std::size_t t = 0; t < together.sizes.size(); ++t) {
        Case c = Of(dtype, {together.sizes[t]});
        c.value = [&, t](int rank, std::size_t, std::size_t i) { return together.Value(rank, t, i); };
        alone.push_back(cluster.Check(c).front());
      }
      all.push_back(alone);
    }
    for (const auto& bits : all) ASSERT_EQ(bits, all.front()) << Info(dtype).name;
  }
}

TEST_P(AdasumTest, AJoinedMemberCountsAsZeros) {
  Cluster cluster(carrier(), size());
  for (const auto& sizes : std::vector<std::vector<std::size_t>>{{6}, {5000, 8}, {20000}}) {
    for (int joined = 0; joined < size(); ++joined) {
      Case c = Of(DType::kFloat32, sizes);
      c.joined = {joined};
      c.seed = static_cast<unsigned>(joined) + 10;
      cluster.Check(c);
      if (size() > 3) {
        c.joined = {joined / 2, joined / 2 + 2};
        cluster.Check(c);
      }
      cluster.CheckSum(c.members);
    }
  }
}

TEST_P(AdasumTest, ScalesMultiplyBeforeAndAfter) {
  Cluster cluster(carrier(), size());
  for (const auto& sizes : std::vector<std::vector<std::size_t>>{{9}, {6001}}) {
    Case c = Of(DType::kFloat32, sizes);
    c.prescale = 0.25;
    c.postscale = -3;
    cluster.Check(c);
    c.prescale = 0;
    const Bits bits = cluster.Check(c);
    c.dtype = DType::kFloat16;  // 4e4 times the values would not be of the type
    c.prescale = 4e4;
    c.postscale = 0.5e-4;
    cluster.Check(c);
  }
}

TEST_P(AdasumTest, OrthogonalVectorsAddUpEqualOnesStayAndZerosAreNeutral) {
  Cluster cluster(carrier(), size());
  for (std::size_t count : {70u, 5000u}) {
    Case c = Of(DType::kFloat32, {count});
    const auto n = static_cast<std::size_t>(size());
    auto own = [](std::size_t i) { return ValueOf(5, 0, 0, i) + 3; };
    auto check = [&](const std::function<double(std::size_t)>& expected) {
      const Bits bits = cluster.Check(c);
      for (std::size_t i = 0; i < count; ++i) {
        float got;
        std::memcpy(&got, bits[0].data() + i * sizeof got, sizeof got);
        ASSERT_EQ(got, static_cast<float>(expected(i))) << i;
      }
    };
    c.value = [&](int r, std::size_t, std::size_t i) { return i % n == static_cast<std::size_t>(r) ? own(i) : 0; };
    check(own);
    c.value = [&](int r, std::size_t, std::size_t i) { return r == size() - 1 ? own(i) : 0; };
    check(own);
    c.value = [&](int, std::size_t, std::size_t) { return 0.0; };
    check([](std::size_t) { return 0; });
    if ((n & (n - 1)) == 0) {  // weights that are powers of two: exact
      c.value = [&](int, std::size_t, std::size_t i) { return own(i); };
      check(own);
    }
  }
}

TEST_P(AdasumTest, NanAndInfinityReachAllRanksAlike) {
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (std::size_t count : {40u, 5000u}) {
      Cluster cluster(carrier(), size());
      Case c = Of(DType::kFloat32, {count});
      c.value = [&](int r, std::size_t t, std::size_t i) {
        return r == size() - 1 && i == count / 2 ? bad : ValueOf(3, r, t, i);
      };
      std::vector<Memory> memory;
      for (int r = 0; r < size(); ++r) memory.emplace_back(c, r);
      cluster.Run(c.members, [&](int r) { return OperationFor(c, &memory[static_cast<std::size_t>(r)]); });
      for (int r = 0; r < size(); ++r) {
        Memory& mine = memory[static_cast<std::size_t>(r)];
        EXPECT_EQ(mine.Bits(0), memory[0].Bits(0)) << "rank " << r;
        EXPECT_FALSE(std::isfinite(mine.Read(mine.output(0), 0)[count / 2]));
      }
      cluster.CheckSum(c.members);
    }
  }
}

// Each rank runs the list at its own pace; sets overlap.
TEST_P(AdasumTest, OperationsOfOverlappingSetsFollowOneAnother) {
  RankConfig setup;
  setup.ring_bytes = SlotRing::RingBytes(3, kChunk);  // the least that it runs with
  auto ranks = MakeRanks(carrier(), size(), setup);
  std::mt19937 random(static_cast<unsigned>(size()));
  std::vector<Case> cases(40);
  for (std::size_t k = 0; k < cases.size(); ++k) {
    Case& c = cases[k];
    c.seed = static_cast<unsigned>(k) + 100;
    while (c.members.size() < 2) {
      c.members.clear();
      for (int r = 0; r < size(); ++r) {
        if (random() % 4 != 0) c.members.push_back(r);
      }
    }
    if (random() % 4 == 0) c.joined = {c.members[random() % c.members.size()]};
    c.in_place = random() % 2 == 0;
    for (std::size_t t = 0; t <= random() % 3; ++t) c.sizes.push_back(random() % (random() % 3 == 0 ? 9000 : 90));
  }
  std::vector<std::vector<Memory>> memory(cases.size());
  for (std::size_t k = 0; k < cases.size(); ++k) {
    for (int r = 0; r < size(); ++r) memory[k].emplace_back(cases[k], r);
  }
  std::vector<std::string> problems(ranks.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < size(); ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 pace(static_cast<unsigned>(r) + 50);
      std::uint64_t next = kFirstChunk;
      for (std::size_t k = 0; k < cases.size(); ++k) {
        const Case& c = cases[k];
        const bool member = std::find(c.members.begin(), c.members.end(), r) != c.members.end();
        Memory* mine = member && !c.Joined(r) ? &memory[k][static_cast<std::size_t>(r)] : nullptr;
        FusedOperation operation = OperationFor(c, mine);
        operation.first_chunk = next;
        Backend& backend = *ranks[static_cast<std::size_t>(r)].backend;
        next += backend.Chunks(operation);
        if (!member) continue;
        if (pace() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pace() % 300));
        if (Result end = RunToEnd(backend, operation); !end.ok()) {
          problems[static_cast<std::size_t>(r)] = end.message();
          return;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& problem : problems) ASSERT_EQ(problem, "");
  for (std::size_t k = 0; k < cases.size(); ++k) {
    const Case& c = cases[k];
    const auto expected = Expected(c);
    for (int r : c.members) {
      if (c.Joined(r)) continue;
      Memory& mine = memory[k][static_cast<std::size_t>(r)];
      for (std::size_t t = 0; t < c.sizes.size(); ++t) {
        const auto values = mine.Read(mine.output(t), t);
        for (std::size_t i = 0; i < values.size(); ++i) {
          ASSERT_NEAR(values[i], static_cast<double>(expected[t][i]), 2e-5) << "case " << k << " rank " << r;
        }
      }
    }
  }
}

TEST_P(AdasumTest, EndsWithAnErrorWhenAMemberNeverComes) {
  RankConfig setup;
  setup.wait_seconds = 0.3;
  for (std::size_t count : {40u, 5000u}) {
    auto ranks = MakeRanks(carrier(), size(), setup);
    const Case c = Of(DType::kFloat32, {count});
    std::vector<Result> results(ranks.size());
    std::vector<Memory> memory;
    for (int r = 0; r < size(); ++r) memory.emplace_back(c, r);
    std::vector<std::thread> threads;
    for (int r = 1; r < size(); ++r) {
      threads.emplace_back([&, r] {
        FusedOperation operation = OperationFor(c, &memory[static_cast<std::size_t>(r)]);
        operation.first_chunk = kFirstChunk;
        results[static_cast<std::size_t>(r)] = RunToEnd(*ranks[static_cast<std::size_t>(r)].backend, operation);
      });
    }
    for (auto& thread : threads) thread.join();
    for (int r = 1; r < size(); ++r) EXPECT_FALSE(results[static_cast<std::size_t>(r)].ok()) << "rank " << r;
  }
}

// A rank that stops after some of its waits, anywhere in the passes or between: the others' waits end, too.
TEST_P(AdasumTest, EndsWithAnErrorWhenAMemberStopsOnTheWay) {
  RankConfig setup;
  const bool segment_carries = HasSegment(carrier());
  const Case c = Of(DType::kFloat32, {segment_carries ? 6000u : 40000u});  // not in one step
  int all = 1 << 20;                                                       // waits of rank 0 in a whole Adasum
  for (int eighth : {8, 0, 1, 2, 3, 4, 5, 6, 7}) {
    if (eighth < 8) setup.wait_seconds = 0.2;
    auto ranks = MakeRanks(carrier(), size(), setup);
    const int limit = all * eighth / 8;
    int left = limit;
    HostBackendConfig config;
    config.chunk_bytes = setup.chunk_bytes;
    config.wait_seconds = setup.wait_seconds;
    StoppingSegment segment(ranks[0].segment.get(), &left);
    StoppingTransport transport(ranks[0].transport.get(), &left);
    if (ranks[0].segment != nullptr) config.segment = &segment;
    if (ranks[0].transport != nullptr) config.transport = &transport;
    ranks[0].backend = CreateHostBackend(config);

    std::vector<Result> results(ranks.size());
    std::vector<Memory> memory;
    for (int r = 0; r < size(); ++r) memory.emplace_back(c, r);
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        FusedOperation operation = OperationFor(c, &memory[static_cast<std::size_t>(r)]);
        operation.first_chunk = kFirstChunk;
        results[static_cast<std::size_t>(r)] = RunToEnd(*ranks[static_cast<std::size_t>(r)].backend, operation);
      });
    }
    for (auto& thread : threads) thread.join();
    if (eighth == 8) {
      for (const auto& result : results) ASSERT_TRUE(result.ok()) << result.message();
      all = limit - left;
      ASSERT_GE(all, 6);
      continue;
    }
    EXPECT_EQ(results[0].message(), "this rank stops") << eighth;
    // Over sockets the last third of the waits is for what rank 0 itself receives: it has sent all.
    if (!segment_carries && eighth > 5) continue;
    for (int r = 1; r < size(); ++r) EXPECT_FALSE(results[static_cast<std::size_t>(r)].ok()) << r << " at " << eighth;
  }
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Carrier, int>>& info) {
  return ::testing::PrintToString(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Carriers, AdasumTest,
                         ::testing::Combine(::testing::Values(Carrier::kSegment, Carrier::kTransport),
                                            ::testing::Values(2, 3, 4, 5, 7)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Real, AdasumTest,
                         ::testing::Combine(::testing::Values(Carrier::kShm, Carrier::kTcp), ::testing::Values(3)),
                         NameOf);

TEST(AdasumAlone, IsTheTensorItself) {
  auto ranks = MakeRanks(Carrier::kSegment, 1);
  Case c;
  c.sizes = {70};
  c.members = {0};
  c.in_place = false;
  c.postscale = 2;
  Memory memory(c, 0);
  ASSERT_TRUE(RunToEnd(*ranks[0].backend, OperationFor(c, &memory)).ok());
  const auto in = memory.Read(memory.input(0), 0), out = memory.Read(memory.output(0), 0);
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i], 2 * in[i]);
}

TEST(AdasumChunks, ThatAreTooSmallForTheMembersAreAnErrorOfAllRanks) {
  RankConfig setup;
  setup.chunk_bytes = 128;
  setup.ring_bytes = 2048;
  auto ranks = MakeRanks(Carrier::kSegment, 3, setup);
  Case c;
  c.sizes = {5000};
  c.members = Everyone(3);
  for (int r : c.members) {
    Memory memory(c, r);
    Result end = RunToEnd(*ranks[static_cast<std::size_t>(r)].backend, OperationFor(c, &memory));
    EXPECT_NE(end.message().find("RONDE_CHUNK_BYTES is too small for Adasum over 3 ranks"), std::string::npos);
  }
}

}  // namespace
}  // namespace ronde::testing
