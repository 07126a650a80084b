#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "net/hmac.h"
#include "transport/shm/factory.h"
#include "transport/tcp/sockets.h"
#include "transport/tree.h"

namespace ronde {

std::string HostId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  for (const char* space : {"net", "ipc", "user"}) {
    struct stat status{};
    if (stat((std::string("/proc/self/ns/") + space).c_str(), &status) == 0) id += "-" + std::to_string(status.st_ino);
  }
  return id;
}

namespace {

constexpr std::size_t kNoteLimit = 4096;

std::size_t HeapBytes(std::int64_t wanted, std::size_t local_ranks) {
  if (wanted >= 0) return static_cast<std::size_t>(wanted);
  // Every rank maps the heaps of all: where address space is limited they might not fit, and with them the rings.
  struct rlimit space{};
  if (getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur != RLIM_INFINITY) return 0;
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<std::size_t>(pages) / local_ranks * static_cast<std::size_t>(page) : 0;
}

// CPUs that this process may keep busy: its affinity, and the quotas of its control group and those above.
double AvailableCpus() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  auto available = static_cast<double>(CPU_COUNT(&cores));
  std::string group;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) group = line.substr(3);
  }
  while (true) {
    std::string quota;
    double period = 0;
    if (std::ifstream limit("/sys/fs/cgroup" + group + "/cpu.max"); limit >> quota >> period) {
      double granted = std::strtod(quota.c_str(), nullptr);  // "max" gives 0
      if (granted > 0 && period > 0) available = std::min(available, granted / period);
    }
    auto slash = group.rfind('/');
    if (slash == std::string::npos) break;
    group.resize(slash);
  }
  double quota = 0, period = 0;  // version 1
  if (std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota && quota > 0 &&
      std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period && period > 0) {
    available = std::min(available, quota / period);
  }
  return available;
}

// Spinning pays only if nobody else needs the core: two threads of every local rank may be awake at a time.
bool MaySpin(std::size_t local_ranks) { return AvailableCpus() >= 2.0 * static_cast<double>(local_ranks); }

class EndpointImpl final : public Endpoint {
 public:
  EndpointImpl(std::shared_ptr<Meeting> meeting, PeerInfo own) : meeting_(std::move(meeting)), own_(std::move(own)) {}

  std::string blob() const override { return own_.Encode(); }

  Expected<Connections> Connect(const std::vector<std::string>& blobs, Deadline deadline) override {
    RONDE_RETURN_IF_ERROR(ReadBlobs(blobs));
    Connections made;
    for (const auto& peer : meeting_->peers) {
      made.host_ids.push_back(peer.host_id);
      made.host_names.push_back(peer.host_name);
    }
    made.job_options = meeting_->peers[0].job_options;

    Tree tree = BuildTree(made.host_ids);
    std::map<int, Fd> sockets;
    RONDE_RETURN_IF_ERROR(MeetTree(tree, deadline, &sockets));
    auto segment = ShareMemory(tree, sockets, deadline);
    if (!segment.ok()) return segment.error();
    made.segment = std::move(segment.value());
    made.mailbox = CreateSocketMailbox(meeting_, std::move(sockets));
    if (made.segment) made.mailbox = CreateShmMailbox(*made.segment, std::move(made.mailbox));
    made.transport = CreateSocketTransport(meeting_);
    return made;
  }

 private:
  int rank() const { return meeting_->config.rank; }

  Result ReadBlobs(const std::vector<std::string>& blobs) {
    if (static_cast<int>(blobs.size()) != meeting_->config.size) {
      return Result(Code::kArgument,
                    std::to_string(blobs.size()) + " ranks came, not " + std::to_string(meeting_->config.size));
    }
    for (std::size_t r = 0; r < blobs.size(); ++r) {
      auto info = PeerInfo::Decode(blobs[r], own_.version);
      if (!info.ok()) return info.error().Because("what rank " + std::to_string(r) + " published cannot be read");
      if (info->rank != static_cast<int>(r)) {
        return Result(Code::kArgument, "two processes say that they are rank " + std::to_string(info->rank));
      }
      if (info->version != own_.version) {
        return Result(Code::kArgument, info->Describe() + " runs ronde " + info->version + ", but " + own_.Describe() +
                                           " runs " + own_.version);
      }
      meeting_->peers.push_back(std::move(info.value()));
    }
    meeting_->config.shared = meeting_->peers[0].shared;
    return Ok();
  }

