#include "transport/conformance.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace ronde::testing {

std::string RunSegmentPipeline(Segment& segment, std::uint64_t first, int chunks) {
  constexpr std::uint64_t kSlots = 3;
  const std::size_t slot_bytes = segment.ring_bytes() / kSlots / 64 * 64;
  const int me = segment.rank();
  auto slot = [&](int rank, std::uint64_t chunk) { return segment.Peer(rank) + chunk % kSlots * slot_bytes; };
  auto await = [&](int peer, Segment::Stage stage, std::uint64_t count) -> std::string {
    return Failure(segment.Await(peer, stage, count, Patience()));
  };
  // Counters stand at the first chunk before the pipeline begins.
  for (auto stage : {Segment::kPacked, Segment::kReduced, Segment::kConsumed}) segment.Publish(stage, first);
  for (std::uint64_t chunk = first; chunk < first + static_cast<std::uint64_t>(chunks); ++chunk) {
    for (int peer : segment.ranks()) {
      if (chunk < first + kSlots) break;
      if (auto error = await(peer, Segment::kConsumed, chunk - kSlots + 1); !error.empty()) return error;
    }
    std::byte* mine = slot(me, chunk);
    for (std::size_t i = 0; i < slot_bytes; ++i) mine[i] = Pattern(me, chunk, i);
    segment.Publish(Segment::kPacked, chunk + 1);
    for (int peer : segment.ranks()) {
      if (auto error = await(peer, Segment::kPacked, chunk + 1); !error.empty()) return error;
      const std::byte* theirs = slot(peer, chunk);
      for (std::size_t i = 0; i < slot_bytes; ++i) {
        if (theirs[i] != Pattern(peer, chunk, i)) {
          return "rank " + std::to_string(me) + " reads a wrong byte " + std::to_string(i) + " of rank " +
                 std::to_string(peer) + "'s chunk " + std::to_string(chunk);
        }
      }
    }
    segment.Publish(Segment::kConsumed, chunk + 1);
  }
  // Nobody leaves, and takes the ring away, while others read.
  for (int peer : segment.ranks()) {
    if (auto error = await(peer, Segment::kConsumed, first + chunks); !error.empty()) return error;
  }
  return "";
}

namespace {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportTest);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MailboxTest);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SegmentTest);

constexpr double kShort = 0.1;        // waits that should time out
constexpr double kWakeSeconds = 0.1;  // an abort reaches a sleeper within this

double ThreadCpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// How long after `wake` a thread in `sleep` came back, the best of a few goes: other load only adds to it. make() gives
// a fresh world for each go.
template <class Make, class Sleep, class Wake>
double WakeSeconds(Make make, Sleep sleep, Wake wake, double limit = kWakeSeconds) {
  double best = 1e9;
  for (int go = 0; go < 5 && best > limit; ++go) {
    World world = make();
    std::atomic<double> back{0};
    std::thread sleeper([&] {
      sleep(world);
      back = Seconds(Now().time_since_epoch());
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    double woken = Seconds(Now().time_since_epoch());
    wake(world);
    sleeper.join();
    best = std::min(best, back - woken);
  }
  return best;
}

// --- Transport ---------------------------------------------------------------------------------------------------

TEST_P(TransportTest, EqualTagsArriveInOrder) {
  World world = Make(2);
  RunRanks(2, [&](int rank) {
    Transport& transport = *world.transports[rank];
    EXPECT_EQ(transport.rank(), rank);
    EXPECT_EQ(transport.size(), 2);
    const int peer = 1 - rank;
    std::vector<std::vector<std::byte>> sent, received;
    std::vector<Transport::Handle> handles;
    for (std::size_t k = 0; k < 40; ++k) {
      sent.push_back(PatternBytes(rank, k, 1 + k * 7));
      received.emplace_back(1 + k * 7);
    }
    for (std::size_t k = 0; k < 40; ++k) {
      handles.push_back(transport.Send(peer, 9, sent[k]));
      handles.push_back(transport.Recv(peer, 9, received[k]));
    }
    for (auto handle : handles) EXPECT_EQ(Failure(transport.Wait(handle, Patience())), "");
    for (std::size_t k = 0; k < 40; ++k) EXPECT_EQ(received[k], PatternBytes(peer, k, 1 + k * 7)) << k;
  });
}

TEST_P(TransportTest, TagsAreMatchedNotOrder) {
  World world = Make(2);
  RunRanks(2, [&](int rank) {
    constexpr int kTags = 64;
    Transport& transport = *world.transports[rank];
    const int peer = 1 - rank;
    auto tag = [](int k) { return (std::uint64_t{1} << 40) * static_cast<std::uint64_t>(k) + 3; };  // 64-bit tags
    std::vector<std::vector<std::byte>> sent, received(kTags, std::vector<std::byte>(33));
    for (int k = 0; k < kTags; ++k) sent.push_back(PatternBytes(rank, k, 33));
    std::vector<Transport::Handle> handles;
    for (int k = kTags - 1; k >= 0; --k) handles.push_back(transport.Recv(peer, tag(k), received[k]));
    for (int k = 0; k < kTags; ++k) handles.push_back(transport.Send(peer, tag(k), sent[k]));
    for (auto handle : handles) EXPECT_EQ(Failure(transport.Wait(handle, Patience())), "");
    for (int k = 0; k < kTags; ++k) EXPECT_EQ(received[k], PatternBytes(peer, k, 33)) << k;
  });
}

TEST_P(TransportTest, ZeroBytes) {
  World world = Make(2);
  RunRanks(2, [&](int rank) {
    Transport& transport = *world.transports[rank];
    std::vector<std::byte> one = PatternBytes(rank, 0, 1), got(1);
    std::vector<Transport::Handle> handles = {transport.Send(1 - rank, 4, {}), transport.Send(1 - rank, 4, one),
                                              transport.Recv(1 - rank, 4, {}), transport.Recv(1 - rank, 4, got)};
    for (auto handle : handles) EXPECT_EQ(Failure(transport.Wait(handle, Patience())), "");
    EXPECT_EQ(got, PatternBytes(1 - rank, 0, 1));
  });
}

TEST_P(TransportTest, BigTransfersBothWaysAtOnce) {
  constexpr std::size_t kBytes = 8 << 20;
  World world = Make(2);
  RunRanks(2, [&](int rank) {
    Transport& transport = *world.transports[rank];
    auto sent = PatternBytes(rank, 7, kBytes);
    std::vector<std::byte> received(kBytes);
    auto send = transport.Send(1 - rank, 1, sent);
    auto recv = transport.Recv(1 - rank, 1, received);
    EXPECT_EQ(Failure(transport.Wait(send, Patience())), "");  // both wait for the send first
    EXPECT_EQ(Failure(transport.Wait(recv, Patience())), "");
    EXPECT_TRUE(received == PatternBytes(1 - rank, 7, kBytes));
  });
}

TEST_P(TransportTest, EverybodyToEverybody) {
  constexpr int kSize = 5;
  World world = Make(kSize);
  auto bytes = [](int from, int to) { return static_cast<std::size_t>(1000 * from + 10 * to + 1); };
  RunRanks(kSize, [&](int rank) {
    Transport& transport = *world.transports[rank];
    std::vector<std::vector<std::byte>> sent(kSize), received(kSize);
    std::vector<Transport::Handle> handles;
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer == rank) continue;
      sent[peer] = PatternBytes(rank, peer, bytes(rank, peer));
      received[peer].resize(bytes(peer, rank));
      handles.push_back(transport.Send(peer, 0, sent[peer]));
      handles.push_back(transport.Recv(peer, 0, received[peer]));
    }
    for (auto handle : handles) EXPECT_EQ(Failure(transport.Wait(handle, Patience())), "");
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer == rank) continue;
      EXPECT_EQ(received[peer], PatternBytes(peer, rank, bytes(peer, rank))) << peer;
    }
  });
}

