// The dimensions of a tensor. The usual few are part of the object, so that copying one allocates nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ronde {

class Shape {
 public:
  using value_type = std::int64_t;
  using iterator = std::int64_t*;
  using const_iterator = const std::int64_t*;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dimensions) : Shape(dimensions.begin(), dimensions.end()) {}
  Shape(const std::int64_t* first, const std::int64_t* last) : size_(static_cast<std::size_t>(last - first)) {
    if (size_ > kFew) many_.resize(size_);
    std::copy(first, last, begin());
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t* data() { return size_ > kFew ? many_.data() : few_.data(); }
  const std::int64_t* data() const { return size_ > kFew ? many_.data() : few_.data(); }
  iterator begin() { return data(); }
  iterator end() { return data() + size_; }
  const_iterator begin() const { return data(); }
  const_iterator end() const { return data() + size_; }
  std::int64_t& operator[](std::size_t i) { return data()[i]; }
  std::int64_t operator[](std::size_t i) const { return data()[i]; }

  void push_back(std::int64_t dimension) {
    if (size_ == kFew) many_.assign(few_.begin(), few_.end());
    if (size_ >= kFew) many_.push_back(dimension);
    if (size_ < kFew) few_[size_] = dimension;
    ++size_;
  }

  bool operator==(const Shape& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  static constexpr std::size_t kFew = 5;  // a batch of volumes with channels
  std::size_t size_ = 0;
  std::array<std::int64_t, kFew> few_{};
  std::vector<std::int64_t> many_;  // all of them, if they are more than a few
};

}  // namespace ronde
