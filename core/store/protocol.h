// The frames between a StoreServer and its clients. A request: kind, key, arguments; an answer: kOk and values, or an
// error code and its text. One request is under way per connection.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/store.h"

namespace ronde {

constexpr std::size_t kStoreFrameLimit = std::size_t{16} << 20;
constexpr char kStoreMagic[] = "ronde-store-1";
// A connection whose other end has vanished without a word ends after this.
constexpr double kStorePeerSeconds = 60;

enum class StoreRequest : unsigned char { kSet = 1, kGet, kAdd, kExchange };

// Fields of a frame: 32-bit length and bytes each.
void PutField(std::string* frame, std::string_view field);
bool SplitFields(std::string_view frame, std::vector<std::string>* fields);
bool ToNumber(const std::string& text, std::int64_t* number);
// What a client sends to show that it knows the secret; the nonce is the server's.
std::string StoreProof(const std::string& secret, const std::string& nonce);

Expected<std::unique_ptr<Store>> ConnectStore(const std::string& url, const std::string& secret, Deadline deadline);

}  // namespace ronde