TEST_P(TransportTest, AnotherSizeIsAnErrorOnTheReceiver) {
  World world = Make(2);
  RunRanks(2, [&](int rank) {
    Transport& transport = *world.transports[rank];
    if (rank == 0) {
      auto data = PatternBytes(0, 0, 17);
      (void)transport.Wait(transport.Send(1, 5, data), Patience());
      return;
    }
    std::vector<std::byte> room(18, std::byte{0xee});
    Result result = transport.Wait(transport.Recv(0, 5, room), Patience());
    EXPECT_EQ(result.code(), Code::kTransport);
    EXPECT_EQ(Contains(result.message(), {"rank 0", "17 bytes", "18"}), "");
    EXPECT_EQ(room, std::vector<std::byte>(18, std::byte{0xee}));
  });
}

// Links may be made when first used: tests of broken or silent ones use them once before.
void Greet(Transport& transport, int peer) {
  auto data = PatternBytes(transport.rank(), 0, 8);
  std::vector<std::byte> got(8);
  auto send = transport.Send(peer, 77, data);
  auto recv = transport.Recv(peer, 77, got);
  EXPECT_EQ(Failure(transport.Wait(send, Patience())), "");
  EXPECT_EQ(Failure(transport.Wait(recv, Patience())), "");
  EXPECT_EQ(got, PatternBytes(peer, 0, 8));
}

TEST_P(TransportTest, DeadlineNamesThePeer) {
  World world = Make(2);
  RunRanks(2, [&](int rank) { Greet(*world.transports[rank], 1 - rank); });
  Transport& transport = *world.transports[0];
  std::vector<std::byte> room(8, std::byte{0xee});
  TimePoint begin = Now();
  double cpu = ThreadCpuSeconds();
  Result result = transport.Wait(transport.Recv(1, 6, room), After(0.4));
  EXPECT_LT(ThreadCpuSeconds() - cpu, 0.2);  // sleeps, does not spin
  EXPECT_EQ(result.code(), Code::kTimeout);
  EXPECT_EQ(Contains(result.message(), {"rank 1"}), "");
  EXPECT_GE(Seconds(Now() - begin), 0.39);
  // Its memory is its caller's again: what comes late goes elsewhere.
  std::vector<std::byte> other(8);
  auto data = PatternBytes(1, 3, 8);
  auto send = world.transports[1]->Send(0, 6, data);
  auto recv = transport.Recv(1, 6, other);
  std::thread sender([&] { EXPECT_EQ(Failure(world.transports[1]->Wait(send, Patience())), ""); });
  EXPECT_EQ(Failure(transport.Wait(recv, Patience())), "");
  sender.join();
  EXPECT_EQ(other, data);
  EXPECT_EQ(room, std::vector<std::byte>(8, std::byte{0xee}));
}

TEST_P(TransportTest, AbortWakesNowAndLater) {
  const Result cause(Code::kStall, "tensor grad.3 stalled");
  auto make = [&] {
    World world = Make(2);
    RunRanks(2, [&](int rank) { Greet(*world.transports[rank], 1 - rank); });
    return world;
  };
  std::vector<std::byte> room(8);
  double seconds = WakeSeconds(
      make,
      [&](World& world) {
        Transport& transport = *world.transports[0];
        for (int k = 0; k < 2; ++k) {
          Result result = transport.Wait(transport.Recv(1, 6, room), Patience());
          EXPECT_EQ(result.code(), Code::kStall);
          EXPECT_EQ(Contains(result.message(), {"tensor grad.3 stalled"}), "");
        }
      },
      [&](World& world) {
        world.transports[0]->Abort(cause);
        world.transports[0]->Abort(Result(Code::kInternal, "a later cause"));  // the first stays
      });
  EXPECT_LT(seconds, kWakeSeconds);
}

