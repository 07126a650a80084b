// The file of a timeline is JSON at every instant: after every system call, wherever a write is cut, after every kill.
#include "engine/trace_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "base/clock.h"
#include "engine/json.h"

namespace ronde {
namespace {

using testing::Events;
using testing::IsJson;
using testing::ReadFile;

class TraceFileTest : public ::testing::Test {
 protected:
  TraceFileTest() {
    folder_ = std::filesystem::canonical(::testing::TempDir()).string() + "/ronde_trace_" + std::to_string(getpid());
    std::filesystem::create_directory(folder_);
  }
  ~TraceFileTest() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  // Nothing can be renamed to the path any more.
  void KeepInPlace(const std::string& path) const { std::filesystem::create_directory(path + ".part"); }

  static std::string Event(int i, std::size_t bytes) {
    std::string event = "{\"n\":" + std::to_string(i) + ",\"x\":\"";
    event += std::string(std::max(bytes, event.size() + 2) - event.size() - 2, 'x');
    return event + "\"}";
  }
  // A file from its beginning to its end, through several moves of the bracket.
  static bool WriteOne(const std::string& path, int events) {
    TraceFile file;
    if (!file.Open(path, 1 << 30, 8192).ok()) return false;
    for (int i = 0; i < events; ++i) {
      if (!file.Add(Event(i, static_cast<std::size_t>(i * 37 % 400))).ok() || !file.Flush().ok()) return false;
    }
    return true;
  }
  // The file is JSON and holds the first events, without a gap; how many.
  static std::size_t ExpectWhole(const std::string& path) {
    EXPECT_TRUE(IsJson(ReadFile(path)));
    const auto events = Events(path);
    for (std::size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ(events[i].rfind("{\"n\":" + std::to_string(i) + ",", 0), 0u) << events[i];
    }
    return events.size();
  }

  std::string folder_;
};

TEST_F(TraceFileTest, EveryStateBetweenCallsIsJson) {
  for (bool in_place : {false, true}) {
    TraceFile file;
    const std::string path = Path(in_place ? "p.json" : "t.json");
    if (in_place) KeepInPlace(path);
    ASSERT_TRUE(file.Open(path, 1 << 30).ok());
    EXPECT_TRUE(IsJson(ReadFile(path)));
    std::size_t added = 0;
    for (int i = 0; i < 8000; ++i) {  // through more than one move of the bracket, with events of all lengths
      const std::size_t length = i % 100 == 0 ? TraceFile::kLongestEvent : static_cast<std::size_t>(i * 37 % 400);
      ASSERT_TRUE(file.Add(Event(i, length)).ok());
      ASSERT_TRUE(file.Flush().ok());
      ++added;
      if (i % 200 == 0 || i < 20) {
        ASSERT_EQ(ExpectWhole(path), added);
      }
    }
    EXPECT_FALSE(file.Add(std::string(TraceFile::kLongestEvent + 1, ' ')).ok());
    const std::uint64_t size = file.size();
    file.Close();
    EXPECT_EQ(ExpectWhole(path), added);
    if (!in_place) {
      EXPECT_EQ(std::filesystem::file_size(path), size + 3);
    }
    EXPECT_EQ(std::filesystem::exists(path + ".part"), in_place);
  }
}

// A writer under ptrace: what a kill leaves that comes between two system calls, for all of them. A kill within one may
// cut a write between two pages, so writes to the file that has the name must each be within one.
TEST_F(TraceFileTest, JsonAfterEverySystemCall) {
  const std::string path = Path("t.json");
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
    raise(SIGSTOP);
    for (int round = 0; round < 2; ++round) {  // makes the file, then replaces it
      if (!WriteOne(path, 300)) _exit(1);
    }
    _exit(0);
  }
  int status = 0, stops = 0, renames = 0, writes = 0;
  std::size_t most = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "ptrace is not allowed here";
  ASSERT_TRUE(WIFSTOPPED(status));
  ASSERT_EQ(ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL), 0);
  while (ptrace(PTRACE_SYSCALL, child, nullptr, nullptr) == 0 && waitpid(child, &status, 0) == child &&
         WIFSTOPPED(status) && !HasFailure()) {
    ++stops;
    if (std::filesystem::exists(path)) {
      most = std::max(most, ExpectWhole(path));
    } else {
      EXPECT_EQ(renames, 0);
    }
    struct __ptrace_syscall_info call{};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, child, reinterpret_cast<void*>(sizeof call), &call) <= 0) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      GTEST_SKIP() << "this kernel does not tell the arguments of system calls";
    }
    if (call.op != PTRACE_SYSCALL_INFO_ENTRY) continue;
    if (call.entry.nr == SYS_ftruncate || call.entry.nr == SYS_write) ADD_FAILURE() << "call " << call.entry.nr;
