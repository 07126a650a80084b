// Logging for one engine. A Log is an object (prefix and level belong to an engine, never to the process). Lines go to
// stderr in one write each, so ranks that share a terminal do not mix.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace ronde {

enum class LogLevel : int { kTrace = 0, kDebug, kInfo, kWarning, kError, kFatal, kOff };

class Log {
 public:
  Log() = default;
  Log(LogLevel level, bool show_time, std::string prefix)
      : level_(level), show_time_(show_time), prefix_(std::move(prefix)) {}

  bool Enabled(LogLevel level) const { return level >= level_; }
  void Write(LogLevel level, std::string_view message) const;
  void Debug(std::string_view m) const { Write(LogLevel::kDebug, m); }
  void Info(std::string_view m) const { Write(LogLevel::kInfo, m); }
  void Warning(std::string_view m) const { Write(LogLevel::kWarning, m); }
  void Error(std::string_view m) const { Write(LogLevel::kError, m); }

 private:
  LogLevel level_ = LogLevel::kWarning;
  bool show_time_ = true;
  std::string prefix_;
};

// "warning" -> kWarning; false when the name is unknown.
bool ParseLogLevel(std::string_view text, LogLevel* level);

}  // namespace ronde