TEST_P(TransportTest, LostPeerIsNamed) {
  World world = Make(3);
  RunRanks(3, [&](int rank) {
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != rank) Greet(*world.transports[rank], peer);
    }
  });
  std::vector<std::byte> room(8);
  Transport& transport = *world.transports[0];
  std::thread sleeper([&] {
    Result result = transport.Wait(transport.Recv(1, 6, room), Patience());
    EXPECT_EQ(result.code(), Code::kPeerLost);
    EXPECT_EQ(Contains(result.message(), {"rank 1"}), "");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.Kill(1);
  sleeper.join();
  // The rest goes on.
  std::thread other([&] { Greet(*world.transports[2], 0); });
  Greet(transport, 2);
  other.join();
}

// --- Mailbox -----------------------------------------------------------------------------------------------------

// The next event, or one with peer -1 after the deadline.
Mailbox::Event NextEvent(Mailbox& mailbox, bool eager = false, Deadline deadline = Patience()) {
  Mailbox::Event event;
  while (!mailbox.Take(&event)) {
    if (Now() >= deadline) return {};
    mailbox.Wait(deadline, eager);
  }
  return event;
}

TEST_P(MailboxTest, MessagesOfAPairKeepTheirOrder) {
  constexpr int kSize = 4;
  constexpr int kMessages = 200;
  World world = Make(kSize);
  auto bytes = [](int rank, int k) { return static_cast<std::size_t>((k * 37 + rank) % 300); };  // some are empty
  RunRanks(kSize, [&](int rank) {
    Mailbox& mailbox = *world.mailboxes[rank];
    std::vector<int> peers = {0};
    if (rank == 0) peers = {1, 2, 3};
    for (int k = 0; k < kMessages; ++k) {
      for (int peer : peers) mailbox.Post(peer, PatternBytes(rank, k * 10 + peer, bytes(rank, k)));
    }
    std::vector<int> next(kSize, 0);
    for (std::size_t n = 0; n < kMessages * peers.size(); ++n) {
      Mailbox::Event event = NextEvent(mailbox, /*eager=*/n % 2 == 1);
      ASSERT_GE(event.peer, 0) << "only " << n << " messages came";
      ASSERT_EQ(Failure(event.lost), "");
      int k = next[event.peer]++;
      ASSERT_EQ(event.message, PatternBytes(event.peer, k * 10 + rank, bytes(event.peer, k)))
          << "message " << k << " of rank " << event.peer;
    }
    // Nobody leaves while others may still hear from it.
    EXPECT_EQ(Failure(mailbox.Flush(Patience())), "");
  });
}

TEST_P(MailboxTest, PostingNeverBlocks) {
  constexpr std::size_t kBytes = 4 << 20;
  constexpr int kMessages = 3;
  World world = Make(2);
  // Both have posted all before either reads.
  for (int rank = 0; rank < 2; ++rank) {
    for (int k = 0; k < kMessages; ++k) world.mailboxes[rank]->Post(1 - rank, PatternBytes(rank, k, kBytes));
  }
  std::atomic<int> finished{0};
  RunRanks(2, [&](int rank) {
    Mailbox& mailbox = *world.mailboxes[rank];
    for (int k = 0; k < kMessages; ++k) {
      Mailbox::Event event = NextEvent(mailbox);
      ASSERT_EQ(event.peer, 1 - rank);
      EXPECT_TRUE(event.message == PatternBytes(1 - rank, k, kBytes)) << k;
    }
    ++finished;
    const Deadline limit = Patience();
    while (finished < 2 && Now() < limit) {  // the other's messages leave while this one waits
      Mailbox::Event event;
      EXPECT_FALSE(mailbox.Take(&event));
      mailbox.Wait(After(0.01), false);
    }
  });
  EXPECT_EQ(finished, 2);
}

TEST_P(MailboxTest, FlushSendsWhatIsQueued) {
  constexpr std::size_t kBytes = 4 << 20;
  World world = Make(2);
  std::thread reader([&] {
    Mailbox::Event event = NextEvent(*world.mailboxes[1]);
    EXPECT_TRUE(event.message == PatternBytes(0, 0, kBytes));
  });
  world.mailboxes[0]->Post(1, PatternBytes(0, 0, kBytes));
  EXPECT_EQ(Failure(world.mailboxes[0]->Flush(Patience())), "");
  reader.join();
}

TEST_P(MailboxTest, WaitEndsAtItsDeadlineAndSleeps) {
  World world = Make(2);
  for (bool eager : {false, true}) {
    TimePoint begin = Now();
    double cpu = ThreadCpuSeconds();
    world.mailboxes[0]->Wait(After(0.3), eager);
    EXPECT_LT(ThreadCpuSeconds() - cpu, 0.1);
    EXPECT_GE(Seconds(Now() - begin), 0.29);
    Mailbox::Event event;
    EXPECT_FALSE(world.mailboxes[0]->Take(&event));
  }
  world.mailboxes[0]->Wait(Now() - std::chrono::seconds(1), false);  // a deadline that is past
}

TEST_P(MailboxTest, RingWakesASleeper) {
  double seconds = WakeSeconds([&] { return Make(2); },
                               [](World& world) {
                                 TimePoint begin = Now();
                                 world.mailboxes[0]->Wait(Patience(), false);
                                 EXPECT_LT(Seconds(Now() - begin), 25);
                               },
                               [](World& world) { world.mailboxes[0]->Ring(); });
  EXPECT_LT(seconds, kWakeSeconds);
}

TEST_P(MailboxTest, RingSticksUntilTheNextWaitOnly) {
  World world = Make(2);
  Mailbox& mailbox = *world.mailboxes[0];
  for (bool eager : {false, true}) {
    mailbox.Ring();
    mailbox.Ring();  // rings are not counted
    Mailbox::Event event;
    EXPECT_FALSE(mailbox.Take(&event));  // Take leaves it alone
    TimePoint begin = Now();
    mailbox.Wait(After(20), eager);
    EXPECT_LT(Seconds(Now() - begin), 10) << "a ring was lost";
    begin = Now();
    mailbox.Wait(After(kShort), eager);
    EXPECT_GE(Seconds(Now() - begin), 0.9 * kShort) << "a ring woke twice";
  }
}

TEST_P(MailboxTest, LostPeerIsAnEventAfterItsLastMessage) {
  for (int lost : {1, 0}) {
    World world = Make(2);
    const int left = 1 - lost;
    world.mailboxes[lost]->Post(left, PatternBytes(lost, 0, 5));
    EXPECT_EQ(Failure(world.mailboxes[lost]->Flush(Patience())), "");
    world.Kill(lost);
    Mailbox& mailbox = *world.mailboxes[left];
    Mailbox::Event event = NextEvent(mailbox);
    EXPECT_EQ(event.peer, lost);
    EXPECT_EQ(event.message, PatternBytes(lost, 0, 5));
    event = NextEvent(mailbox);
    EXPECT_EQ(event.peer, lost);
    EXPECT_EQ(event.lost.code(), Code::kPeerLost);
    EXPECT_EQ(Contains(event.lost.message(), {"rank " + std::to_string(lost)}), "");
    EXPECT_TRUE(event.message.empty());
    mailbox.Post(lost, PatternBytes(left, 0, 5));  // dropped
    EXPECT_EQ(Failure(mailbox.Flush(After(5))), "");
    event = NextEvent(mailbox, false, After(kShort));
    EXPECT_EQ(event.peer, -1) << "a loss was told twice";
  }
}

TEST_P(MailboxTest, LossWakesASleeper) {
  World world = Make(3);
  std::thread sleeper([&] {
    Mailbox::Event event = NextEvent(*world.mailboxes[0]);
    EXPECT_EQ(event.peer, 2);
    EXPECT_EQ(event.lost.code(), Code::kPeerLost);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.Kill(2);
  sleeper.join();
}

// --- Segment -----------------------------------------------------------------------------------------------------

TEST_P(SegmentTest, EveryRankSeesEveryRing) {
  constexpr int kSize = 3;
  World world = Make(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    Segment& segment = *world.segments[rank];
    EXPECT_EQ(segment.rank(), rank);
    EXPECT_EQ(segment.ranks(), (std::vector<int>{0, 1, 2}));
    auto bytes = PatternBytes(rank, 0, segment.ring_bytes());
    std::memcpy(segment.Peer(rank), bytes.data(), bytes.size());
    segment.Publish(Segment::kPacked, 1);
  }
  for (int rank = 0; rank < kSize; ++rank) {
    Segment& segment = *world.segments[rank];
    for (int peer = 0; peer < kSize; ++peer) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment.Peer(peer)) % 64, 0u);
      ASSERT_EQ(Failure(segment.Await(peer, Segment::kPacked, 1, Patience())), "");
      auto expected = PatternBytes(peer, 0, segment.ring_bytes());
      EXPECT_EQ(std::memcmp(segment.Peer(peer), expected.data(), expected.size()), 0) << rank << " reads " << peer;
    }
  }
}

