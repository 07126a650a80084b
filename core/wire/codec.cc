#include "wire/codec.h"

#include <bit>

namespace ronde {

void Writer::Double(double value) {
  auto bits = std::bit_cast<std::uint64_t>(value);
  for (int shift = 0; shift < 64; shift += 8) Byte(static_cast<std::uint8_t>(bits >> shift));
}

void Writer::Text(std::string_view text) {
  Unsigned(text.size());
  Raw(text);
}

void Writer::Raw(std::string_view bytes) {
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  bytes_.insert(bytes_.end(), begin, begin + bytes.size());
}

std::uint8_t Reader::Byte() {
  if (position_ >= bytes_.size()) {
    Fail("the message ends too early");
    return 0;
  }
  return ok() ? static_cast<std::uint8_t>(bytes_[position_++]) : 0;
}

std::uint64_t Reader::Unsigned() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    std::uint8_t byte = Byte();
    if (shift == 63 && byte > 1) break;  // beyond 64 bits
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  Fail("a number is too long");
  return 0;
}

std::int64_t Reader::Signed() {
  std::uint64_t value = Unsigned();
  return static_cast<std::int64_t>(value >> 1) ^ -static_cast<std::int64_t>(value & 1);
}

double Reader::Double() {
  std::uint64_t bits = 0;
  for (int shift = 0; shift < 64; shift += 8) bits |= static_cast<std::uint64_t>(Byte()) << shift;
  return std::bit_cast<double>(bits);
}

std::size_t Reader::Count() {
  std::uint64_t count = Unsigned();
  if (count > bytes_.size() - position_) {
    Fail("a count exceeds the message");
    return 0;
  }
  return static_cast<std::size_t>(count);
}

std::string Reader::Text() {
  std::size_t size = Count();
  if (!ok()) return {};
  std::string text(reinterpret_cast<const char*>(bytes_.data()) + position_, size);
  position_ += size;
  return text;
}

Result Reader::result() const {
  return ok() ? Ok() : Result(Code::kTransport, std::string("malformed message: ") + error_);
}

void Write(Writer& writer, const Definition& definition) {
  writer.Byte(static_cast<std::uint8_t>(definition.op));
  writer.Byte(static_cast<std::uint8_t>(definition.reduction));
  writer.Double(definition.prescale);
  writer.Double(definition.postscale);
  writer.Signed(definition.root);
  writer.Unsigned(definition.set);
  writer.Signed(definition.device);
  writer.Text(definition.name);
  writer.Unsigned(definition.tensors.size());
  for (const auto& tensor : definition.tensors) {
    writer.Text(tensor.name);
    writer.Byte(static_cast<std::uint8_t>(tensor.dtype));
    writer.Signeds(tensor.shape);
  }
  writer.Signeds(definition.ranks);
}

Definition ReadDefinition(Reader& reader) {
  Definition definition;
  auto op = reader.Byte();
  auto reduction = reader.Byte();
  if (op >= std::size(kOps)) reader.Fail("unknown operation");
  if (reduction >= std::size(kReductions)) reader.Fail("unknown reduction");
  if (!reader.ok()) return definition;
  definition.op = static_cast<Op>(op);
  definition.reduction = static_cast<Reduction>(reduction);
  definition.prescale = reader.Double();
  definition.postscale = reader.Double();
  definition.root = static_cast<int>(reader.Signed());
  definition.set = static_cast<SetId>(reader.Unsigned());
  definition.device = static_cast<int>(reader.Signed());
  definition.name = reader.Text();
  for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) {
    TensorSpec tensor;
    tensor.name = reader.Text();
    auto dtype = reader.Byte();
    if (dtype >= std::size(kDTypes)) reader.Fail("unknown element type");
    if (!reader.ok()) return definition;
    tensor.dtype = static_cast<DType>(dtype);
    reader.Signeds(&tensor.shape);
    for (auto dimension : tensor.shape) {
      if (dimension < 0) reader.Fail("negative dimension");
    }
    definition.tensors.push_back(std::move(tensor));
  }
  const OpInfo& info = Info(definition.op);
  if (info.tensors == definition.tensors.empty()) reader.Fail("wrong number of tensors");
  for (const auto& tensor : definition.tensors) {
    if (info.ragged && tensor.shape.empty()) reader.Fail("a ragged operation on a scalar");
  }
  definition.ranks = reader.Signeds<int>();
  if (definition.op == Op::kRemoveProcessSet && definition.ranks.empty()) reader.Fail("no process set is named");
  return definition;
}

}  // namespace ronde
