// The timeline's file: what a reader finds in it at any time, with any names, and at its limits.
#include "engine/timeline.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "engine/json.h"

namespace ronde {
namespace {

using testing::Count;
using testing::Events;
using testing::IsJson;
using testing::ReadFile;

class TimelineTest : public ::testing::Test {
 protected:
  TimelineTest() {
    folder_ = ::testing::TempDir() + "ronde_timeline_" + std::to_string(getpid());
    std::filesystem::create_directory(folder_);
  }
  ~TimelineTest() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  static Timeline::Config Config(std::uint64_t max_bytes = 1 << 30) {
    Timeline::Config config;
    config.host = "h\"1";
    config.max_bytes = max_bytes;
    config.log = Log(LogLevel::kOff, false, "");
    return config;
  }
  // An operation from its negotiation to its end, at `start` microseconds.
  static std::vector<TimelineEvent> Operation(const std::string& name, std::int64_t start) {
    auto definition = std::make_shared<Definition>();
    definition->name = name;
    definition->tensors.push_back({name, DType::kFloat32, {4}});
    auto at = [&](std::int64_t after) { return TimePoint(std::chrono::microseconds(start + after)); };
    std::vector<TimelineEvent> events(4);
    for (auto& event : events) event.definition = definition;
    events[0].kind = TimelineEvent::Kind::kReady;
    events[0].start = at(0);
    events[1].kind = TimelineEvent::Kind::kCommit;
    events[1].start = at(2);
    events[2].kind = TimelineEvent::Kind::kList;
    events[2].count = 1;
    events[2].phases = {std::chrono::microseconds(1), std::chrono::microseconds(2), Duration(0), Duration(500)};
    events[3].kind = TimelineEvent::Kind::kTensor;
    events[3].committed = at(2);
    for (int i = 2; i < 4; ++i) {
      events[i].start = at(5);
      events[i].end = at(9);
      events[i].bytes = 16;
    }
    return events;
  }
  static bool WaitFor(const std::function<bool()>& condition) {
    for (Deadline limit = After(20); Now() < limit; usleep(2000)) {
      if (condition()) return true;
    }
    return condition();
  }