TEST_P(SegmentTest, NeighboursReadAndWriteWhatIsHandedOutOfAHeap) {
  constexpr int kSize = 3;
  constexpr std::size_t kBytes = 20000;
  World world = Make(kSize);
  std::vector<std::byte*> memory;
  for (int rank = 0; rank < kSize; ++rank) {
    auto heap = world.segments[rank]->heap();
    ASSERT_NE(heap, nullptr);
    ASSERT_TRUE(heap->Allocate(5000 * static_cast<std::size_t>(rank)).ok());  // so that offsets differ
    auto made = heap->Allocate(kBytes);
    ASSERT_TRUE(made.ok()) << made.error().message();
    memory.push_back(made.value());
    auto bytes = PatternBytes(rank, 0, kBytes);
    std::memcpy(memory[rank], bytes.data(), kBytes);
  }
  for (int rank = 0; rank < kSize; ++rank) {
    for (int peer = 0; peer < kSize; ++peer) {
      const std::size_t offset = world.segments[peer]->heap()->Find(memory[peer], kBytes).value();
      std::span<std::byte> seen = world.segments[rank]->PeerHeap(peer).subspan(offset, kBytes);
      auto expected = PatternBytes(peer, 0, kBytes);
      EXPECT_EQ(std::memcmp(seen.data() + kSize, expected.data() + kSize, kBytes - kSize), 0);
      seen[static_cast<std::size_t>(rank)] = static_cast<std::byte>(10 * rank + peer);
    }
  }
  for (int peer = 0; peer < kSize; ++peer) {
    for (int rank = 0; rank < kSize; ++rank) EXPECT_EQ(memory[peer][rank], static_cast<std::byte>(10 * rank + peer));
  }
}