  Result MeetTree(const Tree& tree, Deadline deadline, std::map<int, Fd>* sockets) {
    if (meeting_->config.size == 1) return Ok();
    const int parent = tree.parent[rank()];
    Acceptor& acceptor = *meeting_->acceptor;
    std::optional<Dialer> dialer;
    if (parent >= 0) dialer.emplace(meeting_.get(), parent, "control");
    while (true) {
      bool moved = acceptor.Progress();
      if (dialer) {
        moved |= dialer->Progress();
        if (dialer->done()) {
          (*sockets)[parent] = dialer->Take();
          dialer.reset();
        }
      }
      std::string absent;
      for (int child : tree.children[rank()]) {
        if (Fd socket = acceptor.Take("control", child); socket.valid()) (*sockets)[child] = std::move(socket);
        if (!sockets->count(child)) absent += (absent.empty() ? "" : ", ") + meeting_->peers[child].Describe();
      }
      if (absent.empty() && !dialer) return Ok();
      if (Now() >= deadline) {
        std::string text;
        if (dialer) {
          text = meeting_->peers[parent].Describe() + " could not be reached from " + own_.Describe() +
                 " (control connection): " + dialer->last().message();
        }
        if (!absent.empty()) {
          text += (text.empty() ? "" : "; ") + std::string("published an address but did not connect to ") +
                  own_.Describe() + ": " + absent;
        }
        return Result(Code::kTimeout, text);
      }
      if (moved) continue;
      std::vector<pollfd> polled;
      Deadline wake = std::min(deadline, acceptor.Watch(&polled));
      if (dialer) wake = std::min(wake, dialer->Watch(&polled));
      WaitAny(&polled, wake);
    }
  }

  // The ranks of this host agree on shared memory through their leader: each says whether it has some, the leader hands
  // everybody's to everybody, each says whether it could map it, the leader closes the matter. One "no" is a no for
  // all.
  Expected<std::unique_ptr<Segment>> ShareMemory(const Tree& tree, std::map<int, Fd>& sockets, Deadline deadline) {
    std::vector<int> local;
    for (const auto& peer : meeting_->peers) {
      if (peer.host_id == own_.host_id) local.push_back(peer.rank);
    }
    const EndpointConfig& config = meeting_->config;
    if (!config.shared.shared_memory || local.size() < 2) return std::unique_ptr<Segment>();
    ShmConfig shm;
    shm.rank = rank();
    shm.ring_bytes = config.shared.ring_bytes;
    shm.heap_bytes = HeapBytes(config.heap_bytes, local.size());
    shm.spin = MaySpin(local.size());
    shm.name = Hex(RandomBytes(8));
    auto part = CreateShmPart(shm);
    if (!part.ok() && shm.heap_bytes > 0) {  // address space may be short
      const std::string why = part.error().message();
      shm.heap_bytes = 0;
      part = CreateShmPart(shm);
      if (part.ok()) {
        meeting_->log.Write(config.heap_bytes > 0 ? LogLevel::kWarning : LogLevel::kDebug,
                            "hvd.empty_shared gives ordinary memory on this rank (RONDE_SHARED_BYTES): " + why);
      }
    }
    std::string note = part.ok() ? "" : part.error().message();
    return local.front() == rank() ? Lead(local, sockets, part, note, deadline)
                                   : Follow(local, sockets.at(tree.parent[rank()]), part, note, deadline);
  }

  using Part = Expected<std::shared_ptr<ShmPart>>;

  Expected<std::unique_ptr<Segment>> Lead(const std::vector<int>& local, std::map<int, Fd>& sockets, Part& part,
                                          std::string note, Deadline deadline) {
    auto explain = [&](int peer, const Result& error) {
      return error.Because(meeting_->peers[peer].Describe() + " left while shared memory was set up");
    };
    std::vector<Fd> received;
    std::vector<int> descriptors;
    for (int peer : local) {
      if (peer == rank()) {
        descriptors.push_back(part.ok() ? ShmDescriptor(*part.value()) : -1);
        continue;
      }
      auto theirs = RecvFrame(sockets.at(peer), kNoteLimit, deadline);
      if (!theirs.ok()) return explain(peer, theirs.error());
      if (!theirs->empty()) {
        if (note.empty()) note = meeting_->peers[peer].Describe() + ": " + theirs.value();
        descriptors.push_back(-1);
        continue;
      }
      auto fds = RecvDescriptors(sockets.at(peer), 1, deadline);
      if (!fds.ok()) return explain(peer, fds.error());
      descriptors.push_back(fds->front().get());
      received.push_back(std::move(fds->front()));
    }
    auto tell = [&]() -> Result {
      for (int peer : local) {
        if (peer != rank()) {
          RONDE_RETURN_IF_ERROR(explain(peer, SendFrame(sockets.at(peer), note.substr(0, kNoteLimit), deadline)));
        }
      }
      return Ok();
    };
    RONDE_RETURN_IF_ERROR(tell());
    std::unique_ptr<Segment> segment;
    if (note.empty()) {
      for (int peer : local) {
        if (peer == rank()) continue;
        RONDE_RETURN_IF_ERROR(explain(peer, SendDescriptors(sockets.at(peer), descriptors, deadline)));
      }
      auto mapped = CreateShmSegment(part.value(), local, descriptors);
      if (mapped.ok()) {
        segment = std::move(mapped.value());
      } else {
        note = mapped.error().message();
      }
      for (int peer : local) {
        if (peer == rank()) continue;
        auto theirs = RecvFrame(sockets.at(peer), kNoteLimit, deadline);
        if (!theirs.ok()) return explain(peer, theirs.error());
        if (!theirs->empty() && note.empty()) note = meeting_->peers[peer].Describe() + ": " + theirs.value();
      }
      RONDE_RETURN_IF_ERROR(tell());
    }
    if (!note.empty()) {
      meeting_->log.Warning("host " + own_.host_name +
                            " gives no shared memory, so its ranks use sockets (slower): " + note);
      segment.reset();
    }
    return segment;
  }

