// One suite over every store.
#include "store/store.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "net/hmac.h"
#include "net/socket.h"

namespace ronde {
namespace {

enum class Kind { kMemory, kFile, kUnix, kTcp, kPrefix };

class StoreTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/ronde-store-XXXXXX";
    directory_ = mkdtemp(pattern);
    if (GetParam() == Kind::kUnix) server_ = std::move(StoreServer::Start("unix:" + directory_ + "/s", "").value());
    if (GetParam() == Kind::kTcp) server_ = std::move(StoreServer::Start("tcp:127.0.0.1:0", "secret").value());
    state_ = CreateMemoryStoreState();
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }
  std::unique_ptr<Store> Open() {
    switch (GetParam()) {
      case Kind::kMemory: return CreateMemoryStore(state_);
      case Kind::kPrefix: return CreatePrefixStore(CreateMemoryStore(state_), "job/");
      case Kind::kFile: return std::move(OpenStore("file:" + directory_, "", After(5)).value());
      default: return std::move(OpenStore(server_->url(), "secret", After(5)).value());
    }
  }
  std::string directory_;
  std::unique_ptr<StoreServer> server_;
  std::shared_ptr<MemoryStoreState> state_;
};

TEST_P(StoreTest, SetGetAddAndBinaryValues) {
  auto a = Open(), b = Open();
  std::string value("a\0b/\n\xff", 6);
  ASSERT_TRUE(a->Set("some/key with spaces", value).ok());
  EXPECT_EQ(b->Get("some/key with spaces", After(5)).value(), value);
  EXPECT_EQ(a->Add("n", 5).value(), 5);
  EXPECT_EQ(b->Add("n", -2).value(), 3);
  ASSERT_TRUE(a->Set("empty", "").ok());
  EXPECT_EQ(b->Get("empty", After(5)).value(), "");
}

TEST_P(StoreTest, GetWaitsAndItsErrorNamesTheKey) {
  auto a = Open();
  std::thread later([this] {
    auto b = Open();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_TRUE(b->Set("late", "x").ok());
  });
  EXPECT_EQ(a->Get("late", After(5)).value(), "x");
  later.join();
  auto start = Now();
  auto missing = a->Get("never", After(0.05));
  EXPECT_EQ(missing.error().code(), Code::kTimeout);
  EXPECT_NE(missing.error().message().find("never"), std::string::npos);
  EXPECT_LT(Seconds(Now() - start), 2);
}

TEST_P(StoreTest, ExchangeGivesAllToAllOrNamesTheMissing) {
  constexpr std::uint32_t kCount = 8;
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    threads.emplace_back([this, i] {
      auto all = Open()->Exchange("init", i, kCount, "blob " + std::to_string(i), After(10));
      ASSERT_TRUE(all.ok()) << all.error().message();
      for (std::uint32_t k = 0; k < kCount; ++k) EXPECT_EQ(all.value()[k], "blob " + std::to_string(k));
    });
  }
  for (auto& t : threads) t.join();
  auto partial = Open()->Exchange("again", 1, 3, "x", After(0.05));
  EXPECT_EQ(partial.error().code(), Code::kTimeout);
  EXPECT_NE(partial.error().message().find("missing: 0, 2"), std::string::npos) << partial.error().message();
}

TEST_P(StoreTest, LongKeysAreToldApart) {
  auto store = Open();
  std::string a(400, 'k'), b = a + "b";
  ASSERT_TRUE(store->Set(a, "1").ok());
  ASSERT_TRUE(store->Set(b, "2").ok());
  EXPECT_EQ(store->Get(a, After(5)).value(), "1");
  EXPECT_EQ(store->Get(b, After(5)).value(), "2");
}