TEST_P(SegmentTest, AHeapOutlivesItsSegment) {
  World world = Make(2);
  auto heap = world.segments[0]->heap();
  auto made = heap->Allocate(10000);
  ASSERT_TRUE(made.ok());
  world.segments.clear();
  std::memset(made.value(), 7, 10000);
  EXPECT_EQ(made.value()[9999], std::byte{7});
  heap->Free(made.value());
}

TEST_P(SegmentTest, AwaitLeftEndsWhenThePeerHasConsumedOrLeftAbortedOrNot) {
  World world = Make(3);
  Segment& mine = *world.segments[0];
  EXPECT_FALSE(mine.AwaitLeft(1, 5, After(kShort)));
  world.segments[1]->Publish(Segment::kConsumed, 4);
  mine.Abort(Result(Code::kPeerLost, "over"));
  EXPECT_FALSE(mine.AwaitLeft(1, 5, After(kShort)));
  std::thread consumer([&] { world.segments[1]->Publish(Segment::kConsumed, 5); });
  EXPECT_TRUE(mine.AwaitLeft(1, 5, Patience()));
  consumer.join();
  std::thread leaver([&] { world.segments[2]->Leave(); });
  EXPECT_TRUE(mine.AwaitLeft(2, 5, Patience()));
  leaver.join();
}

TEST_P(SegmentTest, SlotsAreReusedAcrossThe32BitBoundary) {
  constexpr int kSize = 4;
  for (std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{1} << 32) - 100, (std::uint64_t{1} << 33) - 2}) {
    World world = Make(kSize);
    RunRanks(kSize, [&](int rank) { EXPECT_EQ(RunSegmentPipeline(*world.segments[rank], first, 200), ""); });
  }
}

