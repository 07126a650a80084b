// The two objects over connected sockets.
#pragma once

#include <map>
#include <memory>

#include "transport/tcp/meeting.h"

namespace ronde {

// `sockets` by peer: the tree's connections.
std::unique_ptr<Mailbox> CreateSocketMailbox(std::shared_ptr<const Meeting> meeting, std::map<int, Fd> sockets);
std::unique_ptr<Transport> CreateSocketTransport(std::shared_ptr<const Meeting> meeting);

}  // namespace ronde
