#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "transport/conformance.h"
#include "transport/shm/factory.h"

namespace ronde::testing {
namespace {

constexpr std::size_t kRingBytes = 12 << 10, kHeapBytes = 256 << 10;

// Names that no other run of these tests uses.
std::string UniqueName(int rank) {
  static int serial = 0;
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(++serial) + "-" + std::to_string(rank);
}

ShmConfig ConfigOf(int rank, bool use_memfd) {
  ShmConfig config;
  config.rank = rank;
  config.ring_bytes = kRingBytes;
  config.heap_bytes = kHeapBytes;
  config.use_memfd = use_memfd;
  config.name = UniqueName(rank);
  return config;
}

bool LeftInDevShm(const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().find(name) != std::string::npos) return true;
  }
  return false;
}

std::function<World(int)> ShmWorlds(bool use_memfd, bool spin) {
  return [=](int size) {
    World world;
    std::vector<std::shared_ptr<ShmPart>> parts;
    std::vector<int> ranks, descriptors;
    for (int rank = 0; rank < size; ++rank) {
      ShmConfig config = ConfigOf(rank, use_memfd);
      config.spin = spin;
      auto part = CreateShmPart(config);
      EXPECT_TRUE(part.ok()) << part.error().message();
      parts.push_back(part.value());
      ranks.push_back(rank);
      descriptors.push_back(ShmDescriptor(*part.value()));
    }
    for (auto& part : parts) {
      auto segment = CreateShmSegment(part, ranks, descriptors);
      EXPECT_TRUE(segment.ok()) << segment.error().message();
      world.segments.push_back(std::move(segment.value()));
    }
    return world;
  };
}

INSTANTIATE_TEST_SUITE_P(ShmMemfd, SegmentTest, ::testing::Values(Implementation{"memfd", ShmWorlds(true, false)}));
INSTANTIATE_TEST_SUITE_P(ShmFile, SegmentTest, ::testing::Values(Implementation{"file", ShmWorlds(false, false)}));
INSTANTIATE_TEST_SUITE_P(ShmSpin, SegmentTest, ::testing::Values(Implementation{"spin", ShmWorlds(true, true)}));

// A child process that runs body() and ends with what it returns; its wait status. The body's waits have deadlines.
template <class Body>
pid_t Fork(Body body) {
  pid_t pid = fork();
  if (pid == 0) {
    // Not what a crash that a test wants would write.
    struct rlimit none{};
    setrlimit(RLIMIT_CORE, &none);
    for (int number : {SIGSEGV, SIGBUS}) signal(number, SIG_DFL);  // a sanitizer's report is not wanted either
    _exit(body());
  }
  return pid;
}
int StatusOf(pid_t pid) {
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}
bool DiedOf(pid_t pid, int number) {
  int status = StatusOf(pid);
  return WIFSIGNALED(status) && WTERMSIG(status) == number;
}

void SendDescriptor(int socket, int descriptor) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != 1) _exit(90);
}
int ReceiveDescriptor(int socket) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  timeval limit{30, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  int descriptor = -1;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message) == nullptr) return -1;
  std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
  return descriptor;
}

class ShmProcessTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Memfd, ShmProcessTest, ::testing::Values(true));
INSTANTIATE_TEST_SUITE_P(File, ShmProcessTest, ::testing::Values(false));