TEST_P(SegmentTest, CountsAreComparedAsWholes) {
  constexpr std::uint64_t k4G = std::uint64_t{1} << 32;
  World world = Make(2);
  Segment& mine = *world.segments[0];
  Segment& theirs = *world.segments[1];
  theirs.Publish(Segment::kPacked, k4G - 1);
  EXPECT_EQ(Failure(mine.Await(1, Segment::kPacked, k4G - 1, Patience())), "");
  EXPECT_EQ(mine.Await(1, Segment::kPacked, k4G + 1, After(kShort)).code(), Code::kTimeout);  // low half: 1
  EXPECT_EQ(mine.Await(1, Segment::kPacked, 2 * k4G, After(kShort)).code(), Code::kTimeout);
  std::thread sleeper([&] { EXPECT_EQ(Failure(mine.Await(1, Segment::kPacked, k4G + 1, Patience())), ""); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  theirs.Publish(Segment::kPacked, k4G);  // low half: 0
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  theirs.Publish(Segment::kPacked, k4G + 1);
  sleeper.join();
  EXPECT_EQ(Failure(mine.Await(1, Segment::kPacked, 5, Patience())), "");  // long reached
}

TEST_P(SegmentTest, TimeoutNamesPeerStageAndCount) {
  World world = Make(2);
  world.segments[1]->Publish(Segment::kPacked, 9);  // another stage
  world.segments[1]->Publish(Segment::kReduced, 3);
  world.segments[0]->Publish(Segment::kReduced, 9);  // another rank
  TimePoint begin = Now();
  double cpu = ThreadCpuSeconds();
  Result result = world.segments[0]->Await(1, Segment::kReduced, 4, After(0.3));
  EXPECT_LT(ThreadCpuSeconds() - cpu, 0.1);
  EXPECT_GE(Seconds(Now() - begin), 0.29);
  EXPECT_EQ(result.code(), Code::kTimeout);
  EXPECT_EQ(Contains(result.message(), {"rank 1", "reduced 3", "4"}), "");
  EXPECT_EQ(world.segments[0]->Await(1, Segment::kConsumed, 1, After(0)).code(), Code::kTimeout);
}

TEST_P(SegmentTest, PublishWakesASleeper) {
  constexpr double kLimit = 0.005;  // less than what is left of a sleep that looks again by itself
  double seconds = WakeSeconds(
      [&] { return Make(2); },
      [](World& world) { EXPECT_EQ(Failure(world.segments[0]->Await(1, Segment::kConsumed, 1, Patience())), ""); },
      [](World& world) { world.segments[1]->Publish(Segment::kConsumed, 1); }, kLimit);
  EXPECT_LT(seconds, kLimit);
}

// Waiters that fall asleep just when the counter grows.
TEST_P(SegmentTest, NoWakeUpIsLost) {
  constexpr std::uint64_t kRounds = 2000;
  World world = Make(2);
  RunRanks(2, [&](int rank) {
    Segment& segment = *world.segments[rank];
    for (std::uint64_t k = 1; k <= kRounds; ++k) {
      // One lags by about as much as the other yields before it sleeps.
      for (std::uint64_t i = 0; k % 2 == static_cast<std::uint64_t>(rank) && i < k % 200; ++i)
        std::this_thread::yield();
      segment.Publish(Segment::kPacked, k);
      ASSERT_EQ(Failure(segment.Await(1 - rank, Segment::kPacked, k, Patience())), "");
    }
  });
}

TEST_P(SegmentTest, AbortWakesNowAndLater) {
  double seconds = WakeSeconds([&] { return Make(3); },
                               [](World& world) {
                                 for (int peer : {1, 2}) {
                                   Result result = world.segments[0]->Await(peer, Segment::kPacked, 1, Patience());
                                   EXPECT_EQ(result.code(), Code::kPeerLost);
                                   EXPECT_EQ(Contains(result.message(), {"rank 2 died"}), "");
                                 }
                               },
                               [](World& world) {
                                 world.segments[0]->Abort(Result(Code::kPeerLost, "rank 2 died"));
                                 world.segments[0]->Abort(Result(Code::kInternal, "a later cause"));
                               });
  EXPECT_LT(seconds, kWakeSeconds);
}

TEST_P(SegmentTest, AbortOfOneRankLeavesTheOthersWaiting) {
  World world = Make(2);
  std::thread sleeper([&] { EXPECT_EQ(Failure(world.segments[1]->Await(0, Segment::kPacked, 1, Patience())), ""); });
  world.segments[0]->Abort(Result(Code::kShutdown, "over"));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.segments[0]->Publish(Segment::kPacked, 1);
  sleeper.join();
}

}  // namespace
}  // namespace ronde::testing
