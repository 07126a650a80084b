#include "wire/codec.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace ronde {
namespace {

Definition Sample(std::mt19937& random) {
  Definition d;
  d.op = kOps[random() % 5].id;
  d.reduction = kReductions[random() % std::size(kReductions)].id;
  d.prescale = static_cast<double>(random()) / 7;
  d.postscale = -0.0;
  d.root = static_cast<int>(random() % 1000);
  d.set = random();
  d.device = static_cast<int>(random() % 3) - 1;
  d.name = std::string(random() % 40, 'n') + std::string("\0\xff", 2);
  for (int t = 0; t < 1 + static_cast<int>(random() % 3); ++t) {
    TensorSpec tensor{"t" + std::to_string(t), kDTypes[random() % std::size(kDTypes)].id, {}};
    for (int k = 0; k < 1 + static_cast<int>(random() % 4); ++k)
      tensor.shape.push_back(static_cast<std::int64_t>(random() % 1000000) << (random() % 30));
    d.tensors.push_back(tensor);
  }
  d.ranks = {0, 5, 70000};
  return d;
}

TEST(Codec, DefinitionsComeBackAsTheyWent) {
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    Definition d = Sample(random);
    Writer writer;
    Write(writer, d);
    auto bytes = writer.Take();
    Reader reader(bytes);
    EXPECT_EQ(ReadDefinition(reader), d);
    EXPECT_TRUE(reader.ok() && reader.done());
  }
}

TEST(Codec, NumbersAtTheirLimits) {
  Writer writer;
  const std::int64_t values[] = {
      0, -1, 1, 63, 64, -64, -65, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};
  for (auto v : values) writer.Signed(v);
  writer.Unsigned(std::numeric_limits<std::uint64_t>::max());
  auto bytes = writer.Take();
  Reader reader(bytes);
  for (auto v : values) EXPECT_EQ(reader.Signed(), v);
  EXPECT_EQ(reader.Unsigned(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(reader.ok() && reader.done());
}

TEST(Codec, CutAndChangedMessagesAreErrorsNotCrashes) {
  std::mt19937 random(2);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    Writer writer;
    Write(writer, Sample(random));
    auto bytes = writer.Take();
    if (i % 2) bytes.resize(random() % bytes.size());
    for (int k = 0; k < 3 && !bytes.empty() && i % 3; ++k)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    Reader reader(bytes);
    ReadDefinition(reader);
    refused += !reader.ok();
  }
  EXPECT_GT(refused, 2000);
}

TEST(Codec, NumbersBeyond64BitsAreRefused) {
  for (int last : {1, 2, 0x7f}) {
    std::vector<std::byte> bytes(9, std::byte{0xff});
    bytes.push_back(static_cast<std::byte>(last));
    Reader reader(bytes);
    EXPECT_EQ(reader.Unsigned(), last == 1 ? std::numeric_limits<std::uint64_t>::max() : 0);
    EXPECT_EQ(reader.ok(), last == 1);
  }
}

TEST(Codec, RandomBytesAreErrorsNotCrashes) {
  std::mt19937 random(3);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::vector<std::byte> bytes(random() % 80);
    for (auto& b : bytes) b = static_cast<std::byte>(random() % (i % 2 ? 256 : 8));
    Reader reader(bytes);
    ReadDefinition(reader);
    refused += !reader.ok();
    EXPECT_EQ(reader.result().ok(), reader.ok());
  }
  EXPECT_GT(refused, 4000);
}

TEST(Codec, ACountThatTheBytesCannotHoldIsRefusedBeforeAllocation) {
  Writer writer;
  writer.Unsigned(std::uint64_t{1} << 60);
  auto bytes = writer.Take();
  Reader reader(bytes);
  EXPECT_TRUE(reader.Signeds<std::int64_t>().empty());
  EXPECT_FALSE(reader.ok());
}

}  // namespace
}  // namespace ronde
