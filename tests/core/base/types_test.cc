#include "base/types.h"

#include <gtest/gtest.h>

#include <set>

namespace ronde {
namespace {

template <class Rows>
void ExpectUniqueNames(const Rows& rows) {
  std::set<std::string_view> names;
  for (const auto& row : rows) EXPECT_TRUE(!row.name.empty() && names.insert(row.name).second) << row.name;
}

TEST(TypesTest, NamesAreUnique) {
  ExpectUniqueNames(kDTypes);
  ExpectUniqueNames(kOps);
  ExpectUniqueNames(kReductions);
}

TEST(TypesTest, SizesAndKindsMatchTheNames) {
  for (const auto& row : kDTypes) {
    const std::string name(row.name);
    const auto digits = name.find_first_of("0123456789");
    const std::size_t bits = digits == std::string::npos ? 8 : std::stoul(name.substr(digits));
    EXPECT_EQ(row.size * 8, bits) << name;
    const Kind kind = name == "bool"          ? Kind::Bool
                      : name.starts_with("u") ? Kind::UInt
                      : name.starts_with("i") ? Kind::Int
                      : name.starts_with("c") ? Kind::Complex
                                              : Kind::Float;
    EXPECT_EQ(row.kind, kind) << name;
  }
}

TEST(TypesTest, WireNumbersNeverChange) {
  EXPECT_EQ(static_cast<int>(DType::kBool), 0);
  EXPECT_EQ(static_cast<int>(DType::kFloat32), 11);
  EXPECT_EQ(static_cast<int>(DType::kComplex128), 14);
  EXPECT_EQ(static_cast<int>(Op::kAllreduce), 0);
  EXPECT_EQ(static_cast<int>(Op::kRemoveProcessSet), 8);
  EXPECT_EQ(static_cast<int>(Reduction::kAverage), 0);
  EXPECT_EQ(static_cast<int>(Reduction::kProduct), 5);
}

TEST(TypesTest, DispatchReachesEveryType) {
  for (const auto& row : kDTypes) {
    EXPECT_EQ(Dispatch(row.id, [](auto element) { return sizeof element; }), row.size) << row.name;
    EXPECT_EQ(Info(row.id).name, row.name);
  }
}

constexpr Row<int> kNone[] = {{DType::kBool, 1}};
static_assert(!Covers(kNone));
constexpr Row<std::string_view> kAll[] = {
#define RONDE_DTYPE(id, wire, ctype, name, kind) {DType::k##id, name},
#include "base/dtypes.def"
#undef RONDE_DTYPE
};
static_assert(Covers(kAll));

TEST(ShapeTest, Counts) {
  EXPECT_EQ(NumElements({}), 1);
  EXPECT_EQ(NumElements({3, 0}), 0);
  EXPECT_EQ(NumElements({1 << 20, 1 << 20}), std::int64_t{1} << 40);
  EXPECT_EQ(RowElements({7}), 1);
  EXPECT_EQ(RowElements({7, 2, 3}), 6);
  EXPECT_EQ(ToString(Shape{}), "[]");
  EXPECT_EQ(ToString(Shape{2, 3}), "[2, 3]");
}

TEST(Shape, IsTheSameInlineAndBeyond) {
  std::vector<std::int64_t> expected;
  Shape grown;
  for (std::int64_t dimension = 3; dimension < 15; ++dimension) {
    const Shape whole(expected.data(), expected.data() + expected.size());
    EXPECT_EQ(std::vector<std::int64_t>(whole.begin(), whole.end()), expected);
    EXPECT_TRUE(whole == grown && grown.size() == expected.size() && grown.empty() == expected.empty());
    Shape copy = Shape{1, 2, 3, 4, 5, 6, 7};  // a longer and a shorter one change places
    copy = grown;
    EXPECT_TRUE(copy == grown);
    Shape moved = std::move(copy);
    EXPECT_TRUE(moved == grown);
    if (!expected.empty()) {
      moved[expected.size() - 1] = -1;
      EXPECT_FALSE(moved == grown);
      EXPECT_EQ(grown[expected.size() - 1], expected.back());
    }
    moved.push_back(0);
    EXPECT_FALSE(moved == grown);
    expected.push_back(dimension);
    grown.push_back(dimension);
  }
}

}  // namespace
}  // namespace ronde
