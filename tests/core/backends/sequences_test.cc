// Ranks that run a long list of operations each at its own pace, as engines do: nothing but the backend keeps them
// together, so a slot that is written while somebody reads it, or a message that meets the wrong operation, shows as a
// wrong value. Process sets overlap and the rings are small.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <thread>

#include "backends/ranks.h"

namespace ronde::testing {
namespace {

constexpr std::int64_t kRow = 2;  // elements

struct Step {
  Op kind = Op::kAllreduce;
  Reduction reduction = Reduction::kSum;
  double prescale = 1, postscale = 1;
  std::vector<int> members;
  std::vector<bool> joined;  // by member
  int root = 0;
  bool in_place = false;
  // By tensor: rows of the whole; allgather: by member; alltoall: by sender and receiver.
  std::vector<std::vector<std::int64_t>> rows;

  std::size_t count() const { return members.size(); }
  bool Has(int rank) const { return std::binary_search(members.begin(), members.end(), rank); }
  std::size_t IndexOf(int rank) const {
    return static_cast<std::size_t>(std::find(members.begin(), members.end(), rank) - members.begin());
  }
  // [first row, rows) of member m's part of a reducescatter.
  std::pair<std::int64_t, std::int64_t> Part(std::size_t t, std::size_t m) const {
    auto n = static_cast<std::int64_t>(count()), k = static_cast<std::int64_t>(m);
    std::int64_t base = rows[t][0] / n, rest = rows[t][0] % n;
    return {k * base + std::min(k, rest), base + (k < rest ? 1 : 0)};
  }
  std::int64_t InputRows(std::size_t t, std::size_t m) const {
    if (kind == Op::kAllgather) return rows[t][m];
    if (kind != Op::kAlltoall) return rows[t][0];
    std::int64_t sum = 0;
    for (std::size_t d = 0; d < count(); ++d) sum += rows[t][m * count() + d];
    return sum;
  }
};

// Different for every rank, tensor and element of a step, and for steps near each other; sums stay exact in float32.
float ValueOf(std::size_t step, int rank, std::size_t tensor, std::int64_t i) {
  return static_cast<float>((static_cast<std::size_t>(rank) * 3 + tensor) * 4096 + static_cast<std::size_t>(i) +
                            step * 131 % 65536);
}

std::vector<Step> MakeSteps(int size, int number, unsigned seed) {
  std::mt19937 random(seed);
  auto one_in = [&](unsigned n) { return random() % n == 0; };
  auto rows = [&] { return static_cast<std::int64_t>(one_in(5) ? 0 : one_in(4) ? random() % 2000 : random() % 60); };
  std::vector<Step> steps(number);
  for (auto& step : steps) {
    while (step.members.empty()) {
      for (int r = 0; r < size; ++r) {
        if (!one_in(3)) step.members.push_back(r);
      }
    }
    const Op kinds[] = {Op::kAllreduce, Op::kAllreduce,     Op::kBroadcast,
                        Op::kAllgather, Op::kReducescatter, Op::kAlltoall};
    step.kind = kinds[random() % std::size(kinds)];
    const Reduction reductions[] = {Reduction::kSum, Reduction::kAverage, Reduction::kMin, Reduction::kMax};
    if (Info(step.kind).reduces) {
      step.reduction = reductions[random() % std::size(reductions)];
      if (one_in(3)) step.prescale = 0.5, step.postscale = 4;
    }
    step.joined.assign(step.count(), false);
    step.root = step.members[random() % step.count()];
    for (std::size_t m = 0; m < step.count(); ++m) {
      step.joined[m] = one_in(6) && step.members[m] != step.root;
    }
    step.in_place = one_in(3);
    step.rows.resize(step.kind == Op::kAlltoall ? 1 : 1 + random() % 3);
    for (auto& list : step.rows) {
      std::size_t entries = step.kind == Op::kAllgather  ? step.count()
                            : step.kind == Op::kAlltoall ? step.count() * step.count()
                                                         : 1;
      for (std::size_t i = 0; i < entries; ++i) {
        std::size_t sender = step.kind == Op::kAlltoall ? i / step.count() : i;
        bool none = Info(step.kind).ragged && step.joined[sender];
        std::int64_t most = step.kind == Op::kAlltoall ? 250 : 2000;  // a sender's element numbers stay below 4096
        list.push_back(none ? 0 : std::min(rows(), most));
      }
    }
  }
  return steps;
}

std::vector<float> Expected(const std::vector<Step>& steps, std::size_t number, int rank, std::size_t t) {
  const Step& step = steps[number];
  const std::size_t me = step.IndexOf(rank), count = step.count();
  std::vector<float> out;
  auto value = [&](std::size_t m, std::int64_t i) { return ValueOf(number, step.members[m], t, i); };
  auto reduced = [&](std::int64_t i) {
    std::optional<double> all;
    for (std::size_t m = 0; m < count; ++m) {
      if (step.joined[m]) continue;
      double v = value(m, i) * step.prescale;
      if (!all) {
        all = v;
      } else if (step.reduction == Reduction::kMin) {
        all = std::min(*all, v);
      } else if (step.reduction == Reduction::kMax) {
        all = std::max(*all, v);
      } else {
        all = *all + v;
      }
    }
    double result = *all * step.postscale;
    return static_cast<float>(step.reduction == Reduction::kAverage ? result / static_cast<double>(count) : result);
  };
  switch (step.kind) {
    case Op::kAllreduce:
      for (std::int64_t i = 0; i < step.rows[t][0] * kRow; ++i) out.push_back(reduced(i));
      break;
    case Op::kBroadcast:
      for (std::int64_t i = 0; i < step.rows[t][0] * kRow; ++i) out.push_back(value(step.IndexOf(step.root), i));
      break;
    case Op::kAllgather:
      for (std::size_t m = 0; m < count; ++m) {
        for (std::int64_t i = 0; i < step.rows[t][m] * kRow; ++i) out.push_back(value(m, i));
      }
      break;
    case Op::kReducescatter: {
      auto [first, rows] = step.Part(t, me);
      for (std::int64_t i = 0; i < rows * kRow; ++i) out.push_back(reduced(first * kRow + i));
      break;
    }
    default:
      for (std::size_t s = 0; s < count; ++s) {
        std::int64_t begin = 0;
        for (std::size_t d = 0; d < me; ++d) begin += step.rows[t][s * count + d];
        for (std::int64_t i = 0; i < step.rows[t][s * count + me] * kRow; ++i)
          out.push_back(value(s, begin * kRow + i));
      }
  }
  return out;
}

bool Same(float a, float b, bool exact) { return exact ? a == b : std::abs(a - b) <= 1e-6f * std::abs(b); }

// One rank's way through the list. Ends with "" or the first thing that was wrong.
std::string RunSteps(Backend& backend, int rank, const std::vector<Step>& steps, std::uint64_t chunk) {
  std::mt19937 random(static_cast<unsigned>(rank) + 77);
  std::string wrong;
  for (std::size_t number = 0; number < steps.size(); ++number) {
    const Step& step = steps[number];
    const bool member = step.Has(rank);
    const std::size_t me = step.IndexOf(rank);
    const bool joined = member && step.joined[me];
    FusedOperation operation = OperationOf(step.kind, step.members);
    operation.reduction = step.reduction;
    operation.prescale = step.prescale;
    operation.postscale = step.postscale;
    operation.joined = step.joined;
    operation.root = step.root;
    operation.first_chunk = chunk;
    std::vector<std::vector<float>> in(step.rows.size()), out(step.rows.size()), expected(step.rows.size());
    for (std::size_t t = 0; t < step.rows.size(); ++t) {
      std::int64_t mine = member ? step.InputRows(t, me) : Info(step.kind).ragged ? 0 : step.rows[t][0];
      FusedTensor tensor{nullptr, nullptr, {mine, kRow}, {}};
      if (Info(step.kind).ragged) tensor.rows = step.rows[t];
      if (member && !joined) {
        expected[t] = Expected(steps, number, rank, t);
        // One element more than is needed, so that memory is never null, and a write past the end shows.
        in[t].assign(std::max<std::size_t>(mine * kRow, expected[t].size()) + 1, -7);
        out[t].assign(expected[t].size() + 1, -7);
        for (std::int64_t i = 0; i < mine * kRow; ++i) in[t][i] = ValueOf(number, rank, t, i);
        tensor.input = in[t].data();
        tensor.output = step.in_place ? in[t].data() : out[t].data();
      }
      operation.tensors.push_back(tensor);
    }
    chunk += backend.Chunks(operation);
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    if (!member) continue;
    if (Result result = RunToEnd(backend, operation); !result.ok()) {
      return "step " + std::to_string(number) + ": " + result.message();
    }
    for (std::size_t t = 0; wrong.empty() && !joined && t < step.rows.size(); ++t) {
      const auto& result = step.in_place ? in[t] : out[t];
      for (std::size_t i = 0; wrong.empty() && i < expected[t].size(); ++i) {
        if (!Same(result[i], expected[t][i], step.reduction != Reduction::kAverage)) {
          wrong = "step " + std::to_string(number) + " (" + std::string(Info(step.kind).name) + " of " +
                  std::to_string(step.count()) + " members) tensor " + std::to_string(t) + " element " +
                  std::to_string(i) + ": " + std::to_string(result[i]) + ", not " + std::to_string(expected[t][i]);
        }
      }
      if (wrong.empty() && !step.in_place && out[t].back() != -7) wrong = "wrote past an output's end";
    }
  }
  return wrong;
}

struct Case {
  Carrier carrier;
  int size;
  std::size_t slots;
  friend void PrintTo(const Case& setup, std::ostream* out) {
    PrintTo(setup.carrier, out);
    *out << ", " << setup.size << " ranks, " << setup.slots << " slots";
  }
};
class SequencesTest : public ::testing::TestWithParam<Case> {};

TEST_P(SequencesTest, OfOverlappingSetsGiveTheRightValuesAtEveryPace) {
  const Case& setup = GetParam();
  auto ranks = MakeRanks(setup.carrier, setup.size, {.ring_bytes = SlotRing::RingBytes(setup.slots, kChunk)});
  auto steps = MakeSteps(setup.size, 400, static_cast<unsigned>(setup.size));
  std::vector<std::string> wrong(setup.size);
  std::vector<std::thread> threads;
  for (int r = 0; r < setup.size; ++r) {
    threads.emplace_back([&, r] { wrong[r] = RunSteps(*ranks[r].backend, r, steps, (std::uint64_t{1} << 32) - 100); });
  }
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < setup.size; ++r) EXPECT_EQ(wrong[r], "") << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(All, SequencesTest,
                         ::testing::Values(Case{Carrier::kSegment, 2, 3}, Case{Carrier::kSegment, 3, 3},
                                           Case{Carrier::kSegment, 3, 4}, Case{Carrier::kSegment, 5, 3},
                                           Case{Carrier::kSegment, 7, 16}, Case{Carrier::kShm, 3, 3},
                                           Case{Carrier::kShm, 5, 5}, Case{Carrier::kTransport, 3, 3},
                                           Case{Carrier::kTransport, 7, 3}, Case{Carrier::kTcp, 2, 3},
                                           Case{Carrier::kTcp, 4, 3}));

}  // namespace
}  // namespace ronde::testing
