// What can be said about a request before it goes anywhere: wrong arguments are this rank's own error, at the call.
#pragma once

#include <memory>
#include <vector>

#include "backends/backend.h"
#include "engine/operation.h"

namespace ronde {

Result CheckRequest(const Request& request, int rank, const std::vector<int>& members,
                    const std::vector<std::unique_ptr<Backend>>& backends);

// What is negotiated of a checked request.
Definition DefinitionOf(const Request& request);
// Whether DefinitionOf would give this one, which it gave for another request. Allocates nothing.
bool Matches(const Request& request, const Definition& definition);
Values ValuesOf(const Request& request, std::size_t members);

// "allreduce 'x'" or "allreduce (unnamed)".
std::string Describe(const Request& request);

}  // namespace ronde
