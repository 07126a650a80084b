#include "base/options.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace ronde {
namespace {

using Environment = std::map<std::string, std::string>;

Expected<Options> Read(const Environment& environment) {
  return Options::From([&](const std::string& variable) -> std::optional<std::string> {
    auto found = environment.find(variable);
    return found == environment.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(OptionsTest, DefaultsAreTheTable) {
  const auto options = Read({});
  ASSERT_TRUE(options.ok()) << options.error().message();
  EXPECT_EQ(options.value().fusion_threshold, 134217728);
  EXPECT_EQ(options.value().cycle_time_ms, 0);
  EXPECT_EQ(options.value().transport, "auto");
  EXPECT_FALSE(options.value().deterministic);
}

TEST(OptionsTest, RondeWinsOverHorovod) {
  const auto options = Read({{"RONDE_FUSION_THRESHOLD", "64"},
                             {"HOROVOD_FUSION_THRESHOLD", "65"},
                             {"HOROVOD_CYCLE_TIME", "2.5"},
                             {"HOROVOD_STALL_CHECK_DISABLE", "1"},
                             {"RONDE_LOG_LEVEL", "debug"}});
  ASSERT_TRUE(options.ok()) << options.error().message();
  EXPECT_EQ(options.value().fusion_threshold, 64);
  EXPECT_EQ(options.value().cycle_time_ms, 2.5);
  EXPECT_TRUE(options.value().stall_check_disable);
  EXPECT_EQ(options.value().log_level, "debug");
}

TEST(OptionsTest, AnErrorNamesVariableAndValue) {
  const Environment wrong[] = {
      {{"RONDE_CACHE_CAPACITY", "12x"}},  {{"RONDE_CACHE_CAPACITY", ""}},    {{"HOROVOD_CACHE_CAPACITY", "1.5"}},
      {{"RONDE_DETERMINISTIC", "maybe"}}, {{"RONDE_START_TIMEOUT", "soon"}}, {{"RONDE_START_TIMEOUT", "-5"}},
      {{"HOROVOD_CACHE_CAPACITY", "-5"}}, {{"RONDE_CYCLE_TIME", "nan"}},     {{"RONDE_CYCLE_TIME", "-3"}}};
  for (const auto& environment : wrong) {
    const auto options = Read(environment);
    ASSERT_FALSE(options.ok()) << environment.begin()->first;
    EXPECT_EQ(options.error().code(), Code::kArgument);
    EXPECT_NE(options.error().message().find(environment.begin()->first), std::string::npos);
    EXPECT_NE(options.error().message().find("'" + environment.begin()->second + "'"), std::string::npos);
  }
}

TEST(OptionsTest, SharedBytesMayBeMinusOneButNotLess) {
  EXPECT_TRUE(Read({{"RONDE_SHARED_BYTES", "-1"}}).ok());
  EXPECT_TRUE(Read({{"RONDE_SHARED_BYTES", "0"}}).ok());
  const auto wrong = Read({{"RONDE_SHARED_BYTES", "-2"}});
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.error().message().find("RONDE_SHARED_BYTES is -2"), std::string::npos);
}

TEST(OptionsTest, JobOptionsTravelAndRankOptionsStay) {
  auto root = Read({{"RONDE_FUSION_THRESHOLD", "12345"},
                    {"RONDE_CYCLE_TIME", "0.1"},
                    {"RONDE_TRANSPORT", "tcp"},
                    {"RONDE_DETERMINISTIC", "1"},
                    {"RONDE_LOG_LEVEL", "trace"}});
  auto other = Read({{"RONDE_FUSION_THRESHOLD", "9"}, {"RONDE_LOG_LEVEL", "error"}});
  ASSERT_TRUE(root.ok() && other.ok());
  const Result adopted = other->AdoptJob(root->EncodeJob());
  ASSERT_TRUE(adopted.ok()) << adopted.message();
  EXPECT_EQ(other->fusion_threshold, 12345);
  EXPECT_EQ(other->cycle_time_ms, 0.1);
  EXPECT_EQ(other->transport, "tcp");
  EXPECT_TRUE(other->deterministic);
  EXPECT_EQ(other->log_level, "error");
  EXPECT_EQ(other->EncodeJob(), root->EncodeJob());
}

TEST(OptionsTest, AForeignJobLineIsAnError) {
  Options options;
  EXPECT_FALSE(options.AdoptJob("NO_SUCH_OPTION=1\n").ok());
  EXPECT_FALSE(options.AdoptJob("FUSION_THRESHOLD\n").ok());
  EXPECT_FALSE(options.AdoptJob("FUSION_THRESHOLD=x\n").ok());
}

TEST(OptionTableTest, NamesAndFlagsAreUnique) {
  std::set<std::string_view> names, flags;
  for (const auto& row : OptionTable()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(row.flag.empty() || (row.flag.starts_with("--") && flags.insert(row.flag).second)) << row.flag;
    EXPECT_TRUE(!row.help.empty() && row.help.ends_with(".")) << row.name;
    EXPECT_GT(row.flag_scale, 0) << row.name;
  }
}

}  // namespace
}  // namespace ronde
