// One suite per seam, run over every implementation. The tests are in conformance_test.cc; an implementation joins with
//
//   INSTANTIATE_TEST_SUITE_P(Tcp, TransportTest, ::testing::Values(Implementation{"tcp", MakeTcpWorld}));
//
// in its own *_test.cc (likewise MailboxTest and SegmentTest).
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace ronde::testing {

// The limit of waits that should succeed: long enough for a busy machine under a sanitizer.
inline Deadline Patience() { return After(30); }

// One job whose ranks are threads of this process; vectors by rank. A suite uses what it tests, the rest may be null.
// All ranks share one host: mailboxes are connected at least between rank 0 and every other rank.
struct World {
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::unique_ptr<Mailbox>> mailboxes;
  std::vector<std::unique_ptr<Segment>> segments;
  // Ends the rank as a kill would; no thread uses its objects then or later. Empty: the objects are destroyed.
  std::function<void(int)> kill;
  std::shared_ptr<void> keep;  // what the objects need; goes last

  void Kill(int rank) {
    if (kill) return kill(rank);
    if (!transports.empty()) transports[rank].reset();
    if (!mailboxes.empty()) mailboxes[rank].reset();
  }
};

struct Implementation {
  std::string name;
  std::function<World(int size)> make;
  friend void PrintTo(const Implementation& implementation, std::ostream* out) { *out << implementation.name; }
};

class ConformanceTest : public ::testing::TestWithParam<Implementation> {
 protected:
  static World Make(int size) { return GetParam().make(size); }
};
class TransportTest : public ConformanceTest {};
class MailboxTest : public ConformanceTest {};
class SegmentTest : public ConformanceTest {};

// "" or what went wrong, so that a failed test shows it.
inline std::string Failure(const Result& result) { return result.ok() ? "" : result.message(); }

// Runs body(rank) on a thread per rank and waits for all; the body's own waits have deadlines.
template <class Body>
void RunRanks(int size, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (auto& thread : threads) thread.join();
}

// The byte that `rank` has at `index` of its message or chunk `number`.
inline std::byte Pattern(int rank, std::uint64_t number, std::size_t index) {
  std::uint64_t x = (static_cast<std::uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u ^ (number + 1) * 0xbf58476d1ce4e5b9u ^
                    (index + 1) * 0x94d049bb133111ebu;
  return static_cast<std::byte>((x ^ x >> 29) * 0x9e3779b97f4a7c15u >> 56);
}
inline std::vector<std::byte> PatternBytes(int rank, std::uint64_t number, std::size_t bytes) {
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = Pattern(rank, number, i);
  return data;
}

// Ranks fill their slots, read everybody's and reuse slots after all consumed them; chunk numbers begin at `first`.
// Ends with "" or the first thing that was wrong. Also run between processes, hence no gtest macros.
std::string RunSegmentPipeline(Segment& segment, std::uint64_t first, int chunks);

inline std::string Contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    if (text.find(part) == std::string::npos) return "\"" + text + "\" lacks \"" + part + "\"";
  }
  return "";
}

}  // namespace ronde::testing
