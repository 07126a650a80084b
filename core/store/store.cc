#include "store/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "net/hmac.h"
#include "net/socket.h"
#include "store/protocol.h"

namespace ronde {

Expected<std::vector<std::string>> Store::Exchange(const std::string& key, std::uint32_t index, std::uint32_t count,
                                                   const std::string& blob, Deadline deadline) {
  RONDE_RETURN_IF_ERROR(Set(key + "/" + std::to_string(index), blob));
  std::vector<std::string> blobs(count);
  std::string missing;
  Result first;
  for (std::uint32_t i = 0; i < count; ++i) {
    auto value = Get(key + "/" + std::to_string(i), deadline);
    if (value.ok()) {
      blobs[i] = std::move(value.value());
    } else if (value.error().code() == Code::kTimeout) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(i);
    } else {
      return value.error();
    }
  }
  if (!missing.empty()) {
    return Result(Code::kTimeout, "'" + key + "': " + std::to_string(count) + " were expected, missing: " + missing);
  }
  return blobs;
}

namespace {
Result NoKey(const std::string& key) { return Result(Code::kTimeout, "nobody set the key '" + key + "' in time"); }
}  // namespace

class MemoryStoreState {
 public:
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string> values;
};

std::shared_ptr<MemoryStoreState> CreateMemoryStoreState() { return std::make_shared<MemoryStoreState>(); }

namespace {

class MemoryStore final : public Store {
 public:
  explicit MemoryStore(std::shared_ptr<MemoryStoreState> state) : state_(std::move(state)) {}
  Result Set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(state_->mutex);
    state_->values[key] = value;
    state_->changed.notify_all();
    return Ok();
  }
  Expected<std::string> Get(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(state_->mutex);
    auto there = [&] { return state_->values.count(key) > 0; };
    if (!state_->changed.wait_until(lock, deadline, there)) return NoKey(key);
    return state_->values[key];
  }
  Expected<std::int64_t> Add(const std::string& key, std::int64_t amount) override {
    std::lock_guard lock(state_->mutex);
    std::string& value = state_->values[key];
    std::int64_t sum = (value.empty() ? 0 : std::strtoll(value.c_str(), nullptr, 10)) + amount;
    value = std::to_string(sum);
    state_->changed.notify_all();
    return sum;
  }

 private:
  std::shared_ptr<MemoryStoreState> state_;
};

// One file per key, written aside and renamed, so that a reader never sees half a value.
class FileStore final : public Store {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {}

  Result Set(const std::string& key, const std::string& value) override {
    std::string temporary = directory_ + "/." + Hex(RandomBytes(8));
    std::ofstream file(temporary, std::ios::binary);
    file << value;
    file.close();
    if (!file || std::rename(temporary.c_str(), Path(key).c_str()) != 0) {
      return Result(Code::kTransport,
                    "cannot write into the store's directory " + directory_ + ": " + std::strerror(errno));
    }
    return Ok();
  }
  Expected<std::string> Get(const std::string& key, Deadline deadline) override {
    while (true) {
      std::ifstream file(Path(key), std::ios::binary);
      if (file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      if (Now() >= deadline) return NoKey(key);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  Expected<std::int64_t> Add(const std::string& key, std::int64_t amount) override {
    Fd lock(open((directory_ + "/.lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    if (!lock.valid() || flock(lock.get(), LOCK_EX) != 0) {
      return Result(Code::kTransport, "cannot lock the store's directory " + directory_);
    }
    auto old = Get(key, Now());
    std::int64_t sum = (old.ok() ? std::strtoll(old.value().c_str(), nullptr, 10) : 0) + amount;
    RONDE_RETURN_IF_ERROR(Set(key, std::to_string(sum)));
    return sum;
  }

 private:
  // A file's name has at most 255 bytes.
  std::string Path(const std::string& key) const {
    return directory_ + "/" + (key.size() <= 100 ? Hex(key) : "sha256-" + Hex(Sha256(key)));
  }
  std::string directory_;
};

class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}
  Result Set(const std::string& key, const std::string& value) override { return store_->Set(prefix_ + key, value); }
  Expected<std::string> Get(const std::string& key, Deadline deadline) override {
    return store_->Get(prefix_ + key, deadline);
  }
  Expected<std::int64_t> Add(const std::string& key, std::int64_t amount) override {
    return store_->Add(prefix_ + key, amount);
  }
  Expected<std::vector<std::string>> Exchange(const std::string& key, std::uint32_t index, std::uint32_t count,
                                              const std::string& blob, Deadline deadline) override {
    return store_->Exchange(prefix_ + key, index, count, blob, deadline);
  }

 private:
  std::shared_ptr<Store> store_;
  std::string prefix_;
};

}  // namespace

std::unique_ptr<Store> CreateMemoryStore(std::shared_ptr<MemoryStoreState> state) {
  return std::make_unique<MemoryStore>(std::move(state));
}
std::unique_ptr<Store> CreatePrefixStore(std::shared_ptr<Store> store, std::string prefix) {
  return std::make_unique<PrefixStore>(std::move(store), std::move(prefix));
}

Expected<std::unique_ptr<Store>> OpenStore(const std::string& url, const std::string& secret, Deadline deadline) {
  if (url.rfind("file:", 0) == 0) {
    std::string directory = url.substr(5);
    if (access(directory.c_str(), W_OK | X_OK) != 0) {
      return Result(Code::kArgument, "the store's directory " + directory + " cannot be used: " + std::strerror(errno));
    }
    return std::unique_ptr<Store>(std::make_unique<FileStore>(directory));
  }
  return ConnectStore(url, secret, deadline);
}

}  // namespace ronde
