// Bytes of the control plane: varints (LEB128), zigzag for signed numbers, length-prefixed text. The reader checks
// every bound, never allocates more than the bytes at hand could fill, and keeps its first error: read on, then ask
// ok().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "wire/definition.h"

namespace ronde {

class Writer {
 public:
  void Byte(std::uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }
  void Unsigned(std::uint64_t value) {
    while (value >= 0x80) {
      Byte(static_cast<std::uint8_t>(value | 0x80));
      value >>= 7;
    }
    Byte(static_cast<std::uint8_t>(value));
  }
  void Signed(std::int64_t value) {
    Unsigned((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void Double(double value);
  void Text(std::string_view text);
  template <class T>
  void Signeds(const T& values) {
    Unsigned(values.size());
    for (auto v : values) Signed(v);
  }
  // Bytes made by another writer.
  void Raw(std::string_view bytes);

  bool empty() const { return bytes_.empty(); }
  // What was written; valid until the next call that writes.
  std::string_view bytes() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }
  void Clear() { bytes_.clear(); }  // keeps its memory
  void Reserve(std::size_t bytes) { bytes_.reserve(bytes); }
  // Gives the bytes away and goes on, empty, with the memory of others.
  std::vector<std::byte> Take(std::vector<std::byte> memory = {}) {
    memory.clear();
    return std::exchange(bytes_, std::move(memory));
  }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::uint8_t Byte();
  std::uint64_t Unsigned();
  std::int64_t Signed();
  double Double();
  std::string Text();
  // A number of items that follow, each of at least one byte.
  std::size_t Count();
  template <class T>
  std::vector<T> Signeds() {
    std::vector<T> values(Count());
    for (auto& v : values) v = static_cast<T>(Signed());
    return values;
  }
  // Appends them to a list of any kind.
  template <class List>
  void Signeds(List* values) {
    for (std::size_t n = Count(); n > 0; --n) values->push_back(Signed());
  }

  bool ok() const { return error_ == nullptr; }
  bool done() const { return !ok() || position_ == bytes_.size(); }
  void Fail(const char* what) {
    if (ok()) error_ = what;
  }
  Result result() const;

 private:
  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
  const char* error_ = nullptr;
};

void Write(Writer& writer, const Definition& definition);
Definition ReadDefinition(Reader& reader);

}  // namespace ronde
