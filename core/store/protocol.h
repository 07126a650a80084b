// The client of a StoreServer and the frames between them. A request: kind, key, arguments; an answer: kOk and a value,
// or an error code and its text. One request is under way per connection.
#pragma once

#include "store/store.h"

namespace ronde {

Expected<std::unique_ptr<Store>> ConnectStore(const std::string& url, const std::string& secret, Deadline deadline);

}  // namespace ronde
