// Adasum over the members of a group (the reduction and its source: math/adasum.h). Every tensor is reduced by itself.
//
// Vocabulary. A tensor of some size is split: each member has a part of it; a small one belongs whole to one member. A
// member's parts, one after the other, are its shard. Pass 1: the owner of a part computes what the part adds to the
// tensor's Gram matrix; the matrices of split tensors are then added up over the members, in their order. Pass 2: the
// owner writes the weighted sum and hands it out. Where parts begin depends on the tensor's size and the number of
// members alone. So the bits of a result depend neither on what a tensor was fused with nor on chunks or carriers.
// Few bytes take one step: everybody reads everything and is the owner of all, part by part, with the same bits.
//
// A member that joined counts as a vector of zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "collectives/segment_collectives.h"
#include "collectives/stream.h"
#include "collectives/transport_collectives.h"
#include "math/math.h"

namespace ronde {

// tensors: this rank's. Those of a member that joined have null pointers; an output may be its input's memory. Of the
// spec, dtype and scales are used. Both passes read the input.
Result Adasum(const SegmentCall& call, const math::ReduceSpec& spec, const std::vector<Piece>& tensors);
// Keeps the others' parts of the own shard from pass 1 to pass 2: memory of about the tensors' size.
Result Adasum(const TransportCall& call, const math::ReduceSpec& spec, const std::vector<Piece>& tensors);

// Chunk numbers of an Adasum in segments. Pure; pointers are not looked at. contributing: members that did not join.
std::uint64_t AdasumChunks(const std::vector<Piece>& tensors, DType dtype, int members, int contributing,
                           std::size_t chunk_bytes);

}  // namespace ronde
