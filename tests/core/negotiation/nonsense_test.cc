// Messages that no negotiator writes.
#include <gtest/gtest.h>

#include <algorithm>

#include "negotiation/simulation.h"
#include "wire/codec.h"

namespace ronde {
namespace {

TEST(Nonsense, AbortsAndNamesTheSender) {
  std::mt19937 random(7);
  int malformed = 0;
  for (int i = 0; i < 3000; ++i) {
    Simulation job({Star(2)});
    std::vector<std::byte> bytes(random() % 60);
    for (auto& b : bytes) b = static_cast<std::byte>(random() % 20);
    if (!bytes.empty()) bytes[0] = std::byte{1};
    job.node(0).Receive(1, bytes, job.now);
    job.Collect(0);
    if (job.aborts[0].message().find("malformed") != std::string::npos) {
      ++malformed;
      EXPECT_NE(job.aborts[0].message().find("rank 1"), std::string::npos);
    }
  }
  EXPECT_GT(malformed, 100);
}

TEST(Nonsense, RecordsFromTheWrongSideOrOfAStrangerAreRefused) {
  auto refused = [](int to, int from, std::vector<std::byte> message, const std::string& why) {
    Simulation job({Chain(3)});
    job.node(to).Receive(from, message, job.now);
    job.Collect(to);
    EXPECT_EQ(job.aborts[to].message(), "rank " + std::to_string(from) + " (host h" + std::to_string(from) +
                                            ") sent nonsense: malformed message: " + why);
    job.Run();
    for (int r = 0; r < 3; ++r) EXPECT_EQ(job.aborts[r].message(), job.aborts[to].message());
  };
  auto bytes = [](std::vector<int> values) {
    std::vector<std::byte> message;
    for (int v : values) message.push_back(static_cast<std::byte>(v));
    return message;
  };
  refused(1, 2, bytes({1, 8, 0, 0, 0}), "a record from the wrong side");   // a batch from below
  refused(1, 0, bytes({1, 2, 4}), "a record from the wrong side");         // a join from above
  refused(0, 1, bytes({1, 2, 0}), "a rank that is not below the sender");  // rank 0 joins at rank 1
  refused(1, 2, bytes({1, 2, 2}), "a rank that is not below the sender");  // rank 1 joins at rank 2
  refused(1, 2, bytes({2, 2, 4}), "unknown protocol version");
  refused(1, 0, bytes({1, 99}), "unknown record");
  refused(1, 0, bytes({1, 9}), "the message ends too early");
  refused(1, 0, bytes({1, 13, 77, 0}), "unknown kind of error");
  Writer writer;
  writer.Byte(1);
  for (int i = 0; i < 2; ++i) {
    writer.Byte(1);
    writer.Unsigned(0);
    writer.Unsigned(1);
    writer.Unsigned(0);
    Write(writer, Reduce("x"));
    writer.Unsigned(1);
    writer.Signed(2);
    writer.Unsigned(0);
  }
  refused(1, 2, writer.Take(), "a rank reports twice");
}

// Whatever changes on the way: no crash, no endless loop, and who finds a message malformed names its sender.
TEST(Nonsense, ChangedMessagesOfARunningJob) {
  int malformed = 0;
  for (unsigned seed = 1; seed <= 3000; ++seed) {
    std::mt19937 random(seed);
    int size = 2 + static_cast<int>(random() % 3);
    Simulation job({random() % 2 ? Chain(size) : Star(size), random() % 2 ? 2 : 65536, 1, {}, seed});
    int countdown = static_cast<int>(random() % 20);
    Simulation::Link changed{-1, -1};
    job.tamper = [&](Simulation::Link link, std::vector<std::byte>& message) {
      if (countdown-- != 0) return;
      changed = link;
      switch (random() % 3) {
        case 0: message.resize(1 + random() % message.size()); break;
        case 1: message[random() % message.size()] = static_cast<std::byte>(random()); break;
        default:
          for (int i = 0; i < 3; ++i) {
            message.insert(message.begin() + static_cast<std::ptrdiff_t>(random() % message.size()),
                           static_cast<std::byte>(random() % 20));
          }
      }
    };
    Definition gather = Reduce("g", {0, 2});
    gather.op = Op::kAllgather;
    for (int step = 0; step < 3; ++step) {
      for (int r = 0; r < size; ++r) {
        job.Submit(r, Reduce("x"));
        job.Submit(r, Group("y", {"a", "b"}));
        job.Submit(r, gather, {r});
        job.Submit(r, Reduce(""));
        if (step == 1) job.Submit(r, Control(Op::kAddProcessSet, {0, 1}));
        if (step == 2 && r > 0) job.Submit(r, Control(Op::kJoin));
      }
      job.Run(2000);
      job.Tick(1.5);
    }
    for (int r = 0; r < size; ++r) {
      std::string text = job.aborts[r].message();
      if (text.find("malformed") == std::string::npos) continue;
      // A change that leaves a message readable may show later, at somebody else's.
      EXPECT_NE(text.find(" sent nonsense: malformed message: "), std::string::npos);
      malformed += text.find("rank " + std::to_string(changed.first) + " (host h") == 0;
    }
  }
  EXPECT_GT(malformed, 1000);
}

}  // namespace
}  // namespace ronde
