#include "api/error.h"
#include "base/options.h"
#include "base/types.h"

// The tables as C rows. Names are string literals from the .def files, so they end with a zero.
namespace {

constexpr ronde_row kDTypeRows[] = {
#define RONDE_DTYPE(id, wire, ctype, name, kind) {name, wire, sizeof(ctype), #kind},
#include "base/dtypes.def"
#undef RONDE_DTYPE
};
constexpr ronde_row kOpRows[] = {
#define RONDE_OP(id, wire, name, reduces, rooted, splits, ragged, fusable, tensors) {name, wire, 0, ""},
#include "base/ops.def"
#undef RONDE_OP
};
constexpr ronde_row kReductionRows[] = {
#define RONDE_REDUCTION(id, wire, name, public_name) {name, wire, 0, public_name},
#include "base/reductions.def"
#undef RONDE_REDUCTION
};
#define RONDE_RETRY_true " retry"
#define RONDE_RETRY_false " final"
constexpr ronde_row kErrorRows[] = {
#define RONDE_ERROR(id, number, python, base, retry) {#id, number, 0, #python " " #base RONDE_RETRY_##retry},
#include "base/errors.def"
#undef RONDE_ERROR
};
constexpr ronde_option_row kOptionRows[] = {
#define RONDE_OPTION(member, type, NAME, default_value, scope, flag, scale, section, help) \
  {#NAME, #type, #default_value, #scope, flag, scale, section, help},
#include "base/options.def"
#undef RONDE_OPTION
};

template <class T, std::size_t N>
const T* At(const T (&rows)[N], uint32_t index) {
  return index < N ? &rows[index] : nullptr;
}

}  // namespace

extern "C" {
const ronde_row* ronde_dtype_row(uint32_t index) { return At(kDTypeRows, index); }
const ronde_row* ronde_op_row(uint32_t index) { return At(kOpRows, index); }
const ronde_row* ronde_reduction_row(uint32_t index) { return At(kReductionRows, index); }
const ronde_row* ronde_error_row(uint32_t index) { return At(kErrorRows, index); }
const ronde_option_row* ronde_option_row_at(uint32_t index) { return At(kOptionRows, index); }
}
