#include "negotiation/fusion.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "negotiation/simulation.h"

namespace ronde {
namespace {

TEST(Fusion, GathersEqualKindsUpToTheThresholdPastOthers) {
  Batch batch;
  auto add = [&](Shape shape, DType dtype) {
    AgreedEntry entry;
    entry.definition = std::make_shared<Definition>(Reduce("t", std::move(shape), dtype));
    batch.entries.push_back(entry);
  };
  add({4}, DType::kFloat32);
  add({2}, DType::kFloat64);
  add({4}, DType::kFloat32);
  add({100}, DType::kFloat32);
  add({1}, DType::kFloat32);
  auto sizes = [&](FusionLimits limits) {
    std::vector<std::size_t> all;
    for (auto& list : PlanFusion(batch, limits, 2)) all.push_back(list.size());
    return all;
  };
  EXPECT_EQ(sizes({1000, false}), (std::vector<std::size_t>{4, 1}));
  EXPECT_EQ(sizes({40, false}), (std::vector<std::size_t>{2, 1, 1, 1}));
  EXPECT_EQ(sizes({0, false}), (std::vector<std::size_t>{1, 1, 1, 1, 1}));
  batch.entries[2].error = Result(Code::kMismatch, "no");
  EXPECT_EQ(sizes({1000, false}), (std::vector<std::size_t>{3, 1}));
}

// Sizes of the lists.
std::vector<std::size_t> Sizes(const Plan& plan) {
  std::vector<std::size_t> sizes;
  for (const auto& list : plan) sizes.push_back(list.size());
  return sizes;
}
AgreedEntry Entry(Definition definition) {
  AgreedEntry entry;
  entry.definition = std::make_shared<Definition>(std::move(definition));
  return entry;
}

TEST(Fusion, GroupsMayBeKeptApartAndAlltoallIsAlone) {
  Batch batch;
  batch.entries = {Entry(Group("g", {"a", "b"})), Entry(Reduce("x", {2})), Entry(Group("h", {"c", "d", "e"})),
                   Entry(Reduce("y", {2}))};
  EXPECT_EQ(Sizes(PlanFusion(batch, {1000, false}, 2)), (std::vector<std::size_t>{7}));
  EXPECT_EQ(Sizes(PlanFusion(batch, {1000, true}, 2)), (std::vector<std::size_t>{2, 2, 3}));
  batch.entries.clear();
  for (const char* name : {"x", "y"}) {
    Definition d = Reduce(name, {0, 2});
    d.op = Op::kAlltoall;
    batch.entries.push_back(Entry(d));
    batch.entries.back().values = {{1, 1}, {1, 1}};
  }
  EXPECT_EQ(Sizes(PlanFusion(batch, {1000, false}, 2)), (std::vector<std::size_t>{1, 1}));
}

TEST(Fusion, RaggedTensorsCountWithTheLargestMember) {
  Batch batch;
  for (const char* name : {"x", "y"}) {
    Definition d = Reduce(name, {0, 2});
    d.op = Op::kAllgather;
    batch.entries.push_back(Entry(d));
    batch.entries.back().values = {{1}, {10}};  // 80 bytes
  }
  EXPECT_EQ(Sizes(PlanFusion(batch, {160, false}, 2)), (std::vector<std::size_t>{2}));
  EXPECT_EQ(Sizes(PlanFusion(batch, {159, false}, 2)), (std::vector<std::size_t>{1, 1}));
}

TEST(Fusion, AnyBatchIsPlannedWholeAndWithinTheThreshold) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    Batch batch;
    std::size_t tensors = 0;
    for (unsigned i = 0; i < random() % 40; ++i) {
      Definition d = Reduce("t" + std::to_string(i), {static_cast<std::int64_t>(random() % 50)},
                            random() % 2 ? DType::kFloat32 : DType::kFloat64);
      if (random() % 4 == 0) d.prescale = 0.5;
      if (random() % 4 == 0) d.op = Op::kBroadcast;
      if (random() % 4 == 0) d.tensors.push_back(TensorSpec{"b", DType::kFloat32, {7}});
      batch.entries.push_back(Entry(d));
      if (random() % 4 == 0) batch.entries.back().joined = {1};
      if (random() % 8 == 0) {
        batch.entries.back().error = Result(Code::kMismatch, "no");
      } else {
        tensors += d.tensors.size();
      }
    }
    FusionLimits limits{static_cast<std::int64_t>(random() % 1000), random() % 2 == 0};
    Plan plan = PlanFusion(batch, limits, 2);
    std::map<std::pair<std::size_t, std::size_t>, int> seen;
    for (const auto& list : plan) {
      ASSERT_FALSE(list.empty());
      std::int64_t bytes = 0;
      const AgreedEntry& first = batch.entries[list.front().entry];
      DType dtype = first.definition->tensors[list.front().tensor].dtype;
      for (const auto& planned : list) {
        const AgreedEntry& entry = batch.entries[planned.entry];
        const TensorSpec& tensor = entry.definition->tensors[planned.tensor];
        ++seen[{planned.entry, planned.tensor}];
        bytes += NumElements(tensor.shape) * static_cast<std::int64_t>(Info(tensor.dtype).size);
        ASSERT_TRUE(entry.error.ok());
        ASSERT_EQ(tensor.dtype, dtype);
        ASSERT_EQ(entry.definition->op, first.definition->op);
        ASSERT_EQ(entry.definition->prescale, first.definition->prescale);
        ASSERT_EQ(entry.joined, first.joined);
        if (limits.keep_groups_apart && planned.entry != list.front().entry) {
          ASSERT_EQ(entry.definition->tensors.size(), 1u);
        }
      }
      ASSERT_TRUE(list.size() == 1 || bytes <= limits.threshold);
    }
    ASSERT_EQ(seen.size(), tensors);
    for (const auto& [tensor, times] : seen) ASSERT_EQ(times, 1);
  }
}

}  // namespace
}  // namespace ronde