TEST_P(StoreTest, ManyClientsAtOnce) {
  constexpr int kClients = 24;
  constexpr int kTimes = 20;
  std::vector<std::thread> threads;
  for (int c = 0; c < kClients; ++c) {
    threads.emplace_back([this, c] {
      auto store = Open();
      for (int i = 0; i < kTimes; ++i) {
        std::string round = std::to_string(i), mine = std::to_string(c), next = std::to_string((c + 1) % kClients);
        EXPECT_TRUE(store->Add("sum", c + 1).ok());
        EXPECT_TRUE(store->Set(round + "/" + mine, round + mine).ok());
        EXPECT_EQ(store->Get(round + "/" + next, After(20)).value(), round + next);
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(Open()->Add("sum", 0).value(), kTimes * kClients * (kClients + 1) / 2);
}

INSTANTIATE_TEST_SUITE_P(All, StoreTest,
                         testing::Values(Kind::kMemory, Kind::kFile, Kind::kUnix, Kind::kTcp, Kind::kPrefix));

TEST(StoreServer, RefusesStrangersAndBadFramesWithoutHarm) {
  auto server = std::move(StoreServer::Start("tcp:127.0.0.1:0", "right").value());
  EXPECT_FALSE(OpenStore(server->url(), "wrong", After(5)).ok());
  for (int i = 0; i < 20; ++i) {
    auto stranger = Dial(server->url(), After(5));
    ASSERT_TRUE(stranger.ok());
    std::string noise = RandomBytes(200);
    (void)SendAll(stranger.value(), std::as_bytes(std::span(noise)), After(1));
  }
  auto store = OpenStore(server->url(), "right", After(5));
  ASSERT_TRUE(store.ok());
  EXPECT_TRUE(store.value()->Set("k", "v").ok());
  EXPECT_EQ(store.value()->Set("k", std::string(17 << 20, 'x')).code(), Code::kArgument);
  server.reset();
  EXPECT_FALSE(store.value()->Get("k", After(1)).ok());
}

TEST(StoreServer, ItsEndEndsWaitingClients) {
  auto server = std::move(StoreServer::Start("tcp:127.0.0.1:0", "s").value());
  auto store = std::move(OpenStore(server->url(), "s", After(5)).value());
  std::thread ender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    server.reset();
  });
  auto start = Now();
  auto value = store->Get("never", Deadline::max());
  EXPECT_LT(Seconds(Now() - start), 2);
  EXPECT_NE(value.error().message().find("tcp:127.0.0.1:"), std::string::npos) << value.error().message();
  ender.join();
  EXPECT_FALSE(store->Set("k", "v").ok());
}

TEST(StoreServer, AnExchangeHasOneCount) {
  auto server = std::move(StoreServer::Start("tcp:127.0.0.1:0", "").value());
  auto a = std::move(OpenStore(server->url(), "", After(5)).value());
  EXPECT_EQ(a->Exchange("x", 0, 2, "a", After(0.05)).error().code(), Code::kTimeout);
  auto other = a->Exchange("x", 1, 3, "b", After(5));
  EXPECT_EQ(other.error().code(), Code::kArgument);
  EXPECT_NE(other.error().message().find("by 2, not 3"), std::string::npos) << other.error().message();
  // Who timed out may come again, and the connection still serves.
  auto b = std::move(OpenStore(server->url(), "", After(5)).value());
  std::thread second([&] { EXPECT_EQ(b->Exchange("x", 1, 2, "b", After(5)).value()[1], "b"); });
  second.join();  // index 0 is there already
  EXPECT_EQ(a->Exchange("x", 0, 2, "again", After(5)).value()[1], "b");
}

TEST(StoreServer, AStrangerThatTalksWithoutEndHoldsUpNobody) {
  auto server = std::move(StoreServer::Start("tcp:127.0.0.1:0", "s").value());
  std::atomic<bool> stop{false};
  std::atomic<int> visits{0};
  std::thread flood([&] {
    std::string noise(1 << 20, '\x01');
    while (!stop) {
      auto stranger = Dial(server->url(), After(1));
      if (stranger.ok()) (void)SendAll(stranger.value(), std::as_bytes(std::span(noise)), After(1));
      ++visits;
    }
  });
  auto store = OpenStore(server->url(), "s", After(5));
  EXPECT_TRUE(store.ok());
  Deadline limit = After(10);
  for (int i = 0; visits < 10 && store.ok() && Now() < limit; ++i) EXPECT_EQ(store.value()->Add("n", 1).value(), i + 1);
  EXPECT_GE(visits, 10);
  stop = true;
  flood.join();
}

}  // namespace
}  // namespace ronde