// The parent hands the descriptors round; job ranks 2, 3, 5 and 8 share the host.
TEST_P(ShmProcessTest, ProcessesShareTheirRings) {
  const std::vector<int> ranks = {2, 3, 5, 8};
  std::vector<ShmConfig> configs;
  for (int rank : ranks) configs.push_back(ConfigOf(rank, GetParam()));
  std::vector<pid_t> children;
  std::vector<int> sockets;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    children.push_back(Fork([&]() -> int {
      auto part = CreateShmPart(configs[i]);
      if (!part.ok()) return 91;
      SendDescriptor(pair[1], ShmDescriptor(*part.value()));
      std::vector<int> descriptors;
      for (std::size_t k = 0; k < ranks.size(); ++k) descriptors.push_back(ReceiveDescriptor(pair[1]));
      auto segment = CreateShmSegment(part.value(), ranks, descriptors);
      if (!segment.ok()) return 92;
      for (int descriptor : descriptors) close(descriptor);  // only borrowed
      std::string error = RunSegmentPipeline(*segment.value(), (std::uint64_t{1} << 32) - 50, 300);
      if (error.empty()) return 0;
      fprintf(stderr, "%s\n", error.c_str());
      return 93;
    }));
    close(pair[1]);
    sockets.push_back(pair[0]);
  }
  std::vector<int> descriptors;
  for (int socket : sockets) descriptors.push_back(ReceiveDescriptor(socket));
  for (int socket : sockets) {
    for (int descriptor : descriptors) SendDescriptor(socket, descriptor);
  }
  for (pid_t child : children) EXPECT_EQ(StatusOf(child), 0);
  for (int fd : sockets) close(fd);
  for (int fd : descriptors) close(fd);
  for (const auto& config : configs) EXPECT_FALSE(LeftInDevShm(config.name));
}

TEST_P(ShmProcessTest, AKilledProcessLeavesNothing) {
  ShmConfig config = ConfigOf(0, GetParam());
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  pid_t child = Fork([&]() -> int {
    auto part = CreateShmPart(config);
    auto segment = CreateShmSegment(part.value(), {0, 1}, {-1, ShmDescriptor(*part.value())});
    if (!segment.ok() || write(ready[1], "x", 1) != 1) return 91;
    (void)segment.value()->Await(1, Segment::kPacked, 1, After(30));
    return 92;
  });
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_FALSE(LeftInDevShm(config.name));  // not even while it lives
  kill(child, SIGKILL);
  EXPECT_TRUE(DiedOf(child, SIGKILL));
  EXPECT_FALSE(LeftInDevShm(config.name));
  close(ready[0]);
  close(ready[1]);
}

TEST_P(ShmProcessTest, AStrayWriteToANeighboursRingFaults) {
  World world = ShmWorlds(GetParam(), false)(2);
  pid_t child = Fork([&]() -> int {
    // Mappings do not reach children, so the child makes its own.
    World own = ShmWorlds(GetParam(), false)(2);
    own.segments[0]->Peer(0)[5] = std::byte{1};
    if (own.segments[1]->Peer(0)[5] != std::byte{1}) return 91;
    own.segments[1]->Peer(0)[5] = std::byte{2};
    return 0;
  });
  EXPECT_TRUE(DiedOf(child, SIGSEGV));
}

TEST_P(ShmProcessTest, ForkedChildrenDoNotInheritTheMappings) {
  World world = ShmWorlds(GetParam(), false)(2);
  for (int peer : {0, 1}) {
    volatile std::byte* ring = world.segments[0]->Peer(peer);
    EXPECT_EQ(std::to_integer<int>(ring[0]), 0);
    pid_t child = Fork([&]() -> int { return std::to_integer<int>(ring[0]); });
    EXPECT_TRUE(DiedOf(child, SIGSEGV)) << peer;
  }
}

TEST(ShmTest, LargeLentMemoryBeginsWhereAHugePageCan) {
  ShmConfig config = ConfigOf(0, true);
  config.heap_bytes = 2 * SharedHeap::kHugePage;
  auto part = CreateShmPart(config);
  ASSERT_TRUE(part.ok());
  auto segment = CreateShmSegment(part.value(), {0}, {ShmDescriptor(*part.value())});
  ASSERT_TRUE(segment.ok());
  auto made = segment.value()->heap()->Allocate(SharedHeap::kHugePage);
  ASSERT_TRUE(made.ok()) << made.error().message();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(made.value()) % SharedHeap::kHugePage, 0u);
}

