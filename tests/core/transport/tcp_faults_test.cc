// What goes wrong when ranks meet over sockets, and between them later.
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "net/hmac.h"
#include "store/store.h"
#include "transport/conformance.h"
#include "transport/tcp/meeting.h"
#include "transport/tcp_job.h"
#include "wire/codec.h"

namespace ronde::testing {
namespace {

std::string Error(const Expected<Connections>& made) { return made.ok() ? "no error" : made.error().message(); }

std::string VersionIn(const std::string& blob) {
  Reader reader(Bytes(blob));
  (void)reader.Text();  // the magic word
  return reader.Text();
}

std::vector<std::string> AddressesIn(const std::string& blob) {
  auto info = PeerInfo::Decode(blob, VersionIn(blob)).value();
  return {info.unix_address, TcpAddress("127.0.0.1", info.tcp_port)};
}

TEST(Meeting, AWrongSecretIsAnErrorThatNamesTheRank) {
  Job job;
  job.seconds = 0.4;
  job.change = [](EndpointConfig& c) { c.secret = c.rank ? "other" : "secret"; };
  for (bool one_host : {true, false}) {
    if (!one_host) job.host = EveryoneElsewhere();
    auto made = ConnectAll(job);
    EXPECT_EQ(Contains(Error(made[0]), {"rank 1 (host host-"}), "");
    EXPECT_EQ(Contains(Error(made[1]), {"rank 0 (host host-", "secret"}), "");
  }
}

TEST(Meeting, AnotherInitIsRefused) {
  Job job;
  job.seconds = 0.4;
  job.change = [](EndpointConfig& c) { c.generation = static_cast<std::uint64_t>(c.rank); };
  auto made = ConnectAll(job);
  EXPECT_EQ(Contains(Error(made[0]), {"rank 1 (host host-same)"}), "");
  EXPECT_EQ(Contains(Error(made[1]), {"rank 0 (host host-same)"}), "");
}

TEST(Meeting, ARankThatNeverComesIsNamedInTime) {
  for (int absent : {0, 1, 2}) {
    for (bool one_host : {true, false}) {
      Job job;
      job.size = 3;
      job.seconds = 0.4;
      job.absent = {absent};
      if (!one_host) job.host = EveryoneElsewhere();
      auto start = Now();
      auto made = ConnectAll(job);
      EXPECT_LT(Seconds(Now() - start), 1.4);
      // Who is connected to it knows; ranks of its host also fail to share memory.
      int witness = absent == 0 ? 1 : 0;
      EXPECT_EQ(made[witness].error().code(), Code::kTimeout);
      EXPECT_EQ(Contains(Error(made[witness]), {"rank " + std::to_string(absent) + " (host host-", "connect"}), "");
    }
  }
}

TEST(Meeting, DifferentVersionsAreNamed) {
  Job job;
  std::string own;
  job.see = [&](int rank, std::vector<std::string>& blobs) {
    if (rank != 0) return;
    own = VersionIn(blobs[1]);
    blobs[1].replace(blobs[1].find(own), own.size(), own.size(), '9');
    blobs[1].resize(blobs[1].size() - 3);  // the rest of another version's blob is not for this one to read
  };
  job.absent = {1};
  auto made = ConnectAll(job);
  EXPECT_EQ(made[0].error().code(), Code::kArgument);
  EXPECT_EQ(Contains(Error(made[0]), {"rank 1 (host host-same) runs ronde " + std::string(own.size(), '9'),
                                      "rank 0 (host host-same) runs " + own}),
            "");
}

TEST(Meeting, BlobsOfNobodyAreRefused) {
  for (std::string blob : {std::string(), std::string("\x05hello"), RandomBytes(60)}) {
    Job job;
    job.absent = {1};
    job.see = [&](int, std::vector<std::string>& blobs) { blobs[1] = blob; };
    EXPECT_EQ(Contains(Error(ConnectAll(job)[0]), {"rank 1"}), "");
  }
}

// Some say nothing, some talk HTTP, some send noise, some claim an endless frame.
std::vector<Fd> Strangers(const std::string& address, int count) {
  std::vector<Fd> strangers;
  for (int i = 0; i < count; ++i) {
    auto stranger = Dial(address, After(5));
    if (!stranger.ok()) continue;
    std::string said;
    if (i % 4 == 1) said = "GET / HTTP/1.1\r\n\r\n";
    if (i % 4 == 2) said = RandomBytes(100);
    if (i % 4 == 3) said = std::string(4, '\xff') + "x";
    (void)SendAll(stranger.value(), Bytes(said), After(1));
    strangers.push_back(std::move(stranger.value()));
  }
  return strangers;
}

TEST(Meeting, StrangersDelayNobody) {
  for (bool one_host : {true, false}) {
    Job job;
    job.size = 3;
    if (!one_host) job.host = EveryoneElsewhere();
    std::vector<Fd> strangers;
    std::vector<std::string> published;
    auto visit = [&](const std::vector<std::string>& blobs) {
      published = blobs;
      for (const auto& blob : blobs) {
        for (const auto& address : AddressesIn(blob)) {
          for (auto& stranger : Strangers(address, 20)) strangers.push_back(std::move(stranger));
        }
      }
    };
    auto start = Now();
    auto made = ConnectAll(job, visit);
    for (auto& m : made) ASSERT_TRUE(m.ok()) << Error(m);
    visit(published);  // those that come before the data connections
    EXPECT_EQ(strangers.size(), 240u);
    RunRanks(3, [&](int rank) {
      Transport& transport = *made[rank]->transport;
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        auto data = PatternBytes(rank, 1, 100);
        std::vector<std::byte> got(100);
        auto send = transport.Send(peer, 1, data);
        auto recv = transport.Recv(peer, 1, got);
        EXPECT_EQ(Failure(transport.Wait(send, After(10))), "");
        EXPECT_EQ(Failure(transport.Wait(recv, After(10))), "");
        EXPECT_EQ(got, PatternBytes(peer, 1, 100));
      }
    });
    EXPECT_LT(Seconds(Now() - start), 5);
  }
}

// Knows all that is published, but not the secret.
TEST(Meeting, AnImpostorIsRefused) {
  for (bool echo : {false, true}) {
    Job job;
    job.seconds = 0.4;
    job.absent = {1};
    std::thread impostor;
    auto made = ConnectAll(job, [&](const std::vector<std::string>& blobs) {
      impostor = std::thread([echo, address = AddressesIn(blobs[0])[0]] {
        auto socket = Dial(address, After(5));
        ASSERT_TRUE(socket.ok());
        Hello hello{0, "control", 1, 0, RandomBytes(16)};
        ASSERT_EQ(Failure(SendFrame(socket.value(), hello.Encode(), After(5))), "");
        auto answer = RecvFrame(socket.value(), 1024, After(5));
        ASSERT_TRUE(answer.ok());
        ASSERT_EQ(answer->size(), 48u);
        std::string proof = echo ? answer->substr(16) : std::string(32, 'x');
        ASSERT_EQ(Failure(SendFrame(socket.value(), proof, After(5))), "");
        EXPECT_FALSE(RecvFrame(socket.value(), 1024, After(5)).ok());
      });
    });
    impostor.join();
    EXPECT_EQ(Contains(Error(made[0]), {"did not connect", "rank 1"}), "");
  }
}

// A rank that gets to itself where it wanted its parent.
TEST(Meeting, ARankIsNotItsOwnPeer) {
  Job job;
  job.seconds = 0.4;
  job.absent = {0};
  job.see = [](int, std::vector<std::string>& blobs) {
    std::string own = AddressesIn(blobs[1])[0], other = AddressesIn(blobs[0])[0];
    blobs[0].replace(blobs[0].find(other), other.size(), own);
  };
  EXPECT_EQ(Contains(Error(ConnectAll(job)[1]), {"rank 0"}), "");
}

TEST(Meeting, InterfacesAreChosenByNameAndNetwork) {
  std::vector<InterfaceAddress> own = {{"eth0", "10.1.2.3", 16, false},
                                       {"docker0", "172.17.0.1", 16, false},
                                       {"eth1", "fd00::7", 64, false},
                                       {"lo", "127.0.0.1", 8, true}};
  auto chosen = [&](const std::string& wanted) {
    auto found = ChooseInterfaces(own, wanted);
    return found.ok() ? AddressesToPublish(found.value()) : std::vector<std::string>{found.error().message()};
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(chosen(""), (Texts{"10.1.2.3", "172.17.0.1", "fd00::7"}));
  EXPECT_EQ(chosen("docker0"), (Texts{"172.17.0.1"}));
  EXPECT_EQ(chosen("10.1.0.0/16"), (Texts{"10.1.2.3"}));
  EXPECT_EQ(chosen("eth1,nothing,10.0.0.0/8"), (Texts{"10.1.2.3", "fd00::7"}));
  EXPECT_EQ(chosen("fd00::/8"), (Texts{"fd00::7"}));
  EXPECT_EQ(chosen("lo"), (Texts{"127.0.0.1"}));
  for (const char* none : {"eth", "192.168.0.0/16", "10.1.0.0/x", "/8"}) {
    EXPECT_NE(chosen(none)[0].find("eth0 10.1.2.3, docker0 172.17.0.1"), std::string::npos) << none;
  }
}

TEST(Meeting, AddressesAreDialledInAUsefulOrder) {
  std::vector<InterfaceAddress> own = {{"eth0", "10.1.2.3", 16, false},
                                       {"docker0", "172.17.0.1", 16, false},
                                       {"eth1", "fd00::7", 64, false},
                                       {"lo", "127.0.0.1", 8, true}};
  using Texts = std::vector<std::string>;
  EXPECT_EQ(AddressesToPublish(own), (Texts{"10.1.2.3", "172.17.0.1", "fd00::7"}));
  EXPECT_EQ(AddressesToPublish({own[3]}), (Texts{"127.0.0.1"}));
  EXPECT_EQ(AddressesToDial(own, {"192.168.0.9", "172.17.0.1", "fd00::9", "10.2.0.1", "10.1.9.9"}),
            (Texts{"fd00::9", "10.1.9.9", "192.168.0.9", "10.2.0.1"}));
  EXPECT_EQ(AddressesToDial(own, {"172.17.0.1", "10.1.2.3"}), (Texts{"172.17.0.1", "10.1.2.3"}));  // one machine
}

// ---- Data connections ----

TEST(DataConnection, AWaitEndsInTimeThoughThePeerDoesNotAnswer) {
  for (bool one_host : {true, false}) {
    Job job;
    if (!one_host) job.host = EveryoneElsewhere();
    auto made = ConnectAll(job);
    for (auto& m : made) ASSERT_TRUE(m.ok()) << Error(m);
    for (int rank : {0, 1}) {  // rank 0 dials, rank 1 is dialled
      std::vector<std::byte> data(10);
      auto start = Now();
      Result result = made[rank]->transport->Wait(made[rank]->transport->Send(1 - rank, 1, data), After(0.2));
      EXPECT_EQ(result.code(), Code::kTimeout);
      EXPECT_EQ(Contains(result.message(), {"rank " + std::to_string(1 - rank)}), "");
      EXPECT_LT(Seconds(Now() - start), 1);
    }
    // What was given up before any byte of it left harms nothing.
    RunRanks(2, [&](int rank) {
      Transport& transport = *made[rank]->transport;
      auto data = PatternBytes(rank, 2, 64);
      std::vector<std::byte> got(64);
      auto send = transport.Send(1 - rank, 2, data);
      auto recv = transport.Recv(1 - rank, 2, got);
      EXPECT_EQ(Failure(transport.Wait(send, Patience())), "");
      EXPECT_EQ(Failure(transport.Wait(recv, Patience())), "");
      EXPECT_EQ(got, PatternBytes(1 - rank, 2, 64));
    });
  }
}

TEST(DataConnection, OneThatIsNotThereYetHoldsUpNoOther) {
  constexpr std::size_t kBytes = 8 << 20;
  Job job;
  job.size = 3;
  auto made = ConnectAll(job);
  for (auto& m : made) ASSERT_TRUE(m.ok()) << Error(m);
  // 0 sends to 1 and 2; 2 turns to 0 only once 1 told it that it has everything.
  RunRanks(3, [&](int rank) {
    Transport& transport = *made[rank]->transport;
    auto data = PatternBytes(0, 3, kBytes);
    std::vector<std::byte> got(kBytes), token(1);
    auto wait = [&](Transport::Handle handle) { EXPECT_EQ(Failure(transport.Wait(handle, After(10))), ""); };
    if (rank == 0) {
      auto second = transport.Send(2, 1, data), first = transport.Send(1, 1, data);
      wait(first);
      wait(second);
    } else if (rank == 1) {
      wait(transport.Recv(0, 1, got));
      wait(transport.Send(2, 2, token));
    } else {
      wait(transport.Recv(1, 2, token));
      wait(transport.Recv(0, 1, got));
    }
    if (rank != 0) {
      EXPECT_TRUE(got == data);
    }
  });
}

TEST(DataConnection, APeerThatIsGoneIsNamed) {
  Job job;
  job.change = [](EndpointConfig& c) { c.shared.peer_timeout = 0.2; };
  auto made = ConnectAll(job);
  for (auto& m : made) ASSERT_TRUE(m.ok()) << Error(m);
  made[1]->transport.reset();
  made[1]->mailbox.reset();  // with it go the listeners
  std::vector<std::byte> data(10);
  Transport& transport = *made[0]->transport;
  Result result = transport.Wait(transport.Send(1, 1, data), After(10));
  EXPECT_EQ(result.code(), Code::kPeerLost);
  EXPECT_EQ(Contains(result.message(), {"rank 1 (host host-same)"}), "");
}

// ---- Processes ----

// Rank 0 is this process, rank 1 a child of it.
class ProcessTest : public ::testing::TestWithParam<bool> {
 protected:
  ProcessTest() {
    char pattern[] = "/tmp/ronde-test-XXXXXX";
    directory_ = mkdtemp(pattern);
    if (!GetParam()) job_.host = EveryoneElsewhere();
  }
  ~ProcessTest() override {
    for (pid_t pid : pids_) kill(pid, SIGKILL);
    int status = 0;
    if (child_ > 0) waitpid(child_, &status, 0);
    std::filesystem::remove_all(directory_);
  }
  std::unique_ptr<Store> Open() { return std::move(OpenStore("file:" + directory_, "", After(5)).value()); }
  Expected<Connections> Meet(Store& store, int rank) {
    auto endpoint = MakeEndpoint(ConfigOf(job_, rank));
    auto blobs = store.Exchange("blobs", static_cast<std::uint32_t>(rank), 2, endpoint->blob(), After(20));
    if (!blobs.ok()) return blobs.error();
    return endpoint->Connect(blobs.value(), After(20));
  }
  // The child connects, runs `body` and stays until it is killed.
  template <class Body>
  void StartRank1(Body body) {
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      auto store = Open();
      auto made = Meet(*store, 1);
      if (made.ok()) body(made.value(), *store);
      while (true) pause();
    }
    pids_.push_back(child_);
  }

  Job job_;
  std::string directory_;
  pid_t child_ = 0;
  std::vector<pid_t> pids_;
};

TEST_P(ProcessTest, AKilledRankIsLostAtOnce) {
  StartRank1([](Connections& made, Store& store) {
    made.mailbox->Post(0, Bytes("last words"));
    (void)made.mailbox->Flush(After(10));
    (void)store.Set("ready", "");
  });
  auto store = Open();
  auto made = Meet(*store, 0);
  ASSERT_TRUE(made.ok()) << Error(made);
  ASSERT_TRUE(store->Get("ready", After(20)).ok());
  TimePoint killed = Now();
  kill(child_, SIGKILL);
  EXPECT_EQ(TakeText(*made->mailbox), "last words");
  EXPECT_EQ(TakeText(*made->mailbox), "lost 1");
  EXPECT_LT(Seconds(Now() - killed), 2.0);
}

TEST_P(ProcessTest, AForkedChildThatExitsHarmsNothing) {
  StartRank1([](Connections& made, Store&) {
    pid_t grandchild = fork();
    if (grandchild == 0) {
      made = {};  // as a Python child that clears up
      _exit(0);
    }
    int status = 0;
    waitpid(grandchild, &status, 0);
    made.mailbox->Post(0, Bytes("still here"));
    (void)made.mailbox->Flush(After(10));
  });
  auto store = Open();
  auto made = Meet(*store, 0);
  ASSERT_TRUE(made.ok()) << Error(made);
  EXPECT_EQ(TakeText(*made->mailbox, 20), "still here");
}

INSTANTIATE_TEST_SUITE_P(Hosts, ProcessTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Unix" : "Tcp"; });

// Data loaders are forked and hold copies of all sockets, so the connection of a killed rank does not end.
class OneHostProcessTest : public ProcessTest {};
TEST_P(OneHostProcessTest, AKilledRankIsLostAtOnceThoughItsChildrenLive) {
  StartRank1([](Connections& made, Store& store) {
    pid_t grandchild = fork();
    if (grandchild == 0) {
      while (true) pause();
    }
    made.mailbox->Post(0, Bytes("last words"));
    (void)made.mailbox->Flush(After(10));
    (void)store.Set("grandchild", std::to_string(grandchild));
  });
  auto store = Open();
  auto made = Meet(*store, 0);
  ASSERT_TRUE(made.ok()) << Error(made);
  auto grandchild = store->Get("grandchild", After(20));
  ASSERT_TRUE(grandchild.ok());
  pids_.push_back(std::stoi(grandchild.value()));
  TimePoint killed = Now();
  kill(child_, SIGKILL);
  EXPECT_EQ(TakeText(*made->mailbox), "last words");
  EXPECT_EQ(TakeText(*made->mailbox), "lost 1");
  EXPECT_LT(Seconds(Now() - killed), 2.0);
}
INSTANTIATE_TEST_SUITE_P(Hosts, OneHostProcessTest, ::testing::Values(true));

}  // namespace
}  // namespace ronde::testing
