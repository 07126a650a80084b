#include "base/result.h"

#include <gtest/gtest.h>

#include <set>

namespace ronde {
namespace {

TEST(ResultTest, SuccessIsEmpty) {
  EXPECT_TRUE(Ok().ok());
  EXPECT_EQ(Ok().code(), Code::kOk);
  EXPECT_TRUE(Ok().Because("nothing failed").ok());
}

TEST(ResultTest, ACauseKeepsItsCodeAndPlace) {
  const int line = __LINE__ + 1;
  const Result first(Code::kPeerLost, "rank 1 on h2 is gone");
  const Result second = first.Because("allreduce of grad.7 failed");
  const Result third = second.Because("step 3");
  EXPECT_EQ(third.code(), Code::kPeerLost);
  EXPECT_EQ(third.message(), "step 3: allreduce of grad.7 failed: rank 1 on h2 is gone");
  EXPECT_EQ(first.message(), "rank 1 on h2 is gone");  // copies and causes share, and never change
  const std::string suffix = "result_test.cc:" + std::to_string(line);
  EXPECT_EQ(third.place(), first.place());
  EXPECT_EQ(third.place().substr(third.place().size() - suffix.size()), suffix);
}

TEST(ResultTest, MacroReturnsTheError) {
  auto run = [](Result inner) -> Result {
    RONDE_RETURN_IF_ERROR(inner);
    return Result(Code::kInternal, "went on");
  };
  EXPECT_EQ(run(Result(Code::kStall, "stuck")).code(), Code::kStall);
  EXPECT_EQ(run(Ok()).code(), Code::kInternal);
}

TEST(ResultTest, ExpectedHoldsOneOfTheTwo) {
  const Expected<std::string> value(std::string("x"));
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(value.value(), "x");
  const Expected<std::string> error(Result(Code::kTimeout, "after 3 s"));
  ASSERT_FALSE(error.ok());
  EXPECT_EQ(error.error().code(), Code::kTimeout);
}

TEST(ErrorTableTest, NumbersAndNamesAreUnique) {
  std::set<int> numbers = {0};
  std::set<std::string> names = {std::string(CodeName(Code::kOk))};
  std::size_t rows = 1;
#define RONDE_ERROR(id, number, python, base, retry) \
  ++rows;                                            \
  numbers.insert(number);                            \
  names.insert(std::string(CodeName(static_cast<Code>(number))));
#include "base/errors.def"
#undef RONDE_ERROR
  EXPECT_EQ(numbers.size(), rows);
  EXPECT_EQ(names.size(), rows);
  EXPECT_EQ(CodeName(Code::kMismatch), "Mismatch");
  EXPECT_EQ(CodeName(static_cast<Code>(250)), "Unknown");
}

}  // namespace
}  // namespace ronde