  std::string folder_;
};

TEST_F(TimelineTest, AnyBytesBecomeJson) {
  EXPECT_EQ(JsonText("plain/näme.0"), "plain/näme.0");
  EXPECT_EQ(JsonText("a\"b\\c\nd\x01"), "a\\\"b\\\\c\\u000ad\\u0001");
  EXPECT_EQ(JsonText("\xff|\xc3|\xe2\x82|\xed\xa0\x80|\xc0\x80"),
            "\\ufffd|\\ufffd|\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd|\\ufffd\\ufffd");
  EXPECT_EQ(JsonText("\xf0\x9f\x98\x80"), "\xf0\x9f\x98\x80");
  std::string all;
  for (int c = 0; c < 256; ++c) all += static_cast<char>(c);
  EXPECT_TRUE(IsJson("\"" + JsonText(all) + "\""));
  for (std::size_t length : {511u, 512u, 513u, 5000u}) {
    for (const char* unit : {"x", "\xc3\xa4", "\xf0\x9f\x98\x80", "\x01", "\xff"}) {
      std::string name;
      while (name.size() < length) name += unit;
      std::string text = JsonText(name + "the end");
      EXPECT_TRUE(IsJson("\"" + text + "\""));
      EXPECT_LT(text.size(), 6 * kLongestText + 10);
      EXPECT_EQ(text.substr(text.size() - 7), "the end");
    }
  }
}

TEST_F(TimelineTest, AnOperationIsInTheFileWithItsPhases) {
  Timeline timeline(Config());
  EXPECT_FALSE(timeline.on());
  ASSERT_TRUE(timeline.Start(Path("t.json"), true).ok());
  EXPECT_TRUE(timeline.on() && timeline.marks_cycles());
  timeline.Add(Operation("quote\"d\n\xff" + std::string(3000, 'x'), 1000));
  timeline.AddCycle(TimePoint(std::chrono::microseconds(1234)));
  timeline.Stop();
  EXPECT_FALSE(timeline.on());
  ASSERT_TRUE(IsJson(ReadFile(Path("t.json"))));
  auto events = Events(Path("t.json"));
  EXPECT_EQ(Count(events, "quote\\\"d\\u000a\\ufffdxxx"), 6u);  // begin and end of negotiate, queue and run
  EXPECT_EQ(Count(events, R"("ph":"n")"), 1u);
  EXPECT_EQ(Count(events, R"("name":"ready: rank 0","cat":"negotiate","ph":"n")"), 1u);
  EXPECT_EQ(Count(events, R"("name":"network","cat":"phase","ph":"X","ts":1006.000,"dur":2.000)"), 1u);
  EXPECT_EQ(Count(events, R"("name":"unpack","cat":"phase","ph":"X","ts":1008.000,"dur":0.500)"), 1u);
  EXPECT_EQ(Count(events, R"("name":"reduce")"), 0u);  // took no time
  EXPECT_EQ(Count(events, R"("name":"cycle","cat":"cycle","ph":"i","ts":1234.000,"s":"t")"), 1u);
  EXPECT_EQ(Count(events, R"-("name":"rank 0 (h\"1)")-"), 1u);
  EXPECT_EQ(Count(events, R"("dropped":0,"cut":false)"), 1u);
}

TEST_F(TimelineTest, WhatIsOpenAtTheEndIsClosed) {
  Timeline timeline(Config());
  ASSERT_TRUE(timeline.Start(Path("t.json"), false).ok());
  timeline.Add(Operation("begun before", 0)[1]);  // its commit only
  timeline.Add(Operation("never committed", 10)[0]);
  timeline.Stop();
  auto events = Events(Path("t.json"));
  EXPECT_EQ(Count(events, "begun before"), 0u);
  EXPECT_EQ(Count(events, R"("name":"never committed","cat":"negotiate","ph":"b")"), 1u);
  EXPECT_EQ(Count(events, R"("name":"never committed","cat":"negotiate","ph":"e")"), 1u);
}

TEST_F(TimelineTest, StartingTwiceAndBadPathsAreErrorsThatNameThePath) {
  Timeline timeline(Config());
  Result bad = timeline.Start(Path("missing/t.json"), false);
  EXPECT_EQ(bad.code(), Code::kArgument);
  EXPECT_NE(bad.message().find(Path("missing/t.json") + " cannot be written: No such file"), std::string::npos);
  EXPECT_FALSE(timeline.on());
  timeline.Stop();
  ASSERT_TRUE(timeline.Start(Path("a.json"), false).ok());
  Result twice = timeline.Start(Path("b.json"), false);
  EXPECT_NE(twice.message().find(Path("a.json") + " already"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(Path("b.json")));
  timeline.Stop();
  timeline.Stop();
  ASSERT_TRUE(timeline.Start(Path("b.json"), false).ok());
  timeline.Add(Operation("x", 0));
  timeline.Stop();
  EXPECT_EQ(Count(Events(Path("a.json")), R"("name":"x")"), 0u);
  EXPECT_EQ(Count(Events(Path("b.json")), R"("name":"x")"), 6u);
}

TEST_F(TimelineTest, TheFileEndsAtItsLimitAndSaysSo) {
  constexpr std::uint64_t kLimit = 600 * 1024;
  Timeline timeline(Config(kLimit));
  ASSERT_TRUE(timeline.Start(Path("t.json"), false).ok());
  ASSERT_TRUE(WaitFor([&] {
    timeline.Add(Operation("tensor", 0));
    return !timeline.on();
  }));
  std::string text = ReadFile(Path("t.json"));  // still open
  EXPECT_TRUE(IsJson(text));
  EXPECT_LE(text.size(), kLimit);
  timeline.Stop();
  text = ReadFile(Path("t.json"));
  EXPECT_TRUE(IsJson(text));
  EXPECT_LT(text.size(), kLimit);
  EXPECT_GT(text.size(), kLimit / 2);
  EXPECT_EQ(Count(Events(Path("t.json")), R"("cut":true)"), 1u);
}

TEST_F(TimelineTest, EventsThatDoNotFitInMemoryAreCounted) {
  Timeline::Config config = Config();
  config.max_waiting = 100;
  Timeline timeline(config);
  ASSERT_TRUE(timeline.Start(Path("t.json"), false).ok());
  std::vector<TimelineEvent> events;
  for (int i = 0; i < 1000; ++i) events.push_back(Operation("open", i)[0]);
  timeline.Add(std::move(events));
  timeline.Stop();
  auto lines = Events(Path("t.json"));
  EXPECT_TRUE(IsJson(ReadFile(Path("t.json"))));
  EXPECT_EQ(Count(lines, R"("name":"900 events lost")"), 1u);
  EXPECT_EQ(Count(lines, R"("dropped":900,"cut":false)"), 1u);
  EXPECT_EQ(Count(lines, R"("ph":"b")"), Count(lines, R"("ph":"e")"));
}

TEST_F(TimelineTest, AFullDiskEndsTheTimelineAndNothingElse) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "there is no /dev/full";
  Timeline timeline(Config());
  Result result = timeline.Start("/dev/full", false);
  EXPECT_NE(result.message().find("/dev/full cannot be written: No space left"), std::string::npos);
  EXPECT_FALSE(timeline.on());
  ASSERT_TRUE(timeline.Start(Path("t.json"), false).ok());
}

TEST_F(TimelineTest, TwoTimelinesOfOneProcess) {
  Timeline first(Config()), second(Config());
  ASSERT_TRUE(first.Start(Path("1.json"), false).ok());
  ASSERT_TRUE(second.Start(Path("2.json"), false).ok());
  first.Add(Operation("one", 0));
  second.Add(Operation("two", 0));
  first.Stop();
  second.Stop();
  EXPECT_EQ(Count(Events(Path("1.json")), R"("name":"one")"), 6u);
  EXPECT_EQ(Count(Events(Path("1.json")), R"("name":"two")"), 0u);
  EXPECT_EQ(Count(Events(Path("2.json")), R"("name":"two")"), 6u);
}

TEST_F(TimelineTest, ARanksPath) {
  EXPECT_EQ(TimelinePath("t.json", 3), "t.rank3.json");
  EXPECT_EQ(TimelinePath("/a.b/t", 0), "/a.b/t.rank0");
  EXPECT_EQ(TimelinePath("a/.hidden", 12), "a/.hidden.rank12");
  EXPECT_EQ(TimelinePath("a/t.json.gz", 1), "a/t.json.rank1.gz");
}

}  // namespace
}  // namespace ronde
