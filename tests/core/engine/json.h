// Whether a text is JSON (RFC 8259), and the events of a trace as texts.
#pragma once

#include <cctype>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace ronde::testing {

class JsonCheck {
 public:
  explicit JsonCheck(std::string_view text) : text_(text) {}
  bool Document() { return Value() && (Spaces(), at_ == text_.size()); }

 private:
  char Next() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool Take(char c) { return Next() == c && ++at_; }
  void Spaces() {
    while (at_ < text_.size() && std::string_view(" \n\r\t").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool Word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  bool Digits() {
    std::size_t from = at_;
    while (std::isdigit(static_cast<unsigned char>(Next()))) ++at_;
    return at_ > from;
  }
  bool Number() {
    (void)Take('-');
    if (!Digits()) return false;
    return !Take('.') || Digits();
  }
  bool String() {
    if (!Take('"')) return false;
    while (at_ < text_.size()) {
      auto c = static_cast<unsigned char>(text_[at_++]);
      if (c == '"') return true;
      if (c < 0x20) return false;
      if (c != '\\') continue;
      char escaped = Next();
      ++at_;
      if (escaped == 'u') {
        for (int i = 0; i < 4; ++i, ++at_) {
          if (!std::isxdigit(static_cast<unsigned char>(Next()))) return false;
        }
      } else if (std::string_view("\"\\/bfnrt").find(escaped) == std::string_view::npos) {
        return false;
      }
    }
    return false;
  }
  template <class Item>
  bool Items(char close, Item item) {
    Spaces();
    if (Take(close)) return true;
    do {
      if (!item()) return false;
      Spaces();
    } while (Take(','));
    return Take(close);
  }
  bool Value() {
    Spaces();
    if (Take('[')) return Items(']', [this] { return Value(); });
    if (Take('{')) {
      return Items('}', [this] { return Spaces(), String() && (Spaces(), Take(':')) && Value(); });
    }
    if (Next() == '"') return String();
    return Word("true") || Word("false") || Word("null") || Number();
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

inline bool IsJson(std::string_view text) { return JsonCheck(text).Document(); }

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Lines of the file that hold an event; a trace has one in each.
inline std::vector<std::string> Events(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> events;
  for (std::string line; std::getline(file, line);) {
    if (line.substr(0, 1) == "{") events.push_back(line.substr(0, line.rfind('}') + 1));
  }
  return events;
}

inline std::size_t Count(const std::vector<std::string>& events, std::string_view part) {
  std::size_t count = 0;
  for (const auto& event : events) count += event.find(part) != std::string::npos;
  return count;
}

}  // namespace ronde::testing
