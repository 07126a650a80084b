// The vocabulary of the core as dicts and lists, so that Python never writes it down again.
#include "bindings.h"

namespace ronde::python {

void BindTables(py::module_& module) {
  module.attr("__version__") = ronde_version();

  py::dict dtypes, dtype_sizes, ops, reductions;
  for (std::uint32_t index = 0; const ronde_row* row = ronde_dtype_row(index); ++index) {
    dtypes[row->name] = row->number;
    dtype_sizes[row->name] = row->size;
  }
  for (std::uint32_t index = 0; const ronde_row* row = ronde_op_row(index); ++index) ops[row->name] = row->number;
  for (std::uint32_t index = 0; const ronde_row* row = ronde_reduction_row(index); ++index) {
    reductions[row->extra] = row->number;
  }
  py::list options;
  for (std::uint32_t index = 0; const ronde_option_row* row = ronde_option_row_at(index); ++index) {
    options.append(py::make_tuple(row->name, row->type, row->default_text, row->scope, row->flag, row->flag_scale,
                                  row->section, row->help));
  }
  module.attr("DTYPES") = dtypes;
  module.attr("DTYPE_SIZES") = dtype_sizes;
  module.attr("OPS") = ops;
  module.attr("REDUCTIONS") = reductions;
  module.attr("OPTIONS") = options;
}

}  // namespace ronde::python
