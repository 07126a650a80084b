#include "base/log.h"

#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <ctime>

namespace ronde {
namespace {
constexpr std::array<std::string_view, 7> kNames = {"trace", "debug", "info", "warning", "error", "fatal", "off"};
}

bool ParseLogLevel(std::string_view text, LogLevel* level) {
  auto same = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (std::equal(text.begin(), text.end(), kNames[i].begin(), kNames[i].end(), same)) {
      *level = static_cast<LogLevel>(i);
      return true;
    }
  }
  return false;
}

void Log::Write(LogLevel level, std::string_view message) const {
  if (!Enabled(level) || level_ == LogLevel::kOff) return;
  std::string line = "[ronde";
  if (show_time_) {
    timeval now{};
    gettimeofday(&now, nullptr);
    tm parts{};
    localtime_r(&now.tv_sec, &parts);
    char text[40];
    std::size_t n = std::strftime(text, sizeof text, " %Y-%m-%d %H:%M:%S", &parts);
    line.append(text, n);
    std::string micros = std::to_string(now.tv_usec);
    line += "." + std::string(6 - micros.size(), '0') + micros;
  }
  if (!prefix_.empty()) line += " " + prefix_;
  line += " ";
  line += kNames[static_cast<std::size_t>(level)];
  line += "] ";
  line += message;
  line += '\n';
  // A failed write to stderr has nowhere to be reported.
  [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace ronde