  Expected<std::unique_ptr<Segment>> Follow(const std::vector<int>& local, const Fd& leader, Part& part,
                                            const std::string& note, Deadline deadline) {
    auto explain = [&](const Result& error) {
      return error.Because(meeting_->peers[local.front()].Describe() + " left while shared memory was set up");
    };
    RONDE_RETURN_IF_ERROR(explain(SendFrame(leader, note.substr(0, kNoteLimit), deadline)));
    if (note.empty()) {
      RONDE_RETURN_IF_ERROR(explain(SendDescriptors(leader, {ShmDescriptor(*part.value())}, deadline)));
    }
    auto verdict = RecvFrame(leader, kNoteLimit, deadline);
    if (!verdict.ok()) return explain(verdict.error());
    if (!verdict->empty()) return std::unique_ptr<Segment>();
    auto fds = RecvDescriptors(leader, local.size(), deadline);
    if (!fds.ok()) return explain(fds.error());
    std::vector<int> descriptors;
    for (const auto& fd : fds.value()) descriptors.push_back(fd.get());
    auto segment = CreateShmSegment(part.value(), local, descriptors);
    std::string problem = segment.ok() ? "" : segment.error().message();
    RONDE_RETURN_IF_ERROR(explain(SendFrame(leader, problem.substr(0, kNoteLimit), deadline)));
    auto closing = RecvFrame(leader, kNoteLimit, deadline);
    if (!closing.ok()) return explain(closing.error());
    if (!closing->empty()) return std::unique_ptr<Segment>();
    return segment;
  }

  std::shared_ptr<Meeting> meeting_;
  PeerInfo own_;
};

}  // namespace

Expected<std::unique_ptr<Endpoint>> Endpoint::Create(const EndpointConfig& config, const Log& log) {
  auto meeting = std::make_shared<Meeting>();
  meeting->config = config;
  meeting->log = log;
  PeerInfo own;
  own.version = RONDE_VERSION;
  own.rank = config.rank;
  own.host_id = config.host_id;
  own.host_name = config.host_name;
  own.job_options = config.job_options;
  own.shared = config.shared;
  if (config.size > 1) {  // a job of one rank touches no network at all
    own.unix_address = "unix:@ronde-" + Hex(RandomBytes(12));
    auto local = Listen(own.unix_address);
    if (!local.ok()) return local.error();
    meeting->unix_listener = std::move(local.value());
    meeting->acceptor = std::make_unique<Acceptor>(meeting.get());
    std::string asked = "tcp:[::]:0";
    auto remote = Listen(asked);
    if (!remote.ok()) {
      asked = "tcp:0.0.0.0:0";
      remote = Listen(asked);
    }
    if (!remote.ok()) return remote.error();
    auto bound = BoundAddress(remote.value(), asked);
    if (!bound.ok()) return bound.error();
    own.tcp_port = std::stoi(bound->substr(bound->rfind(':') + 1));
    meeting->tcp_listener = std::move(remote.value());
    meeting->interfaces = InterfaceAddresses();
    auto chosen = ChooseInterfaces(meeting->interfaces, config.network_interfaces);
    if (!chosen.ok()) return chosen.error().Because("host " + config.host_name);
    own.tcp_hosts = AddressesToPublish(chosen.value());
  }
  return std::unique_ptr<Endpoint>(std::make_unique<EndpointImpl>(std::move(meeting), std::move(own)));
}

}  // namespace ronde