#ifdef SYS_rename
    renames += call.entry.nr == SYS_rename;
#endif
    renames += call.entry.nr == SYS_renameat || call.entry.nr == SYS_renameat2;
    if (call.entry.nr != SYS_pwrite64) continue;
    std::error_code error;
    const std::string link = "/proc/" + std::to_string(child) + "/fd/" + std::to_string(call.entry.args[0]);
    if (std::filesystem::read_symlink(link, error) != path) continue;
    ++writes;
    const std::uint64_t from = call.entry.args[3], to = from + call.entry.args[2] - 1;
    EXPECT_EQ(from / TraceFile::kPage, to / TraceFile::kPage) << from << " to " << to;
  }
  if (WIFSTOPPED(status)) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(most, 300u);
  EXPECT_EQ(writes, 600);
  EXPECT_EQ(renames, 2 * (1 + 2 + 1));  // made, enlarged from 8 KiB to 32 and 128, closed
  EXPECT_GT(stops, 2 * writes);
}

// Writers that are killed at any time, while they make, fill, enlarge, close and replace files as fast as they can.
TEST_F(TraceFileTest, AKilledWriterLeavesJson) {
  constexpr int kKills = 400;
  const std::string path = Path("t.json");
  std::mt19937 random(20240229);
  std::size_t most = 0;
  int parts = 0;
  for (int round = 0; round < kKills && !HasFailure(); ++round) {
    const bool existed = std::filesystem::exists(path);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      while (WriteOne(path, 900)) {
      }
      _exit(1);
    }
    usleep(std::uniform_int_distribution<useconds_t>(0, 8000)(random));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << "round " << round;
    if (existed || std::filesystem::exists(path)) most = std::max(most, ExpectWhole(path));
    parts += std::filesystem::exists(path + ".part");
    if (round % 50 == 49) std::filesystem::remove(path);
  }
  EXPECT_GT(most, 300u);
  EXPECT_GT(parts, 0);  // some were killed while they made a copy
}

TEST_F(TraceFileTest, AFullFileStaysWhole) {
  for (bool in_place : {false, true}) {
    const std::string path = Path(in_place ? "p.json" : "t.json");
    if (in_place) KeepInPlace(path);
    for (std::uint64_t limit : {3u, 400u, 4096u, 20'000u}) {
      TraceFile file;
      ASSERT_TRUE(file.Open(path, limit, 8192).ok());
      std::size_t added = 0;
      Result result;
      for (; added < 1000; ++added) {
        result = file.Add(Event(static_cast<int>(added), 300));
        if (!result.ok()) break;
      }
      EXPECT_NE(result.message().find(path + " is full"), std::string::npos) << limit;
      EXPECT_LE(ReadFile(path).size(), limit);
      file.Close();
      EXPECT_EQ(ExpectWhole(path), added) << limit;
      EXPECT_LE(ReadFile(path).size(), limit);
      EXPECT_GE(added, limit / 310 - limit / TraceFile::kPage);
    }
  }
}

TEST_F(TraceFileTest, LinksAndModesStay) {
  const std::string file = Path("real.json"), link = Path("link.json");
  std::filesystem::create_symlink("real.json", link);
  ASSERT_TRUE(WriteOne(link, 200));  // leads nowhere: the file is made where the link points
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(ExpectWhole(file), 200u);
  ASSERT_EQ(chmod(file.c_str(), 0640), 0);
  ASSERT_TRUE(WriteOne(link, 300));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(ExpectWhole(file), 300u);
  struct stat about{};
  ASSERT_EQ(stat(file.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 07777u, 0640u);
}

TEST_F(TraceFileTest, AProgramMayChangeItsFolder) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory(Path("elsewhere"));
  std::filesystem::current_path(folder_);
  {
    TraceFile file;
    const bool opened = file.Open("t.json", 1 << 30, 8192).ok();
    std::filesystem::current_path(Path("elsewhere"));
    for (int i = 0; i < 200; ++i) EXPECT_TRUE(opened && file.Add(Event(i, 300)).ok());
  }
  std::filesystem::current_path(before);
  EXPECT_EQ(ExpectWhole(Path("t.json")), 200u);
  EXPECT_TRUE(std::filesystem::is_empty(Path("elsewhere")));
}

TEST_F(TraceFileTest, DevicesAreWrittenNotReplaced) {
  TraceFile file;
  ASSERT_TRUE(file.Open("/dev/null", 1 << 30, 8192).ok());
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(file.Add(Event(i, 300)).ok());
  file.Close();
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  EXPECT_FALSE(file.Open(folder_, 1 << 30).ok());  // a folder
}

}  // namespace
}  // namespace ronde
