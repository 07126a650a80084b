#include "transport/conformance.h"
#include "transport/local/factory.h"

namespace ronde::testing {
namespace {

World MakeLocalWorld(int size) {
  auto hub = CreateLocalHub(size, 12 << 10, 256 << 10);
  World world;
  for (int rank = 0; rank < size; ++rank) {
    world.transports.push_back(CreateLocalTransport(hub, rank));
    world.mailboxes.push_back(CreateLocalMailbox(hub, rank));
    world.segments.push_back(CreateLocalSegment(hub, rank));
  }
  world.kill = [hub](int rank) { DisconnectLocal(*hub, rank); };
  return world;
}

INSTANTIATE_TEST_SUITE_P(Local, TransportTest, ::testing::Values(Implementation{"local", MakeLocalWorld}));
INSTANTIATE_TEST_SUITE_P(Local, MailboxTest, ::testing::Values(Implementation{"local", MakeLocalWorld}));
INSTANTIATE_TEST_SUITE_P(Local, SegmentTest, ::testing::Values(Implementation{"local", MakeLocalWorld}));

TEST(LocalTest, TheDisconnectedRankLosesEverybody) {
  World world = MakeLocalWorld(3);
  std::vector<std::byte> room(8);
  auto pending = world.transports[1]->Recv(0, 1, room);
  world.Kill(1);
  Result result = world.transports[1]->Wait(pending, Patience());
  EXPECT_EQ(result.code(), Code::kPeerLost);
  EXPECT_EQ(Contains(result.message(), {"rank 0"}), "");
  world.mailboxes[1]->Post(0, room);  // goes nowhere
  Mailbox::Event event;
  for (int peer : {0, 2}) {
    ASSERT_TRUE(world.mailboxes[1]->Take(&event));
    EXPECT_EQ(event.peer, peer);
    EXPECT_EQ(event.lost.code(), Code::kPeerLost);
    ASSERT_TRUE(world.mailboxes[peer]->Take(&event));
    EXPECT_EQ(event.peer, 1);
    EXPECT_FALSE(event.lost.ok());
    EXPECT_FALSE(world.mailboxes[peer]->Take(&event));
  }
}

TEST(LocalTest, LeavingInPeaceConcernsNeighboursOnly) {
  World world = MakeLocalWorld(3);
  world.mailboxes[2]->Post(0, PatternBytes(2, 0, 3));
  world.mailboxes[2].reset();
  Mailbox::Event event;
  ASSERT_TRUE(world.mailboxes[0]->Take(&event));
  EXPECT_EQ(event.message, PatternBytes(2, 0, 3));
  ASSERT_TRUE(world.mailboxes[0]->Take(&event));
  EXPECT_EQ(event.lost.code(), Code::kPeerLost);
  EXPECT_FALSE(world.mailboxes[1]->Take(&event));
}

TEST(LocalTest, AnAbandonedTransferTouchesNoMemory) {
  World world = MakeLocalWorld(2);
  auto data = std::make_unique<std::vector<std::byte>>(8);
  (void)world.transports[0]->Send(1, 1, *data);
  world.transports[0]->Abort(Result(Code::kShutdown, "over"));
  data.reset();  // the address sanitizer sees a use
  std::vector<std::byte> room(8);
  EXPECT_EQ(world.transports[1]->Wait(world.transports[1]->Recv(0, 1, room), After(0.05)).code(), Code::kTimeout);

  data = std::make_unique<std::vector<std::byte>>(8);
  (void)world.transports[1]->Send(0, 2, *data);
  world.transports[1].reset();
  data.reset();
  EXPECT_EQ(world.transports[0]->Wait(world.transports[0]->Recv(1, 2, room), Patience()).code(), Code::kShutdown);
}

}  // namespace
}  // namespace ronde::testing
