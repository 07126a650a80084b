#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "net/hmac.h"
#include "net/socket.h"
#include "store/protocol.h"

namespace ronde {

void PutField(std::string* frame, std::string_view field) {
  auto size = static_cast<std::uint32_t>(field.size());
  frame->append(reinterpret_cast<const char*>(&size), sizeof size);
  frame->append(field);
}

bool SplitFields(std::string_view frame, std::vector<std::string>* fields) {
  while (!frame.empty()) {
    std::uint32_t size = 0;
    if (frame.size() < sizeof size) return false;
    std::memcpy(&size, frame.data(), sizeof size);
    frame.remove_prefix(sizeof size);
    if (size > frame.size()) return false;
    fields->emplace_back(frame.substr(0, size));
    frame.remove_prefix(size);
  }
  return true;
}

bool ToNumber(const std::string& text, std::int64_t* number) {
  char* end = nullptr;
  errno = 0;
  *number = std::strtoll(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && errno == 0;
}

std::string StoreProof(const std::string& secret, const std::string& nonce) {
  return HmacSha256(secret, kStoreMagic + nonce);
}

namespace {

// How long an answer may take beyond the request's own limit before the server counts as dead.
constexpr double kGraceSeconds = 10;

class StoreClient final : public Store {
 public:
  StoreClient(Fd socket, std::string url) : socket_(std::move(socket)), url_(std::move(url)) {}

  Result Set(const std::string& key, const std::string& value) override {
    auto answer = Ask(StoreRequest::kSet, {key, value}, Now());
    return answer.ok() ? Ok() : answer.error();
  }
  Expected<std::string> Get(const std::string& key, Deadline deadline) override {
    auto answer = Ask(StoreRequest::kGet, {key, Left(deadline)}, deadline);
    if (!answer.ok()) return answer.error();
    return answer->empty() ? std::string() : answer->front();
  }
  Expected<std::int64_t> Add(const std::string& key, std::int64_t amount) override {
    auto answer = Ask(StoreRequest::kAdd, {key, std::to_string(amount)}, Now());
    if (!answer.ok()) return answer.error();
    std::int64_t sum = 0;
    if (answer->empty() || !ToNumber(answer->front(), &sum)) return Broken("sent a bad number");
    return sum;
  }
  Expected<std::vector<std::string>> Exchange(const std::string& key, std::uint32_t index, std::uint32_t count,
                                              const std::string& blob, Deadline deadline) override {
    auto answer = Ask(StoreRequest::kExchange,
                      {key, Left(deadline), std::to_string(index), std::to_string(count), blob}, deadline);
    if (answer.ok() && answer->size() != count) return Broken("sent a wrong number of blobs");
    return answer;
  }

 private:
  static std::string Left(Deadline deadline) {
    double seconds = deadline == Deadline::max() ? 1e9 : std::max(0.0, Seconds(deadline - Now()));
    return std::to_string(static_cast<std::int64_t>(seconds * 1000));
  }
  Result Broken(const std::string& what) { return Result(Code::kTransport, "the store at " + url_ + " " + what); }

  Expected<std::vector<std::string>> Ask(StoreRequest kind, const std::vector<std::string>& fields, Deadline deadline) {
    if (!broken_.ok()) return broken_;
    std::string frame(1, static_cast<char>(kind));
    for (const auto& field : fields) PutField(&frame, field);
    if (frame.size() > kStoreFrameLimit) return Result(Code::kArgument, "a store's value is at most 16 MiB");
    Deadline limit = deadline == Deadline::max() ? deadline : std::max(deadline, Now()) + FromSeconds(kGraceSeconds);
    Result sent = SendFrame(socket_, frame, limit);
    if (!sent.ok()) return GiveUp(sent);
    // The answer to an exchange holds everybody's blobs.
    auto answer = RecvFrame(socket_, std::size_t{1} << 31, limit);
    if (!answer.ok()) return GiveUp(answer.error());
    if (answer->empty()) return Broken("sent an empty answer");
    std::vector<std::string> values;
    if (!SplitFields(std::string_view(answer.value()).substr(1), &values)) return Broken("sent a malformed answer");
    auto code = static_cast<Code>(answer.value()[0]);
    if (code != Code::kOk) return Result(code, values.empty() ? "unknown error" : values.front());
    return values;
  }

  // A late answer would be taken for the answer to the next request, so the connection is not used again.
  Result GiveUp(const Result& why) {
    socket_ = Fd();
    return broken_ = why.Because("the store at " + url_ + " does not answer");
  }

  Fd socket_;
  std::string url_;
  Result broken_;
};

}  // namespace

Expected<std::unique_ptr<Store>> ConnectStore(const std::string& url, const std::string& secret, Deadline deadline) {
  auto socket = Dial(url, deadline);
  if (!socket.ok()) return socket.error().Because("no store at " + url);
  auto hello = RecvFrame(socket.value(), 1024, deadline);
  if (!hello.ok()) return hello.error().Because("no store at " + url);
  std::vector<std::string> fields;
  if (hello->empty() || !SplitFields(std::string_view(hello.value()).substr(1), &fields) || fields.size() != 2 ||
      fields[0] != kStoreMagic) {
    return Result(Code::kTransport, url + " is not a ronde store");
  }
  std::string frame = "h";
  PutField(&frame, kStoreMagic);
  PutField(&frame, StoreProof(secret, fields[1]));
  RONDE_RETURN_IF_ERROR(SendFrame(socket.value(), frame, deadline));
  auto welcome = RecvFrame(socket.value(), 1024, deadline);
  if (!welcome.ok()) return welcome.error().Because("the store at " + url + " refused this client");
  TuneTcp(socket.value(), kStorePeerSeconds);
  return std::unique_ptr<Store>(std::make_unique<StoreClient>(std::move(socket.value()), url));
}

}  // namespace ronde
