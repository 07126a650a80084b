// Endpoints as threads of one process, on one "host" (Unix sockets, shared memory) or on several (TCP over loopback).
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "transport/conformance.h"
#include "transport/tcp_job.h"

namespace ronde {
namespace {

using testing::Bytes, testing::ConnectAll, testing::EveryoneElsewhere, testing::Job, testing::Made, testing::TakeText;

testing::World MakeWorld(const Job& setup) {
  Made made = ConnectAll(setup);
  testing::World world;
  bool memory = true;
  for (auto& m : made) {
    EXPECT_TRUE(m.ok()) << m.error().message();
    world.transports.push_back(std::move(m->transport));
    world.mailboxes.push_back(std::move(m->mailbox));
    memory &= m->segment != nullptr;
    world.segments.push_back(std::move(m->segment));
  }
  if (!memory) world.segments.clear();
  return world;
}
testing::World MakeOneHost(int size) { return MakeWorld({.size = size}); }
testing::World MakeOneHostBySockets(int size) { return MakeWorld({.size = size, .shared_memory = false}); }
testing::World MakeHosts(int size) { return MakeWorld({.size = size, .host = EveryoneElsewhere()}); }

TEST(Endpoint, RanksOfOneHostMeetAndShareMemory) {
  auto made = ConnectAll({.size = 4});
  for (auto& m : made) ASSERT_TRUE(m.ok()) << m.error().message();
  for (int r = 0; r < 4; ++r) {
    ASSERT_NE(made[r]->segment, nullptr);
    EXPECT_EQ(made[r]->job_options, "from 0");
    std::memset(made[r]->segment->Peer(r), 'a' + r, 10);
    made[r]->segment->Publish(Segment::kPacked, 1);
  }
  for (int r = 0; r < 4; ++r) {
    for (int p = 0; p < 4; ++p) {
      ASSERT_TRUE(made[r]->segment->Await(p, Segment::kPacked, 1, After(5)).ok());
      EXPECT_EQ(static_cast<char>(made[r]->segment->Peer(p)[9]), 'a' + p);
    }
  }
}

TEST(Endpoint, MailboxesCarryOrderedMessagesBigOnesAndEnds) {
  for (bool one_host : {true, false}) {
    Job setup;
    setup.size = 3;
    if (!one_host) setup.host = EveryoneElsewhere();
    auto made = ConnectAll(setup);
    for (auto& m : made) ASSERT_TRUE(m.ok()) << m.error().message();
    std::string big(4 << 20, 'b');
    made[1]->mailbox->Post(0, Bytes("one"));
    made[1]->mailbox->Post(0, Bytes(big));
    std::thread flush([&] { EXPECT_TRUE(made[1]->mailbox->Flush(After(10)).ok()); });
    EXPECT_EQ(TakeText(*made[0]->mailbox), "one");
    EXPECT_EQ(TakeText(*made[0]->mailbox), big);
    flush.join();
    made[0]->mailbox->Post(2, Bytes("down"));
    EXPECT_EQ(TakeText(*made[2]->mailbox), "down");
    made[1]->mailbox.reset();
    auto start = Now();
    EXPECT_EQ(TakeText(*made[0]->mailbox), "lost 1");
    EXPECT_LT(Seconds(Now() - start), 1);
    made[0]->mailbox->Post(1, Bytes("into the void"));
  }
}

TEST(Endpoint, RingEndsAWaitAlsoWhenItCameBefore) {
  auto made = ConnectAll({.size = 2});
  ASSERT_TRUE(made[0].ok() && made[1].ok());
  Mailbox::Event none;
  made[0]->mailbox->Ring();
  made[0]->mailbox->Wait(Deadline::max(), false);
  EXPECT_FALSE(made[0]->mailbox->Take(&none));
  std::thread ringer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    made[0]->mailbox->Ring();
  });
  made[0]->mailbox->Wait(Deadline::max(), false);
  EXPECT_FALSE(made[0]->mailbox->Take(&none));
  ringer.join();
  auto start = Now();
  made[0]->mailbox->Wait(After(0.03), false);
  EXPECT_GE(Seconds(Now() - start), 0.029);
}

// One that rings after each piece of work must never leave the other asleep with work to do, however it waits.
TEST(Endpoint, NoRingIsLost) {
  for (bool one_host : {true, false}) {
    Job setup;
    setup.size = 2;
    if (!one_host) setup.host = EveryoneElsewhere();
    auto made = ConnectAll(setup);
    ASSERT_TRUE(made[0].ok() && made[1].ok());
    Mailbox& mailbox = *made[0]->mailbox;
    constexpr int kTurns = 20'000;
    std::atomic<int> given{0}, taken{0};
    std::thread ringer([&] {
      for (int i = 1; i <= kTurns; ++i) {
        given.store(i);
        mailbox.Ring();
        // By turns at once, and after the other may have gone to sleep.
        while (taken.load() < i - i % 3 && taken.load() >= 0) std::this_thread::yield();
      }
    });
    const Deadline deadline = After(60);
    for (int i = 0; taken.load() < kTurns && Now() < deadline; ++i) {
      if (given.load() == taken.load()) mailbox.Wait(deadline, i % 2 == 0);
      taken.store(given.load());
    }
    EXPECT_LT(Now(), deadline);
    if (taken.load() < kTurns) taken.store(-1);
    ringer.join();
  }
}