TEST(ShmTest, AMemfdCannotShrinkUnderTheOthers) {
  auto part = CreateShmPart(ConfigOf(0, true));
  ASSERT_TRUE(part.ok());
  EXPECT_NE(ftruncate(ShmDescriptor(*part.value()), 0), 0);
  EXPECT_NE(fcntl(ShmDescriptor(*part.value()), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(ShmTest, ATooLargeRingIsAnError) {
  struct statvfs room{};
  ASSERT_EQ(statvfs("/dev/shm", &room), 0);
  if (room.f_blocks == 0) GTEST_SKIP() << "/dev/shm has no size limit here";
  ShmConfig config = ConfigOf(0, false);
  config.ring_bytes = static_cast<std::size_t>(room.f_blocks) * room.f_frsize + (1 << 20);
  auto part = CreateShmPart(config);
  ASSERT_FALSE(part.ok());
  EXPECT_EQ(part.error().code(), Code::kTransport);
  EXPECT_EQ(Contains(part.error().message(), {"/dev/shm/ronde-" + config.name, std::strerror(ENOSPC)}), "");
  EXPECT_FALSE(LeftInDevShm(config.name));
  for (bool use_memfd : {true, false}) {
    config.use_memfd = use_memfd;
    config.ring_bytes = ~std::size_t{0} - 100;  // header and ring overflow
    EXPECT_EQ(CreateShmPart(config).error().code(), Code::kArgument);
  }
}

TEST(ShmTest, AnExistingFileIsNotTaken) {
  ShmConfig config = ConfigOf(0, false);
  const std::string path = "/dev/shm/ronde-" + config.name;
  int fd = open(path.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  ASSERT_GE(fd, 0);
  auto part = CreateShmPart(config);
  EXPECT_EQ(part.error().code(), Code::kTransport);
  EXPECT_EQ(Contains(part.error().message(), {path}), "");
  EXPECT_TRUE(LeftInDevShm(config.name));
  unlink(path.c_str());
  close(fd);
}

TEST(ShmTest, ADescriptorOfAnotherSizeIsRefused) {
  auto own = CreateShmPart(ConfigOf(3, true));
  ASSERT_TRUE(own.ok());
  ShmConfig larger = ConfigOf(7, true);
  larger.ring_bytes *= 2;
  auto other = CreateShmPart(larger);
  ASSERT_TRUE(other.ok());
  int tiny = memfd_create("tiny", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(tiny, 4096), 0);
  for (int descriptor : {tiny, ShmDescriptor(*other.value()), -1}) {
    auto segment = CreateShmSegment(own.value(), {3, 7}, {-1, descriptor});
    ASSERT_FALSE(segment.ok());
    EXPECT_EQ(segment.error().code(), Code::kTransport);
    EXPECT_EQ(Contains(segment.error().message(), {"rank 7"}), "");
  }
  close(tiny);
}

TEST(ShmTest, RanksMustContainTheOwn) {
  auto own = CreateShmPart(ConfigOf(3, true));
  ASSERT_TRUE(own.ok());
  int descriptor = ShmDescriptor(*own.value());
  EXPECT_EQ(CreateShmSegment(own.value(), {}, {}).error().code(), Code::kInternal);
  EXPECT_EQ(CreateShmSegment(own.value(), {1, 2}, {descriptor, descriptor}).error().code(), Code::kInternal);
  EXPECT_EQ(CreateShmSegment(own.value(), {3, 4}, {descriptor}).error().code(), Code::kInternal);
}

TEST(ShmTest, ASegmentOfOneRank) {
  auto own = CreateShmPart(ConfigOf(3, true));
  ASSERT_TRUE(own.ok());
  auto segment = CreateShmSegment(own.value(), {3}, {-1});
  ASSERT_TRUE(segment.ok()) << segment.error().message();
  EXPECT_EQ(RunSegmentPipeline(*segment.value(), 0, 5), "");
}

}  // namespace
}  // namespace ronde::testing