TEST(Endpoint, TransportMovesLargeDataBothWaysMatchedByTag) {
  for (bool one_host : {true, false}) {
    Job setup;
    setup.size = 3;
    if (!one_host) setup.host = EveryoneElsewhere();
    auto made = ConnectAll(setup);
    for (auto& m : made) ASSERT_TRUE(m.ok()) << m.error().message();
    constexpr std::size_t kCount = 2 << 20;
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] {
        Transport& transport = *made[r]->transport;
        std::vector<std::vector<std::uint32_t>> out(3), in(3);
        std::vector<Transport::Handle> handles;
        for (int p = 0; p < 3; ++p) {
          if (p == r) continue;
          for (std::size_t i = 0; i < kCount; ++i) out[p].push_back(static_cast<std::uint32_t>(r * 7 + p * 3 + i));
          in[p].resize(kCount);
          auto half = kCount / 2;
          handles.push_back(transport.Send(p, 5, std::as_bytes(std::span(out[p]).first(half))));
          handles.push_back(transport.Send(p, 6, std::as_bytes(std::span(out[p]).subspan(half))));
          handles.push_back(transport.Recv(p, 6, std::as_writable_bytes(std::span(in[p]).subspan(half))));
          handles.push_back(transport.Recv(p, 5, std::as_writable_bytes(std::span(in[p]).first(half))));
        }
        for (auto h : handles) {
          Result result = transport.Wait(h, After(20));
          ASSERT_TRUE(result.ok()) << result.message();
        }
        for (int p = 0; p < 3; ++p) {
          if (p == r) continue;
          for (std::size_t i = 0; i < kCount; i += 997)
            ASSERT_EQ(in[p][i], static_cast<std::uint32_t>(p * 7 + r * 3 + i));
        }
      });
    }
    for (auto& t : threads) t.join();
  }
}

TEST(Endpoint, TransportErrorsNameTheRank) {
  auto made = ConnectAll({.size = 2});
  ASSERT_TRUE(made[0].ok() && made[1].ok());
  std::vector<std::byte> data(100);
  auto handle = made[0]->transport->Recv(1, 1, data);
  std::thread other([&] {
    std::vector<std::byte> out(50);
    auto h = made[1]->transport->Send(0, 1, out);
    EXPECT_TRUE(made[1]->transport->Wait(h, After(5)).ok());
  });
  Result result = made[0]->transport->Wait(handle, After(5));
  other.join();
  EXPECT_NE(result.message().find("rank 1"), std::string::npos) << result.message();
  EXPECT_NE(result.message().find("50 bytes where 100"), std::string::npos) << result.message();

  auto again = ConnectAll({.size = 2});
  handle = again[0]->transport->Recv(1, 1, data);
  auto start = Now();
  std::thread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    again[0]->transport->Abort(Result(Code::kStall, "enough"));
  });
  EXPECT_EQ(again[0]->transport->Wait(handle, Deadline::max()).message(), "enough");
  aborter.join();
  EXPECT_LT(Seconds(Now() - start), 1);
}

// Messages that fit a ring, ones that do not, and a ring that is full, mixed: the order of the sender holds.
TEST(ShmMailbox, SmallAndLargeMessagesKeepTheirOrder) {
  auto made = ConnectAll({.size = 3});
  for (auto& m : made) ASSERT_TRUE(m.ok()) << m.error().message();
  constexpr int kMessages = 3000;
  auto bytes = [](int rank, int k) {
    std::size_t large = k % 97 == 0 ? 70000 : 0;  // more than a ring holds
    return large + static_cast<std::size_t>((k * 31 + rank) % 400);
  };
  std::vector<std::thread> threads;
  for (int r = 1; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Mailbox& mailbox = *made[r]->mailbox;
      for (int k = 0; k < kMessages; ++k) {
        mailbox.Post(0, testing::PatternBytes(r, k, bytes(r, k)));
        if (k % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // lets the reader fall asleep
      }
      EXPECT_TRUE(mailbox.Flush(After(20)).ok());
    });
  }
  int next[3] = {};
  Deadline limit = After(20);
  while (next[1] + next[2] < 2 * kMessages && Now() < limit) {
    Mailbox::Event event;
    if (!made[0]->mailbox->Take(&event)) {
      made[0]->mailbox->Wait(limit, next[1] % 2 == 0);
      continue;
    }
    ASSERT_TRUE(event.lost.ok()) << event.lost.message();
    int k = next[event.peer]++;
    ASSERT_EQ(event.message, testing::PatternBytes(event.peer, k, bytes(event.peer, k))) << "message " << k;
  }
  EXPECT_EQ(next[1] + next[2], 2 * kMessages);
  for (auto& t : threads) t.join();
}

TEST(Endpoint, OneRankNeedsNoNetwork) {
  auto made = ConnectAll({.size = 1});
  ASSERT_TRUE(made[0].ok());
  EXPECT_EQ(made[0]->segment, nullptr);
}

TEST(Endpoint, TwelveRanksOnThreeHosts) {
  Job setup;
  setup.size = 12;
  setup.host = [](int r) { return "h" + std::to_string(r % 3); };
  auto made = ConnectAll(setup);
  for (auto& m : made) ASSERT_TRUE(m.ok()) << m.error().message();
  EXPECT_EQ(made[4]->segment->ranks(), (std::vector<int>{1, 4, 7, 10}));
}

}  // namespace

namespace testing {
namespace {

const Implementation kOneHost{"shm", MakeOneHost};
const Implementation kOneHostBySockets{"unix", MakeOneHostBySockets};
const Implementation kHosts{"tcp", MakeHosts};
INSTANTIATE_TEST_SUITE_P(Sockets, TransportTest, ::testing::Values(kOneHostBySockets, kHosts));
INSTANTIATE_TEST_SUITE_P(Sockets, MailboxTest, ::testing::Values(kOneHost, kOneHostBySockets, kHosts));
INSTANTIATE_TEST_SUITE_P(Sockets, SegmentTest, ::testing::Values(kOneHost));

}  // namespace
}  // namespace testing
}  // namespace ronde
